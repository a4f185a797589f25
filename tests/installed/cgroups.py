"""A control group of our own for the container, so that none of its is left in the one that we were started in."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "turnstile-test-"


def _hierarchies() -> list[Path]:
    """Where we are in those that systemd uses: the unified one, and the named one of old."""
    found = []
    mounts: dict[str, str] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            mounts["0::"] = before.split()[4]
        elif kind == "cgroup" and "name=systemd" in options.split(","):
            mounts["systemd"] = before.split()[4]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, name, path = line.split(":", 2)
        key = "0::" if not name else name.removeprefix("name=")
        if key in mounts:
            found.append(Path(mounts[key] + path.rstrip("/")))
    return found


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text("0")


def _remove(group: Path) -> None:
    """What is left of it, unless something runs in it."""
    for folder, _, _ in os.walk(group, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


@contextlib.contextmanager
def own() -> Iterator[None]:
    """Be in a new group, in each hierarchy that lets us, and remove it with all below it at the end."""
    entered: list[tuple[Path, Path]] = []
    name = _PREFIX + secrets.token_hex(4)
    for before in _hierarchies():
        # Of runs that were killed.
        for old in before.glob(f"{_PREFIX}*"):
            _remove(old)
        group = before / name
        with contextlib.suppress(OSError):
            group.mkdir()
            entered.append((before, group))
            _enter(group)
    try:
        yield
    finally:
        for before, group in entered:
            with contextlib.suppress(OSError):
                _enter(before)
            _remove(group)
