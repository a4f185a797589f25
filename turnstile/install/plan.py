"""What is to be done: the difference between what is wanted and what is there, as steps. Nothing here does I/O.

The order of the steps is that of an update by hand: what can be prepared is, what can't be changed under a running
service is changed while it stands still, and at the end it runs again if it did before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs

from turnstile.install.paths import SERVICE

# -- steps -----------------------------------------------------------------------------------------------------------


@attrs.frozen
class MakeFolder:
    """Make a folder, and those above it."""

    path: Path

    def __str__(self) -> str:
        return f"make the folder {self.path}"


@attrs.frozen
class MakeVenv:
    """Make the Python environment anew, empty."""

    path: Path
    why: str

    def __str__(self) -> str:
        return f"make the Python environment {self.path} ({self.why})"


@attrs.frozen
class CopyDependency:
    """Copy a distribution into the environment."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"copy {self.name} {self.version}"


@attrs.frozen
class CopyRelease:
    """Copy this version of turnstile to its folder."""

    version: str

    def __str__(self) -> str:
        return f"copy turnstile {self.version}"


@attrs.frozen
class SwitchRelease:
    """Let the next start run a version."""

    before: str | None
    version: str

    def __str__(self) -> str:
        return f"put version {self.version} in place" + (
            f" of {self.before}" if self.before else ""
        )


@attrs.frozen
class WriteFile:
    """Write a file whole."""

    path: Path
    text: str = attrs.field(repr=False)
    is_new: bool

    def __str__(self) -> str:
        return f"{'write' if self.is_new else 'replace'} {self.path}"


@attrs.frozen
class RemovePath:
    """Remove a file, or a folder with all that is in it."""

    path: Path

    def __str__(self) -> str:
        return f"remove {self.path}"


@attrs.frozen
class Systemctl:
    """Have systemd do something."""

    verb: str
    units: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(("systemctl", self.verb, *self.units))


Step = (
    MakeFolder
    | MakeVenv
    | CopyDependency
    | CopyRelease
    | SwitchRelease
    | WriteFile
    | RemovePath
    | Systemctl
)


# -- what is wanted, and what is there -------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Wanted:
    """The service as it should be.

    :ivar version: of turnstile; ``None``: it is used where it is (``--no-copy``).
    :ivar folders: that have to be there.
    :ivar venv: the environment's folder; ``None`` as above.
    :ivar dependencies: name and version of what belongs into it.
    :ivar files: text of every file that is ours.
    :ivar config: path and text of the configuration, which is written only if there is none.
    :ivar sockets: every socket unit, and whether it should be enabled.
    :ivar can_start: whether the configuration, as it will be, lets the service run.
    """

    version: str | None
    folders: tuple[Path, ...]
    venv: Path | None
    dependencies: Mapping[str, str]
    files: Mapping[Path, str]
    config: tuple[Path, str]
    sockets: Mapping[str, bool]
    can_start: bool


@attrs.frozen(kw_only=True)
class Seen:
    """The machine as it is.

    :ivar folders: those of the wanted ones that are there.
    :ivar venv_problem: why the environment can't be used as it is; empty if it can.
    :ivar stale: dependencies that are missing or differ.
    :ivar release_differs: whether this version of turnstile is missing or differs.
    :ivar current: the version that the next start runs.
    :ivar files: texts of those of the wanted files that are there.
    :ivar has_config: whether there is a configuration.
    :ivar active: units that run.
    :ivar enabled: units that are started with the machine.
    """

    folders: frozenset[Path] = frozenset()
    venv_problem: str = "there is none"
    stale: frozenset[str] = frozenset()
    release_differs: bool = True
    current: str | None = None
    files: Mapping[Path, str] = attrs.field(factory=dict)
    has_config: bool = False
    active: frozenset[str] = frozenset()
    enabled: frozenset[str] = frozenset()


def plan_install(wanted: Wanted, seen: Seen) -> tuple[Step, ...]:
    """The steps from ``seen`` to ``wanted``; none where nothing drifted."""
    folders: list[Step] = [MakeFolder(path) for path in wanted.folders if path not in seen.folders]
    standing: list[Step] = []
    running: list[Step] = []
    if wanted.venv is not None and wanted.version is not None:
        if seen.venv_problem:
            standing.append(MakeVenv(wanted.venv, seen.venv_problem))
        standing += [
            CopyDependency(name, version)
            for name, version in wanted.dependencies.items()
            if seen.venv_problem or name in seen.stale
        ]
        if seen.release_differs:
            if seen.current == wanted.version:
                standing.append(CopyRelease(wanted.version))
            else:
                running.append(CopyRelease(wanted.version))
        if seen.current != wanted.version:
            running.append(SwitchRelease(seen.current, wanted.version))
    files: list[Step] = []
    in_venv: list[Step] = []
    for path, text in wanted.files.items():
        is_inside = wanted.venv is not None and path.is_relative_to(wanted.venv)
        before = None if is_inside and seen.venv_problem else seen.files.get(path)
        if before != text:
            (in_venv if is_inside else files).append(WriteFile(path, text, before is None))
    path, text = wanted.config
    config: list[Step] = [] if seen.has_config else [WriteFile(path, text, True)]
    standing += in_venv
    return _around(wanted, seen, [*folders, *config], standing, [*running, *files])


def _around(
    wanted: Wanted, seen: Seen, first: list[Step], standing: list[Step], running: list[Step]
) -> tuple[Step, ...]:
    """The steps with those for systemd around them.

    :param standing: what must not be done while the service runs.
    """
    was_active = SERVICE in seen.active
    # What is not registered (any more) is started when it is; what somebody stopped stays so.
    begins = was_active or SERVICE not in seen.enabled
    sockets = [name for name, wants in wanted.sockets.items() if wants]
    unwanted = [name for name, wants in wanted.sockets.items() if not wants]
    if standing:
        # Sockets too: whoever connects would start the service in the middle of this.
        stop = [name for name in (*wanted.sockets, SERVICE) if name in seen.active]
    else:
        stop = [name for name in unwanted if name in seen.active]
        # A socket can't be opened or given up while the service listens there.
        if was_active and (stop or not seen.active.issuperset(sockets)):
            stop.append(SERVICE)
    start = [name for name in sockets if name in stop or (begins and name not in seen.active)]
    if (was_active and SERVICE in stop) or (begins and not was_active):
        start.append(SERVICE)
    disable = [name for name in unwanted if name in seen.enabled]
    enable = [name for name in (*sockets, SERVICE) if name not in seen.enabled]
    steps: list[Step] = list(first)
    if stop:
        steps.append(Systemctl("stop", tuple(stop)))
    steps += [*standing, *running]
    if any(isinstance(step, WriteFile) and _is_unit(step.path) for step in running):
        steps.append(Systemctl("daemon-reload"))
    if disable:
        steps.append(Systemctl("disable", tuple(disable)))
    if not wanted.can_start:
        return tuple(steps)
    if enable:
        steps.append(Systemctl("enable", tuple(enable)))
    if start:
        steps.append(Systemctl("start", tuple(start)))
    elif was_active and (standing or running):
        steps.append(Systemctl("restart", (SERVICE,)))
    return tuple(steps)


def _is_unit(path: Path) -> bool:
    return path.suffix in (".service", ".socket")


def plan_remove(
    paths: tuple[Path, ...], unit_files: tuple[Path, ...], seen: Seen
) -> tuple[Step, ...]:
    """The steps that leave nothing but the configuration and the logs.

    :param paths: folders of ours that are there.
    :param unit_files: units of ours that are there.
    """
    names = [path.name for path in unit_files]
    # The sockets first: the service would be started again by whoever connects.
    order = sorted(names, key=lambda name: name == SERVICE)
    stop = [name for name in order if name in seen.active]
    disable = [name for name in order if name in seen.enabled]
    steps: list[Step] = []
    if stop:
        steps.append(Systemctl("stop", tuple(stop)))
    if disable:
        steps.append(Systemctl("disable", tuple(disable)))
    steps += [RemovePath(path) for path in unit_files]
    if unit_files:
        steps.append(Systemctl("daemon-reload"))
    steps += [RemovePath(path) for path in paths]
    return tuple(steps)
