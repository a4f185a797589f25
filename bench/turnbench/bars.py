"""What is demanded of turnstile, and whether it is met. Pure: figures in, verdicts out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import attrs

#: Row -> contestant -> name of a figure -> value.
Run = Mapping[str, Mapping[str, Mapping[str, float]]]


@attrs.frozen
class Bar:
    """One demand.

    :ivar value: taken from the figures of one run; KeyError where these were not measured.
    :ivar must: the bound; ``None``: there is an aim only.
    :ivar aim: what would be better still.
    :ivar at_least: whether the bounds are lower ones.
    :ivar portable: whether the value says the same on any machine: a ratio to a reference of the same run, bytes,
        counts. Only these decide :func:`failed`.
    """

    row: str
    what: str
    value: Callable[[Run], float]
    must: float | None
    aim: float | None = None
    at_least: bool = True
    portable: bool = True
    unit: str = ""

    def meets(self, value: float, bound: float | None) -> bool:
        """Whether ``value`` is on the right side of ``bound``."""
        if bound is None:
            return True
        return value >= bound if self.at_least else value <= bound


@attrs.frozen
class Verdict:
    """A bar beside the median of what was measured."""

    bar: Bar
    median: float
    values: tuple[float, ...]

    @property
    def missed(self) -> bool:
        """Whether the must is not met."""
        return not self.bar.meets(self.median, self.bar.must)

    @property
    def word(self) -> str:
        """For the table."""
        if self.missed:
            return "MISSED" if self.bar.portable else "missed here"
        if self.bar.aim is None:
            return "met"
        return "aim met" if self.bar.meets(self.median, self.bar.aim) else "met, aim not"


def _ours(row: str, figure: str) -> Callable[[Run], float]:
    return lambda run: run[row]["turnstile"][figure]


def _to_go(row: str, figure: str, *, inverse: bool = False) -> Callable[[Run], float]:
    """Our figure over Go's, or Go's over ours."""

    def ratio(run: Run) -> float:
        ours, theirs = run[row]["turnstile"][figure], run[row]["go"][figure]
        return theirs / ours if inverse else ours / theirs

    return ratio


def _growth(run: Run) -> float:
    figures = run["5"]["turnstile"]
    return max(figures["up_grown_mib"], figures["down_grown_mib"])


BARS: tuple[Bar, ...] = (
    Bar("1", "requests/s, to Go's", _to_go("1", "per_second"), 0.8, 1.3),
    Bar("1", "requests a CPU second, to Go's", _to_go("1", "cpu_us", inverse=True), 1.0),
    Bar("2", "requests/s, to Go's", _to_go("2", "per_second"), 0.6, 1.0),
    Bar("2", "requests a CPU second, to Go's", _to_go("2", "cpu_us", inverse=True), 0.8),
    Bar("3: 200x100", "share of the ideal", _ours("3: 200x100", "share"), 0.99),
    Bar(
        "3: 200x100",
        "added delay p99, to Go's",
        _to_go("3: 200x100", "added_p99_ms"),
        2.0,
        at_least=False,
    ),
    Bar("3: 500x100", "share of the ideal", _ours("3: 500x100", "share"), None, 0.99),
    Bar("4", "added p50, to Go's", _to_go("4", "added_p50_ms"), 2.0, 1.0, at_least=False),
    Bar("4", "added p99, to Go's", _to_go("4", "added_p99_ms"), 2.0, 1.0, at_least=False),
    Bar("5", "upload, to Go's", _to_go("5", "up_mb_s"), 0.8, 1.0),
    Bar("5", "download, to Go's", _to_go("5", "down_mb_s"), 0.8, 1.0),
    Bar("5", "memory grows by", _growth, 32.0, at_least=False, unit=" MiB"),
    Bar("6", "messages lost", _ours("6", "lost"), 0.0, at_least=False),
    Bar(
        "6",
        "added delay p99",
        _ours("6", "added_p99_ms"),
        5.0,
        at_least=False,
        portable=False,
        unit=" ms",
    ),
    Bar("6", "added delay p99, to Go's", _to_go("6", "added_p99_ms"), None, 1.0, at_least=False),
    Bar("6", "64 MiB message, speed to Go's", _to_go("6", "big_mb_s"), None, 1.0),
    Bar(
        "6",
        "64 MiB message, memory grows by",
        _ours("6", "big_grown_mib"),
        8.0,
        at_least=False,
        unit=" MiB",
    ),
    Bar(
        "7",
        "added to chat, image, chat",
        _ours("7", "added_ms"),
        20.0,
        5.0,
        at_least=False,
        portable=False,
        unit=" ms",
    ),
    Bar("8", "1,000 waiters take", _ours("8", "grown_mib"), 30.0, at_least=False, unit=" MiB"),
    Bar(
        "8",
        "CPU while they wait",
        _ours("8", "idle_cpu_percent"),
        1.0,
        at_least=False,
        unit=" %",
    ),
    Bar(
        "8",
        "longest answer while 100 vanish",
        _ours("8", "stall_ms"),
        100.0,
        at_least=False,
        portable=False,
        unit=" ms",
    ),
    Bar(
        "9",
        "start to listening",
        _ours("9", "listening_s"),
        0.6,
        at_least=False,
        portable=False,
        unit=" s",
    ),
    Bar("9", "resident when idle", _ours("9", "rss_mib"), 60.0, at_least=False, unit=" MiB"),
)


def judge(runs: Sequence[Run], bars: Sequence[Bar] = BARS) -> list[Verdict]:
    """The bars that were measured in every run."""
    verdicts = []
    for bar in bars:
        try:
            values = tuple(bar.value(run) for run in runs)
        except KeyError:
            continue
        if values:
            verdicts.append(Verdict(bar, statistics.median(values), values))
    return verdicts


def failed(verdicts: Sequence[Verdict], *, absolute: bool = False) -> bool:
    """Whether a must is missed; ``absolute``: also one that depends on how fast the machine is."""
    return any(v.missed and (v.bar.portable or absolute) for v in verdicts)
