"""``turnstile-peers``: who shares which card, and by how much."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence

from turnstile.gpushare.errors import GpuShareError
from turnstile.gpushare.report import format_table, look_at_all, to_dict

_CLEAR = "\x1b[H\x1b[2J"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="turnstile-peers",
        description="Show the programs that share a GPU's time, with weights and shares.",
        epilog="A share in parentheses is what an idle peer would get if all of them computed.",
    )
    parser.add_argument(
        "--gpu",
        "--gpu-key",
        help="the card: auto, its number, a UUID or its key (default: all that have peers)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line and card")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=1.0,
        metavar="SECONDS",
        help="show it again and again (default: every second)",
    )
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.05 <= seconds <= 86400:
        raise ValueError(text)
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a registry could not be read, 2 if it is not clear which card is meant."""
    options = _parser().parse_args(arguments)
    # A name may have letters that the terminal's encoding has not.
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        while True:
            status = _show(options)
            if options.watch is None:
                return status
            time.sleep(options.watch)
    except GpuShareError as error:
        print(f"turnstile-peers: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # What reads our output has ended. So that nothing is written to it at exit either:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt:
        return 0


def _show(options: argparse.Namespace) -> int:
    snapshots, problems = look_at_all(_find_keys(options.gpu))
    if options.json:
        text = "".join(json.dumps(to_dict(snapshot)) + "\n" for snapshot in snapshots)
    else:
        text = "\n\n".join(map(format_table, snapshots)) or "nobody shares a card here"
        text += "\n"
        if options.watch is not None and sys.stdout and sys.stdout.isatty():
            text = _CLEAR + text
    print(text, end="", flush=True)
    for problem in problems:
        print(f"turnstile-peers: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _find_keys(gpu: str | None) -> list[str]:
    if gpu is None:
        from turnstile.gpushare.shm import list_keys

        return list_keys()
    from turnstile.gpushare.gpu_key import find_key

    key = find_key(gpu)
    return [] if key is None else [key]


if __name__ == "__main__":
    sys.exit(main())
