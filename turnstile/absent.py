"""A listener without an engine: systemd opened the socket, the configuration has no use for it.

Whoever connects is told so at once, rather than left to wait.
"""

from __future__ import annotations

from twisted.internet.defer import Deferred

from turnstile.config import Config, Upstream
from turnstile.engines.base import Admission
from turnstile.gates.base import EnginePolicy
from turnstile.proxy.gate import Busy, Ending, Gate
from turnstile.proxy.http1 import Headers, RequestHead

#: Stands for the engine that there is not; it is never connected to.
NOWHERE = Upstream("http", "127.0.0.1", 9)


class AbsentGate:
    """Refuses its request."""

    capture = 0
    detached = False
    prepares = False

    def __init__(self, reason: str, retry_after: int) -> None:
        self._reason = reason
        self._retry_after = retry_after

    def enter(self) -> Deferred[None] | None:
        raise Busy(self._reason, 503, self._retry_after)

    def prepare(self) -> Deferred[None] | None:
        return None

    def leave(self) -> None:
        """Nothing is held."""

    def contended(self) -> bool:
        return False

    def room(self) -> Deferred[None] | None:
        return None

    def forwarding(self) -> None:
        """Never called."""

    def answered(self, status: int, fields: Headers) -> None:
        """Never called."""

    def captured(self, body: bytes, complete: bool) -> None:
        """Never called."""

    def end(self, ending: Ending, *, body_sent: bool) -> None:
        """Nothing is held."""


class AbsentPolicy(EnginePolicy):
    """Every request is answered 503.

    :param engine: the name for log and metrics.
    :param reason: what the answer says.
    """

    stall_timeout = None

    def __init__(self, engine: str, reason: str, retry_after: int) -> None:
        self.engine = engine
        self.reason = reason
        self.retry_after = retry_after

    def configure(self, config: Config) -> None:
        """Take over the settings."""
        self.retry_after = config.busy_retry_after

    def admission(self, method: bytes, target: bytes) -> Admission:
        return Admission.LEASE

    def open_gate(self, head: RequestHead, client: str) -> Gate:
        return AbsentGate(self.reason, self.retry_after)
