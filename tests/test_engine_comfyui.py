"""ComfyUI's jobs: decisions on a fake clock, then the engine against the simulated one."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import pytest_twisted
import treq
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet import reactor as _reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock, deferLater
from twisted.internet.tcp import Connection, Port
from twisted.web.client import Agent, HTTPConnectionPool

from turnstile.arbiter import Arbiter, Kind, Lease, Tenant
from turnstile.card import Card, Eviction
from turnstile.config import Upstream
from turnstile.engines.client import BadAnswer, make_client
from turnstile.engines.comfy_events import EventStream, make_connect_events
from turnstile.engines.comfy_free import TOLERANCE, Floor, Verdict, reserved_memory
from turnstile.engines.comfy_jobs import (
    Job,
    Outcome,
    QueueView,
    apply_event,
    find_prompt_id,
    judge,
    parse_event,
    parse_history,
    parse_queue,
)
from turnstile.engines.comfy_nested import BURST_IDLE, NestedCalls
from turnstile.engines.comfyui import ComfyEngine
from turnstile.sim import ComfySim, GpuHost
from turnstile.sim.graphs import error_graph, image_graph, sleep_graph, stubborn_graph

reactor: Any = _reactor
LLM = Tenant("ollama", Kind.SHARED)
MIB = 2**20


# -- reading what ComfyUI says -------------------------------------------------------------------------------------


def test_queue_is_read_in_its_order() -> None:
    view = parse_queue(
        {
            "queue_running": [[1, "r", {}, {}, []]],
            "queue_pending": [[2, "a", {}], [9, "c", {}], [5.5, "b", {}]],
        }
    )
    assert view == QueueView(("r",), ("a", "b", "c"))
    assert view.place(frozenset({"r", "b"})) == 0
    assert view.place(frozenset({"b"})) == 2
    assert view.place(frozenset({"x"})) is None


@pytest.mark.parametrize(
    "odd",
    [None, [], {}, {"queue_running": []}, {"queue_running": [], "queue_pending": [1]}, "x"],
)
def test_an_odd_queue_is_not_an_empty_one(odd: Any) -> None:
    with pytest.raises(BadAnswer):
        parse_queue(odd)


def entry(status: Any) -> dict[str, Any]:
    return {"p": {"prompt": [], "outputs": {}, "status": status}}


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ({}, None),
        ({"other": {}}, None),
        (entry({"status_str": "success", "completed": True, "messages": []}), Outcome.SUCCESS),
        (
            entry(
                {
                    "status_str": "error",
                    "completed": False,
                    "messages": [["execution_start", {}], ["execution_error", {}]],
                }
            ),
            Outcome.ERROR,
        ),
        (
            entry(
                {
                    "status_str": "error",
                    "completed": False,
                    "messages": [["execution_interrupted", {}]],
                }
            ),
            Outcome.INTERRUPTED,
        ),
        (entry({"status_str": "error", "messages": "x"}), Outcome.ERROR),
        (entry(None), Outcome.UNKNOWN),
        (entry({}), Outcome.UNKNOWN),
        ({"p": 5}, Outcome.UNKNOWN),
    ],
)
def test_history(answer: Any, outcome: Outcome | None) -> None:
    assert parse_history(answer, "p") is outcome


def test_odd_history() -> None:
    with pytest.raises(BadAnswer):
        parse_history([], "p")


def job(**more: Any) -> Job:
    lease = Arbiter(Clock()).try_acquire(Tenant("comfyui", Kind.EXCLUSIVE))
    assert lease is not None
    return attrs.evolve(Job(lease, 0.0, ids=frozenset({"p"})), **more)


def test_judge() -> None:
    here = QueueView(("p",), ())
    gone = QueueView()
    assert judge(job(), here, Outcome.SUCCESS) is None  # a reused id: history tells of an older one
    assert judge(job(), gone, Outcome.ERROR) is Outcome.ERROR
    assert judge(job(place=3), gone, None) is None
    assert judge(job(place=3, absent=1), gone, None) is Outcome.DELETED
    assert judge(job(place=0, absent=1), gone, None) is Outcome.LOST
    assert judge(job(place=None, absent=1), gone, None) is Outcome.LOST
    assert judge(job(place=3, absent=1, broken=True), gone, None) is Outcome.LOST


ANSWER = b'{"prompt_id": "a-b", "number": 1, "node_errors": {}}'


@pytest.mark.parametrize(
    ("coding", "body", "complete", "found"),
    [
        (None, ANSWER, True, "a-b"),
        (b"identity", ANSWER, True, "a-b"),
        (b"gzip", gzip.compress(ANSWER, mtime=0), True, "a-b"),
        (b"GZIP", gzip.compress(ANSWER, mtime=0), True, "a-b"),
        (b"deflate", zlib.compress(ANSWER), True, "a-b"),
        (b"deflate", zlib.compress(ANSWER)[2:-4], True, "a-b"),
        (b"gzip", gzip.compress(ANSWER, mtime=0)[:20], False, None),
        (b"gzip", b"nonsense", True, None),
        (b"br", ANSWER, True, None),
        (None, ANSWER[:30], False, "a-b"),
        (None, ANSWER[:17], False, None),
        (None, ANSWER[:30], True, None),
        (None, b'{"x": {"prompt_id": "no"', False, None),
        (None, b'{"x": {"prompt_id": "no"}}', True, None),
        (None, b'{"prompt_id": 5}', True, None),
        (None, b'{"prompt_id": "\\u0041"', False, "A"),
        (None, b"[]", True, None),
        (None, b"", True, None),
        (None, b"[" * 60_000, True, None),
    ],
)
def test_prompt_id(coding: bytes | None, body: bytes, complete: bool, found: str | None) -> None:
    headers = [(b"Content-Type", b"application/json")]
    if coding is not None:
        headers.append((b"content-Encoding", coding))
    assert find_prompt_id(headers, body, complete, 65536) == found


def test_prompt_id_of_a_bomb() -> None:
    bomb = gzip.compress(ANSWER[:-1] + b" " * 10**7 + b"}")
    assert find_prompt_id([(b"content-encoding", b"gzip")], bomb, True, 65536) == "a-b"


@given(st.binary(max_size=100), st.booleans(), st.sampled_from([b"gzip", b"deflate", b"", b"x"]))
def test_prompt_id_bears_anything(body: bytes, complete: bool, coding: bytes) -> None:
    find_prompt_id([(b"Content-Encoding", coding)], body, complete, 1000)


def test_progress_is_read_from_events() -> None:
    j = job()

    def tell(kind: str, **data: Any) -> bool:
        event = parse_event(json.dumps({"type": kind, "data": data}).encode())
        assert event is not None
        return apply_event(j, *event, 5.0)

    assert not tell("progress", value=1, max=4, node="2", prompt_id="other")
    assert not tell("status", status={}, prompt_id="p")
    assert j.progress is None and j.last_sign == 0.0
    assert tell("progress", value=1, max=4, node="2", prompt_id="p")
    assert (j.progress and j.progress.value, j.last_sign) == (1, 5.0)
    nodes = {
        "1": {"state": "finished", "value": 1, "max": 1},
        "3": {"state": "running", "value": 2, "max": 9},
    }
    assert tell("progress_state", nodes=nodes, prompt_id="p")
    assert j.progress is not None and (j.progress.node, j.progress.value, j.progress.max) == (
        "3",
        2,
        9,
    )
    assert tell("executing", node="4", prompt_id="p")
    assert j.progress.node == "4"
    assert tell("progress", value="x", max=[], prompt_id="p")
    assert tell("progress_state", nodes=5, prompt_id="p")


@given(st.binary(max_size=80))
def test_events_bear_anything(text: bytes) -> None:
    parse_event(text)


# -- evidence of freed memory --------------------------------------------------------------------------------------


def stats(*devices: Any) -> dict[str, Any]:
    return {"system": {}, "devices": list(devices)}


@pytest.mark.parametrize(
    ("answer", "reserved"),
    [
        (stats({"type": "cuda", "vram_total": 100, "torch_vram_total": 30}), 30),
        (stats({"type": "cuda", "vram_total": 9, "torch_vram_total": 3}, {"type": "cpu"}), 3),
        (stats({"type": "cpu", "vram_total": 100, "torch_vram_total": 100}), None),
        (stats({"type": "mps", "vram_total": 100, "torch_vram_total": 50}), None),
        (stats({"type": "xpu", "vram_total": 100, "torch_vram_total": 100}), None),
        (stats({"type": "cuda", "vram_total": 100}), None),
        (stats(), None),
        ([], None),
        ({"devices": 5}, None),
    ],
)
def test_reserved_memory(answer: Any, reserved: int | None) -> None:
    assert reserved_memory(answer) == reserved


def test_floor_is_learned() -> None:
    floor = Floor()
    floor.note_held(8000 * MIB)
    assert floor.judge(8000 * MIB, 60.0) is Verdict.HELD
    assert floor.judge(300 * MIB, 0.1) is Verdict.HELD
    assert floor.judge(300 * MIB, 1.0) is Verdict.FREED
    floor.note_freed(300 * MIB)
    floor.note_held(8000 * MIB)
    assert floor.judge(300 * MIB + TOLERANCE, 0.0) is Verdict.FREED
    assert floor.judge(2000 * MIB, 1.0) is Verdict.HELD
    assert floor.judge(2000 * MIB, 2.0) is Verdict.KEPT
    assert floor.judge(7000 * MIB, 60.0) is Verdict.HELD
    assert floor.judge(0, 0.0) is Verdict.FREED


# -- the event socket's back-off -----------------------------------------------------------------------------------


def test_events_reconnect_with_back_off_and_at_once_for_a_job() -> None:
    clock = Clock()
    sinks: list[Any] = []
    dropped: list[Any] = []
    changes: list[bool] = []

    def connect(sink: Any) -> Callable[[], None]:
        sinks.append(sink)
        return lambda: dropped.append(sink)

    stream = EventStream(clock, connect, lambda _: None, changes.append)
    stream.start()
    sinks[-1].lost("refused")
    assert stream.state == "waiting"
    for _ in range(60):
        clock.advance(1.0)
        if stream.state == "connecting":
            sinks[-1].lost("refused")
    assert 10 < len(sinks) < 25  # about each five seconds
    count = len(sinks)
    stream.kick()
    assert len(sinks) == count + 1
    sinks[-1].opened()
    assert stream.state == "open" and changes == [True]
    sinks[0].lost("late")  # a stale one
    assert stream.state == "open"
    sinks[-1].lost("gone")
    clock.advance(0.11)
    assert len(sinks) == count + 2 and changes == [True, False]
    stream.stop()
    assert dropped == [sinks[-1]] and clock.getDelayedCalls() == []


# -- nested calls --------------------------------------------------------------------------------------------------


class Nest:
    def __init__(self) -> None:
        self.clock = Clock()
        self.card = Card(self.clock)
        self.active = True
        self.evictions: list[Deferred[Any]] = []

        class Ollama:
            tenant = LLM

        self.card.register(Ollama(), resident=False)  # type: ignore[arg-type]
        self.calls = NestedCalls(self.clock, self.card, "ollama", self.evict, lambda: self.active)

    def evict(self) -> Deferred[Any]:
        self.evictions.append(Deferred())
        return self.evictions[-1].addCallback(lambda _: self.card.mark_evicted("ollama"))


def test_nested_models_are_unloaded_after_the_burst() -> None:
    nest = Nest()
    for _ in range(3):
        leave = nest.calls.enter()
        assert [d.reason for d in nest.card.degraded] == ["nested call"]
        leave()
        leave()
        nest.clock.advance(BURST_IDLE / 2)
    assert nest.calls.count == 0 and not nest.evictions
    nest.clock.advance(BURST_IDLE)
    assert len(nest.evictions) == 1
    nest.evictions[0].callback(None)
    assert not nest.card.degraded and not nest.calls.loaded


def test_the_end_of_a_job_waits_for_nested_calls() -> None:
    nest = Nest()
    first, second = nest.calls.enter(), nest.calls.enter()
    done: list[Any] = []
    nest.calls.finish(60.0).addCallback(done.append)
    first()
    assert not nest.evictions
    second()
    assert len(nest.evictions) == 1 and not done
    nest.evictions[0].callback(None)
    assert done and nest.clock.getDelayedCalls() == []


def test_a_nested_call_during_the_unloading_counts_again() -> None:
    nest = Nest()
    nest.calls.enter()()
    nest.clock.advance(BURST_IDLE)
    leave = nest.calls.enter()
    nest.evictions[0].callback(None)
    assert nest.card.resident == {"ollama"} and nest.card.degraded
    leave()
    nest.clock.advance(BURST_IDLE)
    assert len(nest.evictions) == 2


def test_nested_models_belong_to_others_once_the_job_is_gone() -> None:
    nest = Nest()
    leave = nest.calls.enter()
    nest.active = False
    leave()
    nest.clock.advance(BURST_IDLE)
    assert not nest.evictions and not nest.card.degraded


# -- the engine and the simulated ComfyUI --------------------------------------------------------------------------

AGENT = Agent(reactor, pool=HTTPConnectionPool(reactor, persistent=False))


def clean() -> bool:
    sockets = [reader for reader in reactor.getReaders() if isinstance(reader, (Connection, Port))]
    return not sockets and not reactor.getDelayedCalls()


async def until(condition: Callable[[], Any], seconds: float = 10.0) -> float:
    began = reactor.seconds()
    while not condition():
        assert reactor.seconds() < began + seconds, "waited in vain"
        await deferLater(reactor, 0.005)
    passed: float = reactor.seconds() - began
    return passed


class FakeOllama:
    """A neighbour that leaves when told."""

    tenant = LLM

    def __init__(self) -> None:
        self.evictions = 0

    def evict(self) -> Deferred[Eviction]:
        self.evictions += 1
        return deferLater(reactor, 0.01, lambda: Eviction.CONFIRMED)


@attrs.define(eq=False)
class Rig:
    sim: ComfySim
    engine: ComfyEngine
    arbiter: Arbiter
    card: Card
    ollama: FakeOllama
    ended: list[tuple[str, str | None, bool]]

    async def call(
        self, path: str, payload: Any = None
    ) -> tuple[int, bytes, list[tuple[bytes, bytes]]]:
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        response = await treq.post(self.sim.url + path, data=data, agent=AGENT)
        headers = [(k, v) for k, vs in response.headers.getAllRawHeaders() for v in vs]
        return response.code, await response.content(), headers

    async def lease(self) -> Lease:
        lease = await self.arbiter.acquire(self.engine.tenant, "POST /prompt")
        room = self.card.make_room(self.engine.tenant)
        if room is not None:
            await room
        return lease

    async def submit(self, graph: Any, lease: Lease | None = None, **more: Any) -> Lease:
        """What the data path does with a POST /prompt."""
        lease = lease or await self.lease()
        self.engine.begin_post(lease)
        payload = graph if isinstance(graph, bytes) else {"prompt": graph, **more}
        code, body, headers = await self.call("/prompt", payload)
        self.engine.post_answered(lease, code, headers, body, True)
        return lease

    async def prompt_id(self, lease: Lease) -> str:
        await until(
            lambda: self.engine.job and self.engine.job.lease is lease and self.engine.job.prompt_id
        )
        assert self.engine.job is not None and self.engine.job.prompt_id is not None
        return self.engine.job.prompt_id

    async def idle(self, seconds: float = 10.0) -> float:
        return await until(lambda: self.arbiter.state == "idle", seconds)

    @property
    def outcomes(self) -> list[str]:
        return [outcome for outcome, _, _ in self.ended]


@asynccontextmanager
async def rig(
    *, start: bool = True, events: bool = True, engine: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Rig]:
    options = {"load_time": 0.1, "free_time": 0.05, "step_time": 0.01, **options}
    host = GpuHost(reactor, 1.0, ollama=False, comfy_options=options)
    await host.start()
    arbiter, card, ollama = Arbiter(reactor), Card(reactor), FakeOllama()
    upstream = Upstream.parse(host.comfy.url)
    client = make_client(reactor, upstream, connect_timeout=2.0)
    connect: Any = make_connect_events(reactor, upstream, connect_timeout=2.0)
    settings: dict[str, Any] = {
        "job_timeout": 30.0,
        "job_timeout_action": "release",
        "history_poll_interval": 0.2,
        "free_timeout": 5.0,
        "probe_timeout": 2.0,
        "prompt_capture_limit": 65536,
        **(engine or {}),
    }
    if not events:
        connect = lambda sink: lambda: None  # noqa: E731
    comfy = ComfyEngine(client, reactor, arbiter, card, connect, **settings)
    card.register(comfy)
    card.register(ollama, resident=False)
    ended: list[tuple[str, str | None, bool]] = []
    comfy.add_job_listener(lambda outcome, _, id_, handed: ended.append((outcome, id_, handed)))
    try:
        if start:
            await comfy.start()
            if events:
                await until(lambda: comfy.snapshot()["events"] == "open")
        yield Rig(host.comfy, comfy, arbiter, card, ollama, ended)
    finally:
        comfy.stop()
        await client.close()
        await host.stop()
    await until(clean)


@pytest_twisted.ensureDeferred
async def test_a_job_from_post_to_release() -> None:
    async with rig() as r:
        assert r.card.resident == frozenset()  # it was seen to hold nothing
        r.card.mark_resident("ollama")
        lease = await r.submit(image_graph(steps=4))
        assert r.ollama.evictions == 1
        id_ = await r.prompt_id(lease)
        assert r.arbiter.state == "image" and r.card.resident == {"comfyui"}
        await r.idle()
        assert r.ended == [("success", id_, False)]
        assert r.sim.card.used == 0 and r.card.resident == frozenset()
        assert [call[1:] for call in r.sim.free_calls] == [(True, True)]
        assert not lease.active and not r.card.degraded
        shown = r.engine.snapshot()
        assert shown["job"] is None and shown["last_jobs"][0]["outcome"] == "success"
        json.dumps(shown)


@pytest_twisted.ensureDeferred
async def test_a_job_without_event_socket() -> None:
    async with rig(events=False) as r:
        await r.submit(image_graph(steps=2))
        await r.idle()
        assert r.outcomes == ["success"] and r.sim.card.used == 0


@pytest_twisted.ensureDeferred
async def test_errors_end_a_job() -> None:
    async with rig() as r:
        await r.submit(error_graph())
        await r.idle()
        assert r.outcomes == ["error"]


@pytest_twisted.ensureDeferred
async def test_refused_prompts_give_the_card_back_at_once() -> None:
    async with rig() as r:
        lease = await r.submit({})
        assert not lease.active
        assert r.outcomes == ["refused"] and not r.sim.free_calls and not r.card.resident
        lease = await r.lease()
        r.engine.begin_post(lease)
        r.engine.post_failed(lease, False)
        assert not lease.active
        await r.submit(b"{not json")  # 500: its queue is looked at first
        await r.idle(2.0)
        assert r.outcomes == ["refused"] * 3


@pytest_twisted.ensureDeferred
async def test_a_500_that_is_queued_all_the_same_is_watched() -> None:
    async with rig() as r:
        lease = await r.lease()
        r.engine.begin_post(lease)
        _, body, _ = await r.call("/prompt", {"prompt": sleep_graph(0.3)})
        r.engine.post_answered(lease, 500, [], b"oops", True)
        assert await r.prompt_id(lease) == json.loads(body)["prompt_id"]
        await r.idle()
        assert r.outcomes == ["success"]


@pytest.mark.parametrize("how", ["cut", "no id", "failed"])
@pytest_twisted.ensureDeferred
async def test_an_unknown_id_is_looked_for(how: str) -> None:
    async with rig() as r:
        lease = await r.lease()
        r.engine.begin_post(lease)
        await r.call("/prompt", {"prompt": sleep_graph(0.3)})
        if how == "failed":
            r.engine.post_failed(lease, True)
        else:
            r.engine.post_answered(lease, 200, [], b"{", how == "no id")
        await r.prompt_id(lease)
        await r.idle()
        assert r.outcomes == ["success"]


@pytest_twisted.ensureDeferred
async def test_hand_over_skips_the_free() -> None:
    async with rig() as r:
        await r.submit(image_graph(steps=4))
        second = await r.lease()
        assert r.ended[0][2] and not r.sim.free_calls and r.card.resident == {"comfyui"}
        await r.submit(image_graph(steps=2), second)
        await r.idle()
        assert [handed for _, _, handed in r.ended] == [True, False]
        assert r.sim.card.used == 0


@pytest_twisted.ensureDeferred
async def test_free_between_jobs() -> None:
    async with rig(engine={"free_between_jobs": True}) as r:
        await r.submit(image_graph(steps=4))
        second = await r.lease()
        assert r.sim.free_calls and r.sim.card.used == 0
        await r.submit(image_graph(steps=2), second)
        await r.idle()
        assert [handed for _, _, handed in r.ended] == [False, False]


@pytest_twisted.ensureDeferred
async def test_what_was_left_for_a_job_that_does_not_come_is_freed() -> None:
    async with rig() as r:
        await r.submit(image_graph(steps=4))
        second = await r.lease()
        assert r.sim.card.used > 0
        second.release()  # its client left
        await until(lambda: r.sim.card.used == 0)
        await r.idle()
        assert not r.card.resident


@pytest_twisted.ensureDeferred
async def test_a_refused_prompt_after_a_hand_over_frees() -> None:
    async with rig() as r:
        await r.submit(image_graph(steps=4))
        await r.submit({})
        await r.idle()
        assert r.sim.card.used == 0 and r.outcomes == ["success", "refused"]


@pytest_twisted.ensureDeferred
async def test_deleting_and_interrupting_free_the_card_within_a_second() -> None:
    async with rig() as r:
        first = r.sim.submit(sleep_graph(60.0))
        await until(lambda: r.arbiter.state == "image")
        assert r.engine.job is not None and r.engine.job.foreign
        lease = await r.submit(image_graph())  # the foreign job steps aside
        id_ = await r.prompt_id(lease)
        await until(lambda: r.engine.job and r.engine.job.place == 1)
        await r.call("/queue", {"delete": [id_]})
        assert await until(lambda: not lease.active) < 1.0
        assert r.outcomes == ["deleted"]
        # The foreign one has the card again, until it is interrupted.
        await until(lambda: r.engine.job and r.engine.job.foreign)
        assert r.engine.job is not None and r.engine.job.prompt_id == first
        await r.call("/interrupt", {"prompt_id": first})
        assert await r.idle() < 1.5
        assert r.outcomes == ["deleted", "foreign"]
        lease = await r.submit(sleep_graph(60.0))
        await until(lambda: r.engine.job and r.engine.job.place == 0)
        await r.call("/interrupt", {"prompt_id": await r.prompt_id(lease)})
        assert await until(lambda: not lease.active) < 1.0
        assert r.outcomes[-1] == "interrupted"


@pytest_twisted.ensureDeferred
async def test_f02_a_job_that_vanishes_is_lost() -> None:
    async with rig() as r:
        await r.submit(sleep_graph(60.0))
        await until(lambda: r.engine.job and r.engine.job.place == 0)
        r.sim.faults.lose_job()
        await r.idle(8.0)
        assert r.outcomes == ["lost"]


@pytest_twisted.ensureDeferred
async def test_f03_a_restart_loses_the_job() -> None:
    async with rig() as r:
        await r.submit(image_graph(steps=500))
        await until(lambda: r.engine.job and r.engine.job.place == 0)
        await r.sim.restart(0.3)
        assert await r.idle() < 4.0
        assert r.outcomes == ["lost"]
        await until(lambda: r.engine.snapshot()["events"] == "open")
        await r.submit(image_graph(steps=2))
        await r.idle()
        assert r.outcomes == ["lost", "success"]


@pytest_twisted.ensureDeferred
async def test_a_dead_comfyui_is_given_up_after_five_seconds() -> None:
    async with rig() as r:
        await r.submit(sleep_graph(60.0))
        await until(lambda: r.engine.job and r.engine.job.place == 0)
        await r.sim.kill()
        assert 4.0 < await r.idle() < 7.0
        assert r.outcomes == ["lost"] and not r.card.resident


@pytest_twisted.ensureDeferred
async def test_a_hanging_queue_is_no_reason_to_end() -> None:
    async with rig() as r:
        await r.submit(sleep_graph(0.5))
        r.sim.faults.status(500, "/queue", times=2)
        r.sim.faults.garbage("/queue", times=2)
        await r.idle()
        assert r.outcomes == ["success"]


@pytest_twisted.ensureDeferred
async def test_job_timeout_releases_and_the_end_frees_later() -> None:
    async with rig(engine={"job_timeout": 0.4}) as r:
        lease = await r.submit(stubborn_graph(1.5))
        await until(lambda: not lease.active, 3.0)
        assert r.outcomes == ["timeout"]
        assert [d.reason for d in r.card.degraded] == ["job timeout: the job may still run"]
        assert not any(req.path == b"/interrupt" for req in r.sim.requests)
        assert r.engine.snapshot()["abandoned"]
        await until(lambda: not r.card.degraded)
        await r.idle()
        assert r.outcomes == ["timeout"] and not r.card.resident


@pytest_twisted.ensureDeferred
async def test_job_timeout_can_interrupt() -> None:
    async with rig(engine={"job_timeout": 0.4, "job_timeout_action": "interrupt"}) as r:
        lease = await r.submit(sleep_graph(60.0))
        id_ = await r.prompt_id(lease)
        await until(lambda: not lease.active, 3.0)
        await until(lambda: not r.card.degraded)
        await r.idle()
        [sent] = r.sim.requests_for("POST", "/interrupt")
        assert sent.json() == {"prompt_id": id_}


@pytest_twisted.ensureDeferred
async def test_progress_holds_the_job_timeout_off() -> None:
    async with rig(engine={"job_timeout": 0.5}) as r:
        lease = await r.submit(sleep_graph(1.5))
        id_ = await r.prompt_id(lease)
        for step in range(12):
            await deferLater(reactor, 0.1)
            event = {
                "type": "progress",
                "data": {"value": step, "max": 12, "node": "1", "prompt_id": id_},
            }
            r.engine.tap(json.dumps(event).encode())
        shown = r.engine.snapshot()["job"]
        assert shown["progress"] == {"value": 11, "max": 12, "node": "1"}
        assert shown["running_seconds"] > 1
        await r.idle()
        assert r.outcomes == ["success"]


@pytest_twisted.ensureDeferred
async def test_f14_free_during_a_job_waits_for_its_end() -> None:
    async with rig() as r:
        r.card.mark_resident("comfyui")
        r.sim.submit(image_graph(steps=50))
        await until(lambda: r.sim.card.used > 0)
        d = r.engine.evict()
        assert await d is Eviction.CONFIRMED
        assert r.sim.card.used == 0 and r.sim.running is None


@pytest_twisted.ensureDeferred
async def test_f13_a_comfyui_that_never_frees() -> None:
    async with rig(engine={"free_timeout": 1.0}) as r:
        r.sim.faults.ignore_free = True
        await r.submit(image_graph(steps=2))
        await r.idle()
        assert r.card.resident == {"comfyui"}
        assert [d.reason for d in r.card.degraded] == ["did not leave the card in time"]
        await deferLater(reactor, 0.1)
        assert r.arbiter.state == "idle"  # and it is not tried over and over
        r.sim.faults.ignore_free = False
        assert await r.card.evict("comfyui") is Eviction.CONFIRMED
        assert not r.card.degraded


@pytest_twisted.ensureDeferred
async def test_a_busy_comfyui_is_adopted_at_start() -> None:
    async with rig(start=False) as r:
        r.sim.submit(image_graph(steps=30))
        r.sim.submit(image_graph(steps=30))
        resume = r.arbiter.hold()
        await r.engine.start()
        chat: Deferred[Lease] = r.arbiter.acquire(LLM)
        resume()
        assert r.arbiter.state == "image" and r.engine.snapshot()["job"]["foreign"]
        chat_lease = await chat
        assert r.sim.card.used == 0 and not r.sim.pending
        assert r.outcomes == ["foreign"]
        chat_lease.release()


@pytest_twisted.ensureDeferred
async def test_a_foreign_job_beside_a_chat_waits_for_it_and_is_on_record() -> None:
    async with rig() as r:
        chat = await r.arbiter.acquire(LLM)
        r.card.mark_resident("ollama")
        r.sim.submit(sleep_graph(1.0))
        await until(lambda: r.card.degraded)
        assert [d.reason for d in r.card.degraded] == ["foreign job runs beside other models"]
        assert r.arbiter.image_pending
        chat.release()
        await until(lambda: not r.card.degraded)
        assert r.arbiter.state == "image" and r.ollama.evictions == 1
        await r.idle()
        assert r.outcomes == ["foreign"]


@pytest_twisted.ensureDeferred
async def test_a_foreign_job_that_ends_before_the_chat_leaves_the_line_and_is_freed() -> None:
    async with rig() as r:
        chat = await r.arbiter.acquire(LLM)
        r.card.mark_resident("ollama")
        r.sim.submit(image_graph(steps=20))
        await until(lambda: r.arbiter.image_pending)
        await until(lambda: not r.arbiter.image_pending)
        assert r.card.degraded  # its models are still there
        await until(lambda: not r.card.degraded)
        assert r.sim.card.used == 0 and r.card.resident == {"ollama"}
        chat.release()
        assert r.outcomes == []


@pytest_twisted.ensureDeferred
async def test_foreign_jobs_one_after_the_other_advance() -> None:
    async with rig(engine={"job_timeout": 0.8}) as r:
        for _ in range(4):
            r.sim.submit(sleep_graph(0.5))
        await until(lambda: r.engine.job)
        await r.idle()
        assert r.outcomes == ["foreign"]


@pytest_twisted.ensureDeferred
async def test_freeing_bears_errors() -> None:
    async with rig() as r:
        r.sim.submit(image_graph(steps=1))
        await until(lambda: r.engine.job)
        r.sim.faults.status(500, "/system_stats", times=2)
        r.sim.faults.garbage("/system_stats", times=1)
        r.sim.faults.drop("POST /free", times=1)
        await r.idle()
        assert r.sim.card.used == 0 and not r.card.degraded


@pytest_twisted.ensureDeferred
async def test_freeing_without_system_stats_waits_for_the_worker() -> None:
    async with rig() as r:
        r.sim.faults.status(404, "/system_stats")
        await r.submit(image_graph(steps=1))
        await r.idle()
        assert r.sim.card.used == 0 and not r.card.resident


@pytest_twisted.ensureDeferred
async def test_a_process_that_dies_after_a_job_was_given_up_ends_the_interval() -> None:
    async with rig(engine={"job_timeout": 0.3}) as r:
        lease = await r.submit(stubborn_graph(60.0))
        await until(lambda: not lease.active, 3.0)
        assert r.card.degraded
        await r.sim.kill()
        await until(lambda: not r.card.degraded, 8.0)


@pytest_twisted.ensureDeferred
async def test_i01_nested_calls_hold_the_lease() -> None:
    async with rig() as r:
        assert r.engine.enter_nested() is None
        lease = await r.submit(sleep_graph(0.2))
        leave = r.engine.enter_nested()
        assert leave is not None
        assert [d.reason for d in r.card.degraded] == ["nested call"]
        await until(lambda: not r.sim.running and r.engine.job and r.engine.job.outcome)
        await deferLater(reactor, 0.1)
        assert lease.active
        leave()
        await r.idle()
        assert r.ollama.evictions == 1 and not r.card.degraded and not r.card.resident


@pytest_twisted.ensureDeferred
async def test_stop_in_the_middle_leaves_nothing() -> None:
    async with rig() as r:
        lease = await r.submit(sleep_graph(60.0))
        await until(lambda: r.engine.job and r.engine.job.place == 0)
        r.engine.stop()
        assert not lease.active


@pytest_twisted.ensureDeferred
async def test_stop_while_freeing_leaves_nothing() -> None:
    async with rig() as r:
        r.sim.faults.ignore_free = True
        lease = await r.submit(image_graph(steps=1))
        await until(lambda: r.engine.snapshot()["job"]["phase"] == "freeing")
        r.engine.stop()
        assert not lease.active


@pytest_twisted.ensureDeferred
async def test_start_without_comfyui_is_bounded_and_it_may_come_later() -> None:
    async with rig(start=False) as r:
        await r.sim.stop_listening()
        await r.engine.start()
        assert r.card.resident == {"comfyui"}
        r.sim.start_listening()
        await until(lambda: r.engine.snapshot()["events"] == "open")
        await r.submit(image_graph(steps=1))
        await r.idle()
        assert r.outcomes == ["success"]


@pytest_twisted.ensureDeferred
async def test_our_socket_has_a_name_of_its_own() -> None:
    async with rig() as r:
        [name] = r.sim.sockets
        assert name.startswith("turnstile-") and len(name) > 40
        [request] = r.sim.requests_for("GET", "/ws")
        assert request.header(b"sec-websocket-extensions") is None
        assert request.header(b"origin") is None
