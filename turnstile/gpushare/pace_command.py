"""``turnstile-pace``: run a program so that it computes in its share of a card's time only.

What it does with the program is in `turnstile.gpushare.wrapper`. Where there is nothing to share it becomes the
program.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from turnstile.child import shim
from turnstile.child.guardian import Mode
from turnstile.gpushare.errors import GpuShareError
from turnstile.gpushare.peer import Peer
from turnstile.gpushare.usage import can_measure
from turnstile.gpushare.wrapper import Wrapper, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

_EPILOG = """\
The program shares the card with whatever else joined its registry: other programs under turnstile-pace, and those that
use turnstile.gpushare themselves. Alone, or while the others are idle, it is never stopped. An API request to a stopped
server waits for its turn, at most (1 - share) of a period of 80 to 400 ms; kernels that the card has queued run on.
The program has a session of its own: it can read and write the terminal, but /dev/tty is not there for it. What it
moves to another session (a daemon) is not paced.
"""


def command(
    program: Sequence[str],
    *,
    weight: float,
    name: str = "",
    gpu: str = "auto",
    group: str | None = None,
    on_death: str = "continue",
    watched: bool = False,
) -> list[str]:
    """The command line that runs ``program`` under the wrapper, for those who start processes themselves.

    :param watched: the caller makes the wrapper the leader of a session, signals that as a whole and ends it as a
        whole, as `turnstile.child.process` does. The program stays in it then, and ``on_death`` does not matter.
    """
    options = ["--weight", repr(float(weight)), "--gpu", gpu, "--on-death", on_death]
    if name:
        options += ["--name", name]
    if group:
        options += ["--group", group]
    if watched:
        options.append("--watched")
    file = os.path.join(os.path.dirname(os.path.abspath(__file__)), "pace_main.py")
    return [sys.executable, "-P", file, *options, "--", *program]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="turnstile-pace",
        usage="turnstile-pace [options] -- PROGRAM [ARGUMENT ...]",
        description="Run a program in its weighted share of a GPU's time.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--weight",
        "--gpu-share-weight",
        type=_weight,
        default=1.0,
        help="its part, relative to the others' weights (default: 1)",
    )
    parser.add_argument("--name", default="", help="what people are shown (default: the program's)")
    parser.add_argument(
        "--gpu",
        "--gpu-key",
        default="auto",
        help="the card: auto, its number, a UUID, any key that peers agree on, or none",
    )
    parser.add_argument("--group", help="the system group whose members share the card")
    parser.add_argument(
        "--on-death",
        choices=[mode.value for mode in Mode],
        default=Mode.CONTINUE.value,
        help="what happens to the program if this process is killed (default: continue)",
    )
    parser.add_argument("--quiet", action="store_true", help="say nothing unless there is trouble")
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _weight(text: str) -> float:
    from turnstile.gpushare.registry import check_weight

    return check_weight(float(text))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is the program's."""
    parser = _parser()
    options = parser.parse_args(arguments)
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program or not program[0]:
        parser.error("no program to run (turnstile-pace [options] -- PROGRAM ...)")
    _prepare()
    name = options.name or os.path.basename(program[0])
    if not can_measure():
        say(f"{name} runs unpaced: without /proc it can't be seen when it computes")
        _become(program)
    try:
        peer = Peer.join(
            options.gpu, name=name, weight=options.weight, group=options.group, thread=False
        )
    except (GpuShareError, OSError) as error:
        say(f"{name} runs unpaced: {error}")
        _become(program)
    if peer.key is None:
        if not options.quiet:
            say(f"{name} runs unpaced: there is no card (--gpu names one)")
        _become(program)
    if not options.quiet:
        say(peer.describe())
    return Wrapper(peer, Mode(options.on_death), program, watched=options.watched).run()


def _prepare() -> None:
    """Be as a program in C would be at its start."""
    # Files that are opened from now on would get the numbers of standard ones that are closed, and what
    # is meant for people be written to them.
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest number that is free, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    # Whoever started us may have blocked what is to be passed on.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _become(program: Sequence[str]) -> NoReturn:
    """Without a part in sharing there is nothing to do but to be the program."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        # Python ignores them; ignored, they would stay so.
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(program[0], list(program))
    except (OSError, ValueError) as error:
        say(f"cannot run {program[0]!r}: {getattr(error, 'strerror', None) or error}")
        missing = isinstance(error, FileNotFoundError)
        raise SystemExit(shim.NOT_FOUND if missing else shim.NOT_RUNNABLE) from None


if __name__ == "__main__":
    sys.exit(main())
