"""Whether the memory that an engine left is back: the decision alone, without clock or probe.

Nobody knows how much a card shows when it is empty: the desktop may use three gigabytes of it. So the least that was
ever seen with every engine gone is learned (the floor), and until it is known, or when the desktop has grown, memory
that fell and stays where it is counts as back, provided that the engine itself showed that it holds nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import attrs

from turnstile.vram.reading import MIB

#: Bytes by which the floor may be missed: what others use of the card differs from time to time.
TOLERANCE = 256 * MIB
#: Bytes by which memory that "stays" may move.
STILL = 64 * MIB
#: Seconds that memory has to stay where it fell …
FELL_TIME = 0.5
#: … and where it was, if it did not fall: what the engine had may not have been on this card, or is not back yet.
HELD_TIME = 2.0
#: How many looks must agree.
LOOKS = 3


class Back(enum.Enum):
    """How a wait for memory ended."""

    #: No more is used than ever was with every engine gone.
    FLOOR = "floor"
    #: No more is used than counts as free.
    FREE = "free"
    #: It fell, or did not have to, and stays where it is.
    STABLE = "stable"
    #: It was not seen to come back in time.
    TIMED_OUT = "timed out"
    #: The probe does not tell.
    UNKNOWN = "unknown"

    @property
    def ok(self) -> bool:
        """Whether the card may be used."""
        return self in (Back.FLOOR, Back.FREE, Back.STABLE)


@attrs.define
class Floor:
    """What the card uses without engines.

    :ivar free: bytes used at which the card counts as free whatever was seen.
    :ivar least: the least bytes ever seen used with every engine gone.
    """

    free: int
    least: int | None = None

    def learn(self, used: int) -> None:
        """So much is used, and no engine has any of it."""
        self.least = used if self.least is None else min(self.least, used)

    def judge(self, used: int) -> Back | None:
        """Whether so many bytes are few enough by themselves."""
        if self.least is not None and used <= self.least + TOLERANCE:
            return Back.FLOOR
        return Back.FREE if used <= self.free else None


@attrs.define
class Wait:
    """One wait: judges reading after reading.

    :ivar before: the most bytes that were seen used before the engine left; ``None``: that was not looked at.
    :ivar certain: the engine itself showed that it holds nothing.
    """

    floor: Floor
    before: int | None
    certain: bool
    #: The reading from which the later ones have not moved, since when, and how many agree.
    _level: int | None = None
    _since: float = 0.0
    _looks: int = 0

    def judge(self, used: int, now: float) -> Back | None:
        """What a reading at ``now`` (seconds) decides; ``None``: nothing yet."""
        verdict = self.floor.judge(used)
        if verdict is not None:
            return verdict
        if self._level is None or abs(used - self._level) > STILL:
            self._level, self._since, self._looks = used, now, 0
        self._looks += 1
        if not self.certain or self._looks < LOOKS:
            return None
        enough = FELL_TIME if self._fell(used) else HELD_TIME
        return Back.STABLE if now - self._since >= enough else None

    def proves(self, verdict: Back) -> bool:
        """Whether what was judged so is what the card uses without engines.

        Not what is merely few enough, since it may still be falling, and not what never fell.
        """
        if verdict is Back.STABLE:
            return self._level is not None and self._fell(self._level)
        return verdict is Back.FLOOR

    def _fell(self, used: int) -> bool:
        return self.before is not None and self.before - used > TOLERANCE


#: Tells whether the engine that is waited for got work meanwhile, whose memory is not to be waited for.
Overtaken = Callable[[], bool]
