"""Calls to a chat engine that the nodes of a running ComfyUI job make.

They run inside the job's lease, beside the image models: an overlap that cannot be had otherwise, so it is a degraded
interval. The chat models are unloaded when a burst of calls is over, not between the calls of a list.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from twisted.internet.defer import Deferred, inlineCallbacks
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from turnstile.card import Card

#: Seconds without a call after which a burst is over.
BURST_IDLE = 2.0
REASON = "nested call"
GIVEN_UP = "nested call that does not end"


class NestedCalls:
    """Counts the calls of the job that holds the card.

    :param tenant: name of the engine that is called.
    :param evict: unloads it.
    :param active: whether a ComfyUI job holds the card; if not, the engine may belong to others and is left alone.
    """

    log = Logger()

    def __init__(
        self,
        clock: IReactorTime,
        card: Card,
        tenant: str,
        evict: Callable[[], Deferred[Any]],
        active: Callable[[], bool],
    ) -> None:
        self._clock = clock
        self._card = card
        self._tenant = tenant
        self._evict = evict
        self._active = active
        self.count = 0
        #: Goes up when calls are given up, which are counted apart from then on.
        self._generation = 0
        self._given_up = 0
        #: Whether models may be loaded that have to leave.
        self.loaded = False
        self._timer: IDelayedCall | None = None
        self._quiet: list[Deferred[None]] = []
        self._unloading: list[Deferred[None]] | None = None

    def enter(self) -> Callable[[], None]:
        """A call begins; the returned function ends it, and may be called more than once."""
        self._cancel_timer()
        self.count += 1
        self._mark()
        inside = True
        generation = self._generation

        def leave() -> None:
            nonlocal inside
            if not inside:
                return
            inside = False
            if generation != self._generation:
                self._ended_late()
                return
            self.count -= 1
            if not self.count:
                self._last_left()

        return leave

    @inlineCallbacks
    def finish(self, patience: float) -> Generator[Deferred[Any], Any, None]:
        """The job is over: wait for the calls that still run, then unload.

        :param patience: the most seconds to wait for them.
        """
        if self.count:
            expiry = self._clock.callLater(max(patience, 0.0), self.give_up)
            while self.count:
                quiet: Deferred[None] = Deferred(lambda d: self._quiet.remove(d))
                self._quiet.append(quiet)
                yield quiet
            if expiry.active():
                expiry.cancel()
        self._cancel_timer()
        if self.loaded:
            yield self._unload()

    def give_up(self) -> None:
        """The calls that run are waited for no longer: their engine hangs."""
        if self.count:
            self.log.warn(
                "{count} nested calls to {tenant} do not end", count=self.count, tenant=self._tenant
            )
            self._generation += 1
            self._given_up += self.count
            self.count = 0
            self._card.degrade(self._tenant, GIVEN_UP, lasting=True)
            self._last_left()

    def _ended_late(self) -> None:
        self._given_up -= 1
        # It may have loaded its model just now.
        if self._active():
            self._mark()
            if not self.count:
                self._cancel_timer()
                self._last_left()
        else:
            self._card.mark_resident(self._tenant)
        if not self._given_up:
            self._card.restore(self._tenant, GIVEN_UP)

    def stop(self) -> None:
        """Forget everything; whoever waits goes on."""
        self._cancel_timer()
        self._generation += 1
        self._given_up += self.count
        self.count = 0
        self.loaded = False
        self._fire_quiet()

    def _mark(self) -> None:
        self.loaded = True
        self._card.mark_resident(self._tenant)
        self._card.degrade(self._tenant, REASON)

    def _last_left(self) -> None:
        if self._quiet:
            self._fire_quiet()
        elif self.loaded:
            self._timer = self._clock.callLater(BURST_IDLE, self._burst_over)

    def _fire_quiet(self) -> None:
        quiet, self._quiet = self._quiet, []
        for d in quiet:
            d.callback(None)

    def _burst_over(self) -> None:
        self._timer = None
        if self._active():
            self._unload()
        else:
            self.loaded = False
            self._card.restore(self._tenant, REASON)

    def _cancel_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None and timer.active():
            timer.cancel()

    def _unload(self) -> Deferred[None]:
        waiter: Deferred[None] = Deferred(lambda d: waiters.remove(d) if d in waiters else None)
        if self._unloading is not None:
            waiters = self._unloading
            waiters.append(waiter)
            return waiter
        waiters = self._unloading = [waiter]

        def done(_: object) -> None:
            self._unloading = None
            self.loaded = False
            if self.count:
                # A call came meanwhile: what was unloaded is being loaded again.
                self._mark()
            for d in tuple(waiters):
                d.callback(None)

        d = self._evict()
        d.addErrback(lambda f: self.log.failure("unloading after nested calls failed", failure=f))
        d.addCallback(done)
        return waiter


__all__ = ["BURST_IDLE", "NestedCalls"]
