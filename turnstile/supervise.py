"""What ties the service to those who run it: systemd hears how it is, SIGHUP changes its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.application.service import Service

from turnstile import log as tlog
from turnstile.notify import Manager, Notifier, Pulse, StatusLine
from turnstile.reload import Reloader


class Supervisor(Service):
    """Stands beside the service that it tells about, and is stopped before it.

    :param service: the :class:`turnstile.service.TurnstileService`.
    :param manager: what systemd wants to hear.
    """

    def __init__(self, service: Any, reactor: Any, manager: Manager, reloader: Reloader) -> None:
        self._service = service
        self._reactor = reactor
        self._reloader = reloader
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
        if self._status is not None:
            # Not before the reactor runs: from then on signals mean what they should.
            self._reactor.callWhenRunning(self._service.bound.addCallback, self._up)
            self._service.ready.addCallback(self._looked)

    def _up(self, _: object) -> None:
        self._ready()
        if self._pulse is not None and self.running:
            self._pulse.start()

    def _looked(self, _: object) -> None:
        if self._status is not None:
            self._status.changed()

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
        self._notifier.stopping("stopping", self._service.config.shutdown_timeout)
        if self._status is not None:
            self._status.stop()
        if self._pulse is not None:
            self._pulse.stop()
        self._notifier.close()


def make_reloader(
    service: Any,
    load: Callable[[], Any],
    open_log: Callable[[Any], Callable[[], None]],
) -> Reloader:
    """What reads the configuration of ``service`` again and applies it."""
    return Reloader(service.config, load, lambda config: service.apply(config), open_log)
