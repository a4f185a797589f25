"""The table for people."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from turnbench.bars import Run, Verdict

NAMES = {"direct": "direct", "go": "Go httputil", "turnstile": "turnstile"}

#: Row -> what it is, and the figures that are shown: name, heading, form.
ROWS: dict[str, tuple[str, tuple[tuple[str, str, str], ...]]] = {
    "1": (
        "small GET, no lock, 16 connections",
        (("per_second", "requests/s", ",.0f"), ("cpu_us", "CPU us each", ".1f")),
    ),
    "2": (
        "chat POST, lock taken, 100-byte answer",
        (("per_second", "requests/s", ",.0f"), ("cpu_us", "CPU us each", ".1f")),
    ),
    "4": (
        "time to the first byte, one at a time",
        (
            ("p50_ms", "p50 ms", ".3f"),
            ("added_p50_ms", "added p50", ".3f"),
            ("added_p99_ms", "added p99", ".3f"),
        ),
    ),
    "5": (
        "one long transfer",
        (
            ("up_mb_s", "up MB/s", ",.0f"),
            ("up_cpu_s_gb", "CPU s/GB", ".2f"),
            ("down_mb_s", "down MB/s", ",.0f"),
            ("down_cpu_s_gb", "CPU s/GB", ".2f"),
            ("up_grown_mib", "up +MiB", ".1f"),
            ("down_grown_mib", "down +MiB", ".1f"),
        ),
    ),
    "6": (
        "WebSocket: 1,000 texts/s, 10 previews of 100 KB/s",
        (
            ("lost", "lost", ".0f"),
            ("added_p50_ms", "added p50", ".3f"),
            ("added_p99_ms", "added p99", ".3f"),
            ("cpu_us", "CPU us each", ".1f"),
            ("big_mb_s", "64 MiB: MB/s", ",.0f"),
            ("big_grown_mib", "+MiB", ".1f"),
        ),
    ),
    "7": (
        "chat, image, chat on the simulator",
        (("own_ms", "engines' own ms", ".1f"), ("added_ms", "added ms", ".1f")),
    ),
    "8": (
        "1,000 chats wait behind an image job",
        (
            ("grown_mib", "+MiB", ".1f"),
            ("idle_cpu_percent", "CPU %", ".2f"),
            ("stall_ms", "stall ms", ".1f"),
            ("drain_s", "drain s", ".2f"),
        ),
    ),
    "9": (
        "start",
        (
            ("listening_s", "listening after s", ".2f"),
            ("answering_s", "answering after s", ".2f"),
            ("cpu_s", "CPU s", ".2f"),
            ("rss_mib", "resident MiB", ".1f"),
        ),
    ),
}
_STREAMS = (
    ("share", "of ideal", ".3f"),
    ("added_p50_ms", "added p50", ".2f"),
    ("added_p99_ms", "added p99", ".2f"),
    ("cpu_us", "CPU us a chunk", ".1f"),
)


def describe(row: str) -> tuple[str, tuple[tuple[str, str, str], ...]]:
    """What a row is, and its columns."""
    if row.startswith("3: "):
        count, rate = row[3:].split("x")
        return f"{count} streams of {rate} chunks/s", _STREAMS
    return ROWS[row]


def _median(runs: Sequence[Run], row: str, name: str, figure: str) -> float:
    return statistics.median(run[row][name][figure] for run in runs)


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table, aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for number, cells in enumerate(rows):
        padded = [
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(padded)} |")
        if number == 0:
            dashes = [
                "-" * width if place == 0 else "-" * (width - 1) + ":"
                for place, width in enumerate(widths)
            ]
            lines.append(f"| {' | '.join(dashes)} |")
    return lines


def figures(runs: Sequence[Run]) -> str:
    """What was measured, medians over the runs."""
    parts = []
    for row, by_name in runs[0].items():
        title, columns = describe(row)
        table = [["" if len(by_name) > 1 else " ", *(heading for _, heading, _ in columns)]]
        for name in by_name:
            cells = [format(_median(runs, row, name, figure), form) for figure, _, form in columns]
            table.append([NAMES.get(name, name), *cells])
        parts.append(
            "\n".join([f"{row}. {title}" if row[0] != "3" else f"3. {title}", "", *_lines(table)])
        )
    return "\n\n".join(parts)


def verdicts(found: Sequence[Verdict]) -> str:
    """The demands, and what came of them."""
    table = [["row", "demand", "must", "aim", "measured", "runs", ""]]
    for verdict in found:
        bar = verdict.bar
        sign = "≥" if bar.at_least else "≤"
        bounds = [
            "" if bound is None else f"{sign} {bound:g}{bar.unit}" for bound in (bar.must, bar.aim)
        ]
        table.append(
            [
                bar.row,
                bar.what,
                *bounds,
                f"{verdict.median:.2f}{bar.unit}",
                " ".join(f"{value:.2f}" for value in verdict.values),
                verdict.word,
            ]
        )
    return "\n".join(_lines(table))


def facts(found: Mapping[str, str]) -> str:
    """The machine, one fact a line."""
    return "\n".join(f"{name:10} {value}" for name, value in found.items())
