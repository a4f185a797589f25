"""The unit of a service that ``turnstile-service`` made: the packaged one, with what differs there."""

from __future__ import annotations

from importlib import resources

from turnstile.install.paths import SERVICE, Paths
from turnstile.units import SOCKETS

_HEAD = """\
# Made by turnstile-service, which replaces it when it is run again: your own settings belong into
# a drop-in (systemctl edit turnstile).
"""
#: A new version that can't be used, if only because it refuses the configuration, has to be started again to be taken
#: back; one that leaves for another is no failure.
_RESTART = ["SuccessExitStatus=3", "RestartForceExitStatus=3"]


def packaged(name: str) -> str:
    """The text of a unit that comes with turnstile."""
    return (resources.files("turnstile") / "systemd" / name).read_text(encoding="utf-8")


def service_unit(text: str, command: str, before: str | None) -> str:
    """The service's unit.

    :param text: the packaged one.
    :param command: what to run.
    :param before: what to run before each start.
    """
    lines: list[str] = []
    replaced = 0
    for line in text.splitlines():
        if line.startswith("ExecStart="):
            replaced += 1
            if before is not None:
                lines.append(f"ExecStartPre=-{before}")
            lines.append(f"ExecStart={command}")
        elif line.startswith("RestartPreventExitStatus="):
            # And what is said of it.
            while lines and lines[-1].startswith("#"):
                lines.pop()
            lines += _RESTART
        else:
            lines.append(line)
    if replaced != 1:
        raise ValueError("the packaged unit has not one ExecStart=")
    return _HEAD + "\n".join(lines) + "\n"


def unit_files(paths: Paths, interpreter: str, copied: bool) -> dict[str, str]:
    """Name and text of every unit.

    :param interpreter: the Python that runs turnstile.
    :param copied: whether it is the one of the service's own folder.
    """
    root = paths.inside(paths.root)
    before = f"{interpreter} -I -S {paths.inside(paths.boot)} {root}" if copied else None
    command = f"{interpreter} -I -m turnstile"
    units = {SERVICE: service_unit(packaged(SERVICE), command, before)}
    return units | {name: _HEAD + packaged(name) for name in SOCKETS.values()}
