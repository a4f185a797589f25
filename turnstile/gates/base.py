"""What the gates and policies of all engines have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from turnstile.arbiter import Arbiter, ArbiterClosed, Lease, Tenant, WaitTimeout
from turnstile.card import Card
from turnstile.engines.base import Admission
from turnstile.log import redact_target
from turnstile.proxy.gate import Busy, Ending, Gate
from turnstile.proxy.http1 import Headers, RequestHead


@attrs.frozen(kw_only=True)
class Claim:
    """What all gates of one listener have in common.

    :ivar timeout: seconds in the line, over all attempts, until 503; ``None``: no limit.
    :ivar reject_status: answer at once with this status instead of waiting; ``None``: wait.
    :ivar retry_after: seconds for Retry-After.
    :ivar on_wait: told the address of a client whose request begins to wait.
    """

    arbiter: Arbiter
    card: Card
    tenant: Tenant
    clock: IReactorTime
    retry_after: int
    timeout: float | None = None
    reject_status: int | None = None
    on_wait: Callable[[str], None] | None = None


class LeaseGate:
    """Holds the lease of one request. What engines do beyond that is in the subclasses."""

    capture = 0
    detached = False
    prepares = False

    def __init__(self, claim: Claim, head: RequestHead, client: str) -> None:
        self._claim = claim
        self._label = f"{head.method.decode('latin-1')} {redact_target(head.target)}"
        self._client = client
        self._waited = 0.0
        self.lease: Lease | None = None
        self.forwarded = False

    def enter(self) -> Deferred[None] | None:
        claim = self._claim
        try:
            self.lease = claim.arbiter.try_acquire(claim.tenant, self._label, self._client)
        except ArbiterClosed:
            raise Busy("turnstile is shutting down", 503, claim.retry_after) from None
        if self.lease is not None:
            return None
        if claim.reject_status is not None:
            raise Busy(
                f"the GPU is busy ({self._occupant()})", claim.reject_status, claim.retry_after
            )
        timeout = None if claim.timeout is None else max(0.0, claim.timeout - self._waited)
        if claim.on_wait is not None:
            claim.on_wait(self._client)
        began = claim.clock.seconds()

        def granted(lease: Lease) -> None:
            self._waited += claim.clock.seconds() - began
            self.lease = lease

        def refused(failure: Failure) -> Failure:
            if failure.check(WaitTimeout):
                message = f"the GPU stayed busy for too long ({self._occupant()})"
            elif failure.check(ArbiterClosed):
                message = "turnstile is shutting down"
            else:
                return failure
            return Failure(Busy(message, 503, claim.retry_after))

        d = claim.arbiter.acquire(claim.tenant, self._label, self._client, timeout)
        return d.addCallbacks(granted, refused)

    def _occupant(self) -> str:
        arbiter = self._claim.arbiter
        if arbiter.tenant is None:
            return "starting up" if arbiter.held else "others wait"
        return f"{arbiter.tenant.name} has it"

    def prepare(self) -> Deferred[None] | None:
        return None

    def leave(self) -> None:
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()

    def contended(self) -> bool:
        return self._claim.arbiter.contended

    def room(self) -> Deferred[None] | None:
        return self._claim.card.make_room(self._claim.tenant)

    def forwarding(self) -> None:
        self.forwarded = True
        self._claim.card.mark_resident(self._claim.tenant.name)

    def answered(self, status: int, fields: Headers) -> None:
        """Nothing to learn from it."""

    def captured(self, body: bytes, complete: bool) -> None:
        """Nothing to learn from it."""

    def end(self, ending: Ending, *, body_sent: bool) -> None:
        self.leave()


class EnginePolicy(ABC):
    """What policies have in common; see :class:`turnstile.proxy.resource.Policy`."""

    engine: str
    retry_after: int
    stall_timeout: float | None
    keeps_client_host: bool = False
    #: Whether a GET that is answered 502, 503 or 504 may be sent again: no sense in that where such is the engine's
    #: usual answer while it loads.
    repeats_status = True

    @abstractmethod
    def admission(self, method: bytes, target: bytes) -> Admission: ...

    @abstractmethod
    def open_gate(self, head: RequestHead, client: str) -> Gate: ...

    def is_unload_only(self, target: bytes, body: bytes) -> bool:
        return False

    def absent(self) -> tuple[str, dict[str, Any]]:
        raise NotImplementedError("this engine's table answers no ABSENT")
