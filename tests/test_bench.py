"""The benchmark's verdicts, and its table."""

import importlib
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def bench():
    folder = str(Path(__file__).parent.parent / "bench")
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("turnbench.bars"), importlib.import_module("turnbench.report")
    finally:
        sys.path.remove(folder)


def run(ours, theirs):
    figures = {"per_second": 1000.0, "cpu_us": 50.0}
    return {
        "1": {
            "go": {**figures, "per_second": theirs},
            "turnstile": {**figures, "per_second": ours},
        }
    }


def test_the_median_of_the_runs_decides(bench):
    bars, _ = bench
    good, bad = run(900.0, 1000.0), run(100.0, 1000.0)
    wall, cpu = bars.judge([good, bad, good])
    assert (wall.median, wall.values) == (0.9, (0.9, 0.1, 0.9))
    assert wall.word == "met, aim not"
    assert not bars.failed([wall, cpu])
    verdicts = bars.judge([bad, good, bad])
    assert verdicts[0].missed
    assert bars.failed(verdicts)


def test_rows_that_were_not_measured_are_not_judged(bench):
    bars, _ = bench
    assert {verdict.bar.row for verdict in bars.judge([run(1.0, 1.0)])} == {"1"}


def test_less_is_better_where_the_bar_says_so(bench):
    bars, _ = bench
    growth = {"up_grown_mib": 1.0, "down_grown_mib": 33.0, "up_mb_s": 1.0, "down_mb_s": 1.0}
    verdicts = bars.judge([{"5": {"turnstile": growth, "go": growth}}])
    assert [v.bar.what for v in verdicts if v.missed] == ["memory grows by"]


def test_what_depends_on_the_machine_does_not_decide_unless_asked(bench):
    bars, _ = bench
    verdicts = bars.judge([{"7": {"turnstile": {"added_ms": 25.0}}}])
    assert verdicts[0].missed
    assert verdicts[0].word == "missed here"
    assert not bars.failed(verdicts)
    assert bars.failed(verdicts, absolute=True)


def test_every_bar_of_a_row_can_be_shown(bench):
    bars, report = bench
    for bar in bars.BARS:
        title, columns = report.describe(bar.row)
        assert title
        assert columns


def test_the_tables_show_medians(bench):
    bars, report = bench
    runs = [run(1500.0, 1000.0), run(1700.0, 1000.0), run(1600.0, 1000.0)]
    table = report.figures(runs)
    assert "| turnstile   |      1,600 |        50.0 |" in table
    assert "| Go httputil |      1,000 |        50.0 |" in table
    verdicts = report.verdicts(bars.judge(runs))
    assert "1.50 1.70 1.60 | aim met |" in verdicts
