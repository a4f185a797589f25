"""The process around a program that is paced: it starts it, stops and continues it, and ends as it ends.

The program runs in a session of its own, stopped (SIGSTOP) while it is a peer's turn and continued (SIGCONT) when it is
its own. A guardian process sees to it that it is not left stopped, whatever ends this one; without a guardian it is not
stopped.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import time

from turnstile.child import shim
from turnstile.child.guardian import Group, Guardian, Mode, look_at, start_guardian
from turnstile.gpushare.pacer import Pacer
from turnstile.gpushare.usage import SessionUsage, open_nvml

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from turnstile.gpushare.peer import Peer

#: Passed on to the program as they come.
_PASSED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGALRM)
#: Passed on; so that it can act on it at once it runs for so many seconds from then on.
_RUNS_FOR = {
    signal.SIGINT: 5.0,
    signal.SIGHUP: 5.0,
    signal.SIGTERM: math.inf,
    signal.SIGQUIT: math.inf,
}
#: Seconds for which signals are passed on to a program that gets them itself, too: whoever signals a session
#: may have looked before the program was in it.
_YOUNG = 1.0
#: Seconds between two attempts to get a new guardian.
_GUARDIAN_AGAIN = 5.0
#: Seconds between two looks at whether there is still one.
_GUARDIAN_LOOK = 1.0


def say(message: str) -> None:
    """A line on standard error."""
    with contextlib.suppress(OSError):
        os.write(2, f"turnstile-pace: {message}\n".encode(errors="replace"))


class Freezer:
    """Stops and continues the process groups of a program.

    :param leader: the program's process.
    :param usage: knows the groups.
    """

    def __init__(self, leader: int, usage: SessionUsage) -> None:
        self._leader = leader
        self._usage = usage
        #: Those that were stopped; they are continued whatever is known of them later.
        self._stopped: frozenset[int] = frozenset()

    def stop(self) -> None:
        """Stop it, unless somebody else did: then it is theirs to continue."""
        process = look_at(self._leader)
        if process is not None and process.state == "T":
            return
        self._stopped = self._usage.groups
        self._signal(self._stopped, signal.SIGSTOP)

    def go(self) -> None:
        """Continue it, if it was stopped here."""
        stopped, self._stopped = self._stopped, frozenset()
        self._signal(stopped, signal.SIGCONT)

    def send(self, number: int) -> None:
        """Any other signal."""
        self._signal(self._usage.groups, number)

    @staticmethod
    def _signal(groups: frozenset[int], number: int) -> None:
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)


class Wrapper:
    """Runs one program.

    :param peer: the slot that stands for it.
    :param mode: what happens to it if this process is killed.
    :param watched: somebody else watches over this process's session: see `pace_command.command`.
    """

    def __init__(
        self, peer: Peer, mode: Mode, program: Sequence[str], *, watched: bool = False
    ) -> None:
        self._peer = peer
        self._mode = mode
        self._program = program
        self._watched = watched
        #: Signals that came and were not looked at yet.
        self._signals: list[int] = []
        self._guardian: Guardian | None = None
        self._guardian_due = 0.0

    def run(self) -> int:
        """Run the program to its end; returns its exit status, or dies by the signal that it died by."""
        wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._take_signals()
        try:
            try:
                child = self._start()
            except FileNotFoundError as error:
                return _fail(self._program[0], error, shim.NOT_FOUND)
            except PermissionError as error:
                return _fail(self._program[0], error, shim.NOT_RUNNABLE)
            except (OSError, ValueError) as error:
                return _fail(self._program[0], error, shim.NOT_STARTED)
            status = self._pace(child, wake)
            if self._guardian is not None:
                self._guardian.done()
        finally:
            self._peer.leave()
            signal.set_wakeup_fd(-1)
        if status < 0:
            _die_by(-status)
        return status

    def _take_signals(self) -> None:
        """Handle what is to be passed on. What was ignored, as by nohup, stays so, for the program too."""
        for number in (*_PASSED, *_RUNS_FOR, signal.SIGTSTP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)
        # Only so that it ends the wait: by default nothing is delivered.
        signal.signal(signal.SIGCHLD, self._ignore)

    def _note(self, number: int, _frame: object) -> None:
        self._signals.append(number)

    def _ignore(self, _number: int, _frame: object) -> None:
        """The wake-up is enough."""

    # -- starting it -----------------------------------------------------------------------------------------------

    def _start(self) -> subprocess.Popen[bytes]:
        if self._watched:
            return subprocess.Popen(list(self._program), close_fds=False, process_group=0)
        gate, opener = os.pipe2(os.O_CLOEXEC)
        owner = os.getpid() if self._mode is Mode.KILL else None
        argv = shim.command(self._program, owner=owner, gate=gate, null_stdin=False)
        try:
            # What was open for the program is; what is ours closes by itself.
            os.set_inheritable(gate, True)
            child = subprocess.Popen(argv, close_fds=False, start_new_session=True)
        except OSError:
            os.close(opener)
            raise
        finally:
            os.close(gate)
        try:
            self._guardian = start_guardian(child.pid, self._mode)
        except OSError:
            # An end instead of a byte: the program never runs.
            os.close(opener)
            child.wait()
            raise
        # It may have been killed already.
        with contextlib.suppress(BrokenPipeError):
            os.write(opener, b".")
        os.close(opener)
        return child

    # -- while it runs ---------------------------------------------------------------------------------------------

    def _pace(self, child: subprocess.Popen[bytes], wake: int) -> int:
        group = Group(child.pid)
        session = os.getsid(0) if self._watched else child.pid
        usage = SessionUsage(session, child.pid, strangers={os.getpid()})
        freezer = Freezer(child.pid, usage)
        nvml = open_nvml(self._peer.key or "")
        pacer = Pacer(
            self._peer,
            stop=freezer.stop,
            go=freezer.go,
            cpu=lambda: usage.cpu_seconds(time.monotonic()),
            is_busy=(lambda: nvml.is_busy(usage.pids)) if nvml is not None else None,
        )
        began = time.monotonic()
        pace: Callable[[], float] | None = pacer.step
        try:
            while True:
                status = child.poll()
                if status is not None:
                    return status
                if os.getpid() == 1:
                    self._reap(child)
                young = time.monotonic() - began < _YOUNG
                self._pass_signals(pacer, freezer, forward=young or not self._watched)
                if not self._is_guarded(child):
                    pacer.release(_GUARDIAN_LOOK)
                due = 1.0
                if pace is not None:
                    try:
                        due = pace()
                    except Exception as error:
                        # A program that runs unpaced is better than one that is not run to its end.
                        pace = None
                        pacer.release(math.inf)
                        self._peer.leave()
                        say(f"it runs unpaced from now on: {type(error).__name__}: {error}")
                if select.select([wake], [], [], due)[0]:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, 4096)
        finally:
            # Whoever is left of the group, or all of it after an error of ours.
            freezer.go()
            with contextlib.suppress(OSError):
                group.signal(signal.SIGCONT)

    def _pass_signals(self, pacer: Pacer, freezer: Freezer, *, forward: bool) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGTSTP:
                self._stand_still(freezer, pacer)
                continue
            runs_for = _RUNS_FOR.get(signal.Signals(number))
            if runs_for is not None:
                pacer.release(runs_for)
            if forward:
                freezer.send(number)

    def _stand_still(self, freezer: Freezer, pacer: Pacer) -> None:
        """Ctrl-Z: the program stops with us, until both are continued."""
        pacer.release()
        freezer.stop()
        # By the signal's own means: it stops nobody whom no shell could continue.
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        # Continued.
        signal.signal(signal.SIGTSTP, self._note)
        freezer.go()

    def _is_guarded(self, child: subprocess.Popen[bytes]) -> bool:
        """Whether the program is safe from being left stopped; a guardian that was killed is replaced."""
        if self._watched:
            return True
        now = time.monotonic()
        if now < self._guardian_due:
            return self._guardian is not None
        self._guardian_due = now + _GUARDIAN_LOOK
        if self._guardian is not None and self._guardian.alive():
            return True
        if self._guardian is not None:
            self._guardian.done()
            self._guardian = None
            say("its guardian was killed and is replaced")
        try:
            self._guardian = start_guardian(child.pid, self._mode)
        except OSError as error:
            self._guardian_due = now + _GUARDIAN_AGAIN
            say(f"it runs unpaced for now, there is no guardian to be had: {error.strerror}")
            return False
        return True

    def _reap(self, child: subprocess.Popen[bytes]) -> None:
        """As the first process of a container: wait for what was orphaned and has ended."""
        ours = {child.pid, self._guardian.pid if self._guardian is not None else 0}
        with contextlib.suppress(ChildProcessError):
            while True:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is None or found.si_pid in ours:
                    return
                os.waitpid(found.si_pid, 0)


def _fail(program: str, error: Exception, status: int) -> int:
    say(f"cannot run {program!r}: {getattr(error, 'strerror', None) or error}")
    return status


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
    # One that ends nobody, or not the first process of a container: as shells tell it.
    raise SystemExit(128 + number)
