"""The simulated card: who holds how many bytes of its memory, and when.

Residency is kept as real numbers over time, so that a test can ask afterwards whether two engines
ever held memory at once.  Bytes are bytes; times are ``clock.seconds()``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

MIB = 1 << 20
GIB = 1 << 30


class HasSeconds(Protocol):
    """Anything that tells the time: the reactor, or ``task.Clock``."""

    def seconds(self) -> float: ...


class OutOfVram(Exception):
    """An allocation did not fit and the card does not page."""


@dataclass
class Interval:
    """A span of time in which something held; ``end`` is None while it still does."""

    start: float
    end: float | None = None
    owners: set[str] = field(default_factory=set)
    peak: int = 0


Residents = dict[str, int]


class Card:
    """One GPU with finite memory.

    ``on_full`` says what an allocation beyond ``total_bytes`` does: ``"page"`` lets it happen and
    records it in ``over_committed`` (as Windows drivers do), ``"raise"`` raises `OutOfVram`.
    ``base_bytes`` is a CUDA context that each resident owner costs on top; it is part of ``used``
    but never makes an owner resident by itself.
    """

    def __init__(
        self,
        clock: HasSeconds,
        total_bytes: int = 16 * GIB,
        *,
        on_full: str = "page",
        base_bytes: int = 0,
        max_history: int = 100_000,
    ) -> None:
        if on_full not in ("page", "raise"):
            raise ValueError(f"on_full must be page or raise, not {on_full!r}")
        self.clock = clock
        self.total_bytes = total_bytes
        self.on_full = on_full
        self.base_bytes = base_bytes
        self.history: deque[tuple[float, Residents]] = deque(maxlen=max_history)
        self.overlaps: list[Interval] = []
        self.over_committed: list[Interval] = []
        self._held: dict[str, dict[str, int]] = {}
        self._listeners: list[Callable[[Card], None]] = []

    @property
    def residents(self) -> Residents:
        """Bytes by owner, owners without any left out."""
        return {owner: self.used_by(owner) for owner in self._held}

    @property
    def used(self) -> int:
        return sum(self.used_by(owner) for owner in self._held)

    @property
    def free(self) -> int:
        return max(0, self.total_bytes - self.used)

    def used_by(self, owner: str) -> int:
        held = self._held.get(owner)
        return sum(held.values()) + self.base_bytes if held else 0

    def labels(self, owner: str) -> dict[str, int]:
        """What the owner's bytes are for."""
        return dict(self._held.get(owner, {}))

    def allocate(self, owner: str, label: str, nbytes: int) -> None:
        """Make ``owner``'s allocation ``label`` be ``nbytes`` (grow, shrink, or 0 to drop it)."""
        if nbytes < 0:
            raise ValueError("an allocation cannot be negative")
        held = self._held.get(owner, {})
        if nbytes == held.get(label, 0):
            return
        if nbytes == 0:
            self.release(owner, label)
            return
        base = 0 if held else self.base_bytes
        grown = self.used - held.get(label, 0) + nbytes + base
        if grown > self.total_bytes and self.on_full == "raise" and nbytes > held.get(label, 0):
            raise OutOfVram(f"{owner}: {nbytes} bytes for {label} do not fit")
        self._held.setdefault(owner, {})[label] = nbytes
        self._changed()

    def release(self, owner: str, label: str | None = None) -> None:
        """Give back one allocation, or all that the owner has.  Unknown ones are ignored."""
        held = self._held.get(owner)
        if held is None or (label is not None and label not in held):
            return
        if label is None:
            held.clear()
        else:
            del held[label]
        if not held:
            del self._held[owner]
        self._changed()

    def listen(self, listener: Callable[[Card], None]) -> Callable[[], None]:
        """Call ``listener(card)`` at every change; returns what takes it off again."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _changed(self) -> None:
        now = self.clock.seconds()
        residents = self.residents
        used = sum(residents.values())
        self.history.append((now, residents))
        _track(self.overlaps, now, len(residents) > 1, set(residents), used)
        _track(self.over_committed, now, used > self.total_bytes, set(residents), used)
        for listener in list(self._listeners):
            listener(self)


def _track(spans: list[Interval], now: float, holds: bool, owners: set[str], used: int) -> None:
    """Open, widen or close the last interval of ``spans``."""
    current = spans[-1] if spans and spans[-1].end is None else None
    if not holds:
        if current is not None:
            current.end = now
        return
    if current is None:
        current = Interval(now)
        spans.append(current)
    current.owners |= owners
    current.peak = max(current.peak, used)
