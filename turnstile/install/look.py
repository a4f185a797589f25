"""What is there: the machine's files and units, compared with what is wanted."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Protocol

from turnstile.config import Config, ConfigError, load
from turnstile.install.paths import SERVICE, InstallError, Paths
from turnstile.install.plan import Seen, Wanted
from turnstile.install.source import Files, Source
from turnstile.install.unit import unit_files
from turnstile.reference import env_file
from turnstile.units import SOCKETS, wanted_units
from turnstile.update import boot


class Manager(Protocol):
    """What is asked of systemd: :class:`turnstile.install.systemd.Systemd`."""

    def active(self, units: Iterable[str]) -> frozenset[str]: ...

    def enabled(self, units: Iterable[str]) -> frozenset[str]: ...

    def run(self, verb: str, units: tuple[str, ...] = ()) -> None: ...


ALL_UNITS = (*SOCKETS.values(), SERVICE)


def make_wanted(paths: Paths, source: Source, config: str | None, *, copied: bool) -> Wanted:
    """The service as it should be.

    :param config: text of a configuration for a machine that has none; ``None``: every setting commented out.
    :param copied: into the service's own folder, or used where the source is.
    """
    interpreter = paths.inside(paths.interpreter) if copied else str(source.interpreter)
    files = {
        paths.units / name: text for name, text in unit_files(paths, interpreter, copied).items()
    }
    if copied:
        files[paths.boot] = Path(boot.__file__).read_text(encoding="utf-8")
        files[paths.path_file] = path_file(paths)
    units = _units(paths, config)
    folders = (paths.root, paths.releases) if copied else ()
    return Wanted(
        version=source.version if copied else None,
        folders=(*folders, paths.config.parent),
        venv=paths.venv if copied else None,
        dependencies={b.name: b.version for b in source.dependencies} if copied else {},
        files=files,
        config=(paths.config, config if config is not None else env_file()),
        sockets={name: name in units for name in SOCKETS.values()},
        can_start=bool(units),
    )


def path_file(paths: Paths) -> str:
    """The line that lets Python find the version that is in place when it starts, and no other while it runs."""
    root = paths.inside(paths.root)
    return (
        "import os, sys;"
        f" sys.path.append(os.path.join({root!r}, os.readlink({root + '/' + boot.CURRENT!r})))\n"
    )


def _units(paths: Paths, config: str | None) -> frozenset[str]:
    """The units for the configuration that there will be; none if it names no engine or can't be used."""
    try:
        return frozenset(wanted_units(read_config(paths, config)))
    except ConfigError:
        return frozenset()


def read_config(paths: Paths, config: str | None) -> Config:
    """The configuration that the service will read; raises `turnstile.config.ConfigError`."""
    if _exists(paths.config):
        return load({"config": str(paths.config)}, {})
    with tempfile.NamedTemporaryFile("w", suffix=".env") as file:
        file.write(config or "")
        file.flush()
        return load({"config": file.name}, {})


def look(paths: Paths, source: Source | None, wanted: Wanted, manager: Manager) -> Seen:
    """The machine as it is."""
    files = {}
    for path in wanted.files:
        text = _text(path)
        if text is not None:
            files[path] = text
    venv_problem, stale, differs = "there is none", frozenset(wanted.dependencies), True
    if wanted.venv is not None and source is not None:
        venv_problem = find_venv_problem(paths, source)
        stale = frozenset(
            bundle.name
            for bundle in source.dependencies
            if differs_from(bundle.files, paths.site_packages)
        )
        differs = release_differs(source.release, paths.releases / source.version)
    return Seen(
        folders=frozenset(path for path in wanted.folders if path.is_dir()),
        venv_problem=venv_problem,
        stale=stale,
        release_differs=differs,
        current=boot.current_version(paths.root),
        files=files,
        has_config=_exists(paths.config),
        active=manager.active(ALL_UNITS),
        enabled=manager.enabled(ALL_UNITS),
    )


def find_venv_problem(paths: Paths, source: Source) -> str:
    """Why the environment has to be made anew; empty if it is as it should be."""
    text = _text(paths.venv / "pyvenv.cfg")
    if text is None:
        return "there is none"
    settings = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            settings[name.strip().lower()] = value.strip()
    if Path(settings.get("home", "")).resolve() != source.home:
        return f"it stands on {settings.get('home')}, not on {source.home}"
    version = ".".join(settings.get("version", "").split(".")[:2])
    if any(os.path.islink(path) for path in _folders(paths.venv)):
        return "it holds links to other folders"
    if version != source.python or not paths.site_packages.is_dir():
        return f"it is for Python {version}, not {source.python}"
    if not paths.interpreter.exists():
        return "its Python is gone"
    return ""


def _folders(venv: Path) -> Iterator[str]:
    """Every folder below an environment, but for the link that Python makes."""
    for folder, names, _ in os.walk(venv):
        for name in names:
            if name != "lib64" or Path(folder) != venv:
                yield os.path.join(folder, name)


def check_links(paths: Paths) -> None:
    """Raises `InstallError` if a folder that root is about to write to is a link.

    The service's user may make one, and root must not follow it.
    """
    for path in (paths.releases, paths.venv):
        if path.is_symlink():
            raise InstallError(f"{path} is a symbolic link, which it should not be: remove it")


def differs_from(files: Files, folder: Path) -> bool:
    """Whether one of ``files`` is missing below ``folder``, or is another there."""
    return any(not _same(path, folder / place) for place, path in files.items())


def release_differs(files: Files, folder: Path) -> bool:
    """The same for a version's folder, where nothing else may be either."""
    if differs_from(files, folder):
        return True
    package = folder / "turnstile"
    there = {
        PurePosixPath(path.relative_to(folder).as_posix())
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    return not there <= set(files)


def _same(one: Path, other: Path) -> bool:
    try:
        return one.stat().st_size == other.stat().st_size and one.read_bytes() == other.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return False


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def _exists(path: Path) -> bool:
    # Not Path.exists, which takes a folder that may not be looked into for one without the file.
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def check_machine(paths: Paths) -> None:
    """Raises `InstallError` where the Debian package has the service already."""
    for path in paths.packaged_units:
        if _exists(path):
            raise InstallError(
                f"turnstile is installed as a package of the system ({path}): use apt and systemctl,"
                " or remove that package first"
            )


__all__ = [
    "ALL_UNITS",
    "Manager",
    "check_links",
    "check_machine",
    "look",
    "make_wanted",
    "path_file",
    "read_config",
]
