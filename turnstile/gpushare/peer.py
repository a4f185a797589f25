"""One process's part in sharing a card: a slot that it keeps alive, and turns that it waits for.

A step starts only in its peer's window, so a peer whose step outlasts the window overlaps with the next one's
by less than that step. Before each step the registry's bytes are compared with those that the schedule
was made from, which costs a fraction of a microsecond and no system call; slots are read again only if
something changed. So a change of membership counts from everybody's next step.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections import deque
from typing import NamedTuple

from turnstile.gpushare import layout
from turnstile.gpushare.clock import SYSTEM_CLOCK
from turnstile.gpushare.errors import GpuShareError
from turnstile.gpushare.schedule import Claim, make_schedule
from turnstile.gpushare.snapshot import NEVER_US, Snapshot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType
    from typing import Any, Self

    from turnstile.gpushare.clock import Clock
    from turnstile.gpushare.registry import Registry, Slot
    from turnstile.gpushare.turns import Turn

#: No sleep is longer, so that whoever waits for its window soon notices that others left.
_SLICE_US = 50_000
#: Nobody waits longer than this for a turn, however often the schedule changes meanwhile.
_PATIENCE_US = 1_000_000
#: A heartbeat this old is renewed by the next step: the thread that should do it does not get to run.
_LATE_US = 1_000_000
#: Over how long busy time is averaged.
_BUSY_NS = 2_000_000_000


class Look(NamedTuple):
    """Whether it is a peer's turn, and for how many microseconds that stays so (None: no end in sight)."""

    is_mine: bool
    lasts_us: int | None


class Peer:
    """A process that takes part in sharing a card; made by `join`.

    Methods may be called from any thread. After `leave`, in forked children, and where there is no card, it
    paces nothing: steps start at once.
    """

    def __init__(
        self, registry: Registry | None, name: str, weight: float, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.name = name
        self._weight = weight
        self._clock = clock
        self._wall_us = clock.wall_us
        self._monotonic_ns = clock.monotonic_ns
        self._lock = threading.RLock()
        self._registry = registry
        self._slot: Slot | None = None
        self._trouble = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # Activity and busy time; monotonic nanoseconds.
        self._active = False
        self._touched_ns = 0
        self._depth = 0
        self._busy_ns = 0
        self._busy_since_ns = 0
        self._samples: deque[tuple[int, int]] = deque()
        # What steps go by: (period, start, end) of the window, None while alone; the bytes it was made
        # from, and between which times it holds.
        self._plan: tuple[int, int, int] | None = None
        self._copy: Callable[[], bytes] = bytes
        self._seen = b""
        self._valid_from_us = 0
        self._valid_until_us = NEVER_US

    @classmethod
    def join(
        cls,
        gpu: str | int = "auto",
        name: str = "",
        weight: float = 1.0,
        *,
        group: str | int | None = None,
        thread: bool = True,
        clock: Clock = SYSTEM_CLOCK,
    ) -> Self:
        """Take part in sharing a card.

        ``gpu``: "auto" for the first card that this process may use, its number as the driver counts, a UUID,
        any other key that peers agree on, or "none". ``name`` is shown to people (47 bytes of UTF-8), by
        default the program's. A peer with twice the ``weight`` gets twice the time. ``group``: the system
        group whose members share the card; without it only processes of one user do. Without a ``thread``
        that keeps it alive the caller must call `tick`.

        Raises `ValueError` for a weight that is none, `GpuKeyError` if it is not clear which card is meant,
        `SegmentError` or `RegistryFullError` if there is no slot to be had. Where "auto" finds no card, the
        peer is not registered and runs unpaced.
        """
        if os.name != "posix":
            raise GpuShareError("GPU-share needs POSIX shared memory, which this system has not")
        from turnstile.gpushare.gpu_key import find_key
        from turnstile.gpushare.registry import Registry, check_weight

        weight = check_weight(weight)
        name = name or os.path.basename(sys.argv[0]) or "python"
        key = find_key(gpu)
        if key is None:
            return cls(None, name, weight, clock)
        registry = Registry.open(key, group=_find_group(group), clock=clock)
        try:
            slot = registry.claim(name, weight)
        except BaseException:
            registry.close()
            raise
        self = cls(registry, name, weight, clock)
        self._adopt(slot)
        _watch(self)
        if thread:
            self._start_thread()
        return self

    # -- what it is --------------------------------------------------------------------------------

    @property
    def key(self) -> str | None:
        """The card's key; None if this peer has no part in sharing one."""
        registry = self._registry
        return registry.segment.key if registry is not None else None

    @property
    def slot(self) -> int | None:
        """The number of its slot; None while it has none."""
        slot = self._slot
        return slot.index if slot is not None else None

    @property
    def weight(self) -> float:
        """Its weight; setting one that is none raises `ValueError`."""
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        from turnstile.gpushare.registry import check_weight

        with self._lock:
            self._weight = check_weight(weight)
            if self._slot is not None:
                self._slot.set_weight(self._weight)

    @property
    def trouble(self) -> str:
        """Why it has no slot although it should; empty if all is well. It is tried again with each beat."""
        return self._trouble

    def take_snapshot(self) -> Snapshot:
        """All live peers of the card, this one among them; none without a card."""
        with self._lock:
            if self._registry is None:
                return Snapshot("", self._wall_us(), (), NEVER_US)
            return self._registry.take_snapshot()

    def describe(self) -> str:
        """One line for the log at start."""
        with self._lock:
            if self._registry is None or self._slot is None:
                return f"gpu-share: not registered, {self._trouble or 'no card'}"
            alive = len(self.take_snapshot().peers)
            return (
                f"gpu-share: joined {self._registry.segment.name} slot {self._slot.index}"
                f" (weight {self._weight:g}, {alive} peer{'s' * (alive != 1)} alive)"
            )

    # -- steps -------------------------------------------------------------------------------------

    def step(self, sync: Callable[[], object] | None = None) -> Step:
        """A context for one step of computing: waits for this peer's turn, then measures.

        ``sync`` is called at its end, so that work which was only submitted so far counts as well
        (``torch.cuda.synchronize``).
        """
        return Step(self, sync)

    def turn(self, sync: Callable[[], object] | None = None, reactor: Any = None) -> Turn:
        """`step` for coroutines: ``async with peer.turn(): ...``; ``await peer.turn()`` only waits.

        For asyncio, or for Twisted if a ``reactor`` is given.
        """
        from turnstile.gpushare.turns import Turn

        return Turn(self, sync, reactor)

    def begin(self) -> None:
        """Wait for this peer's turn and begin a step; each needs its `end`. `step` does both."""
        # What `touch`, `wait_us` and `open` do, in the fewest calls: this is what each step pays.
        now_ns = self._touched_ns = self._monotonic_ns()
        if not self._active:
            with self._lock:
                self._set_active(True)
        if self.wait_us():
            for seconds in self.pauses():
                self._clock.sleep(seconds)
            now_ns = self._monotonic_ns()
        with self._lock:
            self._touched_ns = now_ns
            if not self._depth:
                self._busy_since_ns = now_ns
            self._depth += 1

    def end(self) -> None:
        """End a step: what was submitted in it is done. `RuntimeError` if none was begun."""
        now_ns = self._monotonic_ns()
        with self._lock:
            if not self._depth:
                raise RuntimeError("a step ends that did not begin")
            self._touched_ns = now_ns
            self._depth -= 1
            if not self._depth:
                self._busy_ns += now_ns - self._busy_since_ns

    def open(self) -> None:
        """Begin a step without waiting, for those who have waited by `pauses`."""
        now_ns = self._monotonic_ns()
        with self._lock:
            self._touched_ns = now_ns
            if not self._depth:
                self._busy_since_ns = now_ns
            self._depth += 1

    def touch(self) -> None:
        """Count as active from now on for two seconds, as a step does."""
        self._touched_ns = self._monotonic_ns()
        if not self._active:
            with self._lock:
                self._set_active(True)

    def add_busy(self, seconds: float) -> None:
        """Count time that was measured elsewhere as busy."""
        with self._lock:
            self._busy_ns += round(seconds * 1e9)

    def wait_us(self) -> int:
        """Microseconds until it is this peer's turn; 0 if it is."""
        now_us = self._wall_us()
        if not (self._valid_from_us <= now_us < self._valid_until_us) or self._copy() != self._seen:
            self._review(now_us)
        plan = self._plan
        if plan is None:
            return 0
        period, start, end = plan
        position = now_us % period
        return 0 if start <= position < end else (start - position) % period

    def look(self) -> Look:
        """Whether it is this peer's turn, were it active, and for how long that stays so."""
        self.wait_us()  # brings the plan up to date
        plan = self._plan
        if plan is None:
            return Look(True, None)
        period, start, end = plan
        position = self._wall_us() % period
        if start <= position < end:
            return Look(True, end - position)
        return Look(False, (start - position) % period)

    def pauses(self) -> Iterator[float]:
        """Seconds to sleep, again and again, until it is this peer's turn.

        It ends at the time when the turn should come on a clock that nobody sets, even if one wakes up
        too late for it: a step in somebody else's window is better than none at all.
        """
        wait = self.wait_us()
        plan = self._plan
        began_ns = self._monotonic_ns()
        deadline_ns = began_ns + wait * 1000
        while wait:
            yield min(wait, _SLICE_US) / 1e6
            wait = self.wait_us()
            now_ns = self._monotonic_ns()
            if self._plan != plan:
                plan = self._plan
                deadline_ns = min(now_ns + wait * 1000, began_ns + _PATIENCE_US * 1000)
            if now_ns >= deadline_ns:
                return

    def _review(self, now_us: int) -> None:
        """Make the plan anew from what the registry says now."""
        with self._lock:
            if self._slot is not None and not 0 <= now_us - self._slot.beaten_us < _LATE_US:
                self._beat(now_us)
            registry, slot = self._registry, self._slot
            if registry is None or slot is None:
                self._forget_plan()
                return
            # Before the slots are read: what changes meanwhile makes a difference next time.
            self._seen = registry.segment.copy()
            snapshot = registry.take_snapshot()
            claims = [
                Claim(peer.slot, peer.weight)
                for peer in snapshot.peers
                if peer.active and peer.slot != slot.index
            ]
            if claims:
                schedule = make_schedule([*claims, Claim(slot.index, self._weight)])
                window = schedule.get_window(slot.index)
                self._plan = (schedule.period_us, window.start_us, window.end_us)
            else:
                self._plan = None
            self._valid_from_us = min(now_us, slot.beaten_us)
            self._valid_until_us = min(snapshot.stale_us, slot.beaten_us + _LATE_US)

    def _forget_plan(self) -> None:
        self._plan = None
        self._copy = bytes
        self._seen = b""
        self._valid_from_us = 0
        self._valid_until_us = NEVER_US

    # -- staying alive -----------------------------------------------------------------------------

    def tick(self) -> float:
        """Do what is due: renew the heartbeat, publish, become idle. Return seconds until it is due again."""
        with self._lock:
            if self._registry is None:
                return layout.BEAT_US / 1e6
            now_us = self._wall_us()
            slot = self._slot
            if self._registry.segment.is_orphaned():
                self._move()
            elif slot is None or not 0 <= now_us - slot.beaten_us < layout.BEAT_US:
                self._beat(now_us)
            due_us = layout.BEAT_US
            if self._slot is not None:
                due_us -= self._wall_us() - self._slot.beaten_us
            if self._active:
                due_us = min(due_us, self._expire())
            return min(max(due_us, 1000), layout.BEAT_US) / 1e6

    def _beat(self, now_us: int) -> None:
        if self._slot is not None:
            self._slot.set_busy(self._measure())
            if self._slot.beat(now_us):
                return
            # We stood still for so long that somebody took our slot.
            self._slot = None
        self._claim()

    def _claim(self) -> None:
        """Take a slot again, if there is one."""
        assert self._registry is not None
        self._forget_plan()
        try:
            slot = self._registry.claim(self.name, self._weight)
        except (GpuShareError, OSError) as error:
            self._complain(error)
        else:
            self._adopt(slot)

    def _move(self) -> None:
        """Follow the others to the memory that took the place of ours."""
        from turnstile.gpushare.registry import Registry

        assert self._registry is not None
        old, self._slot = self._registry, None
        try:
            self._registry = Registry.open(old.segment.key, group=old.group, clock=self._clock)
        except GpuShareError as error:
            self._complain(error)
            return
        old.close()
        self._claim()

    def _adopt(self, slot: Slot) -> None:
        assert self._registry is not None
        self._slot = slot
        self._trouble = ""
        if not self._samples:
            self._samples.append((self._monotonic_ns(), self._busy_ns))
        if self._active:
            slot.set_active(True)
        self._copy = self._registry.segment.copy
        self._seen = b""  # the next step looks

    def _complain(self, error: Exception) -> None:
        if not self._trouble:
            import logging

            logging.getLogger(__package__).warning("no part in GPU-share for now: %s", error)
        self._trouble = str(error)

    def _set_active(self, active: bool) -> None:
        self._active = active
        if self._slot is not None:
            self._slot.set_active(active)

    def _expire(self) -> int:
        """Become idle if there was no step for long enough; microseconds until it would be time."""
        touched_ns = self._touched_ns
        passed_us = (self._monotonic_ns() - touched_ns) // 1000
        if self._depth or passed_us < layout.ACTIVITY_US:
            return layout.ACTIVITY_US - (0 if self._depth else passed_us)
        self._set_active(False)
        if self._touched_ns != touched_ns:  # a step came in between and took us for active
            self._set_active(True)
        return layout.ACTIVITY_US

    def _measure(self) -> float:
        """The part of the last two seconds that was spent in steps."""
        now_ns = self._monotonic_ns()
        busy_ns = self._busy_ns
        if self._depth:
            busy_ns += now_ns - self._busy_since_ns
        samples = self._samples
        while len(samples) > 1 and now_ns - samples[1][0] >= _BUSY_NS:
            samples.popleft()
        samples.append((now_ns, busy_ns))
        first_ns, first_busy_ns = samples[0]
        return (busy_ns - first_busy_ns) / (now_ns - first_ns) if now_ns > first_ns else 0.0

    def _start_thread(self) -> None:
        self._thread = threading.Thread(
            target=_keep_alive,
            args=(weakref.ref(self), self._stop),
            name="turnstile-gpushare",
            daemon=True,
        )
        self._thread.start()

    # -- leaving -----------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave the slot to others; steps are unpaced from now on. Done at exit, too."""
        self._stop.set()
        with self._lock:
            registry, slot = self._registry, self._slot
            self._registry = self._slot = None
            self._forget_plan()
            if slot is not None:
                slot.release()
            if registry is not None:
                registry.close()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)
        self._thread = None

    def _forget(self) -> None:
        """In a forked child: the slot is the parent's, and nothing that it holds is touched."""
        self._lock = threading.RLock()  # the old one may be held by a thread that is not here
        self._stop = threading.Event()
        self._thread = None
        registry, self._registry, self._slot = self._registry, None, None
        self._forget_plan()
        self._active = False
        if registry is not None:
            registry.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()


class Step:
    """One step, as a context."""

    __slots__ = ("_peer", "_sync")

    def __init__(self, peer: Peer, sync: Callable[[], object] | None) -> None:
        self._peer = peer
        self._sync = sync

    def __enter__(self) -> None:
        self._peer.begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            # After an error there may be nothing left to wait for, or a second error to hide the first.
            if self._sync is not None and kind is None:
                self._sync()
        finally:
            self._peer.end()


def _keep_alive(reference: weakref.ref[Peer], stop: threading.Event) -> None:
    """The heartbeat thread. It ends with its peer."""
    delay = 0.0
    while not stop.wait(delay):
        peer = reference()
        if peer is None:
            return
        try:
            delay = peer.tick()
        except Exception:
            import logging

            logging.getLogger(__package__).exception("GPU-share's heartbeat failed")
            delay = layout.BEAT_US / 1e6
        del peer


def _find_group(group: str | int | None) -> int | None:
    """The id of a group given by name or id; `GpuShareError` if there is none of that name."""
    if group is None or isinstance(group, int):
        return group
    import grp

    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        if group.isdecimal():
            return int(group)
        raise GpuShareError(f"there is no group {group!r} on this system") from None


# -- exit and fork ---------------------------------------------------------------------------------

_peers: weakref.WeakSet[Peer] = weakref.WeakSet()
_watching = False


def _watch(peer: Peer) -> None:
    """Have ``peer`` leave at exit, and forked children know nothing of it."""
    global _watching
    _peers.add(peer)
    if not _watching:
        _watching = True
        atexit.register(_leave_all)
        os.register_at_fork(after_in_child=_forget_all)


def _leave_all() -> None:
    for peer in list(_peers):
        peer.leave()


def _forget_all() -> None:
    for peer in list(_peers):
        peer._forget()
