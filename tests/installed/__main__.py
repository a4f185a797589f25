"""Builds the Debian package, installs it in a booted system, and checks that what it promises holds there.

Run by script/test-deb, in name spaces of its own. Nothing but Python's standard library.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import checks_package
import checks_sandbox
import checks_service
from build import Workshop, version
from images import prepare
from machine import Machine, Refused, layered
from report import Report


def main() -> int:
    parser = argparse.ArgumentParser(prog="script/test-deb")
    parser.add_argument("--cache", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--keep-debs", type=Path, metavar="FOLDER", help="copy the packages there")
    parser.add_argument(
        "--shell", action="store_true", help="no checks, but a shell in the booted system"
    )
    parser.add_argument("--debs", type=Path, metavar="FOLDER", help="use these instead of building")
    options = parser.parse_args()
    images = prepare(options.cache)
    _leave_the_network()
    with tempfile.TemporaryDirectory(prefix="turnstile-test-deb-") as name:
        return _test(Path(name), images, options)


def _leave_the_network() -> None:
    """From here on there is nothing but a loopback interface of our own."""
    import ctypes

    CLONE_NEWNET = 0x40000000
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    # Where systemd-nspawn keeps its own; in our mount name space.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "turnstile-test", "/run"], check=True)


def _skip(reason: str) -> int:
    print(
        f"\ntest-deb: SKIPPED, nothing was tested: no container boots here.\n{reason}", flush=True
    )
    return 1 if os.environ.get("TURNSTILE_TEST_DEB") == "must" else 0


def _test(work: Path, images: dict[str, Path], options: argparse.Namespace) -> int:
    report = Report()
    with layered(images["base"], work / "machine") as root:
        try:
            machine = Machine(root).__enter__()
        except Refused as refused:
            return _skip(str(refused))
        try:
            packages = _packages(work, images, options, report)
            if packages is not None:
                older, newer = packages
                (root / "srv/older.deb").write_bytes(older)
                (root / "srv/newer.deb").write_bytes(newer)
                if options.shell:
                    machine.run("apt-get install --yes /srv/newer.deb", seconds=400)
                    checks_service.start_engines(machine)
                    return subprocess.run(machine.command("exec bash")).returncode
                if checks_package.install(report, machine):
                    checks_service.start_engines(machine)
                    checks_package.configure(report, machine)
                    checks_package.upgrade(report, machine, version())
                    checks_service.run(report, machine)
                    checks_sandbox.run(report, machine)
                    checks_package.remove(report, machine)
        finally:
            machine.__exit__()
    return 0 if report.close() else 1


def _packages(
    work: Path, images: dict[str, Path], options: argparse.Namespace, report: Report
) -> tuple[bytes, bytes] | None:
    """An older and a newer one."""
    if options.debs is not None:
        return (options.debs / "older.deb").read_bytes(), (options.debs / "newer.deb").read_bytes()
    with Workshop(images["build"]) as workshop:
        packages = checks_package.build(report, workshop, version())
    if packages is not None and options.keep_debs is not None:
        options.keep_debs.mkdir(parents=True, exist_ok=True)
        for name, deb in zip(("older", "newer"), packages, strict=True):
            (options.keep_debs / f"{name}.deb").write_bytes(deb)
    return packages


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("test-deb: interrupted")
