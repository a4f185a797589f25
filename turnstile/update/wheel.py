"""A release's wheel: what it says of itself, and unpacking it. It is read only after its signature was found good."""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections.abc import Callable
from email.parser import BytesParser
from importlib import metadata
from pathlib import Path, PurePosixPath

import attrs

from turnstile.update.release import NotUsable

#: The most bytes and files that a wheel may unpack to.
LARGEST_UNPACKED = 64 << 20
MOST_FILES = 5000

_REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[A-Za-z0-9._,\s-]*\])?\s*\(?(?P<specifiers>[^;)]*)\)?\s*"
    r"(?:;(?P<marker>.*))?"
)
_SPECIFIER = re.compile(r"(>=|<=|==|!=|>|<)\s*([0-9]+(?:\.[0-9]+)*)")
_EXTRA = re.compile(r"""\s*extra\s*==\s*["'][^"']*["']\s*""")


@attrs.frozen
class Metadata:
    """What a wheel says of itself."""

    name: str
    version: str
    requires: tuple[str, ...]
    requires_python: str


def read_metadata(data: bytes) -> Metadata:
    """Read a wheel's METADATA; raises `NotUsable`."""
    with _open(data) as wheel:
        names = [
            name
            for name in wheel.namelist()
            if name.endswith(".dist-info/METADATA") and name.count("/") == 1
        ]
        if len(names) != 1:
            raise NotUsable("it is no wheel: it has no metadata")
        message = BytesParser().parsebytes(_read(wheel, wheel.getinfo(names[0])))
    return Metadata(
        name=str(message.get("Name", "")),
        version=str(message.get("Version", "")),
        requires=tuple(str(line) for line in message.get_all("Requires-Dist", [])),
        requires_python=str(message.get("Requires-Python", "")),
    )


def check_metadata(
    found: Metadata,
    version: str,
    python: str,
    installed: Callable[[str], str | None],
) -> None:
    """Raises `NotUsable` unless the wheel is turnstile's ``version`` and would run here.

    An older wheel with its true signature under the name of a newer release is refused here.

    :param python: the version of Python.
    :param installed: the version of an installed distribution, ``None`` if there is none.
    """
    if found.name.lower() != "turnstile":
        raise NotUsable(f"it is the program {found.name[:50]!r}")
    if found.version != version:
        raise NotUsable(f"it says that it is version {found.version[:50]!r}, not {version}")
    if not _fits(python, found.requires_python, "Requires-Python"):
        raise NotUsable(f"it needs Python {found.requires_python}")
    for line in found.requires:
        match = _REQUIREMENT.fullmatch(line.strip())
        if match is None:
            raise NotUsable(f"its requirement {line[:80]!r} is not understood")
        if match["marker"]:
            if _EXTRA.fullmatch(match["marker"]):
                continue
            raise NotUsable(f"its requirement {line[:80]!r} is not understood")
        have = installed(match["name"])
        if have is None or not _fits(have, match["specifiers"], line):
            raise NotUsable(
                f"it needs {match['name']} {match['specifiers']}".rstrip()
                + f" ({have or 'not installed'} here): install it with turnstile-service"
            )


def installed_version(name: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _fits(version: str, specifiers: str, whole: str) -> bool:
    have = _numbers(version)
    for part in filter(None, (part.strip() for part in specifiers.split(","))):
        match = _SPECIFIER.fullmatch(part)
        if match is None:
            raise NotUsable(f"its requirement {whole[:80]!r} is not understood")
        want = _numbers(match[2])
        length = max(len(have), len(want))
        one, other = (numbers + (0,) * (length - len(numbers)) for numbers in (have, want))
        fits = {
            ">=": one >= other,
            "<=": one <= other,
            "==": one == other,
            "!=": one != other,
            ">": one > other,
            "<": one < other,
        }[match[1]]
        if not fits:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version; whatever follows (rc1, .post2, +local) does not count."""
    match = re.match(r"(?:[0-9]+!)?([0-9]+(?:\.[0-9]+)*)", version)
    return tuple(int(number) for number in match[1].split(".")) if match else ()


def unpack(data: bytes, folder: Path) -> None:
    """Unpack a wheel of pure Python into the new ``folder``; raises `NotUsable`, and leaves what it wrote."""
    with _open(data) as wheel:
        entries = wheel.infolist()
        if len(entries) > MOST_FILES:
            raise NotUsable(f"it has more than {MOST_FILES} files")
        if sum(entry.file_size for entry in entries) > LARGEST_UNPACKED:
            raise NotUsable(f"it unpacks to more than {LARGEST_UNPACKED >> 20} MiB")
        seen = set()
        for entry in entries:
            path = _check_name(entry.filename)
            if entry.is_dir():
                continue
            if len(path.parts) < 2:
                raise NotUsable(f"it holds something odd: {entry.filename[:80]!r}")
            kind = entry.external_attr >> 28
            if kind not in (0, 8) or path in seen:  # nothing said, or a regular file
                raise NotUsable(f"it holds something odd: {entry.filename[:80]!r}")
            seen.add(path)
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as file:
                file.write(_read(wheel, entry))
        if PurePosixPath("turnstile/__init__.py") not in seen:
            raise NotUsable("it holds no turnstile")


def sync(folder: Path) -> None:
    """Have everything below ``folder`` on the disk before it is put in place."""
    for parent, _, names in os.walk(folder):
        for name in (*names, "."):
            fd = os.open(os.path.join(parent, name), os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def _check_name(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    top = path.parts[0] if path.parts else ""
    if "\\" in name or "\0" in name or path.is_absolute() or ".." in path.parts:
        raise NotUsable(f"it holds something odd: {name[:80]!r}")
    ours = top == "turnstile" or re.fullmatch(r"turnstile-[^/]*\.dist-info", top)
    if not ours and path.parts[:2] not in (("twisted", "plugins"), ("twisted",)):
        raise NotUsable(f"it holds something odd: {name[:80]!r}")
    return path


def _open(data: bytes) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(io.BytesIO(data))
    except (zipfile.BadZipFile, ValueError, OSError):
        raise NotUsable("it is no wheel") from None


def _read(wheel: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """A file's content, and no more than it claims to be."""
    try:
        with wheel.open(entry) as file:
            content = file.read(LARGEST_UNPACKED + 1)
    except Exception as error:  # zipfile's, zlib's, lzma's, RuntimeError for a password
        raise NotUsable(f"it is damaged: {type(error).__name__}") from None
    if len(content) > LARGEST_UNPACKED or len(content) != entry.file_size:
        raise NotUsable("it is damaged: a file is not as long as it says")
    return content
