"""sd-server: a request that draws has the card alone, has the process started, and may leave a job behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred, fail
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from turnstile.arbiter import Arbiter
from turnstile.card import Card
from turnstile.config import Config
from turnstile.engines import sdserver
from turnstile.engines.base import Admission
from turnstile.engines.sdserver import Cooling, LoadFailed, SdEngine
from turnstile.gates.base import Claim, EnginePolicy, LeaseGate
from turnstile.proxy.exchange import Exchange
from turnstile.proxy.gate import Busy, Ending, Gate
from turnstile.proxy.http1 import Headers, RequestHead
from turnstile.proxy.resource import EngineResource

#: Told of every drawing that is over: how, and after how many seconds.
Report = Callable[[str, float], None]

#: How many lines of sd-server's log a client is shown.
TAIL = 20


class SdGate(LeaseGate):
    """A drawing that is over when it is answered."""

    prepares = True

    def __init__(
        self,
        engine: SdEngine,
        guard: Callable[[], None],
        report: Report,
        claim: Claim,
        head: RequestHead,
        client: str,
    ) -> None:
        super().__init__(claim, head, client)
        self._engine = engine
        self._guard = guard
        self._report = report
        self._began = 0.0
        self._status = 0

    def prepare(self) -> Deferred[None] | None:
        """Make room, then wait for sd-server to listen, started if need be."""
        cooling = self._engine.cooling
        if cooling is not None:
            # Nobody is made to leave for it in vain.
            return fail(cooling).addErrback(self._not_up)
        d = self.room()
        if d is None:
            return None if self._engine.is_up else self._load(None)
        return d.addCallback(self._load)

    def _load(self, _: object) -> Deferred[None]:
        return self._engine.ensure_up().addErrback(self._not_up)

    def _not_up(self, failure: Failure) -> Failure:
        error = failure.value
        if isinstance(error, LoadFailed):
            # 503 is for what passes by itself.
            retry_after = self._claim.retry_after if error.status == 503 else None
            lines = error.tail[-TAIL:]
            return Failure(Busy("\n".join([str(error), *lines]), error.status, retry_after))
        if isinstance(error, Cooling):
            return Failure(Busy(str(error), 503, math.ceil(error.seconds)))
        return failure

    def forwarding(self) -> None:
        super().forwarding()
        self._guard()
        self._begin()

    def _begin(self) -> None:
        assert self.lease is not None
        self._began = self._claim.clock.seconds()
        self._engine.begin_generation(self.lease)

    def answered(self, status: int, fields: Headers) -> None:
        self._status = status

    def end(self, ending: Ending, *, body_sent: bool) -> None:
        lease = self.lease
        if self.forwarded and lease is not None:
            self._engine.end_generation(lease)
            self._report(self._outcome(ending), self._claim.clock.seconds() - self._began)
        super().end(ending, body_sent=body_sent)

    def _outcome(self, ending: Ending) -> str:
        """In the words of image jobs."""
        if ending is Ending.UPSTREAM_LOST:
            return "lost"
        if ending is not Ending.DONE:
            # It goes on drawing, and nobody learns what becomes of it.
            return "unknown"
        if self._status < 300:
            return "success"
        return "refused" if self._status < 500 else "error"


class SdJobGate(SdGate):
    """A request that queues a drawing: once it is posted, its lease is the engine's until that job is over."""

    detached = True

    def __init__(
        self,
        engine: SdEngine,
        guard: Callable[[], None],
        report: Report,
        capture: int,
        claim: Claim,
        head: RequestHead,
        client: str,
    ) -> None:
        super().__init__(engine, guard, report, claim, head, client)
        self.capture = capture
        self._fields: Headers = []
        self._body = b""
        self._complete = False

    def _begin(self) -> None:
        assert self.lease is not None
        self._engine.begin_job(self.lease)

    def answered(self, status: int, fields: Headers) -> None:
        self._status, self._fields = status, fields

    def captured(self, body: bytes, complete: bool) -> None:
        self._body, self._complete = body, complete

    def end(self, ending: Ending, *, body_sent: bool) -> None:
        lease = self.lease
        if not self.forwarded or lease is None:
            self.leave()
            return
        self.lease = None
        if self._status:
            self._engine.post_answered(
                lease, self._status, self._fields, self._body, self._complete
            )
        else:
            self._engine.post_failed(lease, body_sent)


class SdPolicy(EnginePolicy):
    """What holds on sd-server's own listener, and for its part of the broker's."""

    engine = "sd"
    repeats_status = False

    def __init__(
        self,
        config: Config,
        arbiter: Arbiter,
        card: Card,
        engine: SdEngine,
        clock: IReactorTime,
        guard: Callable[[], None],
        report: Report,
    ) -> None:
        self.retry_after = config.busy_retry_after
        # A drawing is answered when it is done, and says nothing before.
        self.stall_timeout = config.job_timeout
        self._engine = engine
        self._guard = guard
        self._report = report
        self._capture = config.prompt_capture_limit
        self._claim = Claim(
            arbiter=arbiter,
            card=card,
            tenant=engine.tenant,
            clock=clock,
            retry_after=config.busy_retry_after,
        )

    def admission(self, method: bytes, target: bytes) -> Admission:
        return sdserver.classify(method, target, self._engine.is_up)

    def absent(self) -> tuple[str, dict[str, Any]]:
        return "sd is not loaded", {"state": self._engine.state.value}

    def open_gate(self, head: RequestHead, client: str) -> Gate:
        if sdserver.generation_kind(head.method, head.target) == "async":
            return SdJobGate(
                self._engine, self._guard, self._report, self._capture, self._claim, head, client
            )
        return SdGate(self._engine, self._guard, self._report, self._claim, head, client)

    def posted(self, target: bytes) -> None:
        """A POST is over, whichever it was."""
        self._engine.note_cancel(target)


class SdResource(EngineResource):
    """sd-server's URL space: cancelled jobs are looked at when that was answered."""

    def ended(self, exchange: Exchange, ending: Ending, duration: float, message: str) -> None:
        """See :class:`EngineResource`."""
        super().ended(exchange, ending, duration, message)
        if exchange.method == b"POST" and isinstance(self.policy, SdPolicy):
            self.policy.posted(exchange.uri)
