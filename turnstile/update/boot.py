"""Runs before each start of an installed turnstile: takes a new version back that did not come up twice.

A program of its own that needs nothing but Python, since the version that it judges may be broken in any way. It is
copied beside the installation, and never updated by what it judges. All that it knows is in these places below the
installation's folder:

* ``releases/X.Y.Z``: one folder a version, that its wheel was unpacked into;
* ``current``: a symbolic link to one of them;
* ``update.json``: the version that is on trial, how often it was started, which one was there before, and the versions
  that failed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

#: Starts that a new version has to come up.
ATTEMPTS = 2
STATE = "update.json"
CURRENT = "current"
RELEASES = "releases"
_EMPTY: dict[str, Any] = {"version": None, "previous": None, "attempts": 0, "refused": []}


def read_state(root: Path) -> dict[str, Any]:
    """What is known of updates; what can't be read counts as nothing."""
    state = dict(_EMPTY)
    try:
        with open(os.path.join(root, STATE), "rb") as file:
            found = json.loads(file.read(1 << 20))
        if not isinstance(found, dict):
            raise ValueError("not an object")
    except FileNotFoundError:
        return state
    except (OSError, ValueError) as error:
        print(f"turnstile: {STATE} can't be read, it counts as empty: {error}", flush=True)
        return state
    for name in ("version", "previous"):
        if _is_name(found.get(name)):
            state[name] = found[name]
    if isinstance(found.get("attempts"), int):
        state["attempts"] = found["attempts"]
    if isinstance(found.get("refused"), list):
        state["refused"] = [name for name in found["refused"] if _is_name(name)]
    return state


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value not in ("", ".", "..") and "/" not in value


def write_state(root: Path, state: dict[str, Any]) -> None:
    """Replace the state, so that it is whole at any time."""
    fd, path = tempfile.mkstemp(prefix=f".{STATE}-", dir=root)
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(state, file, indent=1)
            file.write("\n")
            file.flush()
            os.fchmod(fd, 0o644)
            os.fsync(fd)
        os.replace(path, os.path.join(root, STATE))
    except BaseException:
        os.unlink(path)
        raise
    sync_folder(root)


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def current_version(root: Path) -> str | None:
    """The name of the version that a start would run; ``None`` if there is none."""
    try:
        target = os.readlink(os.path.join(root, CURRENT))
    except OSError:
        return None
    folder, name = os.path.split(target)
    return name if folder == RELEASES and has_release(root, name) else None


def has_release(root: Path, name: str) -> bool:
    """Whether a version is there."""
    return os.path.isdir(os.path.join(root, RELEASES, name, "turnstile"))


def switch(root: Path, name: str) -> None:
    """Let the next start run ``name``, in one step."""
    while True:
        temporary = os.path.join(root, f".{CURRENT}-{os.urandom(8).hex()}")
        try:
            os.symlink(os.path.join(RELEASES, name), temporary)
            break
        except FileExistsError:
            continue
    try:
        os.replace(temporary, os.path.join(root, CURRENT))
    except BaseException:
        os.unlink(temporary)
        raise
    sync_folder(root)


def prepare(root: Path) -> str | None:
    """Count a start, or take a version back; returns what there is to say, or ``None``."""
    state = read_state(root)
    version, previous = state["version"], state["previous"]
    current = current_version(root)
    if version is None:
        if current is None and previous is not None and has_release(root, previous):
            switch(root, previous)
            return f"no version is in place: back to {previous}"
        return None
    if current is not None and current != version:
        # It was never put in place.
        state.update(version=None, attempts=0)
        write_state(root, state)
        return None
    if current is not None and state["attempts"] < ATTEMPTS:
        state["attempts"] += 1
        write_state(root, state)
        return None
    if previous is None or not has_release(root, previous):
        return f"version {version} does not come up, and there is none to go back to"
    refused = [name for name in state["refused"] if name != version]
    state.update(version=None, attempts=0, refused=[*refused, version])
    # In this order: whatever happens in between, the failed version is not what the next start runs.
    switch(root, previous)
    write_state(root, state)
    return f"version {version} did not come up {ATTEMPTS} times: back to {previous}"


def main(arguments: list[str]) -> None:
    """Prepare the installation in the folder that is named; never fails, or nothing would be started."""
    try:
        said = prepare(Path(arguments[0]))
    except Exception as error:
        said = f"the versions could not be looked at: {type(error).__name__}: {error}"
    if said:
        print(f"turnstile: {said}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
