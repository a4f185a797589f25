"""Loads a chat model again after image jobs, so that the next chat need not wait for it.

Only while nobody wants the card and no other engine has models on it; a request for another tenant ends the loading.
"""

from __future__ import annotations

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from turnstile.arbiter import Arbiter, ArbiterClosed, Event, Kind, Lease, Queued, Transition
from turnstile.card import Card
from turnstile.engines.client import ClientError
from turnstile.engines.ollama import OllamaEngine


class Warmer:
    """Watches the arbiter for the moment after the last image job.

    :param engine: whose model is loaded.
    :param model: its name; empty: none is loaded.
    :param timeout: the most seconds that loading may take.
    """

    log = Logger()

    def __init__(
        self,
        arbiter: Arbiter,
        card: Card,
        engine: OllamaEngine,
        model: str,
        timeout: float,
        clock: IReactorTime,
    ) -> None:
        self._arbiter = arbiter
        self._card = card
        self._engine = engine
        self.model = model
        self.timeout = timeout
        self._clock = clock
        self._running = False
        self._soon: IDelayedCall | None = None
        self._expiry: IDelayedCall | None = None
        self._loading: Deferred[None] | None = None
        self._lease: Lease | None = None
        arbiter.add_listener(self._event, Queued, Transition)

    @property
    def busy(self) -> bool:
        """Whether the model is being loaded."""
        return self._lease is not None

    def start(self) -> None:
        """Begin to watch."""
        self._running = True

    def stop(self) -> None:
        """Give up what is under way."""
        self._running = False
        if self._soon is not None and self._soon.active():
            self._soon.cancel()
        self._soon = None
        self._give_up("turnstile stops")

    def _event(self, event: Event) -> None:
        if isinstance(event, Queued):
            if self._lease is not None and event.waiter.tenant != self._engine.tenant:
                self._give_up(f"{event.waiter.tenant.name} wants the card")
        elif isinstance(event, Transition) and event.after is None and event.before is not None:
            if (
                self._running
                and self.model
                and event.before.kind is Kind.EXCLUSIVE
                and self._soon is None
            ):
                # Not at once: who waits comes first, and ComfyUI may have something to clear away.
                self._soon = self._clock.callLater(0, self._begin)

    def _begin(self) -> None:
        self._soon = None
        name = self._engine.tenant.name
        if not self._running or not self.model:
            return
        if self._lease is not None or self._arbiter.tenant is not None:
            return
        others = self._card.resident - {name}
        if others:
            self.log.info(
                "{model} is not warmed up: {others} may still have models on the card",
                model=self.model,
                others=", ".join(sorted(others)),
            )
            return
        try:
            lease = self._arbiter.try_acquire(self._engine.tenant, "warm-up")
        except ArbiterClosed:
            return
        if lease is None:
            return
        self._lease = lease
        self._card.mark_resident(name)
        self.log.info("warming {model} up", model=self.model)
        self._expiry = self._clock.callLater(self.timeout, self._give_up, "WARM_TIMEOUT passed")
        self._loading = d = self._engine.warm(self.model)
        d.addCallbacks(self._loaded, self._failed)

    def _loaded(self, _: object) -> None:
        if self._settle():
            self.log.info("{model} is warm", model=self.model)

    def _failed(self, failure: Failure) -> None:
        if failure.check(CancelledError):
            return
        if failure.check(ClientError):
            self._engine.note_aborted()
            self.log.warn(
                "{model} was not warmed up: {error}", model=self.model, error=failure.value
            )
        else:
            self.log.failure("warming {model} up failed", failure=failure, model=self.model)
        self._settle()

    def _give_up(self, why: str) -> None:
        if self._lease is None:
            return
        self.log.info("warming {model} up ends early: {why}", model=self.model, why=why)
        loading = self._loading
        self._engine.note_aborted()
        if loading is not None:
            loading.cancel()
        self._settle()

    def _settle(self) -> bool:
        """Give the lease back; false if that was done before."""
        expiry, self._expiry = self._expiry, None
        if expiry is not None and expiry.active():
            expiry.cancel()
        self._loading = None
        lease, self._lease = self._lease, None
        if lease is None:
            return False
        lease.release()
        return True
