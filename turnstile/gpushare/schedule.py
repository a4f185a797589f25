"""Who computes when: one window per peer in a period that repeats from the Unix epoch.

Pure functions of the peers' slots and weights. All peers of a card compute the same schedule from the same
registry, so nobody has to tell anybody. Exactly one window is open at any time; a step that began in its
peer's window may end after it.
"""

from __future__ import annotations

from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: No peer gets less than this before shares are made to add up to 1 again.
FLOOR = 0.1
#: The smallest share's window is this long, where the longest period permits.
WINDOW_US = 40_000
SHORTEST_PERIOD_US = 80_000
LONGEST_PERIOD_US = 400_000

_INFINITE = float("inf")


class Claim(NamedTuple):
    """One peer's claim to the card's time."""

    slot: int
    weight: float


class Window(NamedTuple):
    """When one peer computes: from ``start_us`` until just before ``end_us`` of each period."""

    slot: int
    share: float
    start_us: int
    end_us: int


class Schedule(NamedTuple):
    """The windows, in slot order; they fill the period without gaps."""

    period_us: int
    windows: tuple[Window, ...]

    def get_window(self, slot: int) -> Window:
        """The window of ``slot``; `KeyError` if it has none."""
        for window in self.windows:
            if window.slot == slot:
                return window
        raise KeyError(slot)

    def get_owner(self, now_us: int) -> int:
        """The slot whose window is open at ``now_us``; `KeyError` if there are no peers."""
        position = now_us % self.period_us
        for window in self.windows:
            if position < window.end_us:
                return window.slot
        raise KeyError("no peers")

    def wait_us(self, slot: int, now_us: int) -> int:
        """Microseconds until ``slot``'s window opens; 0 inside of it."""
        window = self.get_window(slot)
        position = now_us % self.period_us
        if window.start_us <= position < window.end_us:
            return 0
        return (window.start_us - position) % self.period_us


def clean_weight(weight: float) -> float:
    """``weight``, or 1 if it is none (not a number, infinite, not positive)."""
    return weight if 0.0 < weight < _INFINITE else 1.0


def compute_shares(weights: Sequence[float]) -> list[float]:
    """Each one's share of the card, in order; they add up to 1.

    Plain ratios of the weights, none less than `FLOOR`, then scaled to add up to 1 again.
    """
    if not weights:
        return []
    cleaned = [clean_weight(weight) for weight in weights]
    total = sum(cleaned)
    if total == _INFINITE:  # finite weights, but not their sum
        largest = max(cleaned)
        cleaned = [weight / largest for weight in cleaned]
        total = sum(cleaned)
    raised = [max(weight / total, FLOOR) for weight in cleaned]
    total = sum(raised)
    return [share / total for share in raised]


def make_schedule(claims: Iterable[Claim]) -> Schedule:
    """Divide time among ``claims``, whose slots must differ (`ValueError`), in any order."""
    ordered = sorted(claims)
    shares = compute_shares([claim.weight for claim in ordered])
    if len({claim.slot for claim in ordered}) != len(ordered):
        raise ValueError("two claims have one slot")
    if not shares:
        return Schedule(SHORTEST_PERIOD_US, ())
    wanted = round(WINDOW_US / min(shares))
    period = min(max(wanted, SHORTEST_PERIOD_US), LONGEST_PERIOD_US)
    windows = []
    start, passed = 0, 0.0
    for claim, share in zip(ordered, shares, strict=True):
        passed += share
        # Rounding the borders, not the lengths, keeps each length exact to 1 us.
        end = round(passed * period)
        windows.append(Window(claim.slot, share, start, end))
        start = end
    windows[-1] = windows[-1]._replace(end_us=period)
    return Schedule(period, tuple(windows))


def window(claims: Iterable[Claim], slot: int, now_us: int) -> int:
    """When ``slot`` may compute, in microseconds since the epoch: ``now_us`` if its window is open.

    `KeyError` if it is not among ``claims``.
    """
    schedule = make_schedule(claims)
    return now_us + schedule.wait_us(slot, now_us)
