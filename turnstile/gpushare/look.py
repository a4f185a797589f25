"""A look at a card's registry from outside, without taking part."""

from __future__ import annotations

from turnstile.gpushare.atomic import Words
from turnstile.gpushare.clock import SYSTEM_CLOCK
from turnstile.gpushare.shm import read_segment
from turnstile.gpushare.snapshot import Snapshot, take_snapshot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from turnstile.gpushare.clock import Clock


def look_at(key: str, clock: Clock = SYSTEM_CLOCK) -> Snapshot | None:
    """Who shares the card ``key``; None if nobody ever did. `SegmentError` if that can't be read."""
    image = read_segment(key)
    if image is None:
        return None
    return take_snapshot(Words(image, None), key, clock.wall_us())
