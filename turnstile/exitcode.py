"""An exit status that survives twistd, which knows only 0, 1 and signals.

twistd's ``run`` returns normally however the reactor was stopped, and the process then exits 0. A
status set here is put in place at the very end: after the reactor, the pid file and everything else
that was registered with `atexit` later than this module.
"""

import atexit
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from turnstile.log import Logger

EXIT_FAILURE = 1
EXIT_CONFIG = 2
EXIT_UPDATED = 3

_log = Logger()
_status = 0
_reason = ""


def set_exit_status(code: int) -> None:
    """Let the process exit with ``code``; the first one that isn't 0 stays."""
    global _status
    if not _status:
        _status = code


def get_exit_status() -> int:
    """The status that was set, 0 if none."""
    return _status


def get_failure() -> str:
    """Why the start failed; empty if it did not."""
    return _reason


def fail_startup(reactor: Any, message: str, code: int = EXIT_FAILURE) -> None:
    """Log ``message`` as an error and end the process with ``code`` once the reactor runs.

    For `startService` and the like, where an exception would have twistd print a traceback.
    """
    global _reason
    _log.error("{reason}", reason=message)
    _reason = _reason or message
    set_exit_status(code)
    reactor.callWhenRunning(_stop, reactor)


def leave(reactor: Any, code: int) -> None:
    """End the process in good order, with ``code``."""
    set_exit_status(code)
    _stop(reactor)


def exit_0_on_sigterm(reactor: Any) -> None:
    """Let SIGTERM end the process in good order, with status 0 if nothing else was set.

    twistd's own handler stops the reactor too, but has the process killed by the same signal afterwards.
    """

    def terminate(number: int, frame: object) -> None:
        reactor.callFromThread(_stop, reactor)

    # Not before: the reactor installs its handlers when it starts.
    reactor.callWhenRunning(signal.signal, signal.SIGTERM, terminate)


def hasten_on_second_sigint(
    reactor: Any, is_running: Callable[[], bool], hasten: Callable[[], None]
) -> None:
    """Let the first SIGINT mean what it does, and one that comes while all is being stopped call ``hasten``.

    Stopping a reactor that stops already is an error, with a traceback, to twisted's own handler.
    """
    seen = False

    def install() -> None:
        first = signal.getsignal(signal.SIGINT)
        if not callable(first):
            return

        def interrupted(number: int, frame: Any) -> None:
            nonlocal seen
            if seen or not is_running():
                reactor.callFromThread(hasten)
            else:
                seen = True
                first(number, frame)

        signal.signal(signal.SIGINT, interrupted)

    # Not before: the reactor installs its handlers when it starts.
    reactor.callWhenRunning(install)


def _stop(reactor: Any) -> None:
    # Another part may have stopped it already.
    from twisted.internet.error import ReactorNotRunning

    with contextlib.suppress(ReactorNotRunning):
        reactor.stop()


def _leave() -> None:
    if not _status:
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            if stream is not None:
                stream.flush()
    os._exit(_status)


# Handlers run last in, first out: registered on import, this one runs after
# those of the modules that are imported later.
atexit.register(_leave)
