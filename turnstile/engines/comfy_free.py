"""Making ComfyUI give back the card, and knowing that it did.

``POST /free`` answers at once and only sets two flags, which the worker reads when it is idle or after the running job;
there is no signal of completion. The evidence is ``torch_vram_total`` (reserved by PyTorch) in ``/system_stats``: it
drops when the models are gone. It need not drop to nothing, and how far is learned.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Generator
from typing import Any

import attrs
from twisted.internet.defer import Deferred, inlineCallbacks
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger

from turnstile.card import Eviction
from turnstile.engines.client import ClientError, HttpError, JsonClient, Unreachable
from turnstile.engines.comfy_jobs import QueueView

#: Bytes by which a floor may be missed: small tensors that stay differ from time to time.
TOLERANCE = 64 * 1024 * 1024

#: Seconds that reserved memory has to stay where it fell before that is taken for the floor, while none is known …
STABLE_TIME = 0.5
#: … and when it is above the one that is known (a node pack that keeps a part for good).
KEPT_TIME = 2.0
#: Seconds after ``/free`` within which an idle worker has done what it can (seen: 1 to 250 ms).
WORKER_TIME = 0.25
#: Seconds after which ``/free`` is sent again: a job that came between may have used up its flags.
RESEND_AFTER = 2.0
#: Seconds after which a ``/free`` that failed is sent again. Until one is answered only memory that fell is evidence.
RETRY_AFTER = 0.25

#: Seconds between two looks at first and at most; in between, this share of the time so far.
FIRST_DELAY = 0.003
PATIENCE = 0.06
MOST_DELAY = 0.25
LOOK_TIMEOUT = 5.0
#: Seconds of refused connections after which a ComfyUI that answered before is taken for gone.
GONE_AFTER = 1.0


def reserved_memory(stats: object) -> int | None:
    """Bytes that PyTorch has reserved on the cards; ``None`` where the answer of ``/system_stats`` cannot tell.

    On devices without a count of their own (cpu, mps) ComfyUI reports the whole memory as reserved.
    """
    devices = stats.get("devices") if isinstance(stats, dict) else None
    total = 0
    known = False
    for device in devices if isinstance(devices, list) else ():
        if not isinstance(device, dict) or device.get("type") in ("cpu", "mps"):
            continue
        reserved = _figure(device.get("torch_vram_total"))
        if reserved is None or reserved == device.get("vram_total"):
            continue
        known = True
        total += reserved
    return total if known else None


def _figure(value: object) -> int | None:
    """A number of bytes; Python's JSON also knows NaN and Infinity, which are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return int(value)


@attrs.frozen
class Memory:
    """Bytes of the cards' memory, as ``/system_stats`` told them at some time."""

    used: int
    total: int
    at: float


def device_memory(stats: object, now: float) -> Memory | None:
    """What an answer of ``/system_stats`` says of the cards, whoever uses them; ``None`` where it cannot tell."""
    devices = stats.get("devices") if isinstance(stats, dict) else None
    used = total = 0
    for device in devices if isinstance(devices, list) else ():
        if not isinstance(device, dict) or device.get("type") in ("cpu", "mps"):
            continue
        size, free, reserved_free = (
            _figure(device.get(key, 0)) for key in ("vram_total", "vram_free", "torch_vram_free")
        )
        if size is None or free is None or reserved_free is None:
            continue
        # ComfyUI counts what PyTorch has reserved and does not use as free.
        total += size
        used += max(0, size - free + reserved_free)
    return Memory(used, total, now) if total else None


class Verdict(enum.Enum):
    """What the looks so far show."""

    #: Not yet.
    HELD = "held"
    FREED = "freed"
    #: It fell and stays, above the floor: more will not come.
    KEPT = "kept"


@attrs.define
class Floor:
    """The least reserved memory ever seen after ``/free``; lives as long as the engine does."""

    least: int | None = None
    #: The most seen since the last confirmed release.
    peak: int = 0

    def note_held(self, reserved: int | None) -> None:
        """A look that precedes ``/free``."""
        if reserved is not None:
            self.peak = max(self.peak, reserved)

    def judge(self, reserved: int, unchanged_for: float) -> Verdict:
        """What ``reserved`` bytes mean that have not changed for so many seconds; the queue is empty."""
        if reserved == 0 or (self.least is not None and reserved <= self.least + TOLERANCE):
            return Verdict.FREED
        if self.least is None and reserved <= TOLERANCE and unchanged_for >= STABLE_TIME:
            return Verdict.FREED
        floor = self.least or 0
        fell = self.peak - reserved
        if self.least is None:
            if fell > TOLERANCE and unchanged_for >= STABLE_TIME:
                return Verdict.FREED
        elif fell > TOLERANCE and fell >= (self.peak - floor) / 2 and unchanged_for >= KEPT_TIME:
            return Verdict.KEPT
        return Verdict.HELD

    def note_freed(self, reserved: int) -> None:
        """So much stayed after a release that was confirmed."""
        self.least = reserved if self.least is None else min(self.least, reserved)
        self.peak = reserved


class Freer:
    """One attempt at a time to free ComfyUI.

    :param look: asks for the queue with a time limit.
    :param on_stats: is told each answer of ``/system_stats``.
    """

    log = Logger()

    def __init__(
        self,
        client: JsonClient,
        clock: IReactorTime,
        look: Callable[[float], Deferred[QueueView]],
        on_stats: Callable[[object], None] = lambda stats: None,
    ) -> None:
        self._client = client
        self._clock = clock
        self._look = look
        self._on_stats = on_stats
        self.floor = Floor()

    @inlineCallbacks
    def free(
        self, timeout: float, overtaken: Callable[[], bool]
    ) -> Generator[Deferred[Any], Any, Eviction]:
        """Send ``/free`` until there is evidence that it was done.

        :param overtaken: whether work of our own began meanwhile, so that nothing can be confirmed any more.
        """
        clock = self._clock
        began = clock.seconds()
        deadline = began + timeout
        told: set[type[BaseException]] = set()
        answered = measured = False
        refused_at: float | None = None
        #: When /free was sent, and when it was last answered well: only then has the worker been told.
        sent_at: float | None = None
        told_at: float | None = None
        #: Since when the queue has been seen empty, a /free behind it.
        empty_since: float | None = None
        blind_looks = 0
        last: int | None = None
        last_changed = 0.0
        while (left := deadline - clock.seconds()) > 0 and not overtaken():
            limit = min(LOOK_TIMEOUT, left)
            try:
                if sent_at is None:
                    if not measured:
                        # Tried once only: without it /free is sent all the same.
                        measured = True
                        self.floor.note_held((yield self._reserved(limit)))
                    sent_at = clock.seconds()
                    yield self._post(limit)
                    told_at = clock.seconds()
                view = yield self._look(limit)
                answered, refused_at = True, None
                reserved = yield self._reserved(limit)
                now = clock.seconds()
                if view.ids:
                    # Busy: it frees after the running job, before the next one, whose models it has to be told of anew.
                    empty_since, told_at, last, blind_looks = None, None, None, 0
                    self.floor.note_held(reserved)
                else:
                    empty_since = now if empty_since is None else empty_since
                    if reserved is None:
                        blind_looks += 1
                        if (
                            told_at is not None
                            and blind_looks >= 2
                            and now - max(told_at, empty_since) >= WORKER_TIME
                        ):
                            return Eviction.CONFIRMED
                    else:
                        if reserved != last:
                            last, last_changed = reserved, now
                        verdict = self.floor.judge(reserved, now - last_changed)
                        if verdict is not Verdict.HELD and not overtaken():
                            if verdict is Verdict.KEPT:
                                self.log.warn(
                                    "ComfyUI keeps {mib} MiB whatever it is asked",
                                    mib=reserved // 2**20,
                                )
                            self.floor.note_freed(reserved)
                            return Eviction.CONFIRMED
                    if now - sent_at >= (RETRY_AFTER if told_at is None else RESEND_AFTER):
                        sent_at = now
                        yield self._post(limit)
                        told_at = clock.seconds()
            except Unreachable:
                now = clock.seconds()
                refused_at = now if refused_at is None else refused_at
                if not answered or now - refused_at >= GONE_AFTER:
                    self.log.warn("ComfyUI cannot be freed: nobody listens at its address")
                    return Eviction.UNREACHABLE
            except ClientError as e:
                refused_at = None
                if type(e) not in told:
                    told.add(type(e))
                    self.log.warn(
                        "ComfyUI: freeing meets an error: {error}", error=str(e) or type(e).__name__
                    )
            now = clock.seconds()
            delay = min(max(FIRST_DELAY, (now - began) * PATIENCE), MOST_DELAY)
            yield deferLater(clock, max(0.0, min(delay, deadline - now)))
        if overtaken():
            # The card knows that the engine got work meanwhile, and keeps it as resident.
            return Eviction.CONFIRMED
        self.log.warn(
            "ComfyUI did not give back its memory within {seconds:g} s",
            seconds=timeout,
            reserved=last,
            floor=self.floor.least,
        )
        return Eviction.TIMED_OUT

    def _post(self, timeout: float) -> Deferred[bytes]:
        # Both default to false, and some versions do nothing unless both are set.
        return self._client.post_json(
            "/free", {"unload_models": True, "free_memory": True}, timeout
        )

    @inlineCallbacks
    def _reserved(self, timeout: float) -> Generator[Deferred[Any], Any, int | None]:
        try:
            stats = yield self._client.get_json("/system_stats", timeout)
        except HttpError as e:
            if e.status in (404, 405, 501):
                return None  # no such page: there will be no evidence
            raise
        self._on_stats(stats)
        return reserved_memory(stats)
