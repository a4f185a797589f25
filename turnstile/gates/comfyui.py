"""ComfyUI: an image job has the card from its prompt until the engine says that it is over."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IReactorTime

from turnstile.arbiter import Arbiter
from turnstile.card import Card
from turnstile.config import Config
from turnstile.engines import comfyui
from turnstile.engines.base import Admission
from turnstile.engines.comfyui import ComfyEngine
from turnstile.gates.base import Claim, EnginePolicy, LeaseGate
from turnstile.proxy.gate import Ending, Gate
from turnstile.proxy.http1 import Headers, RequestHead


class ImageGate(LeaseGate):
    """A ComfyUI prompt: once it is posted, its lease is the engine's until the job is over."""

    detached = True

    def __init__(
        self,
        engine: ComfyEngine,
        capture: int,
        guard: Callable[[], None],
        claim: Claim,
        head: RequestHead,
        client: str,
    ) -> None:
        super().__init__(claim, head, client)
        self._engine = engine
        self.capture = capture
        self._guard = guard
        self._status = 0
        self._fields: Headers = []
        self._body = b""
        self._complete = False

    def forwarding(self) -> None:
        lease = self.lease
        assert lease is not None
        self.forwarded = True
        self._engine.begin_post(lease)
        self._guard()

    def answered(self, status: int, fields: Headers) -> None:
        self._status, self._fields = status, fields

    def captured(self, body: bytes, complete: bool) -> None:
        self._body, self._complete = body, complete

    def end(self, ending: Ending, *, body_sent: bool) -> None:
        lease = self.lease
        if not self.forwarded or lease is None:
            self.leave()
            return
        # From here on the engine releases it.
        self.lease = None
        if self._status:
            self._engine.post_answered(
                lease, self._status, self._fields, self._body, self._complete
            )
        else:
            self._engine.post_failed(lease, body_sent)


class ComfyPolicy(EnginePolicy):
    """An image job has the card alone."""

    engine = "comfyui"
    keeps_client_host = True
    #: JOB_TIMEOUT covers an unanswered prompt.
    stall_timeout = None

    def __init__(
        self,
        config: Config,
        arbiter: Arbiter,
        card: Card,
        engine: ComfyEngine,
        clock: IReactorTime,
        guard: Callable[[], None],
    ) -> None:
        self.retry_after = config.busy_retry_after
        self._engine = engine
        self._capture = config.prompt_capture_limit
        self._guard = guard
        self._claim = Claim(
            arbiter=arbiter,
            card=card,
            tenant=engine.tenant,
            clock=clock,
            retry_after=config.busy_retry_after,
        )

    def admission(self, method: bytes, target: bytes) -> Admission:
        return comfyui.classify(method, target)

    def open_gate(self, head: RequestHead, client: str) -> Gate:
        return ImageGate(self._engine, self._capture, self._guard, self._claim, head, client)
