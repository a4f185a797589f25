"""``bench/run``: measure, print one table, judge."""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from turnbench import alone, report, rows
from turnbench.bars import failed, judge
from turnbench.rows import FULL, QUICK, Figures, Scale
from turnbench.stage import Stage, open_stage
from turnbench.tools import build_go, facts, missing


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/run", description="See bench/README.md.")
    parser.add_argument("--quick", action="store_true", help="one short run, under two minutes")
    parser.add_argument("--check", action="store_true", help="exit 1 if a must is missed")
    parser.add_argument(
        "--absolute", action="store_true", help="with --check: also one that is not a ratio"
    )
    parser.add_argument(
        "--runs", type=int, help="how often all is measured (3, with --quick 1); medians count"
    )
    parser.add_argument("--rows", help="some rows only, such as 1,3,9")
    parser.add_argument("--json", metavar="FILE", help='write everything there ("-": print it)')
    return parser.parse_args()


def measurements(scale: Scale) -> dict[str, Callable[[Stage, Scale], Figures]]:
    """All rows, in order."""
    return {
        "1": rows.small_gets,
        "2": rows.chats,
        **{f"3: {count}x{rate}": rows.streams(count, rate) for count, rate in scale.streams},
        "4": rows.first_byte,
        "5": rows.transfers,
        "6": rows.websocket,
        "7": alone.switches,
        "8": alone.waiters,
        "9": alone.starts,
    }


def _measure(scale: Scale, chosen: list[str], title: str) -> dict[str, Figures]:
    found = {}
    # Fresh processes for each run: what one has seen must not colour the next.
    with open_stage() as stage:
        stage.add_all()
        for row, measure in measurements(scale).items():
            if row.partition(":")[0] in chosen:
                began = time.monotonic()
                found[row] = measure(stage, scale)
                what = report.describe(row)[0]
                print(
                    f"{title}row {row.partition(':')[0]}: {what}, {time.monotonic() - began:.0f} s",
                    file=sys.stderr,
                )
    return found


def main() -> int:
    """Measure, print, judge; the exit status."""
    options = _options()
    scale = QUICK if options.quick else FULL
    count = options.runs or (1 if options.quick and not options.check else 3)
    every = sorted({row.partition(":")[0] for row in measurements(scale)})
    chosen = options.rows.split(",") if options.rows else every
    if not set(chosen) <= set(every):
        raise SystemExit(f"bench: the rows are {', '.join(every)}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    for line in missing():
        print(f"bench: {line}", file=sys.stderr)
    build_go()
    machine = {"when": time.strftime("%Y-%m-%d %H:%M"), **facts()}
    runs = []
    for number in range(1, count + 1):
        runs.append(_measure(scale, chosen, f"run {number}/{count}, " if count > 1 else ""))
    found = judge(runs)
    everything = {
        "machine": machine,
        "quick": options.quick,
        "runs": runs,
        "verdicts": [
            {
                "row": v.bar.row,
                "demand": v.bar.what,
                "must": v.bar.must,
                "aim": v.bar.aim,
                "at_least": v.bar.at_least,
                "portable": v.bar.portable,
                "median": v.median,
                "runs": v.values,
                "verdict": v.word,
            }
            for v in found
        ],
    }
    if options.json == "-":
        print(json.dumps(everything, indent=1))
    else:
        print(report.facts(machine), report.figures(runs), report.verdicts(found), sep="\n\n")
        if options.json:
            Path(options.json).write_text(json.dumps(everything, indent=1) + "\n")
    if options.check and failed(found, absolute=options.absolute):
        print("bench: a must is missed", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
