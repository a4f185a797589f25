"""Whose models are on the card, and how one tenant makes room for the next.

A lease (:mod:`turnstile.arbiter`) says who may start work; *residency* says whose models may still be in memory. A
grant is followed by :meth:`Card.make_room`, which evicts every other resident engine. The engine's own evidence comes
first; where the host can tell how much of the card is used, an engine is resident until that shows what it left as free
again. Where all this cannot be confirmed the work goes on all the same, inside a *degraded* interval that log, metrics
and the state page show: the card has two tenants only in such intervals.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import attrs
from twisted.internet.defer import Deferred, DeferredLock, maybeDeferred, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from turnstile.arbiter import Tenant
from turnstile.vram.back import Back

#: Seconds for which a failed eviction is not tried again (circuit breaker); then one request probes.
EVICT_RETRY_AFTER = 30.0

#: How often one engine is evicted while room is made once, if it keeps coming back.
EVICT_ROUNDS = 2

UNREACHABLE = "unreachable while making room"
DID_NOT_LEAVE = "did not leave the card in time"
NOT_TRIED = "eviction failed before, not tried again yet"
CAME_BACK = "came back while room was made"
LOADED_ELSEWHERE = "a model was loaded past turnstile while another engine had the card"

MEMORY_NOT_BACK = "the engine left, but the memory did not come back in time"

#: Why an interval began that ends when the engine has the card to itself.
_HARMLESS_ALONE = (DID_NOT_LEAVE, NOT_TRIED, CAME_BACK, LOADED_ELSEWHERE, MEMORY_NOT_BACK)

#: The most seconds in which the memory of an engine that nobody answers for is waited for.
GONE_WAIT = 5.0

_T = TypeVar("_T")


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


class MemoryWatch(Protocol):
    """What the card asks of a probe; see :class:`turnstile.vram.Vram`."""

    def leaving(self) -> None:
        """An engine is about to be evicted."""
        ...

    def note_empty(self, still: Callable[[], bool]) -> None:
        """Every engine has left, which ``still`` tells later."""
        ...

    def returned(
        self, certain: bool, patience: float, overtaken: Callable[[], bool]
    ) -> Deferred[Back] | None:
        """Wait until what an engine left is back; ``None``: there is no probe."""
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
    #: It got work while it was being evicted, so that the eviction's success proves nothing.
    again: bool = False


class Card:
    """Tracks residency and runs evictions one at a time.

    :param clock: source of time.
    :param retry_after: seconds after a failed eviction during which it is not tried again.
    :param memory: tells how much of the card is used.
    """

    def __init__(
        self,
        clock: IReactorTime,
        *,
        retry_after: float = EVICT_RETRY_AFTER,
        memory: MemoryWatch | None = None,
    ) -> None:
        self._clock = clock
        self.memory = memory
        #: How often residency began, by which "nobody since" is told from "nobody now".
        self._arrivals = 0
        self._retry_after = retry_after
        self._records: dict[str, _Record] = {}
        #: Names of the resident engines; kept beside the records since every request asks.
        self._resident: set[str] = set()
        self._switch: DeferredLock = DeferredLock()
        #: The engine that is being evicted now.
        self._evicting: str | None = None
        #: Whether all of it is being stopped.
        self._stopped = False
        #: Who waits for a switch to a tenant.
        self._joined: dict[str, list[Deferred[None]]] = {}
        #: Who waits for one engine's eviction that was asked for by name.
        self._leaving: dict[str, list[Deferred[Eviction]]] = {}
        self._open: dict[tuple[str, str], Degraded] = {}
        #: Those of them that an eviction does not end.
        self._lasting: set[tuple[str, str]] = set()
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
    def tenants(self) -> tuple[Tenant, ...]:
        """The engines that are registered."""
        return tuple(record.engine.tenant for record in self._records.values())

    @property
    def degraded(self) -> tuple[Degraded, ...]:
        """The degraded intervals that are open now."""
        return tuple(self._open.values())

    def switching(self) -> bool:
        """Whether an eviction is under way."""
        return bool(self._switch.locked)

    def leaves(self, name: str) -> bool:
        """Whether this engine is being evicted, or the memory that it left is waited for."""
        return self._evicting == name

    # -- what engines and the data path tell ------------------------------------------------------------------

    def register(self, engine: Evictable, *, resident: bool = True) -> None:
        """Add an engine; until it was looked at it counts as resident."""
        name = engine.tenant.name
        self._records[name] = _Record(engine, resident)
        if resident:
            self._resident.add(name)

    def mark_resident(self, name: str) -> None:
        """The engine got work that may load models."""
        if name == self._evicting:
            self._records[name].again = True
        if name not in self._resident:
            self._records[name].resident = True
            self._resident.add(name)
            self._arrivals += 1
            # Work that reaches the engine shows that it is there again.
            self.restore(name, UNREACHABLE)

    def mark_evicted(self, name: str) -> None:
        """The engine itself showed that it holds nothing; ends the degraded intervals that it caused."""
        record = self._records[name]
        record.resident = record.again = False
        record.failed_at = None
        self._resident.discard(name)
        for key in [key for key in self._open if key[0] == name and key not in self._lasting]:
            self.restore(*key)
        if self.memory is not None and not self._resident:
            arrivals = self._arrivals
            self.memory.note_empty(lambda: self._arrivals == arrivals)

    def degrade(self, culprit: str, reason: str, *, lasting: bool = False) -> None:
        """Open a degraded interval, unless the same one is open.

        :param lasting: it ends by :meth:`restore` alone: work is under way that may load models after an eviction.
        """
        key = (culprit, reason)
        if lasting:
            self._lasting.add(key)
        if key not in self._open:
            interval = self._open[key] = Degraded(reason, culprit, self._clock.seconds())
            self.history.append(interval)
            self.degraded_total += 1
            self._tell(self._listeners, interval)

    def restore(self, culprit: str, reason: str) -> None:
        """Close a degraded interval, if it is open."""
        self._lasting.discard((culprit, reason))
        interval = self._open.pop((culprit, reason), None)
        if interval is not None:
            interval.ended = self._clock.seconds()
            self._tell(self._listeners, interval)

    def add_listener(self, listener: DegradedListener) -> None:
        """Call ``listener`` when a degraded interval begins and when it ends (``ended`` is set)."""
        self._listeners.append(listener)

    def add_eviction_listener(self, listener: Callable[[str, Eviction, float], None]) -> None:
        """Call ``listener(engine, outcome, seconds)`` after every eviction."""
        self._eviction_listeners.append(listener)

    # -- making room ------------------------------------------------------------------------------------------

    def make_room(self, tenant: Tenant) -> Deferred[None] | None:
        """Evict every other resident engine; ``None`` where there is none, which is the common case.

        Requests that ask for the same tenant meanwhile share one switch, which ends early when all of them are gone. A
        tenant that is itself being evicted waits until that is over: it must not start work that is then told to
        leave. The Deferred never fails but by being cancelled.
        """
        name = tenant.name
        if not self._switch.locked or not (name == self._evicting or name in self._leaving):
            if not self._resident or (len(self._resident) == 1 and name in self._resident):
                if self._open:
                    self._alone(name)
                return None
            if not any(self._due(other) for other in self._others(tenant)):
                self._go_on_without(tenant)
                return None
        waiters = self._joined.get(name)
        first = waiters is None
        if waiters is None:
            waiters = self._joined[name] = []
        waiter: Deferred[None] = Deferred(self._forget(waiters))
        waiters.append(waiter)
        if first:
            d: Deferred[None] = self._switch.run(self._evict_others, tenant, waiters)
            d.addErrback(self._log_failure)
            d.addCallback(self._switched, waiters)
        return waiter

    def evict(self, name: str) -> Deferred[Eviction]:
        """Evict one engine that is known to be resident (after its last job, or after nested calls).

        Those who ask for the same engine meanwhile share one eviction. The Deferred never fails but by being cancelled,
        which leaves the eviction itself to finish.
        """
        if name not in self._resident:
            return succeed(Eviction.CONFIRMED)
        waiters = self._leaving.get(name)
        first = waiters is None
        if waiters is None:
            waiters = self._leaving[name] = []
        waiter: Deferred[Eviction] = Deferred(self._forget(waiters))
        waiters.append(waiter)
        if first:
            d: Deferred[Eviction] = self._switch.run(self._evict_one, name)
            d.addCallback(self._left, name)
        return waiter

    @staticmethod
    def _forget(waiters: list[Deferred[_T]]) -> Callable[[Deferred[_T]], None]:
        def canceller(waiter: Deferred[_T]) -> None:
            if waiter in waiters:
                waiters.remove(waiter)

        return canceller

    def _others(self, tenant: Tenant) -> Iterable[str]:
        return sorted(name for name in self._resident if name != tenant.name)

    def _due(self, name: str) -> bool:
        failed_at = self._records[name].failed_at
        return failed_at is None or self._clock.seconds() - failed_at >= self._retry_after

    def stop(self) -> None:
        """The engines are about to be stopped: evictions that this ends say nothing about the card."""
        self._stopped = True

    def _go_on_without(self, tenant: Tenant) -> None:
        for name in self._others(tenant):
            if not self._due(name):
                self.degrade(name, NOT_TRIED)

    def _alone(self, name: str) -> None:
        """The only resident engine got the card: that it did not leave before does no harm any more."""
        for reason in _HARMLESS_ALONE:
            self.restore(name, reason)

    def _evict_others(self, tenant: Tenant, waiters: list[Deferred[None]]) -> Deferred[Any]:
        self._go_on_without(tenant)
        rounds: dict[str, int] = {}

        def step(_: object) -> Any:
            # Looked at anew each time: an engine may have got work meanwhile. Nobody left to make room for: stop, since
            # another tenant may have the card by now.
            if not waiters:
                return None
            for name in self._others(tenant):
                if not self._due(name):
                    continue
                if rounds.get(name, 0) == EVICT_ROUNDS:
                    self.degrade(name, CAME_BACK)
                    continue
                rounds[name] = rounds.get(name, 0) + 1
                return self._evict_one(name).addCallback(step)
            if self._open and self._resident <= {tenant.name}:
                self._alone(tenant.name)
            return None

        def over(result: object) -> object:
            # Before the lock is let go: who comes later needs a switch of its own.
            del self._joined[tenant.name]
            return result

        d: Deferred[Any] = succeed(None)
        return d.addCallback(step).addBoth(over)

    def _evict_one(self, name: str) -> Deferred[Eviction]:
        if name not in self._resident:
            return succeed(Eviction.CONFIRMED)
        record = self._records[name]
        record.again = False
        self._evicting = name
        if self.memory is not None:
            self.memory.leaving()
        began = self._clock.seconds()
        took = 0.0
        back: Back | None = None
        d: Deferred[Any] = maybeDeferred(record.engine.evict)

        def failed(failure: Failure) -> Eviction:
            self._log_failure(failure)
            return Eviction.TIMED_OUT

        def left(outcome: Eviction) -> Eviction | Deferred[Eviction]:
            nonlocal took
            took = self._clock.seconds() - began
            waiting = self._await_memory(name, outcome, record)
            return outcome if waiting is None else waiting.addCallback(seen, outcome)

        def seen(how: Back, outcome: Eviction) -> Eviction:
            nonlocal back
            back = how
            if how.ok:
                for culprit, reason in [key for key in self._open if key[1] == MEMORY_NOT_BACK]:
                    self.restore(culprit, reason)
            # No process and no memory: gone, though nobody was there to say so.
            return Eviction.CONFIRMED if how is Back.FLOOR else outcome

        def done(outcome: Eviction) -> Eviction:
            self._evicting = None
            if self._stopped and outcome is not Eviction.CONFIRMED:
                return outcome
            if outcome is Eviction.TIMED_OUT:
                record.failed_at = self._clock.seconds()
                self.degrade(name, DID_NOT_LEAVE)
            elif record.again:
                # What was confirmed is older than the work that it got meanwhile: it stays resident.
                record.failed_at = None
            elif outcome is Eviction.CONFIRMED:
                self.mark_evicted(name)
                if back is Back.TIMED_OUT:
                    # Whoever has it, the next one loads beside it.
                    self.degrade(name, MEMORY_NOT_BACK)
            else:
                # No process, no memory; but nobody confirmed it, so the doubt is on record.
                self.degrade(name, UNREACHABLE)
                record.resident = False
                record.failed_at = None
                self._resident.discard(name)
                self._alone(name)
            self._tell(self._eviction_listeners, name, outcome, took)
            return outcome

        d.addErrback(failed)
        d.addCallback(left)
        d.addCallback(done)
        return d

    def _await_memory(self, name: str, outcome: Eviction, record: _Record) -> Deferred[Back] | None:
        """Wait until what the engine left is back, if that can be seen.

        Not after a time-out, since it may still have it all; nor while another engine is resident, whose own memory
        would hide it.
        """
        if self.memory is None or outcome is Eviction.TIMED_OUT or self._stopped or record.again:
            return None
        if not self._resident <= {name}:
            return None
        certain = outcome is Eviction.CONFIRMED
        return self.memory.returned(
            certain, math.inf if certain else GONE_WAIT, lambda: record.again or self._stopped
        )

    def _switched(self, _: object, waiters: list[Deferred[None]]) -> None:
        for waiter in tuple(waiters):
            if not waiter.called:
                waiter.callback(None)

    def _left(self, outcome: Eviction, name: str) -> None:
        for waiter in tuple(self._leaving.pop(name)):
            if not waiter.called:
                waiter.callback(outcome)

    @staticmethod
    def _tell(listeners: Iterable[Callable[..., None]], *what: object) -> None:
        for listener in listeners:
            try:
                listener(*what)
            except Exception:
                Logger(namespace=__name__).failure("a listener of the card failed")

    def _log_failure(self, failure: Failure) -> None:
        Logger(namespace=__name__).failure("eviction failed unexpectedly", failure=failure)
