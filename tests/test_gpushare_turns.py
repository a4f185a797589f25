"""Waiting for one's turn in coroutines, of asyncio and of Twisted."""

import asyncio
import sys

import pytest
from gpushare_kit import VirtualClock, join, new_key
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock

from turnstile.gpushare.turns import wait_for_turn

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /dev/shm")


class Both(Clock):
    """A reactor whose time is that of the peers."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def pump(self, seconds, step=0.001):
        for _ in range(round(seconds / step)):
            self.clock.advance(step)
            self.advance(step)


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def reactor(clock):
    return Both(clock)


@pytest.fixture
def pair(clock):
    """The first has the first 40 ms of each 80, the second the others."""
    with new_key() as key:
        peers = join(key, clock, "first"), join(key, clock, "second")
        for peer in peers:
            peer.touch()
        clock.advance(-clock.wall_us() % 80_000 / 1e6)
        yield peers
        for peer in peers:
            assert peer._depth == 0
            peer.leave()


# -- Twisted


def test_twisted_waits_for_the_window(pair, reactor, clock):
    first, second = pair
    assert first._depth == 0
    done = wait_for_turn(first, reactor)
    assert done.called  # it is its turn
    done = wait_for_turn(second, reactor)
    reactor.pump(0.039)
    assert not done.called
    reactor.pump(0.002)
    assert done.called
    assert second.wait_us() == 0
    assert reactor.getDelayedCalls() == []


def test_twisted_steps(pair, reactor, clock):
    _, second = pair
    happened = []

    async def decode():
        for _ in range(3):
            async with second.turn(reactor=reactor, sync=lambda: happened.append("sync")):
                happened.append(clock.wall_us() % 80_000)
                assert second._depth == 1
                step = Deferred()
                reactor.callLater(0.015, step.callback, None)
                await step

    done = Deferred.fromCoroutine(decode())
    reactor.pump(0.2)
    assert done.called
    assert happened == [40_000, "sync", 55_000, "sync", 70_000, "sync"]


def test_twisted_cancelled(pair, reactor):
    _, second = pair
    done = wait_for_turn(second, reactor)
    failures = []
    done.addErrback(failures.append)
    done.cancel()
    assert failures[0].check(CancelledError)
    assert reactor.getDelayedCalls() == []


def test_an_error_in_a_twisted_step(pair, reactor):
    first, _ = pair

    async def decode():
        async with first.turn(reactor=reactor, sync=lambda: pytest.fail("no sync")):
            raise ZeroDivisionError

    failures = []
    Deferred.fromCoroutine(decode()).addErrback(failures.append)
    assert failures[0].check(ZeroDivisionError)


def test_twisted_without_a_card(reactor, clock):
    alone = join("none", clock)
    assert wait_for_turn(alone, reactor).called


# -- asyncio


@pytest.fixture
def virtual_sleep(monkeypatch, clock):
    """asyncio's sleep, in the time of the peers."""
    slept = []

    async def sleep(seconds):
        slept.append(seconds)
        clock.advance(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return slept


def test_asyncio_waits_for_the_window(pair, virtual_sleep, clock):
    first, second = pair

    async def decode():
        await first.turn()
        assert virtual_sleep == []
        await second.turn()
        assert clock.wall_us() % 80_000 == 40_000
        async with second.turn():
            assert second._depth == 1
        for _ in range(2):
            async with first.turn():
                assert clock.wall_us() % 80_000 == 0
            clock.advance(0.04)

    asyncio.run(decode())
    assert sum(virtual_sleep) == pytest.approx(0.12)


def test_asyncio_cancelled(pair):
    _, second = pair

    async def decode():
        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def wait():
        async with second.turn():
            pytest.fail("it was not its turn")

    asyncio.run(decode())
