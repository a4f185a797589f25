"""The few things that a child does between fork and exec, as a program of its own.

Twisted has no hook at that point, and code run there in a fork of a threaded program is not safe. So the child is this
file, run by a bare interpreter (:func:`command`), which prepares its own process and then becomes the real program:

1. a session, and thus a process group, of its own: a mere group in the owner's session would get SIGHUP from the kernel
   (POSIX: orphaned process groups) if its owner dies while it is stopped;
2. the kernel is told to kill it when its parent dies (Linux: ``PR_SET_PDEATHSIG``), and it is checked that the parent
   did not die before that;
3. it waits for the byte that opens its *gate*, so that the guardian is there before the program is; the end of that
   pipe instead means that the owner is gone, and the program never runs;
4. what systemd addressed to the owner alone leaves the environment;
5. standard input is ``/dev/null``; no signal is blocked, and those that Python ignores are not.

Standard library only, and no import of turnstile: it runs without a search path.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence

#: Exit codes as shells have them: found but not runnable, not found; and for what failed before that.
NOT_RUNNABLE = 126
NOT_FOUND = 127
NOT_STARTED = 125

#: Variables that are addressed to the owner and would mislead another process.
SERVICE_PREFIXES = (b"LISTEN_", b"NOTIFY_", b"WATCHDOG_")

_PR_SET_PDEATHSIG = 1


def command(
    program: Sequence[str],
    *,
    owner: int | None = None,
    gate: int | None = None,
    null_stdin: bool = True,
) -> list[str]:
    """The command line that runs ``program`` (its name or path, and arguments) by way of the shim.

    :param owner: the process that will be the parent; the child dies with it. ``None``: it may outlive it.
    :param gate: the descriptor, in the child, of a pipe's read end; the program starts when a byte comes.
    :param null_stdin: standard input is ``/dev/null``; else it is inherited. A terminal can be read there, though it is
        not the child's own: job control and what is typed as a signal are the owner's to pass on.
    :raises ValueError: if there is no program.
    """
    if not program or not program[0]:
        raise ValueError("no program")
    return [
        sys.executable,
        *("-I", "-S", "-E"),
        os.path.abspath(__file__),
        str(owner or 0),
        str(-1 if gate is None else gate),
        "null" if null_stdin else "inherit",
        *program,
    ]


def _main(arguments: list[str]) -> int:
    owner, gate = int(arguments[0]), int(arguments[1])
    null_stdin, program = arguments[2] == "null", arguments[3:]
    try:
        if os.getsid(0) != os.getpid():
            os.setsid()
        if owner and not _die_with(owner):
            return NOT_STARTED
        if gate >= 0 and not _pass(gate):
            return NOT_STARTED
        if null_stdin:
            _null_stdin()
    except OSError as error:
        return _fail(f"cannot prepare the process for {program[0]!r}: {error}", NOT_STARTED)
    _restore_signals()
    environment = {
        key: value for key, value in os.environb.items() if not key.startswith(SERVICE_PREFIXES)
    }
    try:
        os.execvpe(program[0], program, environment)
    except OSError as error:
        return _explain(program[0], error)
    except ValueError as error:
        return _fail(f"cannot run {program[0]!r}: {error}", NOT_RUNNABLE)


def _die_with(owner: int) -> bool:
    """Ask for SIGKILL at the parent's death; false if it died already."""
    if sys.platform == "linux":
        try:
            import ctypes

            prctl = ctypes.CDLL(None).prctl
        except (ImportError, OSError, AttributeError):
            pass  # the guardian does without
        else:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == owner


def _pass(gate: int) -> bool:
    """Wait at the gate; false if nobody will open it any more."""
    opened = os.read(gate, 1)
    os.close(gate)
    return bool(opened)


def _null_stdin() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    if null != 0:
        os.dup2(null, 0)
        os.close(null)
    else:
        os.set_inheritable(0, True)


def _restore_signals() -> None:
    for name in ("SIGPIPE", "SIGXFSZ"):
        number = getattr(signal, name, None)
        if number is not None:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _explain(name: str, error: OSError) -> int:
    reason = error.strerror or str(error)
    found = os.path.exists(name) if os.sep in name else error.errno != errno.ENOENT
    if not found:
        where = "" if os.sep in name else " (looked for on PATH)"
        return _fail(f"cannot run {name!r}: {reason}{where}", NOT_FOUND)
    if error.errno == errno.ENOENT:
        reason = "it exists, but its interpreter or loader does not"
    return _fail(f"cannot run {name!r}: {reason}", NOT_RUNNABLE)


def _fail(message: str, code: int) -> int:
    text = f"turnstile: {message}\n".encode("utf-8", "backslashreplace")
    try:  # noqa: SIM105 (contextlib would take as long to import as all the rest)
        os.write(2, text)
    except OSError:
        pass
    return code


if __name__ == "__main__":
    # Not sys.exit: nothing of ours is to be flushed or finalised, and it must be quick.
    os._exit(_main(sys.argv[1:]))
