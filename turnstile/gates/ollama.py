"""Ollama: chat requests share the card; those from inside an image job run within its lease."""

from __future__ import annotations

import socket
from collections.abc import Callable

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from turnstile.arbiter import Arbiter, Kind, Lease
from turnstile.card import Card
from turnstile.config import Config
from turnstile.engines import ollama
from turnstile.engines.base import Admission
from turnstile.engines.comfyui import ComfyEngine
from turnstile.engines.ollama import OllamaEngine
from turnstile.gates.base import Claim, EnginePolicy, LeaseGate
from turnstile.log import Logger
from turnstile.proxy.gate import Ending, Gate
from turnstile.proxy.http1 import RequestHead

_log = Logger()


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


class OllamaPolicy(EnginePolicy):
    """Chat requests share the card."""

    engine = "ollama"

    def __init__(
        self,
        config: Config,
        arbiter: Arbiter,
        card: Card,
        engine: OllamaEngine,
        clock: IReactorTime,
        on_wait: Callable[[str], None] | None = None,
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
            timeout=config.llm_wait_timeout,
            reject_status=config.llm_busy_status if config.llm_busy_mode == "reject" else None,
            on_wait=on_wait,
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
