"""What the simulated engines have in common: a port, a clock with a speed, faults, a diary."""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine
from email.utils import formatdate
from typing import Any, Protocol
from urllib.parse import unquote_to_bytes

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IAddress, IDelayedCall, IListeningPort
from twisted.internet.protocol import Factory
from twisted.logger import Logger
from twisted.python.failure import Failure

from .card import Card
from .exchange import Exchange, HttpError, RecordedRequest
from .faults import Faults, Rule
from .http import Connection

log = Logger()

LISTEN_TRIES = 100


class Reactor(Protocol):
    """What the simulator needs of a reactor."""

    def seconds(self) -> float: ...

    def callLater(self, delay: float, call: Any, /, *args: Any, **kw: Any) -> IDelayedCall: ...

    def listenTCP(
        self, port: int, factory: Any, backlog: int = ..., interface: str = ...
    ) -> IListeningPort: ...


class _Factory(Factory):
    noisy = False

    def __init__(self, server: EngineSim) -> None:
        self.server = server

    def buildProtocol(self, addr: IAddress | None) -> Connection:
        self.server.connections_seen += 1
        return Connection(self.server, self.server.connections_seen)


class EngineSim:
    """A simulated engine: subclasses say what it answers and what dies with it.

    Durations are simulated seconds; one takes ``1 / speed`` real ones.  ``keep_alive_timeout`` is
    how many *real* seconds an idle connection is kept (None: for ever), since clients that reuse
    connections count real ones; ``keep_alive_max`` is how many requests one connection may carry,
    ``closes_on_errors`` whether an answer of 400 and above is the last on its connection.
    """

    owner = "engine"
    eager_continue = False
    keep_alive_timeout: float | None = None
    keep_alive_max: int | None = None
    closes_on_errors = False
    faults: Faults

    def __init__(
        self, card: Card, clock: Any, *, speed: float = 1.0, max_requests: int = 5000
    ) -> None:
        self.card = card
        self.clock: Reactor = clock
        self.speed = speed
        self.host = "127.0.0.1"
        self.port = 0
        self.connections: set[Connection] = set()
        self.connections_seen = 0
        self.requests: deque[RecordedRequest] = deque(maxlen=max_requests)
        self.requests_seen = 0
        self.errors: list[Failure] = []
        self._listening: IListeningPort | None = None
        self._tasks: set[Deferred[Any]] = set()
        self._generation = 0

    # -- for subclasses

    async def handle(self, exchange: Exchange) -> None:
        """Answer one request."""
        raise NotImplementedError

    def reset(self) -> None:
        """The process died: forget everything it knew and held."""
        raise NotImplementedError

    def boot(self) -> None:
        """The process starts."""

    def release_card(self) -> None:
        """The driver takes back what a dead process held."""
        self.card.release(self.owner)

    def real(self, seconds: float) -> float:
        """Simulated seconds as real ones."""
        return seconds / self.speed

    def standard_headers(self) -> list[tuple[bytes, bytes]]:
        """What stands in every answer."""
        return [(b"Date", formatdate(usegmt=True).encode())]

    def connection_headers(self, kept: bool) -> list[tuple[bytes, bytes]]:
        """What an answer says of its connection."""
        return [] if kept else [(b"Connection", b"close")]

    def sleep(self, seconds: float) -> Deferred[None]:
        """Fire after so many simulated seconds; cancelling leaves nothing behind."""
        done: Deferred[None] = Deferred(lambda _: call.cancel())
        call = self.clock.callLater(self.real(seconds), done.callback, None)
        return done

    def spawn(self, work: Coroutine[Deferred[Any], Any, Any]) -> Deferred[Any]:
        """Run a coroutine that dies with the process."""
        task = Deferred.fromCoroutine(work)
        if not task.called:
            self._tasks.add(task)
        task.addBoth(self._task_ended, task)
        return task

    def _task_ended(self, result: object, task: Deferred[Any]) -> None:
        self._tasks.discard(task)
        if isinstance(result, Failure) and not result.check(CancelledError):
            self.errors.append(result)
            log.failure("simulated {owner} failed", failure=result, owner=self.owner)

    # -- requests

    def begin(self, exchange: Exchange) -> None:
        """A request's head is in."""
        self.requests.append(exchange.record)
        self.requests_seen += 1
        rule = self.faults.pick(exchange.method, exchange.target)
        if self.eager_continue and exchange.expects_continue:
            exchange.expects_continue = False
            exchange.connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        task = Deferred.fromCoroutine(self._serve(exchange, rule))
        exchange.task = task
        task.addErrback(self._serve_failed)

    def _serve_failed(self, failure: Failure) -> None:
        if not failure.check(CancelledError):
            self.errors.append(failure)
            log.failure("simulated {owner} failed", failure=failure, owner=self.owner)

    async def _serve(self, exchange: Exchange, rule: Rule | None) -> None:
        try:
            if rule is None or await self._strike(exchange, rule):
                await self.handle(exchange)
        except HttpError as error:
            if not exchange.started:
                exchange.reply(error.status, error.body, error.content_type, close=error.close)
        except CancelledError:
            raise
        except Exception:
            if not exchange.started:
                exchange.reply(500, b"500 Internal Server Error", close=True)
            else:
                exchange.cut(True)
            raise

    async def _strike(self, exchange: Exchange, rule: Rule) -> bool:
        """Do what the rule says; true if the request is to be served all the same."""
        kind = rule.kind
        if kind in ("trickle", "drop_upload") or (kind == "drop" and rule.after is not None):
            exchange.arm(rule)
            return True
        if kind == "delay":
            await self.sleep(rule.seconds)
            return True
        await exchange.stream(lambda data: None)
        if kind == "hang":
            await Deferred()
        elif kind == "status":
            exchange.reply(rule.code, rule.body, rule.content_type, rule.headers)
        elif kind == "raw":
            exchange.connection.send(rule.body)
            if rule.close:
                exchange.cut(False)
            else:
                exchange.started = True
                exchange.finish()
        else:
            exchange.cut(rule.rst)
        return False

    def requests_for(self, method: str, path: str) -> list[RecordedRequest]:
        """The recorded requests of one method and (percent-decoded) path."""
        wanted = path.encode()
        return [
            record
            for record in self.requests
            if record.method == method and unquote_to_bytes(record.path) == wanted
        ]

    # -- the port

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def listening(self) -> bool:
        return self._listening is not None

    def listen(self, port: int = 0, interface: str = "127.0.0.1") -> None:
        """Start the engine; port 0 lets the kernel pick one, kept over restarts."""
        self.host, self.port = interface, port
        self.start_listening()
        self.boot()

    def start_listening(self) -> None:
        """Accept connections (again)."""
        if self._listening is None:
            self._listening = self.clock.listenTCP(
                self.port, _Factory(self), backlog=1024, interface=self.host
            )
            self.port = self._listening.getHost().port  # type: ignore[attr-defined]

    def stop_listening(self) -> Deferred[None]:
        """Refuse new connections; open ones stay."""
        listening, self._listening = self._listening, None
        if listening is None:
            return succeed(None)
        stopped: Deferred[None] = Deferred()
        done = listening.stopListening()
        if done is None:
            return succeed(None)
        done.addCallback(lambda _: stopped.callback(None))
        return stopped

    def drop_connections(self, rst: bool = True) -> None:
        """Cut every open connection."""
        for connection in list(self.connections):
            connection.drop(rst)

    def _abort_connections(self) -> None:
        for connection in list(self.connections):
            connection.abort()

    def kill(self) -> Deferred[None]:
        """End the process at once: sockets reset, port closed, state and VRAM gone."""
        self._generation += 1
        return Deferred.fromCoroutine(self._kill())

    async def _kill(self) -> None:
        stopped = self.stop_listening()
        lost = [connection.lost for connection in self.connections]
        self._abort_connections()
        while self._tasks:
            self._tasks.pop().cancel()
        self.reset()
        self.release_card()
        await stopped
        for connection_lost in lost:
            if not connection_lost.called:
                await _after(connection_lost)

    def stop(self) -> Deferred[None]:
        """As `kill`; nothing of the engine is left in the reactor afterwards."""
        return self.kill()

    def restart(self, downtime: float = 0.5) -> Deferred[None]:
        """Kill it and start it afresh on the same port after ``downtime``."""
        killed = self.kill()
        return Deferred.fromCoroutine(self._restart(killed, self._generation, downtime))

    async def _restart(self, killed: Deferred[None], generation: int, downtime: float) -> None:
        await killed
        pause = self.spawn(_wait(self.sleep(downtime)))
        await pause
        for attempt in range(LISTEN_TRIES):
            if self._generation != generation:
                return  # Killed, stopped or restarted again meanwhile.
            try:
                self.start_listening()
            except CannotListenError:
                if attempt == LISTEN_TRIES - 1:
                    raise
                await self.spawn(_wait(self.sleep(0.05 * self.speed)))
            else:
                self.boot()
                return


async def _wait(deferred: Deferred[None]) -> None:
    await deferred


def _after(deferred: Deferred[None]) -> Deferred[None]:
    """A Deferred of its own that fires when the shared one does."""
    mine: Deferred[None] = Deferred()

    def pass_on(result: None) -> None:
        if not mine.called:
            mine.callback(None)

    deferred.addCallback(pass_on)
    return mine
