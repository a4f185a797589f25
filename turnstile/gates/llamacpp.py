"""llama.cpp: chat requests share the card; the lease of a request to load a model lasts until that is loaded."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote_to_bytes

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from turnstile.arbiter import Arbiter, Lease
from turnstile.card import Card
from turnstile.config import Config
from turnstile.engines.base import Admission
from turnstile.engines.llamacpp import LlamaEngine, StartFailed
from turnstile.gates.base import Claim, EnginePolicy, LeaseGate
from turnstile.proxy.gate import Busy, Ending, Gate
from turnstile.proxy.http1 import Headers, RequestHead

_LOAD = b"/models/load"
_CONVERSATION = b"x-conversation-id"


class LlamaGate(LeaseGate):
    """A request that may use a model."""

    prepares = True

    def __init__(self, engine: LlamaEngine, claim: Claim, head: RequestHead, client: str) -> None:
        super().__init__(claim, head, client)
        self._engine = engine
        self._loads = unquote_to_bytes(head.path).endswith(_LOAD)
        self._conversation = _conversation(head)
        self._refused = False

    def prepare(self) -> Deferred[None] | None:
        """Have the server started that was stopped for another engine, once that one has left."""
        if not self._engine.needs_start:
            return None
        d = self.room()
        if d is None:
            return self._start(None)
        return d.addCallback(self._start)

    def _start(self, _: object) -> Deferred[None]:
        return self._engine.ensure_started().addErrback(self._not_started)

    def _not_started(self, failure: Failure) -> None:
        failure.trap(StartFailed)
        raise Busy(str(failure.value), 502, None)

    def answered(self, status: int, fields: Headers) -> None:
        self._refused = status >= 300

    def end(self, ending: Ending, *, body_sent: bool) -> None:
        engine = self._engine
        if self.forwarded and ending is not Ending.DONE:
            engine.note_aborted(self._conversation)
        lease = self.lease
        if self._loads and self.forwarded and not self._refused and lease is not None:
            # The answer comes when the loading begins.
            self.lease = None
            engine.loaded().addBoth(_release, lease)
            return
        super().end(ending, body_sent=body_sent)


def _release(_: Any, lease: Lease) -> None:
    lease.release()


def _conversation(head: RequestHead) -> str | None:
    for name, value in head.fields:
        if name.lower() == _CONVERSATION:
            return value.decode("latin-1")
    return None


class LlamaPolicy(EnginePolicy):
    """What holds on llama.cpp's own listener, and for its part of the broker's."""

    engine = "llamacpp"
    repeats_status = False

    def __init__(
        self,
        config: Config,
        arbiter: Arbiter,
        card: Card,
        engine: LlamaEngine,
        clock: IReactorTime,
    ) -> None:
        self.retry_after = config.busy_retry_after
        self.stall_timeout = config.llm_stall_timeout
        self._engine = engine
        self._claim = Claim(
            arbiter=arbiter,
            card=card,
            tenant=engine.tenant,
            clock=clock,
            retry_after=config.busy_retry_after,
            timeout=config.busy_wait,
            reject_status=config.llm_busy_status if config.llm_busy_mode == "reject" else None,
        )

    def admission(self, method: bytes, target: bytes) -> Admission:
        return self._engine.admission(method, target)

    def absent(self) -> tuple[str, dict[str, Any]]:
        return "llama.cpp was stopped to make room for another engine", {"state": "stopped"}

    def open_gate(self, head: RequestHead, client: str) -> Gate:
        return LlamaGate(self._engine, self._claim, head, client)
