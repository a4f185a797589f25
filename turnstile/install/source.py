"""What is installed from: the environment that runs now. Nothing is downloaded; what works here is copied."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path, PurePosixPath

import attrs

import turnstile
from turnstile.install.paths import InstallError, is_hidden

_REQUIREMENT = re.compile(
    r"\s*(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[(?P<extras>[^\]]*)\])?[^;]*(?:;(?P<marker>.*))?"
)
_EXTRA = re.compile(r"""\bextra\s*==\s*["']([^"']+)["']""")

#: What distributions import without saying so in their metadata: service-identity before version 21, without which
#: Twisted would check the names in certificates only roughly.
_UNDECLARED = {"service-identity": ["six"]}

#: Files by their place below site-packages.
Files = Mapping[PurePosixPath, Path]


@attrs.frozen
class Bundle:
    """A distribution, and where its files are now."""

    name: str
    version: str
    files: Files


@attrs.frozen
class Source:
    """All that an installation is made of.

    :ivar version: of turnstile.
    :ivar release: turnstile's own files.
    :ivar dependencies: everything else that it needs.
    :ivar python: the version of Python, as ``3.11``.
    :ivar home: the folder of the Python that the environment stands on.
    :ivar interpreter: the Python that runs now.
    """

    version: str
    release: Files
    dependencies: tuple[Bundle, ...]
    python: str
    home: Path
    interpreter: Path


def normal(name: str) -> str:
    """A distribution's name as names are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted_requirements(lines: list[str], extras: set[str]) -> Iterator[tuple[str, set[str]]]:
    """Name and extras of what a distribution with ``extras`` may need.

    Other conditions than extras (systems, versions of Python) are not looked at: what is not installed here was not
    needed here.
    """
    for line in lines:
        match = _REQUIREMENT.fullmatch(line)
        if match is None:
            continue
        asked = {normal(name) for name in _EXTRA.findall(match["marker"] or "")}
        if asked and asked.isdisjoint(extras):
            continue
        wants = {normal(extra.strip()) for extra in (match["extras"] or "").split(",")}
        yield normal(match["name"]), wants - {""}


def closure(
    root: str, distribution: Callable[[str], metadata.Distribution | None]
) -> dict[str, metadata.Distribution]:
    """``root`` and everything installed that it needs, by name."""
    found: dict[str, metadata.Distribution] = {}
    known: dict[str, set[str]] = {}
    todo: list[tuple[str, set[str]]] = [(root, set())]
    while todo:
        name, extras = todo.pop()
        if name in known and extras <= known[name]:
            continue
        known.setdefault(name, set()).update(extras)
        dist = distribution(name)
        if dist is None:
            continue
        found[name] = dist
        lines = [*(dist.requires or []), *_UNDECLARED.get(name, [])]
        todo += wanted_requirements(lines, known[name])
    return found


def _distribution(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def bundle(dist: metadata.Distribution) -> Bundle:
    """The files of an installed distribution below its site-packages; raises `InstallError`."""
    name = normal(dist.metadata["Name"])
    if dist.read_text("RECORD") is None:
        raise InstallError(
            f"{name} was not installed by pip, so that it can't be copied: make an environment"
            " (python3 -m venv DIR), install turnstile in it with pip, and run its turnstile-service"
        )
    files = {}
    for entry in dist.files or ():
        # Programs and manual pages lie elsewhere; a service needs none.
        if entry.is_absolute() or ".." in entry.parts or _is_derived(entry):
            continue
        path = Path(str(entry.locate()))
        if path.is_file():
            files[PurePosixPath(entry)] = path
    return Bundle(name, dist.version, files)


def _is_derived(path: PurePosixPath) -> bool:
    return "__pycache__" in path.parts or path.suffix == ".pyc" or path.name == "dropin.cache"


def release_files(package: Path, dist: metadata.Distribution) -> Files:
    """The files of turnstile itself: the package, the plugin, and what tells its version."""
    parent = package.parent
    found = {}
    for path in sorted(package.rglob("*")):
        place = PurePosixPath(path.relative_to(parent).as_posix())
        if path.is_file() and not _is_derived(place):
            found[place] = path
    plugin = PurePosixPath("twisted/plugins/turnstile_plugin.py")
    found[plugin] = parent / plugin
    folder = f"turnstile-{dist.version}.dist-info"
    base = Path(str(getattr(dist, "_path", parent / folder)))  # no public name in Python 3.11
    for name in ("METADATA", "PKG-INFO"):
        if (base / name).is_file():
            found[PurePosixPath(folder) / "METADATA"] = base / name
            break
    if not (parent / plugin).is_file() or len(found) < 3:
        raise InstallError("this copy of turnstile is not complete: install it with pip")
    return found


def find_source() -> Source:
    """The environment that runs now; raises `InstallError` if a service can't be made from it."""
    found = closure("turnstile", _distribution)
    own = found.pop("turnstile", None)
    if own is None:
        raise InstallError(
            "turnstile is not installed here: run pip install with its wheel or folder"
        )
    home = Path(getattr(sys, "_base_executable", sys.executable)).parent.resolve()
    return Source(
        version=turnstile.__version__,
        release=release_files(Path(turnstile.__file__).parent, own),
        dependencies=tuple(bundle(dist) for _, dist in sorted(found.items())),
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        home=home,
        interpreter=Path(sys.executable),
    )


def check_visible(path: Path, what: str) -> None:
    """Raises `InstallError` if the service could not see ``path``."""
    for seen in (path, path.resolve()):
        if is_hidden(seen):
            raise InstallError(f"{what} is {path}, which the service's sandbox hides from it")
