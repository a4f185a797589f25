"""Who may use the card, and in what order.

The arbiter hands out *leases*. A tenant of kind ``SHARED`` (a chat engine) may hold any number at once, a tenant
of kind ``EXCLUSIVE`` (an image engine) one; leases of two tenants never exist together. Waiting exclusive requests
close admission to shared ones (writer preference), exclusive requests are served first come first served, shared
tenants take turns in order of arrival and all waiters of the granted tenant enter together.

A lease says who may *start work*. Whose models are still in memory is another question: see :mod:`turnstile.card`.

Nothing here does I/O or knows what an engine is, and nothing is logged but a listener that raises; time comes from
the injected clock.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger


class Kind(enum.Enum):
    """How leases of one tenant go together."""

    SHARED = "llm"
    EXCLUSIVE = "image"


@attrs.frozen
class Tenant:
    """An engine, as the arbiter sees it."""

    name: str
    kind: Kind


class WaitTimeout(Exception):
    """The request waited for its whole time limit and was not granted the card."""


class ArbiterClosed(Exception):
    """The arbiter is shutting down: nothing is granted any more."""


class Lease:
    """The right of one request to use the card until :meth:`release`."""

    __slots__ = ("_arbiter", "asked_at", "client", "details", "granted_at", "label", "tenant")

    def __init__(
        self, arbiter: Arbiter, tenant: Tenant, label: str, client: str, asked_at: float, now: float
    ) -> None:
        self._arbiter: Arbiter | None = arbiter
        self.tenant = tenant
        self.label = label
        self.client = client
        self.asked_at = asked_at
        self.granted_at = now
        self.details: dict[str, Any] = {}

    @property
    def active(self) -> bool:
        """Whether the lease still holds the card."""
        return self._arbiter is not None

    def release(self) -> None:
        """Give the card back. Every call but the first does nothing."""
        arbiter, self._arbiter = self._arbiter, None
        if arbiter is not None:
            arbiter._released(self)


@attrs.define(eq=False)
class Waiter:
    """One request in a waiting line."""

    tenant: Tenant
    label: str
    client: str
    asked_at: float
    deferred: Deferred[Lease]
    #: Chosen to enter as soon as there is a place: a member of the group that was granted the card together.
    admitted: bool = False
    #: Admitted by a turn of ``image_burst``, which a waiting image job does not take back.
    turn: bool = False
    expiry: Any = None


@attrs.define(eq=False)
class Queued:
    """A request began to wait."""

    waiter: Waiter


@attrs.define(eq=False)
class Granted:
    """A request got its lease, ``waited`` seconds after it asked."""

    lease: Lease
    waited: float


@attrs.define(eq=False)
class Abandoned:
    """A waiting request left its line: ``cancelled``, ``timeout`` or ``shutdown``."""

    waiter: Waiter
    why: str


@attrs.define(eq=False)
class Released:
    """A lease ended after ``held`` seconds."""

    lease: Lease
    held: float


@attrs.define(eq=False)
class Transition:
    """The card passed from one tenant (``None``: idle) to another."""

    before: Tenant | None
    after: Tenant | None
    at: float


Event = Queued | Granted | Abandoned | Released | Transition
EVENTS: tuple[type[Event], ...] = (Queued, Granted, Abandoned, Released, Transition)
Listener = Callable[[Event], None]


class Arbiter:
    """A writer-preferring lock with several shared tenants, fairness limits and visible lines.

    :param clock: source of time and of time-outs.
    :param image_burst: after this many exclusive leases in a row with shared requests waiting, the shared requests
        that wait at that moment get a turn; 0 means never.
    :param max_inflight: the most shared leases at once; 0 means no limit.
    """

    def __init__(self, clock: IReactorTime, *, image_burst: int = 0, max_inflight: int = 0) -> None:
        self._clock = clock
        self.image_burst = image_burst
        self.max_inflight = max_inflight
        self._current: Tenant | None = None
        self._leases: set[Lease] = set()
        self._exclusive: deque[Waiter] = deque()
        self._shared: deque[Waiter] = deque()
        #: How many of the shared waiters are admitted, so that the common question needs no scan.
        self._admitted = 0
        self._run = 0
        self._holds = 0
        self._closed = False
        self._pumping = False
        #: By kind of event, so that one that nobody wants need not be made.
        self._listeners: dict[type[Event], list[Listener]] = {kind: [] for kind in EVENTS}
        #: Events that wait for their turn, while a listener is being told of an earlier one.
        self._events: deque[Event] = deque()
        self._telling = False

    # -- what anyone may look at ------------------------------------------------------------------------------

    @property
    def tenant(self) -> Tenant | None:
        """The tenant that holds the card now."""
        return self._current

    @property
    def state(self) -> str:
        """``idle``, ``llm`` or ``image``."""
        return self._current.kind.value if self._current else "idle"

    @property
    def leases(self) -> frozenset[Lease]:
        """The leases that exist now."""
        return frozenset(self._leases)

    @property
    def llm_inflight(self) -> int:
        """How many shared leases exist now."""
        current = self._current
        return len(self._leases) if current is not None and current.kind is Kind.SHARED else 0

    @property
    def image_pending(self) -> bool:
        """Whether an exclusive request waits."""
        return bool(self._exclusive)

    @property
    def contended(self) -> bool:
        """Whether anybody waits."""
        return bool(self._exclusive or self._shared)

    @property
    def held(self) -> bool:
        """Whether grants are held back (start-up, shutdown)."""
        return self._holds > 0 or self._closed

    def waiting(self, kind: Kind) -> Iterator[Waiter]:
        """The waiters of one kind, in the order of their lines."""
        return iter(tuple(self._exclusive if kind is Kind.EXCLUSIVE else self._shared))

    def add_listener(self, listener: Listener, *kinds: type[Event]) -> None:
        """Call ``listener`` with every event of ``kinds`` (all, if none is named), synchronously and after the state
        has changed.

        Every listener sees the events in the order in which they happened: one that a listener causes is told after
        the one that is being told. What a listener raises is logged.
        """
        for kind in kinds or EVENTS:
            self._listeners[kind].append(listener)

    def change_limits(self, *, image_burst: int, max_inflight: int) -> None:
        """Set what the constructor was given anew; whoever waits may profit at once."""
        self.image_burst = image_burst
        self.max_inflight = max_inflight
        self._pump()

    # -- asking -----------------------------------------------------------------------------------------------

    def try_acquire(self, tenant: Tenant, label: str = "", client: str = "") -> Lease | None:
        """A lease, if one can be had at once without overtaking anybody; else ``None``.

        :raises ArbiterClosed: if the arbiter is shutting down.
        """
        if self._closed:
            raise ArbiterClosed
        if self._holds or not self._may_enter(tenant):
            return None
        return self._grant(tenant, label, client, self._clock.seconds())

    def acquire(
        self, tenant: Tenant, label: str = "", client: str = "", timeout: float | None = None
    ) -> Deferred[Lease]:
        """A lease, as soon as the order allows it.

        Cancelling the Deferred takes the request out of its line without a trace. It fails with
        :class:`WaitTimeout` after ``timeout`` seconds and with :class:`ArbiterClosed` at shutdown.
        """
        now = self._clock.seconds()
        deferred: Deferred[Lease] = Deferred(lambda _: self._cancelled(waiter))
        waiter = Waiter(tenant, label, client, now, deferred)
        if self._closed:
            deferred.errback(ArbiterClosed())
            return deferred
        exclusive = tenant.kind is Kind.EXCLUSIVE
        (self._exclusive if exclusive else self._shared).append(waiter)
        if exclusive:
            self._close_admission()
        self._pump()
        if not deferred.called:
            if timeout is not None:
                waiter.expiry = self._clock.callLater(timeout, self._expire, waiter)
            self._emit(Queued(waiter))
        return deferred

    def successor(self, lease: Lease) -> Tenant | None:
        """The tenant that would be granted the card if ``lease``, the last one, were released now."""
        if self.held or self._leases != {lease}:
            return None
        waiter = self._choose_next()
        return waiter.tenant if waiter is not None else None

    # -- starting and stopping --------------------------------------------------------------------------------

    def hold(self) -> Callable[[], None]:
        """Grant nothing until the returned function is called (which may happen more than once)."""
        self._holds += 1
        held = True

        def resume() -> None:
            nonlocal held
            if held:
                held = False
                self._holds -= 1
                self._pump()

        return resume

    def close(self) -> None:
        """Refuse every waiter and every later request with :class:`ArbiterClosed`; leases stay until released."""
        self._closed = True
        for waiter in (*self._exclusive, *self._shared):
            self._refuse(waiter, "shutdown", ArbiterClosed)

    # -- the machine ------------------------------------------------------------------------------------------

    def _may_enter(self, tenant: Tenant) -> bool:
        """Whether a newcomer may have a lease at once."""
        current = self._current
        if self._exclusive or (current is not None and current is not tenant and current != tenant):
            return False
        if tenant.kind is Kind.EXCLUSIVE:
            return current is None and not self._shared
        return not self._shared and self._has_place()

    def _has_place(self) -> bool:
        return not self.max_inflight or len(self._leases) < self.max_inflight

    def _choose_next(self) -> Waiter | None:
        """Who enters an idle card next; pure."""
        if self._admitted:
            # The group that was granted the card together enters whole, even if its first members are done already.
            return self._first_admitted()
        if self._exclusive and not (self._shared and self._turn_is_due()):
            return self._exclusive[0]
        return self._shared[0] if self._shared else None

    def _turn_is_due(self) -> bool:
        return self._shared[0].turn or 0 < self.image_burst <= self._run

    def _next(self) -> Waiter | None:
        """Take the waiter that may enter now, if any, out of its line."""
        if self._holds or self._closed:
            return None
        current = self._current
        if current is None:
            chosen = self._choose_next()
            if chosen is None:
                return None
            if chosen.tenant.kind is Kind.EXCLUSIVE:
                return self._exclusive.popleft()
            if not self._admitted:
                self._admit_group(chosen)
            return self._take(chosen)
        if current.kind is Kind.EXCLUSIVE or not self._shared or not self._has_place():
            return None
        if self._admitted:
            return self._take(self._first_admitted())
        head = self._shared[0]
        if head.tenant == current and not self._exclusive:
            return self._take(head)
        return None

    def _admit_group(self, chosen: Waiter) -> None:
        """Admit all waiters of a tenant together, past a waiting image job only those whose turn it is."""
        images_wait = bool(self._exclusive)
        if images_wait and not chosen.turn:
            for waiter in self._shared:
                waiter.turn = True
        for waiter in self._shared:
            if waiter.tenant == chosen.tenant and (waiter.turn or not images_wait):
                waiter.admitted = True
                self._admitted += 1

    def _first_admitted(self) -> Waiter:
        return next(waiter for waiter in self._shared if waiter.admitted)

    def _take(self, waiter: Waiter) -> Waiter:
        self._remove(self._shared, waiter)
        return waiter

    def _remove(self, line: deque[Waiter], waiter: Waiter) -> None:
        if line and line[0] is waiter:
            line.popleft()
        else:
            line.remove(waiter)
        if waiter.admitted:
            self._admitted -= 1

    def _close_admission(self) -> None:
        """An image job waits: shared waiters that hold no place yet stay out, but for those of a turn."""
        if self._admitted:
            for waiter in self._shared:
                if waiter.admitted and not waiter.turn:
                    waiter.admitted = False
                    self._admitted -= 1

    def _pump(self) -> None:
        """Grant until nobody may enter. A loop, since a grant may release at once, a thousand times over."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while (waiter := self._next()) is not None:
                self._cancel_expiry(waiter)
                lease = self._grant(waiter.tenant, waiter.label, waiter.client, waiter.asked_at)
                if waiter.deferred.called:
                    # A listener cancelled it when it heard of the grant.
                    lease.release()
                else:
                    waiter.deferred.callback(lease)
        finally:
            self._pumping = False

    def _grant(self, tenant: Tenant, label: str, client: str, asked_at: float) -> Lease:
        now = self._clock.seconds()
        lease = Lease(self, tenant, label, client, asked_at, now)
        before, self._current = self._current, tenant
        self._leases.add(lease)
        if tenant.kind is Kind.EXCLUSIVE:
            self._run += 1
        else:
            self._run = 0
        heard = self._listeners
        if heard[Transition] and (before is None or before != tenant):
            self._emit(Transition(before, tenant, now), Granted(lease, now - asked_at))
        elif heard[Granted]:
            self._emit(Granted(lease, now - asked_at))
        return lease

    def _released(self, lease: Lease) -> None:
        self._leases.discard(lease)
        now = self._clock.seconds()
        idle = not self._leases
        if idle:
            self._current = None
            if lease.tenant.kind is Kind.EXCLUSIVE and not self._shared:
                self._run = 0
        heard = self._listeners
        if heard[Released]:
            released = Released(lease, now - lease.granted_at)
            if idle:
                self._emit(released, Transition(lease.tenant, None, now))
            else:
                self._emit(released)
        elif idle and heard[Transition]:
            self._emit(Transition(lease.tenant, None, now))
        if self._shared or self._exclusive:
            self._pump()

    def _leave(self, waiter: Waiter, why: str) -> bool:
        """Take ``waiter`` out of its line; false if it is in none (granted or gone)."""
        line = self._exclusive if waiter.tenant.kind is Kind.EXCLUSIVE else self._shared
        if waiter not in line:
            return False
        self._remove(line, waiter)
        self._cancel_expiry(waiter)
        self._emit(Abandoned(waiter, why))
        # A waiting writer that leaves may free the readers behind it.
        self._pump()
        return True

    def _cancelled(self, waiter: Waiter) -> None:
        self._leave(waiter, "cancelled")

    def _expire(self, waiter: Waiter) -> None:
        waiter.expiry = None
        self._refuse(waiter, "timeout", WaitTimeout)

    def _refuse(self, waiter: Waiter, why: str, error: type[Exception]) -> None:
        # Whoever hears that it left may have cancelled it meanwhile.
        if self._leave(waiter, why) and not waiter.deferred.called:
            waiter.deferred.errback(error())

    def _cancel_expiry(self, waiter: Waiter) -> None:
        expiry, waiter.expiry = waiter.expiry, None
        if expiry is not None and expiry.active():
            expiry.cancel()

    def _emit(self, *events: Event) -> None:
        self._events.extend(events)
        if self._telling:
            return
        self._telling = True
        try:
            while self._events:
                event = self._events.popleft()
                for listener in self._listeners[type(event)]:
                    try:
                        listener(event)
                    except Exception:
                        Logger(namespace=__name__).failure(
                            "a listener failed on {event}", event=event
                        )
        finally:
            self._telling = False


__all__ = [
    "Abandoned",
    "Arbiter",
    "ArbiterClosed",
    "Event",
    "Granted",
    "Kind",
    "Lease",
    "Queued",
    "Released",
    "Tenant",
    "Transition",
    "WaitTimeout",
    "Waiter",
]
