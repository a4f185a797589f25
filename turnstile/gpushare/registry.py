"""Who shares one card: slots in shared memory, claimed, kept alive and left.

Anybody may die or stop at any instruction, so nothing here waits for anybody. A slot belongs to the pid in
it for as long as its heartbeat is renewed. Claiming takes two swaps:

1. The heartbeat, from the old one that was seen to the present. It is a reservation: for three seconds nobody
   else of ours takes a slot whose heartbeat is fresh. Who dies here leaves a slot that ages as any other.
2. The pid, from 0 or the dead owner's to one's own. It decides, against peers of any make.

Then the heartbeat is swapped once more, from the reservation to the present: it fails if the claimant stood
still for so long that others thought it dead, who may be about to take the slot. In the same way each beat
swaps the heartbeat from the last one to the present: if that fails, the slot was taken and the owner learns
of it. Other words of a slot are its owner's alone and are written again with every beat.
"""

from __future__ import annotations

import contextlib
import os
import struct

from turnstile.gpushare import layout
from turnstile.gpushare.clock import SYSTEM_CLOCK
from turnstile.gpushare.errors import GpuShareError, RegistryFullError, SegmentError
from turnstile.gpushare.shm import open_segment
from turnstile.gpushare.snapshot import Snapshot, is_alive, take_snapshot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from turnstile.gpushare.atomic import Words
    from turnstile.gpushare.clock import Clock
    from turnstile.gpushare.shm import Segment

#: A round in which every candidate was lost means that others got slots; 16 of them are all there is.
_ROUNDS = 64


class Registry:
    """The peers of one card."""

    def __init__(
        self, segment: Segment, clock: Clock = SYSTEM_CLOCK, group: int | None = None
    ) -> None:
        self.segment = segment
        self.group = group
        self._clock = clock

    @classmethod
    def open(cls, key: str, *, group: int | None = None, clock: Clock = SYSTEM_CLOCK) -> Registry:
        """Open the registry of the card ``key``, making it first if need be; `SegmentError` if that fails."""
        return cls(open_segment(key, group=group), clock, group)

    def take_snapshot(self) -> Snapshot:
        """Who is there now."""
        return take_snapshot(self.segment.words, self.segment.key, self._clock.wall_us())

    def claim(self, name: str, weight: float, pid: int | None = None) -> Slot:
        """Take a slot, for this process if no ``pid`` is given.

        Raises `ValueError` for a weight that is none, `RegistryFullError` if all slots are taken,
        `SegmentError` where slots can't be taken safely.
        """
        single = check_weight(weight)
        pid = os.getpid() if pid is None else pid
        with self.segment.lock():
            self._check_company()
            for _ in range(_ROUNDS):
                candidates = list(self._find_candidates())
                if not candidates:
                    raise self._make_full_error()
                for index, owner, heartbeat_us in candidates:
                    slot = self._try(index, owner, heartbeat_us, pid)
                    if slot is not None:
                        slot.fill(layout.encode_name(name), single)
                        return slot
        raise GpuShareError(
            f"{self.segment.name}: every free slot was taken by others, time after time"
        )

    def _check_company(self) -> None:
        """Without compare-and-swap, let no peer in that others might race with."""
        if self.segment.words.lock_free:
            return
        for peer in self.take_snapshot().peers:
            if not peer.ours:
                raise SegmentError(
                    f"{self.segment.name}: {peer.name!r} (pid {peer.pid}) is a program of another make, and"
                    " without libatomic its claims and ours could collide: install libatomic (Debian:"
                    " libatomic1)"
                )

    def _find_candidates(self) -> Iterator[tuple[int, int, int]]:
        """Slots to try, best first: free ones, those of the dead, those that somebody seems to be taking."""
        words, now_us = self.segment.words, self._clock.wall_us()
        dead, reserved = [], []
        for index in range(layout.SLOT_COUNT):
            base = layout.get_slot_offset(index)
            # In this order: a pid that is older than the heartbeat fails the second swap.
            owner = words.load_u32(base + layout.PID)
            heartbeat_us = words.load_i64(base + layout.HEARTBEAT_US)
            candidate = (index, owner, heartbeat_us)
            if not is_alive(heartbeat_us, now_us):
                if not owner:
                    yield candidate
                else:
                    dead.append(candidate)
            elif not owner:
                reserved.append(candidate)
        yield from dead
        yield from reserved

    def _try(self, index: int, owner: int, heartbeat_us: int, pid: int) -> Slot | None:
        words, base = self.segment.words, layout.get_slot_offset(index)
        reserved_us = _differ(self._clock.wall_us(), heartbeat_us)
        if not words.swap_i64(base + layout.HEARTBEAT_US, heartbeat_us, reserved_us):
            return None
        if not words.swap_u32(base + layout.PID, owner, pid):
            return None
        now_us = _differ(self._clock.wall_us(), reserved_us)
        if not words.swap_i64(base + layout.HEARTBEAT_US, reserved_us, now_us):
            words.swap_u32(base + layout.PID, pid, 0)
            return None
        return Slot(words, index, pid, now_us)

    def _make_full_error(self) -> RegistryFullError:
        holders = ", ".join(
            f"{peer.name or '?'} ({peer.pid})" for peer in self.take_snapshot().peers
        )
        return RegistryFullError(
            f"{self.segment.name}: all {layout.SLOT_COUNT} slots are taken by live processes: {holders}"
        )

    def close(self) -> None:
        """Let go of the memory. Slots that were not released die of age."""
        self.segment.close()

    def abandon(self) -> None:
        """`close` in a forked child, where another thread may have been using it."""
        self.segment.abandon()


class Slot:
    """A slot that this process owns, until `beat` says otherwise."""

    def __init__(self, words: Words, index: int, pid: int, now_us: int) -> None:
        self.index = index
        self.beaten_us = now_us
        self._words = words
        self._base = layout.get_slot_offset(index)
        self._pid = pid
        self._boot_us = now_us
        self._name = bytes(layout.NAME_SIZE)
        self._weight = 1.0
        self._active = False
        self._busy_ppm = 0

    def fill(self, name: bytes, weight: float) -> None:
        """Write all of it for the first time, idle."""
        self._name, self._weight = name, weight
        self._write()

    def set_weight(self, weight: float) -> None:
        """Publish another weight; `ValueError` if it is none."""
        self._weight = check_weight(weight)
        if self._is_ours():
            self._words.store_f32(self._base + layout.WEIGHT, self._weight)

    def set_active(self, active: bool) -> None:
        """Publish whether this peer computes."""
        self._active = active
        if self._is_ours():
            self._words.store_u32(self._base + layout.ACTIVE, int(active))

    def set_busy(self, busy: float) -> None:
        """Publish with the next beat the part of the time, 0 to 1, that it computed."""
        self._busy_ppm = round(min(max(busy, 0.0), 1.0) * 1_000_000)

    def beat(self, now_us: int) -> bool:
        """Renew the heartbeat; False if the slot is another's by now, and this object of no use any more."""
        words, base = self._words, self._base
        now_us = _differ(now_us, self.beaten_us)
        if not words.swap_i64(base + layout.HEARTBEAT_US, self.beaten_us, now_us):
            return False
        # Peers of another make may take a slot without touching the heartbeat.
        if (
            words.load_u32(base + layout.PID) != self._pid
            or words.load_i64(base + layout.BOOT_US) != self._boot_us
        ):
            return False
        self.beaten_us = now_us
        self._write()
        return True

    def release(self) -> None:
        """Leave the slot to others, at once."""
        words, base = self._words, self._base
        if not self._is_ours():
            return
        words.store_u32(base + layout.ACTIVE, 0)
        words.store_u32(base + layout.BUSY_PPM, 0)
        # As in claiming, the heartbeat tells whether it is still ours to give up.
        if words.swap_i64(base + layout.HEARTBEAT_US, self.beaten_us, 0):
            words.swap_u32(base + layout.PID, self._pid, 0)

    def _is_ours(self) -> bool:
        return self._words.load_i64(self._base + layout.HEARTBEAT_US) == self.beaten_us

    def _write(self) -> None:
        words, base = self._words, self._base
        words.store_u32(base + layout.ACTIVE, int(self._active))
        words.store_f32(base + layout.WEIGHT, self._weight)
        words.store_u32(base + layout.BUSY_PPM, self._busy_ppm)
        words.store_i64(base + layout.BOOT_US, self._boot_us)
        words.store_i64(layout.MARKS_AT + 8 * self.index, self._boot_us)
        words.store_bytes(base + layout.NAME, self._name)


def _differ(now_us: int, old_us: int) -> int:
    """The present for a heartbeat that was ``old_us``: never the same, or a swap would leave no trace."""
    return now_us if now_us != old_us else now_us + 1


def check_weight(weight: float) -> float:
    """``weight`` as the registry holds it, in single precision; `ValueError` if it is none."""
    with contextlib.suppress(OverflowError, struct.error):
        single: float = struct.unpack("f", struct.pack("f", weight))[0]
        if 0.0 < single < float("inf"):
            return single
    raise ValueError(f"{weight!r} is not a weight: it must be a number greater than 0 (up to 3e38)")
