"""What ties the service to those who run it.

systemd hears how the service is, SIGHUP changes its settings, updates replace it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.application.service import Service

import turnstile
from turnstile import exitcode
from turnstile import log as tlog
from turnstile.config import Config
from turnstile.notify import Manager, Notifier, Pulse, StatusLine
from turnstile.reload import Reloader
from turnstile.update import pubkey
from turnstile.update.download import Downloader
from turnstile.update.layout import Layout
from turnstile.update.signature import load_keys
from turnstile.update.updater import Program, Updater

_log = tlog.Logger()


class Supervisor(Service):
    """Stands beside the service that it tells about, and is stopped before it.

    :param service: the :class:`turnstile.service.TurnstileService`.
    :param manager: what systemd wants to hear.
    :param load: reads the configuration anew; raises `turnstile.config.ConfigError`.
    :param open_log: opens the log of other settings; see :class:`turnstile.reload.Reloader`.
    """

    def __init__(
        self,
        service: Any,
        reactor: Any,
        manager: Manager,
        load: Callable[[], Config],
        open_log: Callable[[Config], Callable[[], None]],
    ) -> None:
        self._service = service
        self._reactor = reactor
        self._reloader = Reloader(service.config, load, self._apply, open_log)
        self._updater: Updater | None = None
        self._notifier = Notifier(reactor, manager.address)
        self._status: StatusLine | None = None
        self._pulse: Pulse | None = None
        if self._notifier.enabled:
            self._status = StatusLine(reactor, self._notifier, service.arbiter, service.card)
            if manager.watchdog is not None:
                self._pulse = Pulse(reactor, manager.watchdog, self._notifier.beat, service.ailment)
        service.on_hangup = self.reload

    @property
    def is_managed(self) -> bool:
        """Whether systemd started the process, and will start it again."""
        return self._notifier.enabled

    def startService(self) -> None:
        """Say so once the listeners are open; requests that come before the engines were looked at wait."""
        super().startService()  # type: ignore[no-untyped-call]
        # Not before the reactor runs: from then on signals mean what they should.
        self._reactor.callWhenRunning(self._watch)

    def _watch(self) -> None:
        self._service.bound.addCallback(self._up)
        self._service.ready.addCallback(self._looked)

    def _up(self, _: object) -> None:
        self._ready()
        if self._pulse is not None and self.running:
            self._pulse.start()
        self._begin_updates()

    def _looked(self, _: object) -> None:
        if self._status is not None:
            self._status.changed()
        self._begin_updates()

    def _begin_updates(self) -> None:
        """Once the listeners are open and the engines were looked at, the version counts as one that works."""
        service = self._service
        if service.bound.called and service.ready.called and self.running and not self._updater:
            self._updater = make_updater(service, self._reactor, self.is_managed)
            self._updater.came_up()

    def _apply(self, config: Config) -> None:
        self._service.apply(config)
        if self._updater is not None:
            self._updater.configure(config)

    def _ready(self) -> None:
        if self._status is not None and self.running:
            self._notifier.ready(self._status.text())

    def reload(self) -> None:
        """SIGHUP: open the log file anew, read the configuration again."""
        tlog.reopen()
        if not self.running:
            return
        self._notifier.reloading()
        try:
            self._reloader.reload()
        finally:
            self._ready()

    def stopService(self) -> None:
        """Say that the service stops, and how long that may take."""
        super().stopService()  # type: ignore[no-untyped-call]
        if self._updater is not None:
            self._updater.stop()
        self._notifier.stopping("stopping", self._service.config.shutdown_timeout)
        if self._status is not None:
            self._status.stop()
        if self._pulse is not None:
            self._pulse.stop()
        self._notifier.close()


def make_updater(service: Any, reactor: Any, is_managed: bool) -> Updater:
    """What looks for new versions of the program that runs."""
    try:
        keys = load_keys(pubkey.PUBLIC_KEYS)
    except ValueError as error:
        _log.error("no updates: {problem}", problem=str(error))
        keys = ()
    package = Path(turnstile.__file__).parent
    program = Program(turnstile.__version__, Layout.find(package, Path(sys.prefix)), is_managed)
    return Updater(
        reactor,
        service.config,
        program,
        keys,
        lambda: Downloader(reactor),
        service.arbiter,
        service.card,
        lambda: exitcode.leave(reactor, exitcode.EXIT_UPDATED),
    )
