"""Looks for new versions while turnstile runs, and ends the process for one as soon as the card is idle."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred, inlineCallbacks
from twisted.internet.interfaces import IDelayedCall
from twisted.python.failure import Failure

from turnstile.arbiter import Arbiter, Event, Transition
from turnstile.card import Card
from turnstile.config import Config
from turnstile.log import Logger
from turnstile.update.fetch import DownloadError, Fetches, Source, find_update, install_update
from turnstile.update.layout import Layout
from turnstile.update.release import NothingNew, NotUsable

_log = Logger()

#: Seconds for which a new version has to run until it stays; then is the first look for another one.
CONFIRM_AFTER = 10.0


class IdleWatch:
    """Calls once as soon as nobody has the card or waits for it.

    Cards are idle for a moment between two jobs: it is looked at once more after what is due now was done.
    """

    def __init__(
        self, reactor: Any, arbiter: Arbiter, card: Card, callback: Callable[[], None]
    ) -> None:
        self._reactor = reactor
        self._arbiter = arbiter
        self._card = card
        self._callback: Callable[[], None] | None = callback
        self._call: IDelayedCall | None = None
        arbiter.add_listener(self._event)
        self._soon()

    def cancel(self) -> None:
        """Call no more."""
        self._callback = None
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _event(self, event: Event) -> None:
        if isinstance(event, Transition) and event.after is None:
            self._soon()

    def _soon(self, seconds: float = 0.0) -> None:
        if self._callback is not None and self._call is None:
            self._call = self._reactor.callLater(seconds, self._look)

    def _look(self) -> None:
        self._call = None
        arbiter, callback = self._arbiter, self._callback
        if callback is None or arbiter.tenant is not None or arbiter.contended:
            return
        if arbiter.held or self._card.switching():
            # Both end without the card changing hands.
            self._soon(0.5)
            return
        self._callback = None
        callback()


@attrs.frozen
class Program:
    """What runs.

    :ivar version: its version.
    :ivar layout: the installation that it is part of; ``None`` if that is not one that can be updated.
    :ivar is_managed: whether it is started again when it ends.
    """

    version: str
    layout: Layout | None
    is_managed: bool


class Updater:
    """Looks at the start and every UPDATE_INTERVAL.

    :param program: what runs.
    :param keys: publishers' keys.
    :param leave: ends the process so that it is started again.
    """

    def __init__(
        self,
        reactor: Any,
        config: Config,
        program: Program,
        keys: tuple[Any, ...],
        make_fetcher: Callable[[], Fetches],
        arbiter: Arbiter,
        card: Card,
        leave: Callable[[], None],
    ) -> None:
        self._reactor = reactor
        self._config = config
        self._program = program
        self._keys = keys
        self._make_fetcher = make_fetcher
        self._fetcher: Fetches | None = None
        self._arbiter = arbiter
        self._card = card
        self._leave = leave
        self._call: IDelayedCall | None = None
        self._work: Deferred[None] | None = None
        self._idle: IdleWatch | None = None
        self._installed: str | None = None
        self._told = ""
        self._up = False
        self._confirmed = False

    # -- life --------------------------------------------------------------------------------------------------------

    def came_up(self) -> None:
        """The service works: if that lasts, the version stays."""
        self._up = True
        self._call = self._reactor.callLater(CONFIRM_AFTER, self._settled)

    def stop(self) -> None:
        """The service stops in good order, so it did come up if it got so far."""
        if self._call is not None:
            self._call.cancel()
            self._call = None
        if self._idle is not None:
            self._idle.cancel()
        work, self._work = self._work, None
        if work is not None:
            work.cancel()
        if self._up:
            self._up = False
            self._confirm()

    def configure(self, config: Config) -> None:
        """Take over settings that changed."""
        before, self._config = self._config, config
        names = ("auto_update", "update_interval", "update_repo", "update_asset")
        if any(getattr(before, name) != getattr(config, name) for name in names):
            if self._call is not None and self._confirmed:
                self._call.cancel()
                self._call = self._reactor.callLater(0, self._look)

    def _settled(self) -> None:
        self._call = None
        self._confirm()
        self._look()

    def _confirm(self) -> None:
        if self._confirmed:
            return
        self._confirmed = True
        layout, version = self._program.layout, self._program.version
        if layout is None:
            return
        try:
            if layout.confirm(version, lambda said: _log.warn("{problem}", problem=said)):
                _log.info("version {version} came up and stays", version=version)
        except OSError as error:
            _log.warn(
                "the update can't be confirmed: {problem}", problem=error.strerror or str(error)
            )

    # -- looking -----------------------------------------------------------------------------------------------------

    def obstacle(self) -> str | None:
        """Why updates are off; empty if that is how it is meant to be, ``None`` if they are on."""
        config, wanted = self._config, self._config.auto_update
        if wanted is False or (wanted is None and not self._keys):
            return ""
        if self._program.layout is None:
            # A package's or an image's copy is updated like the rest of the system.
            return "" if wanted is None else "turnstile-service did not make this installation"
        if not self._keys:
            return "this build of turnstile has no publisher's key"
        if config.update_repo is None:
            return "UPDATE_REPO is not set"
        return None

    def _look(self) -> None:
        self._call = self._reactor.callLater(self._config.update_interval, self._look)
        obstacle = self.obstacle()
        if obstacle is not None:
            if obstacle:
                self._tell(f"no automatic updates: {obstacle}")
            return
        if self._work is None:
            self._work = d = self._update()
            d.addErrback(self._failed)
            d.addBoth(self._done)

    def _done(self, _: object) -> None:
        self._work = None

    @inlineCallbacks
    def _update(self) -> Generator[Deferred[Any], Any, None]:
        config, program = self._config, self._program
        assert config.update_repo is not None and program.layout is not None
        if self._fetcher is None:
            self._fetcher = self._make_fetcher()
        source = Source(repository=config.update_repo, asset=config.update_asset, keys=self._keys)
        running = self._installed or program.version
        version, data = yield find_update(self._fetcher, source, running, program.layout.refused)
        yield install_update(self._reactor, program.layout, version, data)
        self._installed = version
        if not program.is_managed:
            _log.warn("turnstile {version} is installed: restart to apply", version=version)
            return
        _log.warn(
            "turnstile {version} is installed; it is started as soon as the card is idle",
            version=version,
        )
        if self._idle is None:
            self._idle = IdleWatch(self._reactor, self._arbiter, self._card, self._restart)

    def _restart(self) -> None:
        _log.warn("leaving for turnstile {version}", version=self._installed)
        self._leave()

    def _failed(self, failure: Failure) -> None:
        error = failure.value
        if isinstance(error, NothingNew):
            self._told = ""
            _log.info("no update: {version} is the latest release", version=str(error.version))
        elif isinstance(error, (NotUsable, DownloadError)):
            self._tell(f"no update: {error}")
        elif not isinstance(error, CancelledError):
            _log.failure("looking for an update failed", failure=failure)

    def _tell(self, text: str) -> None:
        """One line, and not again each time that it is looked."""
        if text != self._told:
            self._told = text
            _log.warn("{problem}", problem=text)


__all__ = ["IdleWatch", "Program", "Updater"]
