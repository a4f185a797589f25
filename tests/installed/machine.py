"""A booted Debian system in a container (systemd-nspawn) that shares our network, which is nobody else's.

Whoever uses this runs in mount, process and network name spaces of its own (script/test-deb makes them), so that
nothing is left behind however it ends, and no port is anybody else's.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

_BOOT = 90.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Refused(Exception):
    """The kernel, or what guards it, lets no container boot."""


class Failed(Exception):
    """Something did not come out as it should."""


@contextlib.contextmanager
def layered(image: Path, place: Path) -> Iterator[Path]:
    """``image`` with a layer of memory over it that takes all changes."""
    place.mkdir()
    _run("mount", "-t", "tmpfs", "-o", "mode=755", "turnstile-test", place)
    root = place / "root"
    for name in ("upper", "work", "root"):
        (place / name).mkdir()
    options = f"lowerdir={image},upperdir={place / 'upper'},workdir={place / 'work'}"
    _run("mount", "-t", "overlay", "-o", options, "overlay", root)
    try:
        yield root
    finally:
        _run("umount", "--recursive", "--lazy", place)
        place.rmdir()


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, stdin=subprocess.DEVNULL)


class Machine:
    """The container; ``with`` boots it and takes it down."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._console = root.parent / "console"
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._leader = 0

    def __enter__(self) -> "Machine":
        command = [
            "systemd-nspawn",
            "--quiet",
            "--boot",
            "--register=no",
            "--keep-unit",
            "--console=pipe",
            "--machine=turnstile-test",
            "--link-journal=no",
            "--resolv-conf=off",
            "--timezone=off",
            f"--directory={self.root}",
        ]
        with self._console.open("wb") as console:
            self._nspawn = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
        try:
            self._wait_for_boot()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        nspawn = self._nspawn
        if nspawn is None:
            return
        # There is nothing in it to be saved; systemd-nspawn ends when its child does.
        if self._leader:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._leader, signal.SIGKILL)
        else:
            nspawn.terminate()
        deadline = time.monotonic() + 10.0
        while nspawn.poll() is None:
            _reap(nspawn.pid)
            if time.monotonic() > deadline:
                nspawn.kill()
            time.sleep(0.02)

    @property
    def console(self) -> str:
        """What the boot wrote."""
        return self._console.read_text(errors="replace")

    def _wait_for_boot(self) -> None:
        assert self._nspawn is not None
        deadline = time.monotonic() + _BOOT
        while time.monotonic() < deadline:
            if self._nspawn.poll() is not None:
                raise Refused(f"systemd-nspawn ended: {self.console.strip()[-800:]}")
            self._leader = self._leader or _child_of(self._nspawn.pid)
            if self._leader:
                state = self.run("systemctl is-system-running", check=False).stdout.strip()
                if state in ("running", "degraded"):
                    return
            time.sleep(0.2)
        raise Refused(f"no system came up within {_BOOT:.0f} s: {self.console.strip()[-800:]}")

    # -- inside ------------------------------------------------------------------------------------

    def command(self, script: str, *, pid: int = 0) -> list[str]:
        """What runs a shell's ``script`` in the container; ``pid``: in the name spaces of that process in it."""
        # Cgroups are seen as the container does; the processes stay in ours.
        environ = [
            "env",
            "-i",
            f"PATH={_PATH}",
            "LC_ALL=C.UTF-8",
            "HOME=/root",
            "DEBIAN_FRONTEND=noninteractive",
        ]
        return [
            "nsenter",
            f"--target={pid or self._leader}",
            "--mount",
            "--uts",
            "--ipc",
            "--pid",
            "--cgroup",
            "--root",
            "--wd",
            *environ,
            "/bin/sh",
            "-c",
            script,
        ]

    def run(
        self, script: str, *, check: bool = True, seconds: float = 120.0, input: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell's ``script`` as root; raises `Failed` if it fails, or hangs."""
        try:
            done = subprocess.run(
                self.command(script),
                input=input or "",
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"not done within {seconds:.0f} s: {script}") from None
        if check and done.returncode:
            output = (done.stdout + done.stderr).strip()
            raise Failed(f"{script!r} exited {done.returncode}: {output[-600:]}")
        return done

    def out(self, script: str, **options: object) -> str:
        """What it wrote to its standard output, without blanks at the ends."""
        return self.run(script, **options).stdout.strip()  # type: ignore[arg-type]

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit."""
        properties = shlex.quote(",".join(names))
        lines = self.out(f"systemctl show --property={properties} {unit}").splitlines()
        return dict(line.split("=", 1) for line in lines)

    def state(self, unit: str = "turnstile.service") -> str:
        """``active``, ``inactive``, ``failed``, …"""
        return self.out(f"systemctl is-active {unit}", check=False)

    def write(self, path: str, text: str) -> None:
        """Put a file there, with its folder."""
        quoted = shlex.quote(path)
        self.run(f'mkdir -p "$(dirname {quoted})" && cat > {quoted}', input=text)

    def journal(self, unit: str = "turnstile", since: str = "") -> str:
        """The unit's messages; ``since`` a cursor of `cursor`."""
        after = f"--after-cursor={shlex.quote(since)}" if since else ""
        return self.out(f"journalctl --no-pager --output=cat --unit={unit} {after}")

    def cursor(self) -> str:
        """Where the journal ends now."""
        line = self.out(
            "journalctl --sync; journalctl --no-pager --lines=1 --show-cursor --output=cat"
        ).splitlines()[-1]
        return line.removeprefix("-- cursor: ")


def _reap(but: int) -> None:
    """Orphans are ours to bury where we are process 1; a container ends only when all of its dead are."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != but:
            with contextlib.suppress(OSError):
                os.waitpid(int(entry.name), os.WNOHANG)


def _child_of(pid: int) -> int:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text()
                if int(stat.rpartition(")")[2].split()[1]) == pid:
                    return int(entry.name)
    return 0


def until(what: str, condition, seconds: float = 20.0, pause: float = 0.1):  # type: ignore[no-untyped-def]
    """The first true answer of ``condition``; raises `Failed` if there is none in time."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            raise Failed(f"waited {seconds:.0f} s in vain: {what}")
        time.sleep(pause)
