"""The data path's sockets behave as Twisted's, but write at once."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from proxy_fakes import Watched
from proxy_kit import End, OpenEnd, open_sockets, turn
from pytest_twisted import ensureDeferred
from twisted.internet import reactor as _reactor
from twisted.internet import selectreactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import HostnameEndpoint, TCP4ClientEndpoint
from twisted.internet.error import ConnectionDone, ConnectionLost, ConnectionRefusedError
from twisted.internet.protocol import Factory
from twisted.internet.task import Clock
from twisted.logger import globalLogPublisher

from turnstile.proxy.sockets import (
    LEAST_READ,
    MOST_READ,
    DirectClient,
    DirectServer,
    SocketLoop,
    socket_loop,
)

reactor: Any = _reactor
LOOPBACK = "127.0.0.1"


class Ends(Factory, Watched):
    """Keeps what it builds."""

    noisy = False

    def __init__(self, kind: type[End]) -> None:
        Watched.__init__(self)
        self.kind = kind
        self.ends: list[End] = []

    def buildProtocol(self, addr: Any) -> End:
        self.ends.append(self.kind())
        reactor.callLater(0, self.look)
        return self.ends[-1]


@asynccontextmanager
async def connected(
    server: type[End] = End, client: type[End] = End
) -> AsyncIterator[tuple[Any, Any]]:
    """The two ends of a connection, both of the loop's."""
    loop = socket_loop(reactor)
    accepting = Ends(server)
    port = reactor.listenTCP(0, accepting, interface=LOOPBACK)
    loop.adopt(port)
    ends: list[End] = []
    try:
        factory = Factory.forProtocol(client)
        factory.noisy = False
        theirs = await TCP4ClientEndpoint(loop, LOOPBACK, port.getHost().port).connect(factory)
        ends.append(theirs)
        await accepting.when(lambda: accepting.ends and accepting.ends[0].transport)
        ours = accepting.ends[0]
        ends.append(ours)
        yield ours, theirs
    finally:
        await port.stopListening()
        for end in ends:
            if end.lost is None:
                end.transport.abortConnection()
                await end.closed()
        assert not [end for end in ends if end.transport in loop.getReaders()]


@pytest.fixture
def failures() -> Iterator[list[Any]]:
    events: list[Any] = []

    def observe(event: Any) -> None:
        if event.get("log_failure") is not None:
            events.append(event["log_failure"])

    globalLogPublisher.addObserver(observe)
    yield events
    globalLogPublisher.removeObserver(observe)


def kernel_has(end: End) -> bytes:
    """What lies in a socket unread."""
    try:
        data: bytes = end.transport.getHandle().recv(1 << 20, socket.MSG_PEEK)
    except BlockingIOError:
        return b""
    return data


def test_there_is_one_loop_for_a_reactor() -> None:
    loop = socket_loop(reactor)
    assert isinstance(loop, SocketLoop)
    assert socket_loop(reactor) is loop
    assert socket_loop(loop) is loop


def test_what_is_no_epoll_reactor_serves_as_it_is() -> None:
    clock = Clock()
    assert socket_loop(clock) is clock
    assert not isinstance(socket_loop(selectreactor.SelectReactor()), SocketLoop)


@ensureDeferred
async def test_both_kinds_of_sockets_are_the_loops() -> None:
    async with connected() as (ours, theirs):
        assert isinstance(ours.transport, DirectServer)
        assert isinstance(theirs.transport, DirectClient)
        assert ours.transport not in reactor.getReaders()
        assert ours.transport in socket_loop(reactor).getReaders()


@ensureDeferred
async def test_a_write_is_with_the_kernel_at_once() -> None:
    async with connected() as (ours, theirs):
        theirs.stop_reading()
        ours.transport.write(b"one")
        assert kernel_has(theirs) == b"one"
        ours.transport.writeSequence([b" two", b" three"])
        assert kernel_has(theirs) == b"one two three"
        ours.transport.write(b"")
        theirs.go_on_reading()
        await theirs.until(b"one two three")


@ensureDeferred
async def test_what_the_kernel_does_not_take_waits_and_keeps_its_order() -> None:
    sent = b"".join(b"%07d," % n for n in range(2_000_000))
    async with connected() as (ours, theirs):
        theirs.stop_reading()
        for place in range(0, len(sent), 1_000_000):
            ours.transport.write(sent[place : place + 1_000_000])
        # The one producer that it has is told to stop.
        assert ours.choked
        ours.transport.write(b"and more")
        theirs.go_on_reading()
        await theirs.until(b"and more")
        assert theirs.received == sent + b"and more"
        assert not ours.choked


@ensureDeferred
async def test_the_connection_ends_behind_what_was_written() -> None:
    async with connected() as (ours, theirs):
        theirs.stop_reading()
        ours.transport.write(b"x" * 8_000_000)
        ours.fin()
        theirs.go_on_reading()
        await theirs.closed()
        assert len(theirs.received) == 8_000_000
        assert theirs.clean
        await ours.closed()
        assert ours.lost.check(ConnectionDone)


@ensureDeferred
async def test_half_a_connection_may_end_before_the_other() -> None:
    async with connected(OpenEnd, OpenEnd) as (ours, theirs):
        ours.transport.write(b"last")
        ours.half_close()
        await theirs.when(lambda: theirs.ended, "the end of half of it")
        assert theirs.received == b"last"
        theirs.send(b"answer")
        await ours.until(b"answer")
        ours.transport.write(b"too late")
        theirs.fin()
        await ours.when(lambda: ours.ended, "the end of the rest")
        assert theirs.received == b"last"


@ensureDeferred
async def test_nothing_is_sent_after_an_abort() -> None:
    async with connected() as (ours, theirs):
        theirs.stop_reading()
        ours.transport.abortConnection()
        ours.transport.write(b"too late")
        assert kernel_has(theirs) == b""
        await ours.closed()
        ours.transport.write(b"much too late")


@ensureDeferred
async def test_a_write_to_a_reset_connection_ends_it_later_not_now() -> None:
    async with connected() as (ours, theirs):
        ours.stop_reading()
        theirs.rst()
        await theirs.closed()
        ours.transport.write(b"x")
        ours.transport.write(b"y")
        assert ours.lost is None
        await ours.closed()
        assert ours.lost.check(ConnectionLost)


@ensureDeferred
async def test_a_reset_ends_one_that_reads() -> None:
    async with connected() as (ours, theirs):
        theirs.rst()
        await ours.closed()
        assert ours.lost.check(ConnectionLost)


@ensureDeferred
async def test_data_before_the_end_is_read_first() -> None:
    async with connected() as (ours, theirs):
        ours.stop_reading()
        theirs.send(b"x" * 300_000)
        theirs.fin()
        await turn(3)
        assert ours.received == b""
        ours.go_on_reading()
        await ours.closed()
        assert len(ours.received) == 300_000
        assert ours.clean


@ensureDeferred
async def test_reads_grow_with_what_comes_and_shrink_again() -> None:
    async with connected() as (ours, theirs):
        assert ours.transport._read_size == LEAST_READ
        theirs.send(b"x" * 16_000_000)
        await ours.when(lambda: len(ours.received) == 16_000_000, "all of it")
        assert LEAST_READ < ours.transport._read_size <= MOST_READ
        for count in range(10):
            theirs.send(b"y")
            await ours.when(lambda count=count: len(ours.received) == 16_000_001 + count, "one")
        assert ours.transport._read_size == LEAST_READ


@ensureDeferred
async def test_a_protocol_that_fails_loses_its_connection_and_no_other(failures: list[Any]) -> None:
    class Failing(End):
        def dataReceived(self, data: bytes) -> None:
            raise ZeroDivisionError

    async with connected(server=Failing) as (ours, theirs), connected() as (one, other):
        theirs.send(b"x")
        await theirs.closed()
        assert ours.lost.check(ZeroDivisionError)
        assert [failure.type for failure in failures] == [ZeroDivisionError]
        other.send(b"still there")
        await one.until(b"still there")


@ensureDeferred
async def test_nobody_listens() -> None:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        number = probe.getsockname()[1]
    factory = Factory.forProtocol(End)
    factory.noisy = False
    with pytest.raises(ConnectionRefusedError):
        await TCP4ClientEndpoint(socket_loop(reactor), LOOPBACK, number).connect(factory)
    assert not open_sockets()


@ensureDeferred
async def test_names_are_resolved() -> None:
    accepting = Ends(End)
    port = reactor.listenTCP(0, accepting, interface=LOOPBACK)
    factory = Factory.forProtocol(End)
    factory.noisy = False
    endpoint = HostnameEndpoint(socket_loop(reactor), "localhost", port.getHost().port)
    end: Any = await endpoint.connect(factory)
    assert isinstance(end.transport, DirectClient)
    end.transport.abortConnection()
    await end.closed()
    await port.stopListening()
    for theirs in accepting.ends:
        await theirs.closed()


@ensureDeferred
async def test_the_reactors_own_descriptors_and_timers_have_their_turn() -> None:
    class Echo(End):
        def dataReceived(self, data: bytes) -> None:
            self.transport.write(data)

    async with connected(Echo, Echo) as (ours, _):
        # These two keep each other busy for ever.
        ours.transport.write(b"ping")
        one, other = socket.socketpair()
        other.setblocking(False)
        heard: Deferred[bytes] = Deferred()

        class Reader:
            def fileno(self) -> int:
                return other.fileno()

            def doRead(self) -> None:
                reactor.removeReader(self)
                heard.callback(other.recv(100))

            def logPrefix(self) -> str:
                return "-"

            def connectionLost(self, reason: Any) -> None: ...

        reactor.addReader(Reader())
        reactor.callLater(0.001, one.send, b"hello")
        assert await heard.addTimeout(15.0, reactor) == b"hello"
        one.close()
        other.close()


@ensureDeferred
async def test_a_port_of_another_kind_is_left_alone(tmp_path: Any) -> None:
    accepting = Ends(End)
    port = reactor.listenUNIX(str(tmp_path / "socket"), accepting)
    before = port.transport
    socket_loop(reactor).adopt(port)
    assert port.transport is before
    await port.stopListening()


@ensureDeferred
async def test_a_reset_of_ours_is_seen_as_one() -> None:
    async with connected() as (ours, theirs):
        handle = ours.transport.getHandle()
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        ours.transport.abortConnection()
        await theirs.closed()
        assert theirs.lost.check(ConnectionLost)
