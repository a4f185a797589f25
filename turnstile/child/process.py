"""Children of a reactor: spawned through the shim, watched by a guardian, ended as a whole group.

A child is *gone* when its process was reaped and nobody of its group is left: only then has a driver given back what
they held on the card.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure

from turnstile.child import guardian, shim
from turnstile.child.fanout import Fanout
from turnstile.child.guardian import Group, Mode
from turnstile.child.logfile import RotatingLog

#: Seconds between looks at what is left of a group, first and longest.
FIRST_LOOK = 0.005
LONGEST_LOOK = 0.25
#: Seconds between looks at the size of the log.
LOG_LOOK = 10.0
#: How many lines of the log are kept of a child that is gone.
KEPT_LINES = 50
#: Seconds until a guardian that ended is replaced, the first time and at most.
REPLACE_FIRST = 0.0
REPLACE_LONGEST = 60.0

#: The descriptor of the gate in the child.
_GATE = 3


@attrs.frozen
class ExitStatus:
    """How a process ended: with a code, or by a signal."""

    code: int | None = None
    signal: int | None = None

    def __str__(self) -> str:
        if self.signal is not None:
            try:
                return f"killed by {signal.Signals(self.signal).name}"
            except ValueError:
                return f"killed by signal {self.signal}"
        return f"exit code {self.code}"


class Child(Protocol):
    """A program that was started. Tests with virtual time have their own."""

    @property
    def pid(self) -> int:
        """Its process id, which is that of its group and session as well."""
        ...

    @property
    def status(self) -> ExitStatus | None:
        """How it ended; ``None``: it runs."""
        ...

    def when_exited(self) -> Deferred[ExitStatus]:
        """Fires when the process itself was reaped. Cancellable, never fails otherwise."""
        ...

    def when_gone(self) -> Deferred[ExitStatus]:
        """Fires when its whole group is gone. Cancellable, never fails otherwise."""
        ...

    def when_settled(self) -> Deferred[ExitStatus]:
        """Fires when nothing of it is left, helpers of ours included. Cancellable, never fails otherwise."""
        ...

    def terminate(self, grace: float) -> Deferred[ExitStatus]:
        """SIGTERM to the group, SIGKILL after ``grace`` seconds; fires as :meth:`when_gone`.

        May be called again, also with less grace. To cancel the Deferred doesn't stop the end.
        """
        ...

    def tail(self, lines: int) -> list[str]:
        """The last lines of its output, also when it is gone."""
        ...


class _Watched(ProcessProtocol):
    """Tells when the process was reaped, whoever else has its pipes."""

    def __init__(self, ended: Any) -> None:
        self._ended = ended

    def processExited(self, reason: Failure) -> None:
        value: Any = reason.value
        self._ended(ExitStatus(getattr(value, "exitCode", None), getattr(value, "signal", None)))


class Spawner:
    """Starts children.

    :param reactor: runs processes and has the time.
    """

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor

    def spawn(
        self, program: Sequence[str], env: Mapping[str, str] | None, log: RotatingLog
    ) -> Child:
        """Start a program (name or path, and arguments).

        That it can't be run shows as an exit code of the shim's, with the reason in the log.

        :param env: its environment; ``None``: ours. What systemd tells us is left out.
        :param log: gets its standard output and error; one child at a time.
        :raises OSError: if there is no process or file to be had.
        """
        return _Child(self._reactor, program, env, log)


class _Child:
    """The real one."""

    log = Logger()

    def __init__(
        self,
        reactor: Any,
        program: Sequence[str],
        env: Mapping[str, str] | None,
        log: RotatingLog,
    ) -> None:
        self._reactor = reactor
        self._name = os.path.basename(program[0])
        self._log = log
        self._last_lines: list[str] | None = None
        self._exited: Fanout[ExitStatus] = Fanout()
        self._gone: Fanout[ExitStatus] = Fanout()
        self._settled: Fanout[ExitStatus] = Fanout()
        self._status: ExitStatus | None = None
        self._deadline: IDelayedCall | None = None
        self._killed = False
        self._look: IDelayedCall | None = None
        self._pause = FIRST_LOOK
        self._log_look: IDelayedCall | None = None
        self._guardian: Any = None
        self._replace: IDelayedCall | None = None
        self._replace_after = REPLACE_FIRST

        command = shim.command(program, owner=os.getpid(), gate=_GATE, null_stdin=False)
        output = log.begin(program)
        try:
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._transport = reactor.spawnProcess(
                    _Watched(self._process_exited),
                    sys.executable,
                    command,
                    env=env,
                    childFDs={0: null, 1: output, 2: output, _GATE: "w"},
                )
            finally:
                os.close(null)
        except BaseException:
            log.close()
            raise
        self.pid: int = self._transport.pid
        self._group = Group(self.pid)
        try:
            self._start_guardian()
        except OSError:
            self._group.signal(signal.SIGKILL)
            raise
        self._transport.writeToChild(_GATE, b".")
        self._transport.closeChildFD(_GATE)
        self._watch_log()

    # -- what anyone may look at -----------------------------------------------------------------------------------

    @property
    def status(self) -> ExitStatus | None:
        return self._status

    def when_exited(self) -> Deferred[ExitStatus]:
        return self._exited.wait()

    def when_gone(self) -> Deferred[ExitStatus]:
        return self._gone.wait()

    def when_settled(self) -> Deferred[ExitStatus]:
        return self._settled.wait()

    def tail(self, lines: int) -> list[str]:
        if self._last_lines is None:
            return self._log.tail(lines)
        return self._last_lines[-lines:] if lines > 0 else []

    # -- its end ---------------------------------------------------------------------------------------------------

    def terminate(self, grace: float) -> Deferred[ExitStatus]:
        waiter = self.when_gone()
        if self._gone.fired or self._killed:
            return waiter
        if grace <= 0:
            self._kill()
            return waiter
        if self._deadline is None:
            # One that is stopped could not act on the first.
            self._group.signal(signal.SIGTERM, signal.SIGCONT)
            self._deadline = self._reactor.callLater(grace, self._expire)
        elif self._deadline.getTime() > self._reactor.seconds() + grace:
            self._deadline.reset(grace)
        return waiter

    def _expire(self) -> None:
        self._deadline = None
        self.log.warn("{name} (pid {pid}) did not end and is killed", name=self._name, pid=self.pid)
        self._kill()

    def _kill(self) -> None:
        self._killed = True
        self._group.signal(signal.SIGKILL)

    def _process_exited(self, status: ExitStatus) -> None:
        self._status = status
        self._exited.fire(status)
        self._look_at_the_rest()

    def _look_at_the_rest(self) -> None:
        """Whatever of the group is left has lost its head and does no good any more."""
        self._look = None
        if self._group.members():
            self._kill()
            self._look = self._reactor.callLater(self._pause, self._look_at_the_rest)
            self._pause = min(self._pause * 2, LONGEST_LOOK)
            return
        assert self._status is not None
        for call in (self._deadline, self._log_look, self._replace):
            if call is not None and call.active():
                call.cancel()
        self._deadline = self._log_look = self._replace = None
        self._last_lines = self._log.tail(KEPT_LINES)
        self._log.close()
        self._dismiss_guardian()
        self._gone.fire(self._status)

    # -- its guardian ----------------------------------------------------------------------------------------------

    def _start_guardian(self) -> None:
        self._replace = None
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            errors = 2
            try:
                os.fstat(errors)
            except OSError:
                errors = null
            self._guardian = self._reactor.spawnProcess(
                _Watched(self._guardian_exited),
                sys.executable,
                guardian.command(self.pid, Mode.KILL),
                env=None,
                childFDs={0: "w", 1: null, 2: errors},
            )
        finally:
            os.close(null)

    def _dismiss_guardian(self) -> None:
        if self._guardian is None:
            assert self._status is not None
            self._settled.fire(self._status)
            return
        # It may have ended, and not be reaped yet: then its pipe is gone.
        with suppress(KeyError):
            self._guardian.writeToChild(0, b".")
            self._guardian.closeChildFD(0)

    def _guardian_exited(self, status: ExitStatus) -> None:
        self._guardian = None
        if self._gone.fired:
            assert self._status is not None
            self._settled.fire(self._status)
            return
        self.log.error(
            "the guardian of {name} (pid {pid}) ended ({status}) and is replaced",
            name=self._name,
            pid=self.pid,
            status=str(status),
        )
        self._replace = self._reactor.callLater(self._replace_after, self._replace_guardian)
        self._replace_after = min(max(1.0, self._replace_after * 2), REPLACE_LONGEST)

    def _replace_guardian(self) -> None:
        try:
            self._start_guardian()
        except OSError as error:
            self.log.error(
                "{name} (pid {pid}) has no guardian: {reason}",
                name=self._name,
                pid=self.pid,
                reason=error.strerror or str(error),
            )
            self._replace = self._reactor.callLater(REPLACE_LONGEST, self._replace_guardian)

    # -- its log ---------------------------------------------------------------------------------------------------

    def _watch_log(self) -> None:
        self._log.rotate_if_large()
        self._log_look = self._reactor.callLater(LOG_LOOK, self._watch_log)
