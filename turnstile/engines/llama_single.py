"""A llama.cpp server of one model: it leaves the card by going to sleep, or by being stopped.

No request unloads its model. Started with ``--sleep-idle-seconds`` it unloads it by itself after that time without
work; ``/props`` then says ``is_sleeping``, not before the memory is free, and asking for that wakes nothing. Otherwise
commands of the user's stop and start it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from twisted.internet.defer import Deferred, TimeoutError, inlineCallbacks, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from turnstile.commands import CommandFailed, Commands
from turnstile.engines.client import ClientError, HttpError, JsonClient

#: Seconds after which the command is run again while the server still answers.
STOP_AGAIN_AFTER = 10.0
#: Seconds between looks at a server that is starting.
START_DELAY = 0.25
LOOK_TIMEOUT = 5.0


class StartFailed(Exception):
    """The server could not be started; the message is for the client."""


def is_loading(error: BaseException) -> bool:
    """Whether it is the answer of a server that is loading its model."""
    return isinstance(error, HttpError) and error.status == 503


class SingleServer:
    """What is known of a server of one model, and what can be done about it.

    :param mark_resident: tells the card that the model may be in memory.
    :param load_timeout: the most seconds that a start may take.
    """

    log = Logger()

    def __init__(
        self,
        client: JsonClient,
        clock: IReactorTime,
        mark_resident: Callable[[], None],
        *,
        commands: Commands | None,
        stop_command: str | None,
        start_command: str | None,
        load_timeout: float,
    ) -> None:
        self._client = client
        self._clock = clock
        self._mark_resident = mark_resident
        self._commands = commands
        self.stop_command = stop_command if commands is not None else None
        self.start_command = start_command if commands is not None else None
        self.load_timeout = load_timeout
        #: Whether it slept when last asked; ``None``: it was never asked.
        self.asleep: bool | None = None
        #: Waiting for its sleep was in vain the last time.
        self.sleepless = False
        #: We stopped it, and have not seen it since.
        self.stopped = False
        #: We started it and have not seen it yet, so that it may be there though nobody answers.
        self.pending = False
        self._told = True
        self._start: Deferred[None] | None = None
        self._waiters: list[Deferred[None]] = []

    @property
    def is_down(self) -> bool:
        """Whether nobody would answer until it is started again by us."""
        return self.stopped and self.start_command is not None

    def snapshot(self) -> dict[str, Any]:
        """For the state page."""
        return {"asleep": self.asleep, "stopped": self.stopped, "starting": self._start is not None}

    def introduce(self) -> None:
        """It answers for the first time, or again: the next look says what it can do."""
        self._told = False
        self.sleepless = False

    @inlineCallbacks
    def look(self, timeout: float) -> Generator[Deferred[Any], Any, bool]:
        """Whether it sleeps."""
        self.stopped = self.pending = False
        props = yield self._client.get_json("/props", timeout)
        says = props.get("is_sleeping") if isinstance(props, dict) else None
        self.asleep = says is True
        if self.asleep:
            self.sleepless = False
        elif says is None:
            # An older one, which knows no sleep.
            self.sleepless = True
        if not self._told:
            self._told = True
            self._tell_what_it_can()
        return self.asleep

    def _tell_what_it_can(self) -> None:
        if self.stop_command is not None:
            self.log.info("llama.cpp serves one model and is stopped by command")
        elif self.asleep:
            self.log.info("llama.cpp serves one model, which leaves the card when it sleeps")
        else:
            self.log.warn(
                "llama.cpp serves one model, which cannot be told to leave the card: {unless}it stays there beside"
                " every other engine. Start llama-server without a model, so that it becomes a router, or set"
                " LLAMA_STOP_COMMAND and LLAMA_START_COMMAND",
                unless="" if self.sleepless else "unless it sleeps (--sleep-idle-seconds) ",
            )

    def stop(self) -> None:
        """End what runs in the background; the server itself stays as it is."""
        self._give_up("turnstile stops")

    # -- leaving the card ------------------------------------------------------------------------------------------

    def leave(self, deadline: float) -> Leaving:
        """Begin one attempt to have it leave; bounded by ``deadline``."""
        self._give_up("another engine needs the card")
        return Leaving(self, self._clock, deadline)

    # -- starting --------------------------------------------------------------------------------------------------

    def ensure_started(self) -> Deferred[None]:
        """See :meth:`turnstile.engines.llamacpp.LlamaEngine.ensure_started`."""
        if not self.is_down:
            return succeed(None)

        def forget(waiter: Deferred[None]) -> None:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

        waiter: Deferred[None] = Deferred(forget)
        self._waiters.append(waiter)
        if self._start is None:
            self._start = d = self._bring_up()
            d.addBoth(self._over)
        return waiter

    @inlineCallbacks
    def _bring_up(self) -> Generator[Deferred[Any], Any, None]:
        assert self._commands is not None and self.start_command is not None
        clock = self._clock
        began = clock.seconds()
        self._mark_resident()
        ended: list[object] = []
        command: Deferred[Any] | None = None
        while (left := began + self.load_timeout - clock.seconds()) > 0:
            try:
                # 200 only once the model is loaded.
                yield self._client.get_json("/health", min(LOOK_TIMEOUT, left))
            except HttpError as e:
                if not is_loading(e):
                    raise StartFailed(f"llama.cpp answers {e} after its start") from None
            except ClientError:
                pass
            else:
                self.stopped = self.pending = False
                self.log.info(
                    "llama.cpp is up after {seconds:.1f} s", seconds=clock.seconds() - began
                )
                return
            if command is None:
                self.log.info("llama.cpp: starting it by command")
                self.pending = True
                # It may be the server itself, so its end is not waited for.
                command = self._commands.run(self.start_command, None).addBoth(ended.append)
            if ended and ended[0] != 0:
                raise StartFailed(f"LLAMA_START_COMMAND failed: {_outcome(ended[0])}")
            yield deferLater(clock, START_DELAY)
        raise StartFailed(f"llama.cpp did not come up within {self.load_timeout:g} s")

    def _give_up(self, why: str) -> None:
        start = self._start
        if start is not None:
            self._start = None
            self._tell(Failure(StartFailed(f"llama.cpp is not started: {why}")))
            start.cancel()

    def _over(self, result: Any) -> None:
        if self._start is None:
            return  # given up
        self._start = None
        if isinstance(result, Failure):
            if result.check(StartFailed):
                self.log.warn("{problem}", problem=str(result.value))
            else:
                self.log.failure("starting llama.cpp failed", failure=result)
                result = Failure(StartFailed("llama.cpp could not be started"))
        self._tell(result)

    def _tell(self, result: Any) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.called:
                waiter.callback(result)


class Leaving:
    """One attempt to make a server of one model leave the card."""

    def __init__(self, server: SingleServer, clock: IReactorTime, deadline: float) -> None:
        self._server = server
        self._clock = clock
        self._deadline = deadline
        self._ran_at: float | None = None
        self._succeeded = False
        self._waited = False
        #: Whether that nobody answers may be due to us.
        self.begun = server.stop_command is not None and server.pending

    @inlineCallbacks
    def push(self) -> Generator[Deferred[Any], Any, bool]:
        """It still holds the card: do what can be done now. False: nothing can, and waiting is in vain."""
        server = self._server
        if server.stop_command is None:
            self._waited = True
            return not server.sleepless
        now = self._clock.seconds()
        if self._ran_at is None or now - self._ran_at >= STOP_AGAIN_AFTER:
            self.begun = True
            self._ran_at = now
            self._succeeded = yield self._stop(self._deadline - now)
        return True

    @inlineCallbacks
    def gone(self) -> Generator[Deferred[Any], Any, bool]:
        """Nobody answers any more; whether that is the work of a stop command that went well.

        The server closes its port before it frees its memory: only the command's end shows that the process is gone.
        """
        if self._ran_at is None:
            yield self.push()
        if self._succeeded:
            self._server.stopped = True
            self._server.pending = False
        return self._succeeded

    def over(self) -> None:
        """The attempt ended."""
        server = self._server
        if self._waited and not server.asleep and self._clock.seconds() >= self._deadline:
            server.sleepless = True

    @inlineCallbacks
    def _stop(self, timeout: float) -> Generator[Deferred[Any], Any, bool]:
        server = self._server
        assert server._commands is not None and server.stop_command is not None
        server.log.info("llama.cpp: stopping it by command")
        try:
            # It is killed after that time, which is not waited for.
            d = server._commands.run(server.stop_command, timeout)
            code = yield d.addTimeout(timeout, self._clock)
        except (CommandFailed, TimeoutError) as e:
            code = e
        if code != 0:
            server.log.warn("LLAMA_STOP_COMMAND failed: {outcome}", outcome=_outcome(code))
        return bool(code == 0)


def _outcome(result: object) -> str:
    if isinstance(result, Failure):
        return result.getErrorMessage()
    if isinstance(result, TimeoutError):
        return "it does not end"
    return f"exit code {result}" if isinstance(result, int) else str(result)


__all__ = ["Leaving", "SingleServer", "StartFailed", "is_loading"]
