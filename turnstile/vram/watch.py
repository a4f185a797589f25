"""The card's memory as the rest of turnstile sees it: what is used now, and the wait until it is back."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import attrs
from twisted.internet.defer import CancelledError, Deferred, inlineCallbacks, succeed
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from turnstile.vram.back import Back, Floor, Overtaken, Wait
from turnstile.vram.reading import GIB, Probe, ProbeError, Reading
from turnstile.vram.worker import Runs

#: The most seconds that one look may take; a little more than a program that is run for it gets.
LOOK_TIMEOUT = 11.0
FIRST_DELAY = 0.01
BACKOFF = 2.0
MOST_DELAY = 0.25
#: How many looks in a row have to fail until another probe is looked for, and seconds between such searches.
FAILURES = 3
SEARCH_AGAIN = 60.0
#: Seconds after which a page's figures are too old.
STALE = 2.0
#: Seconds after every engine has left at which the card is looked at once more: the driver may take its time.
SETTLED = 2.0

ReadingListener = Callable[["Reading | None"], None]
WaitListener = Callable[[Back, float], None]


class Source(Protocol):
    """A probe whose answer comes later."""

    @property
    def name(self) -> str: ...

    def open(self) -> Deferred[str]:
        """As :meth:`turnstile.vram.reading.Probe.open`."""
        ...

    def read(self) -> Deferred[Reading]:
        """As :meth:`turnstile.vram.reading.Probe.read`."""
        ...


@attrs.define
class Threaded:
    """A probe that blocks, asked in the worker's thread."""

    probe: Probe
    worker: Runs

    @property
    def name(self) -> str:
        """The probe's."""
        return self.probe.name

    def open(self) -> Deferred[str]:
        """See :class:`Source`."""
        return self.worker.run(self.probe.open, LOOK_TIMEOUT)

    def read(self) -> Deferred[Reading]:
        """See :class:`Source`."""
        return self.worker.run(self.probe.read, LOOK_TIMEOUT)


class Vram:
    """Looks at the card's memory.

    :param sources: probes, of which the first that works is used.
    :param wait: the most seconds that :meth:`returned` takes; 0: it does not wait.
    :param free: bytes used at which the card counts as free whatever was seen.
    :param named: the user asked for this probe, so that it is worth a warning if it does not work.
    :param on_stop: called by :meth:`stop`.
    """

    log = Logger()

    def __init__(
        self,
        clock: IReactorTime,
        sources: Sequence[Source],
        *,
        wait: float,
        free: int,
        named: bool = False,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._sources = tuple(sources)
        self.wait = wait
        self._named = named
        self._on_stop = on_stop
        self.floor = Floor(free)
        self._source: Source | None = None
        self._watches = ""
        self._searched_at = -math.inf
        self._failures = 0
        self._problem: str | None = None
        self._reading: Reading | None = None
        self._read_at = -math.inf
        #: The most seen since memory was last known to be back.
        self._peak: int | None = None
        self._looking: Deferred[Reading | None] | None = None
        self._waiters: list[Deferred[Reading | None]] = []
        self._waits: set[Deferred[Back]] = set()
        self._again: IDelayedCall | None = None
        self._complained = False
        self._stopped = False
        self._reading_listeners: list[ReadingListener] = []
        self._wait_listeners: list[WaitListener] = []
        self._last_wait: dict[str, Any] | None = None

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> Deferred[None]:
        """Look for a probe that works, and say which. Fires when that is over."""
        return self._look().addCallback(lambda _: None)

    def stop(self) -> None:
        """End every wait."""
        self._stopped = True
        for wait in tuple(self._waits):
            wait.cancel()
        self._look_again_not()
        if self._looking is not None:
            self._looking.cancel()
        self._on_stop()

    def add_reading_listener(self, listener: ReadingListener) -> None:
        """Call ``listener`` with every reading (``None``: the probe could not tell)."""
        self._reading_listeners.append(listener)

    def add_wait_listener(self, listener: WaitListener) -> None:
        """Call ``listener(how, seconds)`` at the end of every wait for memory."""
        self._wait_listeners.append(listener)

    # -- looking ---------------------------------------------------------------------------------------------------

    @property
    def works(self) -> bool:
        """Whether there is a probe that works."""
        return self._source is not None

    @property
    def reading(self) -> Reading | None:
        """What was seen last, at whatever time."""
        return self._reading

    def read(self) -> Deferred[Reading | None]:
        """What is used now; ``None`` where nobody can tell. Those who ask meanwhile share one look. Never fails."""
        if self._source is None and not self._may_search():
            return succeed(None)
        return self._look()

    def _may_search(self) -> bool:
        due = self._clock.seconds() - self._searched_at >= SEARCH_AGAIN
        return bool(self._sources) and (due or self._looking is not None)

    def _look(self) -> Deferred[Reading | None]:
        def forget(waiter: Deferred[Reading | None]) -> None:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

        waiter: Deferred[Reading | None] = Deferred(forget)
        self._waiters.append(waiter)
        if self._looking is None:
            # Before it begins, since it may be over at once.
            self._looking = Deferred()
            self._looking = look = self._search() if self._source is None else self._ask()
            look.addErrback(self._broke).addCallback(self._looked)
        return waiter

    @inlineCallbacks
    def _ask(self) -> Generator[Deferred[Any], Any, Reading | None]:
        source = self._source
        assert source is not None
        try:
            reading: Reading = yield source.read()
        except ProbeError as error:
            self._failures += 1
            if self._problem is None:
                self._problem = str(error)
                self.log.warn(
                    "memory probe {probe} fails: {error}", probe=source.name, error=str(error)
                )
            if self._failures >= FAILURES:
                self._source = None
                self._searched_at = self._clock.seconds()
            return None
        if self._problem is not None:
            self.log.info("memory probe {probe} works again", probe=source.name)
        self._failures, self._problem = 0, None
        return reading

    @inlineCallbacks
    def _search(self) -> Generator[Deferred[Any], Any, Reading | None]:
        self._searched_at = self._clock.seconds()
        reasons: list[str] = []
        for source in self._sources:
            try:
                watches = yield source.open()
                reading: Reading = yield source.read()
            except ProbeError as error:
                reasons.append(f"{source.name}: {error}")
                continue
            self._source, self._watches = source, watches
            self._failures, self._problem = 0, None
            self.log.info(
                "memory probe: {probe} watches {what}, {used:.1f} of {total:.1f} GiB used",
                probe=source.name,
                what=watches,
                used=reading.used / GIB,
                total=reading.total / GIB,
            )
            return reading
        problem = "; ".join(reasons) or "none is configured"
        if problem != self._problem:
            self._problem = problem
            tell = self.log.warn if self._named else self.log.info
            tell("no memory probe: the engines' own word has to do ({reasons})", reasons=problem)
        return None

    def _broke(self, failure: Failure) -> None:
        if not failure.check(CancelledError):
            self.log.failure("looking at the card's memory failed", failure=failure)

    def _looked(self, reading: Reading | None) -> None:
        self._looking = None
        if reading is not None:
            self._reading, self._read_at = reading, self._clock.seconds()
            self._peak = reading.used if self._peak is None else max(self._peak, reading.used)
        self._tell(self._reading_listeners, reading)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.called:
                waiter.callback(reading)

    # -- the wait --------------------------------------------------------------------------------------------------

    def leaving(self) -> None:
        """An engine is about to leave: see what is used now, to know later whether it fell."""
        if self._source is not None and self.wait > 0:
            self.read()

    def note_empty(self, still: Callable[[], bool]) -> None:
        """Every engine has left: see what is used without them, now and a little later.

        :param still: whether that has been so all the time, asked when the answer comes.
        """
        if self._stopped or (self._source is None and self._looking is None):
            return

        def learn(reading: Reading | None) -> None:
            if reading is not None and still():
                self.floor.learn(reading.used)

        def later() -> None:
            self._again = None
            if still():
                self.read().addCallback(learn)

        self.read().addCallback(learn)
        self._look_again_not()
        self._again = self._clock.callLater(SETTLED, later)

    def _look_again_not(self) -> None:
        again, self._again = self._again, None
        if again is not None:
            again.cancel()

    def returned(
        self, certain: bool, patience: float, overtaken: Overtaken
    ) -> Deferred[Back] | None:
        """Wait until what an engine left is back; ``None``: there is nothing to wait with.

        Looks at once, and then less and less often. The Deferred never fails.

        :param certain: the engine itself showed that it holds nothing.
        :param patience: the most seconds to wait, if that is less than is configured.
        :param overtaken: ends the wait when it says so.
        """
        if self._source is None or self._stopped or self.wait <= 0:
            return None
        d = self._wait(certain, min(self.wait, patience), overtaken)
        if not d.called:
            self._waits.add(d)
        return d.addErrback(self._cancelled).addBoth(self._waited, d)

    @inlineCallbacks
    def _wait(
        self, certain: bool, limit: float, overtaken: Overtaken
    ) -> Generator[Deferred[Any], Any, Back]:
        clock = self._clock
        began = clock.seconds()
        deadline = began + limit
        wait = Wait(self.floor, self._peak, certain)
        delay = FIRST_DELAY
        # What is being looked at now may have been seen before the engine left.
        late = self._looking is not None
        while True:
            reading = yield self._within(self.read(), deadline - clock.seconds())
            now = clock.seconds()
            if overtaken() or self._source is None:
                outcome = Back.UNKNOWN
                break
            if late and reading is not None:
                late = False
                wait.before = self._peak
                continue
            verdict = None if reading is None else wait.judge(reading.used, now)
            if verdict is not None and reading is not None:
                outcome = verdict
                self._peak = reading.used
                if certain and wait.proves(verdict):
                    self.floor.learn(reading.used)
                break
            if now >= deadline:
                outcome = Back.TIMED_OUT
                break
            yield deferLater(clock, min(delay, deadline - now))
            delay = min(delay * BACKOFF, MOST_DELAY)
        self._report(outcome, clock.seconds() - began, certain)
        return outcome

    def _within(self, look: Deferred[Reading | None], seconds: float) -> Deferred[Reading | None]:
        """``None`` if it takes longer than that."""
        if look.called:
            return look

        def cancelled(_: object) -> None:
            if expiry.active():
                expiry.cancel()

        outer: Deferred[Reading | None] = Deferred(cancelled)
        expiry = self._clock.callLater(max(seconds, 0.0), outer.callback, None)

        def over(reading: Reading | None) -> None:
            if expiry.active():
                expiry.cancel()
            if not outer.called:
                outer.callback(reading)

        look.addCallback(over)
        return outer

    def _report(self, outcome: Back, seconds: float, certain: bool) -> None:
        reading = self._reading
        self._last_wait = {"outcome": outcome.value, "seconds": round(seconds, 3)}
        if outcome is Back.TIMED_OUT and certain:
            if not self._complained:
                self._complained = True
                self.log.warn(
                    "the card's memory did not come back within {seconds:.1f} s"
                    " ({used:.1f} GiB are used, the least ever seen: {least})",
                    seconds=seconds,
                    used=math.nan if reading is None else reading.used / GIB,
                    least="not known"
                    if self.floor.least is None
                    else f"{self.floor.least / GIB:.1f} GiB",
                )
        elif outcome.ok:
            self._complained = False
        self._tell(self._wait_listeners, outcome, seconds)

    def _tell(self, listeners: Sequence[Callable[..., None]], *what: object) -> None:
        for listener in listeners:
            try:
                listener(*what)
            except Exception:
                self.log.failure("a listener of the card's memory failed")

    def _cancelled(self, failure: Failure) -> Back:
        if not failure.check(CancelledError):
            self.log.failure("waiting for the card's memory failed", failure=failure)
        return Back.UNKNOWN

    def _waited(self, outcome: Back, d: Deferred[Back]) -> Back:
        self._waits.discard(d)
        return outcome

    # -- what people see -------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """For the state page; asks for a new reading if this one is old, for the next who looks."""
        now = self._clock.seconds()
        if now - self._read_at > STALE and self._looking is None and not self._stopped:
            self.read()
        reading = self._reading
        return {
            "probe": None if self._source is None else self._source.name,
            "watches": self._watches or None,
            "problem": self._problem,
            "used": None if reading is None else reading.used,
            "total": None if reading is None else reading.total,
            "age": None if reading is None else round(now - self._read_at, 3),
            "floor": self.floor.least,
            "waiting": bool(self._waits),
            "last_wait": self._last_wait,
        }
