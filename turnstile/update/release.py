"""Where releases are, and what is said of the latest one.

Gitea's and GitHub's answers are alike in what counts here.
"""

from __future__ import annotations

import fnmatch
import json
import re
from urllib.parse import urlsplit

import attrs

from turnstile.update.version import Version

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@attrs.frozen
class Repository:
    """A repository on a forge.

    :ivar url: the address that people open, without a slash at its end.
    :ivar api: where the latest release is described.
    """

    url: str
    api: str

    @classmethod
    def parse(cls, text: str) -> Repository:
        """Understand ``https://HOST/OWNER/NAME``; raises ValueError with a reason."""
        if not text.isascii() or not text.isprintable() or " " in text:
            raise ValueError(f"{text!r} is not a URL")
        parts = urlsplit(text)
        if parts.scheme.lower() != "https":
            raise ValueError(f"{text!r}: updates are fetched over https:// only")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError(f"{text!r}: a repository's URL has no user, no query and no fragment")
        try:
            host, _ = parts.hostname, parts.port
        except ValueError:
            host = None
        names = parts.path.strip("/").removesuffix(".git").split("/")
        if not host or len(names) < 2 or not all(_NAME.fullmatch(name) for name in names):
            raise ValueError(f"{text!r} is not https://HOST/OWNER/REPOSITORY")
        *base, owner, name = names
        path = f"{owner}/{name}/releases/latest"
        root = "/".join([f"https://{parts.netloc}", *base])
        if host in ("github.com", "www.github.com"):
            api = f"https://api.github.com/repos/{path}"
        else:
            api = f"{root}/api/v1/repos/{path}"
        return cls(f"{root}/{owner}/{name}", api)

    def __str__(self) -> str:
        return self.url


@attrs.frozen
class Asset:
    """A file of a release; ``size`` is what the forge says, ``None`` if it does not."""

    name: str
    url: str
    size: int | None = None


@attrs.frozen
class Release:
    """A release as its forge describes it."""

    tag: str
    assets: tuple[Asset, ...] = ()
    unfinished: bool = False

    @property
    def version(self) -> Version | None:
        """Its version, if its tag is one of ours."""
        return Version.parse_tag(self.tag)


class NotUsable(Exception):
    """A release can't be installed; the text is one line that says why."""


def parse_release(body: bytes) -> Release:
    """Read the answer to a request for the latest release; raises `NotUsable`."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        raise NotUsable("the answer is not JSON") from None
    tag = answer.get("tag_name") if isinstance(answer, dict) else None
    if not isinstance(tag, str):
        raise NotUsable("the answer describes no release")
    listed = answer.get("assets")
    assets = []
    for entry in listed if isinstance(listed, list) else ():
        if not isinstance(entry, dict):
            continue
        name, url, size = entry.get("name"), entry.get("browser_download_url"), entry.get("size")
        if isinstance(name, str) and isinstance(url, str):
            is_size = isinstance(size, int) and not isinstance(size, bool)
            assets.append(Asset(name, url, size if is_size else None))
    unfinished = bool(answer.get("draft") or answer.get("prerelease"))
    return Release(tag, tuple(assets), unfinished)


@attrs.frozen
class Files:
    """What of a release is downloaded."""

    wheel: Asset
    signature: Asset
    checksum: Asset | None


def choose_files(release: Release, pattern: str) -> Files:
    """Wheel, signature and checksum of ``release``; raises `NotUsable`.

    :param pattern: of the wheel's name, as file names are matched.
    """
    wheels = [a for a in release.assets if fnmatch.fnmatchcase(a.name, pattern)]
    if len(wheels) != 1:
        found = ", ".join(sorted(a.name for a in wheels)) or "none"
        raise NotUsable(f"{release.tag} should have one file named {pattern} (it has: {found})")
    (wheel,) = wheels
    by_name = {asset.name: asset for asset in release.assets}
    signature = by_name.get(f"{wheel.name}.sig")
    if signature is None:
        raise NotUsable(f"{release.tag} is not signed: it has no {wheel.name}.sig")
    return Files(wheel, signature, by_name.get(f"{wheel.name}.sha256"))


@attrs.frozen
class NothingNew(Exception):
    """The latest release is the one that runs."""

    version: Version


def judge(running: str, release: Release, refused: frozenset[str]) -> Version:
    """The version to install; raises `NotUsable`, or `NothingNew`.

    :param running: the version that runs.
    :param refused: versions that did not come up.
    """
    current = Version.parse(running)
    if current is None:
        raise NotUsable(f"{running} is a development version, which is never updated")
    version = release.version
    if version is None:
        raise NotUsable(f"the latest release, {release.tag[:50]!r}, is not named vX.Y.Z")
    if release.unfinished:
        raise NotUsable(f"{release.tag} is a draft or a pre-release")
    if version == current:
        raise NothingNew(version)
    if version < current:
        raise NotUsable(f"the latest release is {release.tag}, older than {running} that runs")
    if str(version) in refused:
        raise NotUsable(f"{release.tag} was tried before and did not come up")
    return version


__all__ = [
    "Asset",
    "Files",
    "NotUsable",
    "NothingNew",
    "Release",
    "Repository",
    "choose_files",
    "judge",
    "parse_release",
]
