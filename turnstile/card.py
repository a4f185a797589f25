"""Whose models are on the card, and how one tenant makes room for the next.

A lease (:mod:`turnstile.arbiter`) says who may start work; *residency* says whose models may still be in memory. A
grant is followed by :meth:`Card.make_room`, which evicts every other resident engine. Where that cannot be confirmed
the work goes on all the same, inside a *degraded* interval that log, metrics and the state page show: the card has two
tenants only in such intervals.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import attrs
from twisted.internet.defer import Deferred, DeferredLock, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from turnstile.arbiter import Tenant

#: Seconds for which a failed eviction is not tried again (circuit breaker); then one request probes.
EVICT_RETRY_AFTER = 30.0

UNREACHABLE = "unreachable while making room"


class Eviction(enum.Enum):
    """How an attempt to evict an engine ended."""

    #: The engine itself showed that it holds nothing any more.
    CONFIRMED = "confirmed"
    #: Nobody answers at its address: no process, so nothing that could be told to leave.
    UNREACHABLE = "unreachable"
    #: It answered (or hung) but did not leave within its time-out.
    TIMED_OUT = "timed out"


class Evictable(Protocol):
    """What the card asks of an engine."""

    @property
    def tenant(self) -> Tenant: ...

    def evict(self) -> Deferred[Eviction]:
        """Make the engine give back the card, bounded by its own time-out. Must not fail."""
        ...


@attrs.define(eq=False)
class Degraded:
    """An interval in which the promise of one tenant is not kept, and why."""

    reason: str
    #: The engine that may still hold memory.
    culprit: str
    began: float
    ended: float | None = None


DegradedListener = Callable[[Degraded], None]


@attrs.define
class _Record:
    engine: Evictable
    resident: bool = False
    failed_at: float | None = None


class Card:
    """Tracks residency and runs evictions one at a time.

    :param clock: source of time.
    :param retry_after: seconds after a failed eviction during which it is not tried again.
    """

    def __init__(self, clock: IReactorTime, *, retry_after: float = EVICT_RETRY_AFTER) -> None:
        self._clock = clock
        self._retry_after = retry_after
        self._records: dict[str, _Record] = {}
        #: Names of the resident engines; kept beside the records since every request asks.
        self._resident: set[str] = set()
        self._switch: DeferredLock = DeferredLock()
        self._joined: dict[str, list[Deferred[None]]] = {}
        self._open: dict[tuple[str, str], Degraded] = {}
        #: Past and present degraded intervals, the latest last.
        self.history: deque[Degraded] = deque(maxlen=1000)
        self.degraded_total = 0
        self._listeners: list[DegradedListener] = []
        self._eviction_listeners: list[Callable[[str, Eviction, float], None]] = []

    # -- what anyone may look at ------------------------------------------------------------------------------

    @property
    def resident(self) -> frozenset[str]:
        """Names of the engines whose models may be in memory."""
        return frozenset(self._resident)

    @property
    def degraded(self) -> tuple[Degraded, ...]:
        """The degraded intervals that are open now."""
        return tuple(self._open.values())

    def switching(self) -> bool:
        """Whether an eviction is under way."""
        return bool(self._switch.locked)

    # -- what engines and the data path tell ------------------------------------------------------------------

    def register(self, engine: Evictable, *, resident: bool = True) -> None:
        """Add an engine; until it was looked at it counts as resident."""
        name = engine.tenant.name
        self._records[name] = _Record(engine, resident)
        if resident:
            self._resident.add(name)

    def mark_resident(self, name: str) -> None:
        """The engine got work that may load models."""
        if name not in self._resident:
            self._resident.add(name)
            self._records[name].resident = True
            # Work that reaches the engine shows that it is there again.
            self.restore(name, UNREACHABLE)

    def mark_evicted(self, name: str) -> None:
        """The engine itself showed that it holds nothing; ends every degraded interval that it caused."""
        self._resident.discard(name)
        record = self._records[name]
        record.resident = False
        record.failed_at = None
        for key in [key for key in self._open if key[0] == name]:
            self.restore(*key)

    def degrade(self, culprit: str, reason: str) -> None:
        """Open a degraded interval, unless the same one is open."""
        key = (culprit, reason)
        if key not in self._open:
            interval = self._open[key] = Degraded(reason, culprit, self._clock.seconds())
            self.history.append(interval)
            self.degraded_total += 1
            for listener in self._listeners:
                listener(interval)

    def restore(self, culprit: str, reason: str) -> None:
        """Close a degraded interval, if it is open."""
        interval = self._open.pop((culprit, reason), None)
        if interval is not None:
            interval.ended = self._clock.seconds()
            for listener in self._listeners:
                listener(interval)

    def add_listener(self, listener: DegradedListener) -> None:
        """Call ``listener`` when a degraded interval begins and when it ends (``ended`` is set)."""
        self._listeners.append(listener)

    def add_eviction_listener(self, listener: Callable[[str, Eviction, float], None]) -> None:
        """Call ``listener(engine, outcome, seconds)`` after every eviction."""
        self._eviction_listeners.append(listener)

    # -- making room ------------------------------------------------------------------------------------------

    def make_room(self, tenant: Tenant) -> Deferred[None] | None:
        """Evict every other resident engine; ``None`` where there is none, which is the common case.

        Requests that ask for the same tenant meanwhile share one switch. The Deferred never fails but by being
        cancelled, which leaves the switch itself to finish.
        """
        if not self._resident or (len(self._resident) == 1 and tenant.name in self._resident):
            return None
        if not any(self._due(name) for name in self._others(tenant)):
            self._go_on_without(tenant)
            return None
        waiter: Deferred[None] = Deferred(lambda d: waiters.remove(d) if d in waiters else None)
        waiters = self._joined.get(tenant.name)
        if waiters is not None:
            waiters.append(waiter)
            return waiter
        waiters = self._joined[tenant.name] = [waiter]
        d: Deferred[None] = self._switch.run(self._evict_others, tenant)
        d.addErrback(self._log_failure)
        d.addCallback(self._switched, tenant)
        return waiter

    def evict(self, name: str) -> Deferred[Eviction]:
        """Evict one engine that is known to be resident (after its last job, or after nested calls)."""
        if name not in self._resident:
            return succeed(Eviction.CONFIRMED)
        d: Deferred[Eviction] = self._switch.run(self._evict_one, name)
        return d

    def _others(self, tenant: Tenant) -> Iterable[str]:
        return sorted(name for name in self._resident if name != tenant.name)

    def _due(self, name: str) -> bool:
        failed_at = self._records[name].failed_at
        return failed_at is None or self._clock.seconds() - failed_at >= self._retry_after

    def _go_on_without(self, tenant: Tenant) -> None:
        for name in self._others(tenant):
            if not self._due(name):
                self.degrade(name, "eviction failed before, not tried again yet")

    def _evict_others(self, tenant: Tenant) -> Deferred[None]:
        self._go_on_without(tenant)
        due = [name for name in self._others(tenant) if self._due(name)]

        def step(_: object = None) -> Deferred[None] | None:
            if not due:
                return None
            d = self._evict_one(due.pop(0))
            return d.addCallback(step)  # type: ignore[return-value]

        return succeed(None).addCallback(step)

    def _evict_one(self, name: str) -> Deferred[Eviction]:
        if name not in self._resident:
            return succeed(Eviction.CONFIRMED)
        began = self._clock.seconds()
        d = self._records[name].engine.evict()

        def failed(failure: Failure) -> Eviction:
            self._log_failure(failure)
            return Eviction.TIMED_OUT

        def done(outcome: Eviction) -> Eviction:
            if outcome is Eviction.CONFIRMED:
                self.mark_evicted(name)
            elif outcome is Eviction.UNREACHABLE:
                # No process, no memory; but nobody confirmed it, so the doubt is on record.
                self.degrade(name, UNREACHABLE)
                self._resident.discard(name)
                self._records[name].resident = False
            else:
                self._records[name].failed_at = self._clock.seconds()
                self.degrade(name, "did not leave the card in time")
            for listener in self._eviction_listeners:
                listener(name, outcome, self._clock.seconds() - began)
            return outcome

        return d.addErrback(failed).addCallback(done)

    def _switched(self, _: object, tenant: Tenant) -> None:
        for waiter in self._joined.pop(tenant.name, ()):
            if not waiter.called:
                waiter.callback(None)

    def _log_failure(self, failure: Failure) -> None:
        Logger(namespace=__name__).failure("eviction failed unexpectedly", failure=failure)
