"""``turnstile-pace``: run a program so that it computes in its share of a card's time only.

The program runs in a session of its own, stopped (SIGSTOP) while it is a peer's turn and continued (SIGCONT) when it is
its own. A guardian process sees to it that it is not left stopped, whatever ends this one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from turnstile.child import shim
from turnstile.child.guardian import Group, Guardian, Mode, start_guardian
from turnstile.gpushare.errors import GpuShareError
from turnstile.gpushare.pacer import Pacer
from turnstile.gpushare.peer import Peer
from turnstile.gpushare.usage import GroupUsage, open_nvml

#: Passed on to the program as they come.
_FORWARDED = (
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
    signal.SIGALRM,
)
#: Passed on, and the program is not stopped any more: it is to end.
_ENDING = (signal.SIGTERM, signal.SIGQUIT)

_EPILOG = """\
The program shares the card with whatever else joined its registry: other programs under turnstile-pace, and those that
use turnstile.gpushare themselves. Alone, or while the others are idle, it is never stopped. An API request to a stopped
server waits for its turn, at most (1 - share) of a period of 80 to 400 ms; kernels that the card has queued run on.
The program has a session of its own: it can read and write the terminal, but /dev/tty is not there for it.
"""


def command(
    program: Sequence[str],
    *,
    weight: float,
    name: str = "",
    gpu: str = "auto",
    group: str | None = None,
    on_death: str = "continue",
) -> list[str]:
    """The command line that runs ``program`` under the wrapper, for those who start processes themselves."""
    options = ["--weight", repr(float(weight)), "--gpu", gpu, "--on-death", on_death]
    if name:
        options += ["--name", name]
    if group:
        options += ["--group", group]
    return [sys.executable, "-m", "turnstile.gpushare.pace_command", *options, "--", *program]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="turnstile-pace",
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
    parser.add_argument("program", nargs=argparse.REMAINDER, help="-- and the program to run")
    return parser


def _weight(text: str) -> float:
    from turnstile.gpushare.registry import check_weight

    return check_weight(float(text))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is the program's."""
    parser = _parser()
    options = parser.parse_args(arguments)
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        parser.error("no program to run (turnstile-pace [options] -- PROGRAM …)")
    name = options.name or os.path.basename(program[0])
    try:
        peer = Peer.join(
            options.gpu, name=name, weight=options.weight, group=options.group, thread=False
        )
    except (GpuShareError, OSError) as error:
        _say(f"{name} runs unpaced: {error}")
        _become(program)
    if peer.key is None:
        if not options.quiet:
            _say(f"{name} runs unpaced: there is no card (--gpu names one)")
        _become(program)
    if not options.quiet:
        _say(peer.describe())
    return Wrapper(peer, Mode(options.on_death), program).run()


def _become(program: Sequence[str]) -> NoReturn:
    """Without a part in sharing there is nothing to do but to be the program."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(program[0], list(program))
    except OSError as error:
        _say(f"cannot run {program[0]!r}: {error.strerror}")
        missing = isinstance(error, FileNotFoundError)
        raise SystemExit(shim.NOT_FOUND if missing else shim.NOT_RUNNABLE) from None


def _say(message: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"turnstile-pace: {message}\n".encode(errors="replace"))


class Wrapper:
    """Starts the program, paces it, passes signals on and ends as it ends."""

    def __init__(self, peer: Peer, mode: Mode, program: Sequence[str]) -> None:
        self._peer = peer
        self._mode = mode
        self._program = program
        #: Signals that came and were not looked at yet.
        self._signals: list[int] = []
        self._ending = False

    def run(self) -> int:
        """Run the program to its end; returns its exit status, or dies by the signal that it died by."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        before = self._take_signals()
        try:
            try:
                child, guardian = self._start(before)
            except OSError as error:
                _say(f"cannot start a process: {error.strerror or error}")
                return shim.NOT_STARTED
            status = self._pace(child, wake_read)
            guardian.done()
        finally:
            self._peer.leave()
            signal.set_wakeup_fd(-1)
            os.close(wake_read)
            os.close(wake_write)
        if status < 0:
            _die_by(-status)
        return status

    def _take_signals(self) -> dict[int, Any]:
        """Handle what is to be passed on. What was ignored, as by nohup, stays so, for the program too."""
        handled: tuple[int, ...] = (*_FORWARDED, *_ENDING, signal.SIGTSTP, signal.SIGCONT)
        before: dict[int, Any] = {}
        for number in handled:
            if number != signal.SIGCONT and signal.getsignal(number) is signal.SIG_IGN:
                continue
            before[number] = signal.signal(number, self._note)
        # Only so that it ends the wait: by default nothing is delivered.
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._ignore)
        return before

    def _note(self, number: int, _frame: object) -> None:
        self._signals.append(number)

    def _ignore(self, _number: int, _frame: object) -> None:
        """The wake-up is enough."""

    def _start(self, handlers: dict[int, Any]) -> tuple[subprocess.Popen[bytes], Guardian]:
        gate_read, gate_write = os.pipe2(os.O_CLOEXEC)
        owner = os.getpid() if self._mode is Mode.KILL else None
        argv = shim.command(self._program, owner=owner, gate=gate_read, null_stdin=False)
        try:
            child = subprocess.Popen(argv, pass_fds=(gate_read,), start_new_session=True)
        except OSError:
            os.close(gate_write)
            raise
        finally:
            os.close(gate_read)
        try:
            guardian = start_guardian(child.pid, self._mode)
        except OSError:
            # An end instead of a byte: the program never runs.
            os.close(gate_write)
            child.wait()
            raise
        os.write(gate_write, b".")
        os.close(gate_write)
        return child, guardian

    # -- while it runs ---------------------------------------------------------------------------------------------

    def _pace(self, child: subprocess.Popen[bytes], wake: int) -> int:
        usage = GroupUsage(child.pid)
        nvml = open_nvml(self._peer.key or "")
        clock = _monotonic()
        pacer = Pacer(
            self._peer,
            stop=lambda: _signal_groups(usage, signal.SIGSTOP),
            go=lambda: _signal_groups(usage, signal.SIGCONT),
            cpu=lambda: usage.cpu_seconds(clock()),
            is_busy=(lambda: nvml.is_busy(usage.pids)) if nvml is not None else None,
        )
        try:
            while True:
                status = child.poll()
                if status is not None:
                    return status
                self._pass_signals(child, usage, pacer)
                due = 0.5 if self._ending else pacer.step()
                if select.select([wake], [], [], due)[0]:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, 4096)
        finally:
            # Whoever is left of the group, or all of it after an error of ours.
            with contextlib.suppress(OSError):
                Group(child.pid).signal(signal.SIGCONT)

    def _pass_signals(
        self, child: subprocess.Popen[bytes], usage: GroupUsage, pacer: Pacer
    ) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGTSTP:
                self._stand_still(usage, pacer)
            elif number == signal.SIGCONT:
                continue
            else:
                if number in _ENDING:
                    self._ending = True
                if number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT):
                    # Running, it can act on it at once.
                    pacer.release()
                _signal_groups(usage, number)

    def _stand_still(self, usage: GroupUsage, pacer: Pacer) -> None:
        """Ctrl-Z: the program stops with us, until both are continued."""
        _signal_groups(usage, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        # Continued.
        _signal_groups(usage, signal.SIGCONT)
        pacer.release()


def _monotonic() -> Callable[[], float]:
    import time

    return time.monotonic


def _signal_groups(usage: GroupUsage, number: int) -> None:
    """Signal every process group of the program's session."""
    for group in usage.groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


def _die_by(number: int) -> NoReturn:
    """End as the program ended, so that whoever waits for us sees the same."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        # One core file is enough.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(OSError):
        os.kill(os.getpid(), number)
    # Blocked, or one that ends nobody: as shells tell it.
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
