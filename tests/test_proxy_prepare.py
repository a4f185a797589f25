"""Upstreams that have to be got up first, engines that a request must not start, and two engines behind one port."""

from __future__ import annotations

import json

import pytest
import pytest_twisted
from proxy_fakes import FakePolicy, reactor
from proxy_kit import OK, Clocked, RawUpstream, proxying, turn
from twisted.internet.endpoints import TCP4ServerEndpoint

from turnstile.config import Upstream
from turnstile.proxy.gate import Busy, Ending
from turnstile.proxy.http1 import RequestHead
from turnstile.proxy.resource import EngineResource
from turnstile.proxy.retry import RetryPolicy
from turnstile.proxy.site import ProxySite
from turnstile.proxy.sockets import socket_loop
from turnstile.proxy.upstream import UpstreamPool

GATED = b"POST /gated HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc"


def preparing(when: str = "later") -> FakePolicy:
    policy = FakePolicy()
    policy.prepare = when
    return policy


@pytest_twisted.ensureDeferred
async def test_the_upstream_is_prepared_with_the_lease_and_before_connecting() -> None:
    async with proxying(policy=preparing()) as p:
        client = await p.client(GATED)
        await p.policy.preparing()
        await turn(5)
        assert p.policy.gate.calls == ["enter", "prepare"] and p.upstream.ends == []
        p.policy.gate.preparing.callback(None)  # type: ignore[union-attr]
        (await p.upstream.request(b"abc")).send(OK)
        await client.until(b"ok")
        await p.policy.ended(Ending.DONE, True)
        assert p.policy.gate.calls[:4] == ["enter", "prepare", "room", "forwarding"]


@pytest_twisted.ensureDeferred
async def test_one_that_is_prepared_already_costs_nothing() -> None:
    async with proxying(policy=preparing("now")) as p:
        client = await p.client(GATED)
        (await p.upstream.request(b"abc")).send(OK)
        await client.until(b"ok")
        await p.policy.ended(Ending.DONE, True)


@pytest_twisted.ensureDeferred
async def test_every_attempt_prepares_it_again() -> None:
    async with proxying(policy=preparing("now"), listen=False) as p:
        client = await p.client(GATED)
        await p.policy.when(lambda: len(p.policy.retries) == 1)
        p.clock.advance(1)
        await p.policy.when(lambda: len(p.policy.retries) == 2)
        assert p.policy.gate.calls == ["enter", "prepare", "leave"] * 2
        client.fin()
        await p.policy.ended(Ending.NOT_SENT, False)


@pytest.mark.parametrize("retry_after", [9, None])
@pytest_twisted.ensureDeferred
async def test_what_cannot_be_prepared_is_the_answer(retry_after: int | None) -> None:
    async with proxying(policy=preparing()) as p:
        client = await p.client(GATED)
        await p.policy.preparing()
        p.policy.gate.preparing.errback(  # type: ignore[union-attr]
            Busy("it crashed:\nout of memory", 502, retry_after)
        )
        await client.until(b"}")
        head, _, body = bytes(client.received).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 502 ")
        assert json.loads(body) == {"error": "it crashed:\nout of memory"}
        assert (b"Retry-After: 9" in head) == (retry_after == 9)
        assert (b"Retry-After" in head) == (retry_after is not None)
        await p.policy.ended(Ending.NOT_SENT, False)
        assert p.upstream.ends == []


@pytest_twisted.ensureDeferred
async def test_a_failure_that_nobody_foresaw_is_a_500() -> None:
    async with proxying(policy=preparing()) as p:
        p.failures = 1
        client = await p.client(GATED)
        await p.policy.preparing()
        p.policy.gate.preparing.errback(ValueError("what"))  # type: ignore[union-attr]
        await client.until(b"HTTP/1.1 500 ")
        await p.policy.ended(Ending.NOT_SENT, False)


@pytest.mark.parametrize("end", ["fin", "rst"])
@pytest_twisted.ensureDeferred
async def test_a_client_that_leaves_meanwhile(end: str) -> None:
    async with proxying(policy=preparing()) as p:
        client = await p.client(GATED)
        await p.policy.preparing()
        getattr(client, end)()
        await p.policy.ended(Ending.NOT_SENT, False)
        assert p.policy.gate.cancelled == 1 and p.upstream.ends == []


@pytest_twisted.ensureDeferred
async def test_a_shutdown_meanwhile() -> None:
    async with proxying(policy=preparing()) as p:
        client = await p.client(GATED)
        await p.policy.preparing()
        p.site.drain()
        await client.until(b"HTTP/1.1 503 ")
        await p.policy.ended(Ending.NOT_SENT, False)
        assert p.policy.gate.cancelled == 1


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
@pytest_twisted.ensureDeferred
async def test_a_request_that_must_not_start_the_engine(method: bytes) -> None:
    policy = FakePolicy()
    policy.is_absent = True
    async with proxying(policy=policy) as p:
        client = await p.client(b"%s /observe HTTP/1.1\r\nHost: h\r\n\r\n" % method)
        await client.until(b"\r\n\r\n")
        await p.policy.when(lambda: p.policy.done == [503])
        head, _, body = bytes(client.received).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ") and b"Retry-After" not in head
        if method == b"GET":
            assert json.loads(body) == {"error": "fake is not loaded", "state": "down"}
        else:
            assert body == b""
        # The connection goes on.
        client.take()
        client.send(b"GET /v1/observe HTTP/1.1\r\nHost: h\r\n\r\n")
        await client.until(b'"down"}')
        body = bytes(client.received).partition(b"\r\n\r\n")[2]
        assert json.loads(body)["error"]["message"] == "fake is not loaded"
        assert p.upstream.ends == [] and p.policy.gates == []


@pytest_twisted.ensureDeferred
async def test_an_engine_that_went_away_before_it_was_connected_to() -> None:
    async with proxying(listen=False) as p:
        client = await p.client(b"GET /observe HTTP/1.1\r\nHost: h\r\n\r\n")
        await p.policy.when(lambda: len(p.policy.retries) == 1)
        p.policy.is_absent = True
        p.clock.advance(1)
        await client.until(b"fake is not loaded")
        assert p.policy.done == [503]


@pytest_twisted.ensureDeferred
async def test_two_engines_behind_one_port() -> None:
    async with proxying() as p:
        other, other_policy = RawUpstream(), FakePolicy()
        await other.listen()
        where = Upstream.parse(f"http://127.0.0.1:{other.number}")
        sockets = socket_loop(reactor)
        pool = UpstreamPool(Clocked(p.clock, sockets), where, timeout=5.0)
        second = EngineResource(
            pool, other_policy, reactor=p.clock, retry=RetryPolicy(), observer=other_policy
        )
        first = p.site.resource

        def route(head: RequestHead) -> EngineResource:
            return second if head.path.startswith(b"/gated/other") else first

        p.site = ProxySite(
            first, {}, clock=p.clock, vigil=p.site.vigil, route=route, others=[second]
        )
        p.more_ports.append(p.port)
        p.port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(p.site)
        sockets.adopt(p.port)
        client = await p.client(b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n")
        (await p.upstream.request()).send(OK)
        await client.until(b"ok")
        client.take()
        # The same connection, the other engine.
        client.send(GATED.replace(b"/gated", b"/gated/other"))
        end = await other.request(b"abc")
        end.send(OK)
        await client.until(b"ok")
        assert p.policy.gates == [] and other_policy.gate.calls[0] == "enter"
        assert p.policy.done == [200] and other_policy.done == [200]
        # A job that is carried through at either engine keeps the listener from being drained.
        other_policy.detached = True
        client.send(GATED.replace(b"/gated", b"/gated/other"))
        await end.when(lambda: other.everything.count(b"abc") == 2)
        client.fin()
        await turn(20)
        assert len(second.carried) == 1
        drained = p.site.drain()
        assert not drained.called
        end.send(OK)
        await other_policy.when(lambda: len(other_policy.done) == 2)
        await turn(2)
        assert drained.called
        pool.abort()
        for one in other.ends:
            one.transport.abortConnection()
        await other.stop()
