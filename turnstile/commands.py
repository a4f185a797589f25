"""Commands of the user's, run by a shell, in a thread of their own each.

They come from the configuration: what stops and starts an engine, what tells how much memory is used. Each gets its own
session, so that a time-out reaches all of it, and none of the sockets and notifications that are turnstile's.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol, cast

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

#: Bytes of output that are kept of a command that is asked something.
OUTPUT_LIMIT = 64 * 1024
_OURS = ("LISTEN_", "NOTIFY_", "WATCHDOG_")


class CommandFailed(Exception):
    """A command did not do what it is for; the message says why."""


def clean_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without what systemd tells turnstile alone."""
    source = os.environ if environment is None else environment
    return {key: value for key, value in source.items() if not key.startswith(_OURS)}


def _begin(command: str, **streams: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=subprocess.DEVNULL,
        env=clean_environment(),
        start_new_session=True,
        **streams,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ask(command: str, timeout: float) -> str:
    """What ``command`` prints; blocks.

    :raises CommandFailed: if it fails, prints too much or takes longer than ``timeout`` seconds.
    """
    try:
        process = _begin(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        raise CommandFailed(str(error)) from None
    with process:
        try:
            deadline = time.monotonic() + timeout
            output, errors = _read(process, deadline)
            code = process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise CommandFailed(f"took longer than {timeout:g} s") from None
        finally:
            if process.returncode is None:
                _end(process)
    if code != 0:
        # Some tell what is wrong where their answer would be.
        words = (errors.strip() or output.strip()).decode("utf-8", "replace").splitlines()
        raise CommandFailed(f"exit code {code}" + (f": {words[-1]}" if words else ""))
    return output.decode("utf-8", "replace")


def _read(process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bytes]:
    """All that it prints until it closes both of its outputs."""
    texts = {process.stdout: b"", process.stderr: b""}
    with selectors.DefaultSelector() as selector:
        for stream in texts:
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(process.args, 0)
            for key, _ in selector.select(left):
                data = os.read(key.fd, OUTPUT_LIMIT)
                stream = cast(Any, key.fileobj)
                texts[stream] += data
                if not data:
                    selector.unregister(stream)
                elif len(texts[stream]) > OUTPUT_LIMIT:
                    raise CommandFailed("prints too much")
    return texts[process.stdout], texts[process.stderr]


class Commands(Protocol):
    """Runs commands that act on an engine."""

    def run(self, command: str, timeout: float | None) -> Deferred[int]:
        """Fires with the exit code once ``command`` has ended.

        After ``timeout`` seconds (``None``: never) it is killed. Cancelling leaves it to run.
        """
        ...


class ShellCommands:
    """The real ones. Their output goes where turnstile's own errors go."""

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor

    def run(self, command: str, timeout: float | None) -> Deferred[int]:
        done: Deferred[int] = Deferred()

        def tell(result: int | Failure) -> None:
            if not done.called:
                done.callback(result)

        def work() -> None:
            result: int | Failure
            try:
                process = _begin(command, stdout=2)
                try:
                    result = process.wait(timeout)
                except subprocess.TimeoutExpired:
                    _end(process)
                    result = Failure(CommandFailed(f"took longer than {timeout:g} s"))
            except Exception:
                result = Failure()
            self._reactor.callFromThread(tell, result)

        threading.Thread(target=work, daemon=True, name="command").start()
        return done
