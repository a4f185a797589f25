"""Policies and gates: how requests of each engine claim the card. The seam between the data path and the engines."""

from __future__ import annotations

import socket
from collections.abc import Callable

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from turnstile.arbiter import Arbiter, ArbiterClosed, Kind, Lease, Tenant, WaitTimeout
from turnstile.card import Card
from turnstile.config import Config
from turnstile.engines import comfyui, ollama
from turnstile.engines.base import Admission
from turnstile.engines.comfyui import ComfyEngine
from turnstile.engines.ollama import OllamaEngine
from turnstile.log import Logger, redact_target
from turnstile.proxy.gate import Busy, Ending, Gate
from turnstile.proxy.http1 import Headers, RequestHead

_log = Logger()


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


class LlmGate(LeaseGate):
    """A chat request: its lease ends with its answer."""

    def __init__(self, engine: OllamaEngine, claim: Claim, head: RequestHead, client: str) -> None:
        super().__init__(claim, head, client)
        self._engine = engine

    def end(self, ending: Ending, *, body_sent: bool) -> None:
        if self.forwarded and ending is not Ending.DONE:
            self._engine.note_aborted()
        super().end(ending, body_sent=body_sent)


class NestedGate(LlmGate):
    """A chat request from inside an image job: it runs within the job's lease while ComfyUI has the card."""

    def __init__(
        self,
        comfy: ComfyEngine | None,
        on_nested: Callable[[], None],
        engine: OllamaEngine,
        claim: Claim,
        head: RequestHead,
        client: str,
    ) -> None:
        super().__init__(engine, claim, head, client)
        self._comfy = comfy
        self._on_nested = on_nested
        self._leave_job: Callable[[], None] | None = None

    def enter(self) -> Deferred[None] | None:
        if self._comfy is not None:
            self._leave_job = self._comfy.enter_nested()
            if self._leave_job is not None:
                self._on_nested()
                return None
        return super().enter()

    def leave(self) -> None:
        leave, self._leave_job = self._leave_job, None
        if leave is not None:
            leave()
        super().leave()

    def room(self) -> Deferred[None] | None:
        return None if self._leave_job is not None else super().room()


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


class OllamaPolicy:
    """Chat requests share the card."""

    engine = "ollama"
    keeps_client_host = False

    def __init__(
        self,
        config: Config,
        arbiter: Arbiter,
        card: Card,
        engine: OllamaEngine,
        clock: IReactorTime,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        self._engine = engine
        self._claim = Claim(
            arbiter=arbiter,
            card=card,
            tenant=engine.tenant,
            clock=clock,
            retry_after=config.busy_retry_after,
            on_wait=on_wait,
        )
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Take over the settings, for requests that come from now on."""
        self.retry_after = config.busy_retry_after
        self.stall_timeout: float | None = config.llm_stall_timeout
        self._claim = attrs.evolve(
            self._claim,
            retry_after=config.busy_retry_after,
            timeout=config.llm_wait_timeout,
            reject_status=config.llm_busy_status if config.llm_busy_mode == "reject" else None,
        )

    def admission(self, method: bytes, target: bytes) -> Admission:
        return ollama.classify(method, target)

    def is_unload_only(self, target: bytes, body: bytes) -> bool:
        return ollama.is_unload_only(target, body)

    def open_gate(self, head: RequestHead, client: str) -> Gate:
        return LlmGate(self._engine, self._claim, head, client)


class NestedOllamaPolicy(OllamaPolicy):
    """The listener for ComfyUI nodes that call Ollama."""

    def __init__(
        self,
        config: Config,
        arbiter: Arbiter,
        card: Card,
        engine: OllamaEngine,
        clock: IReactorTime,
        comfy: ComfyEngine | None,
        on_nested: Callable[[], None],
    ) -> None:
        super().__init__(config, arbiter, card, engine, clock)
        self._comfy = comfy
        self._on_nested = on_nested

    def open_gate(self, head: RequestHead, client: str) -> Gate:
        return NestedGate(self._comfy, self._on_nested, self._engine, self._claim, head, client)


class ComfyPolicy:
    """An image job has the card alone."""

    engine = "comfyui"
    keeps_client_host = True
    #: JOB_TIMEOUT covers an unanswered prompt.
    stall_timeout: float | None = None

    def __init__(
        self,
        config: Config,
        arbiter: Arbiter,
        card: Card,
        engine: ComfyEngine,
        clock: IReactorTime,
        guard: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._guard = guard
        self._claim = Claim(
            arbiter=arbiter,
            card=card,
            tenant=engine.tenant,
            clock=clock,
            retry_after=config.busy_retry_after,
        )
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Take over the settings, for requests that come from now on."""
        self.retry_after = config.busy_retry_after
        self._capture = config.prompt_capture_limit
        self._claim = attrs.evolve(self._claim, retry_after=config.busy_retry_after)

    def admission(self, method: bytes, target: bytes) -> Admission:
        return comfyui.classify(method, target)

    def is_unload_only(self, target: bytes, body: bytes) -> bool:
        return False

    def open_gate(self, head: RequestHead, client: str) -> Gate:
        return ImageGate(self._engine, self._capture, self._guard, self._claim, head, client)


class NestedHint:
    """Says once per image job that a waiting LLM request seems to come from inside that job.

    Such a request waits for the job, and the job for it, unless it goes through the nested listener.
    """

    def __init__(self, arbiter: Arbiter, comfy_host: str, nested_listener: str | None) -> None:
        self._arbiter = arbiter
        self._host = comfy_host
        self._nested = nested_listener
        self._addresses: frozenset[str] | None = None
        self._hinted: Lease | None = None
        self._warned = False

    def __call__(self, client: str) -> None:
        tenant = self._arbiter.tenant
        if tenant is None or tenant.kind is not Kind.EXCLUSIVE or not client:
            return
        lease = next(iter(self._arbiter.leases), None)
        if lease is self._hinted or client not in self._comfy_addresses():
            return
        self._hinted = lease
        advice = (
            f"send such calls to the nested listener ({self._nested})"
            if self._nested
            else "give such calls a listener of their own (--listen-ollama-nested)"
        )
        # With everything on one machine every client shares that address, most of them innocent: once is enough.
        tell = _log.info if self._warned and client in ("127.0.0.1", "::1") else _log.warn
        self._warned = True
        tell(
            "an LLM request from ComfyUI's own address waits for the image job; if a node of that job sent it,"
            " neither will end: {advice}",
            advice=advice,
            client=client,
        )

    def _comfy_addresses(self) -> frozenset[str]:
        # Literal addresses only: looking a name up would block, and a container's name is not what its peers show.
        if self._addresses is None:
            found = {self._host}
            if self._host == "localhost":
                found |= {"127.0.0.1", "::1"}
            for family in (socket.AF_INET, socket.AF_INET6):
                try:
                    found.add(socket.inet_ntop(family, socket.inet_pton(family, self._host)))
                except OSError:
                    continue
            self._addresses = frozenset(found)
        return self._addresses
