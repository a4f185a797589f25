"""One log line for each change of the card: transitions, waits that end badly, doubts."""

from __future__ import annotations

from turnstile import log as tlog
from turnstile.arbiter import (
    Abandoned,
    Arbiter,
    Event,
    Granted,
    Queued,
    Tenant,
    Transition,
)
from turnstile.card import Card, Degraded, Eviction

_log = tlog.Logger()


def _name(tenant: Tenant | None) -> str:
    return f"{tenant.kind.value} ({tenant.name})" if tenant is not None else "idle"


class Narrator:
    """Listens to the arbiter and the card, and tells the log."""

    def __init__(self, arbiter: Arbiter, card: Card) -> None:
        arbiter.add_listener(self._arbiter_event, Queued, Granted, Abandoned, Transition)
        card.add_listener(self._degraded)
        card.add_eviction_listener(self._evicted)

    def _arbiter_event(self, event: Event) -> None:
        if isinstance(event, Abandoned):
            waiter = event.waiter
            tell = _log.warn if event.why == "timeout" else _log.info
            tell(
                "{label} left the waiting line: {why}",
                label=waiter.label,
                why=event.why,
                client=waiter.client,
                tenant=waiter.tenant.name,
            )
        elif tlog.debug_enabled:
            self._debug(event)

    def _debug(self, event: Event) -> None:
        if isinstance(event, Transition):
            _log.debug(
                "the card: {before} -> {after}",
                before=_name(event.before),
                after=_name(event.after),
            )
        elif isinstance(event, Queued):
            _log.debug("{label} waits", label=event.waiter.label, tenant=event.waiter.tenant.name)
        elif isinstance(event, Granted) and event.waited > 0:
            _log.debug(
                "{label} was granted the card after {waited:.3f} s",
                label=event.lease.label,
                waited=event.waited,
                tenant=event.lease.tenant.name,
            )

    def _degraded(self, interval: Degraded) -> None:
        if interval.ended is None:
            _log.warn(
                "degraded: {culprit} may hold memory beside another engine: {reason}",
                culprit=interval.culprit,
                reason=interval.reason,
            )
        else:
            _log.info(
                "no longer degraded after {seconds:.1f} s: {culprit}, {reason}",
                seconds=interval.ended - interval.began,
                culprit=interval.culprit,
                reason=interval.reason,
            )

    def _evicted(self, engine: str, outcome: Eviction, seconds: float) -> None:
        tell = _log.info if outcome is Eviction.CONFIRMED else _log.warn
        tell(
            "evicting {engine}: {outcome} after {seconds:.3f} s",
            engine=engine,
            outcome=outcome.value,
            seconds=seconds,
        )
