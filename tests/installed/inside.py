"""Builds the Debian package, installs it in a booted system, and checks that what it promises holds there.

Run by __main__.py, in name spaces of its own. Nothing but Python's standard library.
"""

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import cgroups
import checks_package
import checks_pip
import checks_sandbox
import checks_service
from build import Workshop, sources, version
from images import ROOT, prepare
from machine import Machine, Refused, layered
from report import Report

_CLONE_NEWNET = 0x40000000


def main() -> int:
    parser = argparse.ArgumentParser(prog="script/test-deb")
    for name, kind in (("--cache", Path), ("--work", Path), ("--lifeline", int)):
        parser.add_argument(name, type=kind, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=("deb", "pip"), help="only what is installed so")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="copy the packages there")
    parser.add_argument(
        "--use", type=Path, metavar="FOLDER", help="use those that were kept, build none"
    )
    parser.add_argument(
        "--shell", action="store_true", help="no checks, but a shell in a system with the package"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_watch, args=(options.lifeline,), daemon=True).start()
    images = prepare(options.cache)
    _leave_the_network()
    with cgroups.own():
        try:
            return _test(options.work, images, options)
        except Refused as refused:
            print("\ntest-deb: SKIPPED, nothing was tested: no container boots here.")
            print(refused, flush=True)
            return 1 if os.environ.get("TURNSTILE_TEST_DEB") == "must" else 0
        finally:
            # Who made it may be gone.
            shutil.rmtree(options.work, ignore_errors=True)


def _watch(lifeline: int) -> None:
    """End as by Ctrl-C once the other end of the pipe is closed."""
    os.read(lifeline, 1)
    # A real signal, which ends what the main thread waits for.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _leave_the_network() -> None:
    """From here on there is nothing but a loopback interface of our own."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    # Where systemd-nspawn keeps its own; in our mount name space.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "turnstile-test", "/run"], check=True)


@contextlib.contextmanager
def _booted(image: Path, place: Path) -> Iterator[Machine]:
    with layered(image, place) as root, Machine(root) as machine:
        yield machine


def _test(work: Path, images: dict[str, Path], options: argparse.Namespace) -> int:
    # Before much time is spent: is that possible here at all?
    with _booted(images["base"], work / "first"):
        pass
    report = Report()
    files = _files(work, images, options, report)
    if files is None:
        report.close()
        return 1
    if options.shell:
        with _booted(images["base"], work / "machine") as machine:
            (machine.root / "srv/newer.deb").write_bytes(files["newer.deb"])
            machine.run("apt-get install --yes /srv/newer.deb", seconds=400)
            checks_service.start_engines(machine)
            return subprocess.run(machine.command("exec bash")).returncode
    if options.only != "pip":
        with _booted(images["base"], work / "machine") as machine:
            _test_deb(report, machine, files)
    if options.only != "deb":
        with _booted(images["pip"], work / "other") as machine:
            wheels = {name: data for name, data in files.items() if ".whl" in name}
            checks_pip.run(report, machine, wheels)
            dockerfile = (ROOT / "Dockerfile").read_text()
            checks_pip.dockerfile(report, machine, sources(), dockerfile)
    return 0 if report.close() else 1


def _test_deb(report: Report, machine: Machine, files: dict[str, bytes]) -> None:
    for name in ("older.deb", "newer.deb"):
        (machine.root / "srv" / name).write_bytes(files[name])
    if not checks_package.install(report, machine):
        return
    checks_service.start_engines(machine)
    checks_package.configure(report, machine)
    checks_package.upgrade(report, machine)
    checks_service.run(report, machine)
    checks_sandbox.run(report, machine)
    checks_package.remove(report, machine)


def _files(
    work: Path, images: dict[str, Path], options: argparse.Namespace, report: Report
) -> dict[str, bytes] | None:
    """The packages to test, by name; None if they can't be built."""
    if options.use is not None:
        return {path.name: path.read_bytes() for path in options.use.iterdir()}
    files: dict[str, bytes] = {}
    with Workshop(images["build"], work / "workshop") as workshop:
        for part, build in (("deb", checks_package.build), ("pip", checks_pip.build)):
            if options.only in (None, part):
                built = build(report, workshop, version())
                if built is None:
                    return None
                files |= built
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (options.keep / name).write_bytes(data)
    return files


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("test-deb: interrupted")
