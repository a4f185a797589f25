"""One look for a new version: ask the forge, download, check, unpack beside, try, put in place."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Protocol

import attrs
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from twisted.internet.defer import Deferred, inlineCallbacks
from twisted.internet.error import ProcessExitedAlready
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.threads import deferToThread
from twisted.python.failure import Failure

from turnstile.update import wheel
from turnstile.update.download import DownloadError
from turnstile.update.layout import Layout
from turnstile.update.release import (
    NotUsable,
    Repository,
    choose_files,
    judge,
    parse_release,
)
from turnstile.update.signature import check_checksum, check_signature

#: The most bytes that are downloaded of each.
LARGEST_ANSWER = 4 << 20
LARGEST_WHEEL = 16 << 20
LARGEST_SMALL_FILE = 4096
#: Seconds that a new version has for being imported once.
TRIAL_TIMEOUT = 60.0
_LARGEST_OUTPUT = 1 << 16

# What the service imports at its start, so that a version that can't is never put in place.
_TRIAL = """
import sys
sys.path.insert(0, sys.argv[1])
import turnstile, turnstile.service, turnstile.tap, twisted.plugins.turnstile_plugin
assert turnstile.__file__.startswith(sys.argv[1]), turnstile.__file__
print(turnstile.__version__)
"""


class Fetches(Protocol):
    """What downloads: :class:`turnstile.update.download.Downloader`."""

    def get(self, url: str, limit: int, accept: str = "*/*") -> Deferred[bytes]: ...


@attrs.frozen(kw_only=True)
class Source:
    """Where updates come from, and who vouches for them."""

    repository: Repository
    asset: str
    keys: tuple[Ed25519PublicKey, ...]


@inlineCallbacks
def find_update(
    fetcher: Fetches, source: Source, running: str, refused: frozenset[str]
) -> Generator[Deferred[Any], Any, tuple[str, bytes]]:
    """Version and wheel of a newer release that is its publisher's.

    Fails with `turnstile.update.release.NothingNew`, `NotUsable` or `DownloadError`.
    """
    if not source.keys:
        raise NotUsable("this build of turnstile has no publisher's key")
    body = yield fetcher.get(source.repository.api, LARGEST_ANSWER, "application/json")
    release = parse_release(body)
    version = judge(running, release, refused)
    files = choose_files(release, source.asset)
    limit = LARGEST_WHEEL if files.wheel.size is None else min(files.wheel.size, LARGEST_WHEEL)
    if files.wheel.size is not None and files.wheel.size > LARGEST_WHEEL:
        raise NotUsable(f"{release.tag}: {files.wheel.name} is larger than {LARGEST_WHEEL} bytes")
    try:
        signature = yield fetcher.get(files.signature.url, LARGEST_SMALL_FILE)
        data = yield fetcher.get(files.wheel.url, limit)
        if files.checksum is not None:
            checksum = yield fetcher.get(files.checksum.url, LARGEST_SMALL_FILE)
            check_checksum(data, checksum)
        if files.wheel.size is not None and len(data) != files.wheel.size:
            raise NotUsable(f"it has {len(data)} bytes instead of {files.wheel.size}")
        check_signature(data, signature, source.keys)
        # Only now, since nothing in it is to be believed before.
        found = wheel.read_metadata(data)
        wheel.check_metadata(
            found, str(version), platform.python_version(), wheel.installed_version
        )
    except NotUsable as error:
        raise NotUsable(f"{release.tag} is not installed: {error}") from None
    return str(version), data


@inlineCallbacks
def install_update(
    reactor: Any,
    layout: Layout,
    version: str,
    data: bytes,
    *,
    python: Path | None = None,
    place: Path | None = None,
    finish: Callable[[Path], None] = lambda _: None,
) -> Generator[Deferred[Any], Any, None]:
    """Unpack a wheel beside the version that runs, import it once in a process of its own, and put it in place.

    :param python: what imports it; by default the installation's own.
    :param place: where it is unpacked: a folder of the same file system; by default beside the other versions.
    :param finish: called with the folder before it is put in place.

    Fails with `NotUsable` if it can't be used or there is no room for it; nothing has changed then.
    """
    try:
        with layout.lock(), layout.staging(place) as folder:
            staged = folder / version
            staged.mkdir()
            yield deferToThread(_unpack, data, staged)
            yield _try(reactor, python or layout.python, staged, version)
            finish(staged)
            layout.put_in_place(staged, version)
    except NotUsable as error:
        raise NotUsable(f"v{version} is not installed: {error}") from None
    except OSError as error:
        raise NotUsable(
            f"v{version} is not installed: {error.strerror or error}: {error.filename}"
        ) from None


def _unpack(data: bytes, folder: Path) -> None:
    wheel.unpack(data, folder)
    wheel.sync(folder)


class _Trial(ProcessProtocol):
    """A process that imports a version; cancelling :attr:`done` ends it."""

    def __init__(self) -> None:
        self.out = b""
        self.err = b""
        self.done: Deferred[int] = Deferred(lambda _: self._kill())

    def outReceived(self, data: bytes) -> None:
        self.out = (self.out + data)[-_LARGEST_OUTPUT:]

    def errReceived(self, data: bytes) -> None:
        self.err = (self.err + data)[-_LARGEST_OUTPUT:]

    def processEnded(self, reason: Failure) -> None:
        error: Any = reason.value
        if not self.done.called:
            self.done.callback(-error.signal if error.signal else error.exitCode)

    def _kill(self) -> None:
        transport: Any = self.transport
        with contextlib.suppress(ProcessExitedAlready):
            transport.signalProcess("KILL")


@inlineCallbacks
def _try(
    reactor: Any, python: Path, folder: Path, version: str
) -> Generator[Deferred[Any], Any, None]:
    # A process of its own: the modules of the running version are in this one.
    environ = {name: os.environ[name] for name in ("PATH", "LANG", "TZ") if name in os.environ}
    trial = _Trial()
    arguments = [str(python), "-I", "-B", "-c", _TRIAL, str(folder)]
    reactor.spawnProcess(trial, str(python), arguments, environ, "/")
    code = yield trial.done.addTimeout(TRIAL_TIMEOUT, reactor, _took_too_long)
    if code != 0:
        lines = trial.err.decode("utf-8", "replace").strip().splitlines() or [f"status {code}"]
        raise NotUsable(f"it does not start: {lines[-1][:200]}")
    said = trial.out.decode("utf-8", "replace").strip()
    if said != version:
        raise NotUsable(f"it says that it is {said[:50]!r}")


def _took_too_long(result: Any, seconds: float) -> Any:
    raise NotUsable(f"it does not start: it took more than {seconds:g} s")


__all__ = ["DownloadError", "Source", "find_update", "install_update"]
