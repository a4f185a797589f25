"""The simulated card for processes of their own: memory that lives as long as a connection.

A simulated sd-server that is a real process holds its memory through a connection to the process
that has the `Card`.  However it ends, the kernel closes that connection, and what it held is free:
the part of the driver.  The wire is JSON, a line a message; addresses are ``host:port``.

``python -m turnstile.sim.card_server ADDRESS`` prints the bytes in use and in all, as the command
of a memory probe may.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IDelayedCall, IListeningPort
from twisted.internet.protocol import Factory, connectionDone
from twisted.protocols.basic import LineOnlyReceiver
from twisted.python.failure import Failure

from .card import Card, HasSeconds, OutOfVram
from .sd_worker import SdFaults


def encode(**message: Any) -> bytes:
    """A message as it goes over the wire."""
    return json.dumps(message).encode() + b"\n"


def split(address: str) -> tuple[str, int]:
    """Host and port of an address."""
    host, _, port = address.rpartition(":")
    return host, int(port)


class RemoteProcess(LineOnlyReceiver):
    """A process that holds memory of the card, as the process with the card knows it."""

    delimiter = b"\n"
    MAX_LENGTH = 1 << 20

    def __init__(self, server: CardServer, number: int) -> None:
        self.server = server
        self.number = number
        self.pid = 0
        self.owner = ""
        #: What it says of itself: main, grandchild.
        self.role = ""
        self.command: list[str] = []
        self.alive = True
        self.began = server.clock.seconds()
        self.ended: float | None = None
        #: loading, up; what it renders now, if anything.
        self.state = "loading"
        self.rendering: str | None = None
        self.rendered: list[str] = []
        #: Method and target of every request that it got.
        self.requests: list[tuple[str, str]] = []
        self._labels: set[str] = set()
        self._ordered: list[Deferred[None]] = []

    # -- what a test may do

    def order(self, **changes: Any) -> Deferred[None]:
        """Change its `Orders` while it runs; fires when it has heard that, or has ended."""
        obeyed: Deferred[None] = Deferred()
        if self.alive:
            self._ordered.append(obeyed)
            self._send(orders=changes)
        else:
            obeyed.callback(None)
        return obeyed

    def exit(self, status: int) -> None:
        """Have it end by itself."""
        self._send(exit=status)

    def count(self, path: str) -> int:
        """How many requests it got for a path."""
        return sum(target.split("?")[0] == path for _, target in self.requests)

    # -- the wire

    def _send(self, **message: Any) -> None:
        if self.alive:
            self.transport.write(encode(**message))  # type: ignore[union-attr]

    def lineReceived(self, line: bytes) -> None:
        message = json.loads(line)
        if "hold" in message:
            self._hold(message["hold"], message["bytes"])
        elif "hello" in message:
            self.pid, self.owner, self.role = message["hello"], message["owner"], message["role"]
            self.command = message["command"]
            self.server.arrived(self)
        elif "ask" in message:
            self._send(used=self.server.card.used, total=self.server.card.total_bytes)
        elif "obeyed" in message:
            self._ordered.pop(0).callback(None)
        elif "request" in message:
            self.requests.append((message["request"], message["target"]))
        elif "state" in message:
            self.state = message["state"]
        elif "render" in message:
            self.rendering = message["render"]
        elif "rendered" in message:
            self.rendering = None
            self.rendered.append(message["rendered"])

    def _hold(self, label: str, nbytes: int) -> None:
        name = f"{label} of {self.pid}"
        try:
            self.server.card.allocate(self.owner, name, nbytes)
        except OutOfVram:
            self._send(oom=label)
            return
        (self._labels.add if nbytes else self._labels.discard)(name)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.alive = False
        self.ended = self.server.clock.seconds()
        self.server.departed(self)
        while self._ordered:
            self._ordered.pop(0).callback(None)

    def free(self) -> None:
        """The driver takes back what it held."""
        labels, self._labels = self._labels, set()
        for label in sorted(labels):
            self.server.card.release(self.owner, label)


class _Factory(Factory):
    noisy = False

    def __init__(self, server: CardServer) -> None:
        self._server = server
        self._number = 0

    def buildProtocol(self, addr: object) -> RemoteProcess:
        self._number += 1
        return RemoteProcess(self._server, self._number)


class CardServer:
    """Lends a `Card` to other processes.

    ``faults`` and ``options`` are what a simulated sd-server is told when it starts; its own command
    line comes before ``options``.  ``release_delay``: real seconds that the driver takes to give a
    dead process's memory back.
    """

    def __init__(
        self,
        card: Card,
        clock: Any,
        *,
        faults: SdFaults | None = None,
        options: dict[str, Any] | None = None,
        release_delay: float = 0.0,
    ) -> None:
        self.card = card
        self.clock = clock
        self.faults = SdFaults() if faults is None else faults
        self.options = options or {}
        self.release_delay = release_delay
        #: Every process that said hello, those that ended too.
        self.processes: list[RemoteProcess] = []
        #: Is called with each of them when it does.
        self.on_start: Callable[[RemoteProcess], None] = lambda process: None
        self.address = ""
        self._listening: IListeningPort | None = None
        self._freeing: dict[RemoteProcess, IDelayedCall] = {}

    @property
    def alive(self) -> list[RemoteProcess]:
        """The processes that are there now."""
        return [process for process in self.processes if process.alive]

    def listen(self, port: int = 0, interface: str = "127.0.0.1") -> None:
        """Begin; `address` is for ``--card``."""
        self._listening = self.clock.listenTCP(port, _Factory(self), interface=interface)
        host: Any = self._listening.getHost()
        self.address = f"{host.host}:{host.port}"

    def stop(self) -> Deferred[None]:
        """End; processes that are left end themselves when they notice."""
        for process in self.alive:
            process.transport.abortConnection()  # type: ignore[union-attr]
        for process in list(self._freeing):
            self._free(process)
        listening, self._listening = self._listening, None
        stopped = listening.stopListening() if listening is not None else None
        return succeed(None) if stopped is None else stopped

    def arrived(self, process: RemoteProcess) -> None:
        self.processes.append(process)
        if process.role == "main":
            process._send(orders=asdict(self.faults.orders()), options=self.options)
        self.on_start(process)

    def departed(self, process: RemoteProcess) -> None:
        if self.release_delay:
            self._freeing[process] = self.clock.callLater(self.release_delay, self._free, process)
        else:
            process.free()

    def _free(self, process: RemoteProcess) -> None:
        call = self._freeing.pop(process)
        if call.active():
            call.cancel()
        process.free()


class RemoteCard(Card):
    """The card as a process sees it that has it from a `CardServer`.

    It knows of its own memory only.
    """

    def __init__(self, clock: HasSeconds, send: Callable[[bytes], None]) -> None:
        super().__init__(clock)
        self._send = send

    def allocate(self, owner: str, label: str, nbytes: int) -> None:
        super().allocate(owner, label, nbytes)
        if nbytes:
            self._send(encode(hold=label, bytes=nbytes))

    def release(self, owner: str, label: str | None = None) -> None:
        held = self.labels(owner)
        for name in held if label is None else held.keys() & {label}:
            self._send(encode(hold=name, bytes=0))
        super().release(owner, label)


def usage(address: str) -> tuple[int, int]:
    """Bytes in use and in all, asked of a `CardServer` in another process."""
    with socket.create_connection(split(address), timeout=10) as connection:
        connection.sendall(encode(ask=True))
        with connection.makefile("rb") as lines:
            answer = json.loads(lines.readline())
    return answer["used"], answer["total"]


if __name__ == "__main__":
    print(*usage(sys.argv[1]))
