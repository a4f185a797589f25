"""The wait until the memory is back: the decision, the watch around it, and the thread that may hang."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import attrs
import pytest
import pytest_twisted
from engine_kit import Http, Response, clean, reactor, result_of, run, until
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet import error
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock
from twisted.logger import globalLogPublisher
from twisted.python.failure import Failure

from turnstile.engines.client import JsonClient
from turnstile.vram.amdgpu import AmdgpuProbe
from turnstile.vram.back import FELL_TIME, HELD_TIME, LOOKS, STILL, TOLERANCE, Back, Floor, Wait
from turnstile.vram.choice import ComfySource, make_vram
from turnstile.vram.reading import GIB, MIB, ProbeError, Reading
from turnstile.vram.watch import (
    FAILURES,
    LOOK_TIMEOUT,
    SEARCH_AGAIN,
    SETTLED,
    STALE,
    Threaded,
    Vram,
)
from turnstile.vram.worker import Worker

FREE = 2 * GIB
TOTAL = 24 * GIB

_T = TypeVar("_T")

# -- the decision --------------------------------------------------------------------------------------------------


def test_few_enough_is_back_whatever_was_seen() -> None:
    wait = Wait(Floor(FREE), None, certain=False)
    assert wait.judge(FREE + 1, 0.0) is None
    assert wait.judge(FREE, 0.1) is Back.FREE


def test_the_floor_counts_for_a_desktop_that_uses_more() -> None:
    floor = Floor(FREE, least=3 * GIB)
    assert Wait(floor, 15 * GIB, certain=False).judge(3 * GIB + TOLERANCE, 0.0) is Back.FLOOR
    assert Wait(floor, 15 * GIB, certain=False).judge(3 * GIB + TOLERANCE + 1, 0.0) is None


def test_the_floor_is_the_least_ever_seen() -> None:
    floor = Floor(FREE)
    for used, least in ((5, 5), (7, 5), (3, 3), (4, 3)):
        floor.learn(used)
        assert floor.least == least


def judged(wait: Wait, readings: list[tuple[float, int]]) -> tuple[float, Back] | None:
    """When what was decided."""
    for at, used in readings:
        verdict = wait.judge(used, at)
        if verdict is not None:
            return at, verdict
    return None


def steady(used: int, seconds: float, begin: float = 0.0) -> list[tuple[float, int]]:
    return [(begin + i / 10, used) for i in range(round(seconds * 10) + 1)]


def test_what_fell_and_stays_is_back() -> None:
    wait = Wait(Floor(FREE), 15 * GIB, certain=True)
    readings = [*steady(15 * GIB, 1.0), *steady(3 * GIB, 9.0, 1.1)]
    assert judged(wait, readings) == (pytest.approx(1.1 + FELL_TIME), Back.STABLE)
    assert wait.proves(Back.STABLE)


def test_what_still_falls_is_not_back() -> None:
    wait = Wait(Floor(FREE), 20 * GIB, certain=True)
    readings = [(i / 10, 20 * GIB - i * (STILL + MIB)) for i in range(100)]
    assert judged(wait, readings) is None


def test_what_did_not_fall_takes_longer_and_proves_nothing() -> None:
    for before in (None, 15 * GIB, 15 * GIB + TOLERANCE):
        wait = Wait(Floor(FREE), before, certain=True)
        assert judged(wait, steady(15 * GIB, 9.0)) == (pytest.approx(HELD_TIME), Back.STABLE)
        assert not wait.proves(Back.STABLE)


def test_few_looks_show_no_rest() -> None:
    wait = Wait(Floor(FREE), 15 * GIB, certain=True)
    at = [10.0 * i for i in range(LOOKS)]
    assert [wait.judge(3 * GIB, t) for t in at] == [None] * (LOOKS - 1) + [Back.STABLE]


def test_rest_counts_only_with_the_engines_own_evidence() -> None:
    wait = Wait(Floor(FREE), 15 * GIB, certain=False)
    assert judged(wait, steady(3 * GIB, 100.0)) is None


def test_what_proves_the_floor() -> None:
    wait = Wait(Floor(FREE), 15 * GIB, certain=True)
    # Few enough, it may still be falling.
    assert not wait.proves(Back.FREE) and wait.proves(Back.FLOOR)
    assert not wait.proves(Back.TIMED_OUT) and not wait.proves(Back.UNKNOWN)


@given(
    least=st.none() | st.integers(0, TOTAL),
    before=st.none() | st.integers(0, TOTAL),
    certain=st.booleans(),
    steps=st.lists(st.tuples(st.floats(0.01, 1.0), st.integers(0, TOTAL)), max_size=40),
)
def test_no_reading_above_all_floors_is_back_without_rest(
    least: int | None, before: int | None, certain: bool, steps: list[tuple[float, int]]
) -> None:
    floor = Floor(FREE, least)
    wait = Wait(floor, before, certain)
    now, seen = 0.0, []
    for step, used in steps:
        now += step
        seen.append((now, used))
        verdict = wait.judge(used, now)
        low = used <= FREE or (least is not None and used <= least + TOLERANCE)
        assert (verdict in (Back.FLOOR, Back.FREE)) == low
        if verdict is Back.STABLE:
            assert certain
            rest = [value for at, value in seen if at >= now - FELL_TIME]
            assert max(rest) - min(rest) <= 2 * STILL
        if verdict is not None:
            break


# -- the watch -----------------------------------------------------------------------------------------------------


class Host:
    """A probe whose card the test sets."""

    name = "fake"

    def __init__(self) -> None:
        self.used: int = GIB
        self.error: str | None = None
        self.looks = 0
        self.opened = 0
        #: Set: answers come when the test says so.
        self.slow: list[tuple[Deferred[Reading], Reading]] | None = None

    def open(self) -> Deferred[str]:
        self.opened += 1
        return fail(ProbeError(self.error)) if self.error else succeed("a card")

    def read(self) -> Deferred[Reading]:
        self.looks += 1
        if self.error:
            return fail(ProbeError(self.error))
        if self.slow is None:
            return succeed(Reading(self.used, TOTAL))
        d: Deferred[Reading] = Deferred()
        self.slow.append((d, Reading(self.used, TOTAL)))
        return d

    def answer(self) -> None:
        assert self.slow is not None
        d, reading = self.slow.pop(0)
        d.callback(reading)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def watch(clock: Clock, host: Host) -> Iterator[Vram]:
    vram = Vram(clock, [host], wait=45.0, free=FREE)
    assert result_of(vram.start()) == [None] and vram.works
    yield vram
    vram.stop()
    assert clock.getDelayedCalls() == []


@pytest.fixture
def logged() -> Iterator[list[str]]:
    texts: list[str] = []

    def note(event: dict[str, Any]) -> None:
        if event.get("log_format"):
            texts.append(event["log_format"].format(**event))

    globalLogPublisher.addObserver(note)
    yield texts
    globalLogPublisher.removeObserver(note)


def never() -> bool:
    return False


def returned(watch: Vram, certain: bool = True, patience: float = 1000.0) -> list[Any]:
    d = watch.returned(certain, patience, never)
    assert d is not None
    return result_of(d)


def test_memory_that_is_back_costs_no_time(watch: Vram, host: Host, clock: Clock) -> None:
    assert returned(watch) == [Back.FREE]
    assert host.looks == 2 and clock.seconds() == 0


def test_looks_come_soon_and_then_less_often(watch: Vram, host: Host, clock: Clock) -> None:
    host.used = 15 * GIB
    watch.leaving()
    at: list[float] = []
    watch.add_reading_listener(lambda _: at.append(clock.seconds()))
    result = returned(watch, certain=False)
    run(clock, 45.5)
    assert result == [Back.TIMED_OUT]
    assert at[:4] == pytest.approx([0.0, 0.01, 0.03, 0.07], abs=0.005)
    assert max(b - a for a, b in pairwise(at)) <= 0.26
    assert at[-1] == pytest.approx(45.0, abs=0.02)


def test_it_ends_when_the_memory_is_back(watch: Vram, host: Host, clock: Clock) -> None:
    host.used = 15 * GIB
    watch.leaving()
    result = returned(watch)
    run(clock, 1.0)
    assert result == []
    assert watch.snapshot()["waiting"]
    host.used = GIB
    run(clock, 0.3)
    assert result == [Back.FREE]
    assert watch.snapshot()["last_wait"]["outcome"] == "free" and not watch.snapshot()["waiting"]


def test_a_desktop_of_three_gigabytes_costs_half_a_second_once(
    watch: Vram, host: Host, clock: Clock
) -> None:
    for expected in (Back.STABLE, Back.FLOOR, Back.FLOOR):
        host.used = 15 * GIB
        watch.leaving()
        host.used = 3 * GIB
        began = clock.seconds()
        result = returned(watch)
        while not result:
            clock.advance(0.01)
        assert result == [expected]
        assert clock.seconds() - began <= (1.0 if expected is Back.STABLE else 0.0)


def test_the_floor_is_learned_while_nobody_is_there(watch: Vram, host: Host, clock: Clock) -> None:
    host.used = 3 * GIB
    watch.note_empty(lambda: True)
    assert watch.floor.least == 3 * GIB
    # The driver took its time: once more a little later.
    host.used = 2 * GIB
    clock.advance(SETTLED)
    assert watch.floor.least == 2 * GIB


def test_the_floor_is_learned_while_a_probe_is_looked_for(clock: Clock, host: Host) -> None:
    """At the start the engines may have been looked at first."""
    host.slow = []
    vram = Vram(clock, [host], wait=45.0, free=FREE)
    started = result_of(vram.start())
    vram.note_empty(lambda: True)
    host.used = 9 * GIB
    host.answer()
    assert started == [None] and vram.floor.least == GIB
    vram.stop()
    assert clock.getDelayedCalls() == []


def test_the_floor_is_not_learned_of_a_card_in_use(watch: Vram, host: Host, clock: Clock) -> None:
    empty = [True]
    host.slow = []
    watch.note_empty(lambda: empty[0])
    empty[0] = False
    host.answer()
    clock.advance(SETTLED)
    assert watch.floor.least is None and host.looks == 2


def test_what_was_looked_at_before_it_left_is_no_evidence(
    watch: Vram, host: Host, clock: Clock
) -> None:
    """Too low a reading from before (another engine's start) must not end the wait."""
    host.slow = []
    watch.leaving()
    host.used = 15 * GIB
    result = returned(watch)
    host.answer()
    assert result == []
    host.answer()
    assert result == []
    host.used = GIB
    clock.advance(0.01)
    host.answer()
    assert result == [Back.FREE]


def test_the_reading_from_before_tells_that_it_fell(watch: Vram, host: Host, clock: Clock) -> None:
    host.slow = []
    host.used = 15 * GIB
    watch.leaving()
    host.used = 3 * GIB
    result = returned(watch)
    for _ in range(200):
        while host.slow:
            host.answer()
        if result:
            break
        clock.advance(0.01)
    assert result == [Back.STABLE] and clock.seconds() < HELD_TIME


def test_without_evidence_only_the_floor_counts_and_not_for_long(
    watch: Vram, host: Host, clock: Clock
) -> None:
    host.used = 15 * GIB
    watch.leaving()
    host.used = 3 * GIB
    result = returned(watch, certain=False, patience=5.0)
    run(clock, 4.9)
    assert result == []
    run(clock, 0.2)
    assert result == [Back.TIMED_OUT]


def test_time_outs_are_told_once(watch: Vram, host: Host, clock: Clock, logged: list[str]) -> None:
    ups = [0]

    def restless() -> None:
        # It never rests, so that nothing can be said of it.
        ups[0] += 1
        host.used = 15 * GIB + (ups[0] % 2) * GIB

    watch.add_reading_listener(lambda _: restless())
    watch.leaving()
    for _ in range(2):
        result = returned(watch)
        run(clock, 46.0)
        assert result == [Back.TIMED_OUT]
    told = [text for text in logged if "did not come back" in text]
    assert len(told) == 1 and "within 45.0 s" in told[0] and "not known" in told[0]


def test_an_engine_that_got_work_is_not_waited_for(watch: Vram, host: Host, clock: Clock) -> None:
    host.used = 15 * GIB
    overtaken = [False]
    d = watch.returned(True, 1000.0, lambda: overtaken[0])
    assert d is not None
    result = result_of(d)
    run(clock, 0.5)
    overtaken[0] = True
    run(clock, 0.3)
    assert result == [Back.UNKNOWN]


def test_a_stop_ends_the_wait(watch: Vram, host: Host, clock: Clock) -> None:
    host.used = 15 * GIB
    result = returned(watch)
    run(clock, 0.5)
    watch.stop()
    assert result == [Back.UNKNOWN]
    assert watch.returned(True, 10.0, never) is None


def test_waiting_can_be_switched_off(clock: Clock, host: Host) -> None:
    vram = Vram(clock, [host], wait=0.0, free=FREE)
    vram.start()
    looks = host.looks
    vram.leaving()
    assert vram.returned(True, 10.0, never) is None and host.looks == looks
    vram.stop()


def test_a_hanging_probe_is_bounded_by_the_wait(watch: Vram, host: Host, clock: Clock) -> None:
    host.slow = []
    result = returned(watch)
    run(clock, 44.9, 0.1)
    assert result == []
    run(clock, 0.2, 0.1)
    assert result == [Back.TIMED_OUT]
    host.answer()


def test_a_failing_probe_is_given_up_and_looked_for_again(
    watch: Vram, host: Host, clock: Clock, logged: list[str]
) -> None:
    host.error = "the driver is gone"
    result = returned(watch)
    run(clock, 1.0)
    assert result == [Back.UNKNOWN] and not watch.works
    assert watch.snapshot()["problem"] == "the driver is gone"
    assert len([text for text in logged if "fails: the driver is gone" in text]) == 1
    # Nobody waits for nothing.
    assert watch.returned(True, 10.0, never) is None
    assert result_of(watch.read()) == [None]
    host.error = None
    assert result_of(watch.read()) == [None]
    clock.advance(SEARCH_AGAIN)
    assert result_of(watch.read()) == [Reading(host.used, TOTAL)] and watch.works


def test_one_failure_ends_nothing(watch: Vram, host: Host, clock: Clock, logged: list[str]) -> None:
    host.used = 15 * GIB
    result = returned(watch)
    assert FAILURES > 2
    host.error = "a hiccup"
    run(clock, 0.02)
    host.error, host.used = None, GIB
    run(clock, 0.3)
    assert result == [Back.FREE]
    assert any("works again" in text for text in logged)


def test_the_first_probe_that_works_is_used(clock: Clock, logged: list[str]) -> None:
    hosts = [Host(), Host(), Host()]
    hosts[0].error, hosts[0].name = "not installed", "nvml"
    hosts[1].name, hosts[1].used = "amdgpu", 5 * GIB
    vram = Vram(clock, hosts, wait=45.0, free=FREE)
    assert result_of(vram.start()) == [None]
    assert vram.snapshot()["probe"] == "amdgpu" and not hosts[2].opened
    assert "memory probe: amdgpu watches a card, 5.0 of 24.0 GiB used" in logged
    vram.stop()


@pytest.mark.parametrize("named", [True, False])
def test_none_that_works_is_told(clock: Clock, host: Host, logged: list[str], named: bool) -> None:
    host.error = "not there"
    vram = Vram(clock, [host], wait=45.0, free=FREE, named=named)
    levels: list[str] = []

    def note(event: dict[str, Any]) -> None:
        if "no memory probe" in str(event.get("log_format")):
            levels.append(event["log_level"].name)

    globalLogPublisher.addObserver(note)
    assert result_of(vram.start()) == [None] and not vram.works
    globalLogPublisher.removeObserver(note)
    assert levels == ["warn" if named else "info"]
    assert "no memory probe: the engines' own word has to do (fake: not there)" in logged
    assert vram.returned(True, 10.0, never) is None
    vram.note_empty(lambda: True)
    vram.leaving()
    vram.stop()
    assert clock.getDelayedCalls() == []


def test_no_probe_configured(clock: Clock) -> None:
    vram = Vram(clock, [], wait=45.0, free=FREE)
    assert result_of(vram.start()) == [None]
    assert result_of(vram.read()) == [None] and vram.snapshot()["probe"] is None
    vram.stop()


def test_those_who_ask_share_a_look(watch: Vram, host: Host) -> None:
    host.slow = []
    looks = host.looks
    one, two, gone = watch.read(), watch.read(), watch.read()
    gone.addErrback(lambda _: None)
    gone.cancel()
    results = result_of(one), result_of(two)
    host.answer()
    assert host.looks == looks + 1
    assert results == ([Reading(host.used, TOTAL)],) * 2


def test_a_page_asks_for_new_figures(watch: Vram, host: Host, clock: Clock) -> None:
    looks = host.looks
    host.slow = []
    clock.advance(STALE)
    assert watch.snapshot()["used"] == GIB and host.looks == looks
    host.used = 2 * GIB
    clock.advance(0.1)
    shown = watch.snapshot()
    assert shown["used"] == GIB and shown["age"] == pytest.approx(STALE + 0.1)
    assert watch.snapshot() == shown and host.looks == looks + 1
    host.answer()
    shown = watch.snapshot()
    assert shown["used"] == 2 * GIB and shown["age"] == 0 and shown["total"] == TOTAL


def test_listeners_hear_and_do_no_harm(watch: Vram, host: Host, clock: Clock) -> None:
    readings: list[Reading | None] = []
    waits: list[tuple[Back, float]] = []

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    watch.add_reading_listener(broken)
    watch.add_wait_listener(broken)
    watch.add_reading_listener(readings.append)
    watch.add_wait_listener(lambda how, seconds: waits.append((how, seconds)))
    assert returned(watch) == [Back.FREE]
    host.error = "gone"
    watch.read()
    assert readings == [Reading(GIB, TOTAL), None] and waits == [(Back.FREE, 0.0)]


# -- the thread ----------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_the_worker_runs_elsewhere() -> None:
    worker = Worker(reactor)
    try:
        where = await worker.run(threading.current_thread, 60.0)
        assert where is not threading.current_thread() and where.daemon
        assert await worker.run(threading.current_thread, 60.0) is where

        def broken() -> None:
            raise ProbeError("no")

        with pytest.raises(ProbeError, match="no"):
            await worker.run(broken, 60.0)
    finally:
        worker.stop()
    with pytest.raises(ProbeError, match="stops"):
        await worker.run(threading.current_thread, 60.0)
    where.join(60.0)
    assert not where.is_alive()
    await until(clean)


@pytest_twisted.ensureDeferred
async def test_a_job_that_hangs_is_left_alone() -> None:
    worker = Worker(reactor)
    go_on = threading.Event()
    jobs: list[str] = []

    def hang() -> str:
        go_on.wait(60.0)
        jobs.append("hung")
        return "late"

    try:
        with pytest.raises(ProbeError, match="no answer within"):
            await worker.run(hang, 0.05)
        # Not queued behind it.
        with pytest.raises(ProbeError, match="still hangs"):
            await worker.run(lambda: jobs.append("queued"), 60.0)
        go_on.set()
        while True:
            try:
                await worker.run(lambda: jobs.append("next"), 60.0)
                break
            except ProbeError:
                await Deferred.fromCoroutine(tick())
        assert jobs == ["hung", "next"]
    finally:
        go_on.set()
        worker.stop()
    await until(clean)


async def tick() -> None:
    d: Deferred[None] = Deferred()
    reactor.callLater(0.005, d.callback, None)
    await d


@pytest_twisted.ensureDeferred
async def test_a_caller_that_leaves_the_worker() -> None:
    worker = Worker(reactor)
    d = worker.run(lambda: 1, 60.0)
    d.addErrback(lambda _: None)
    d.cancel()
    worker.stop()
    await until(clean)


class Inline:
    """Runs in the caller's thread."""

    def run(self, job: Callable[[], _T], timeout: float) -> Deferred[_T]:
        assert timeout == LOOK_TIMEOUT
        try:
            return succeed(job())
        except ProbeError:
            return fail()

    def stop(self) -> None:
        """Nothing to stop."""


class Blocking:
    name = "blocking"

    def open(self) -> str:
        return "a card"

    def read(self) -> Reading:
        return Reading(1, 2)


def test_a_blocking_probe_is_asked_by_the_worker(clock: Clock) -> None:
    vram = Vram(clock, [Threaded(Blocking(), Inline())], wait=1.0, free=0)
    vram.start()
    assert vram.reading == Reading(1, 2) and vram.snapshot()["probe"] == "blocking"
    vram.stop()


# -- ComfyUI as a probe, and the choice ----------------------------------------------------------------------------


def comfy(http: Http, clock: Clock) -> JsonClient:
    return JsonClient(http, clock, "http://comfy")


def test_comfyui_tells_the_memory_of_its_card(clock: Clock) -> None:
    http = Http()
    device = {"type": "cuda", "vram_total": 24 * GIB, "vram_free": 20 * GIB, "torch_vram_free": GIB}
    http.answer = lambda *_: {"devices": [device]}
    source = ComfySource(comfy(http, clock))
    assert result_of(source.open()) == ["its card (24.0 GiB)"]
    assert result_of(source.read()) == [Reading(5 * GIB, 24 * GIB)]


@pytest.mark.parametrize(
    "answer",
    [error.ConnectionRefusedError(), Response(500, b""), {"devices": [{"type": "cpu"}]}, []],
)
def test_comfyui_that_does_not_tell(clock: Clock, answer: Any) -> None:
    http = Http()
    http.answer = lambda *_: answer
    [failure] = result_of(ComfySource(comfy(http, clock)).read())
    assert isinstance(failure, Failure) and failure.check(ProbeError)


@attrs.define
class Settings:
    vram_probe: str = "auto"
    vram_probe_command: str | None = None
    gpu: str | None = None
    vram_wait: float = 45.0
    free_gib: float = 2.0


@pytest_twisted.ensureDeferred
async def test_a_command_is_the_probe() -> None:
    settings: Any = Settings(vram_probe_command="echo 1GiB 8GiB")
    vram = make_vram(reactor, settings)
    await vram.start()
    assert vram.snapshot()["probe"] == "command"
    assert vram.reading == Reading(GIB, 8 * GIB)
    vram.stop()
    await until(clean)


@pytest_twisted.ensureDeferred
async def test_comfyui_is_the_last_resort(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr("turnstile.vram.choice.AmdgpuProbe", lambda gpu: AmdgpuProbe(gpu, tmp_path))
    http = Http()
    http.answer = lambda *_: {
        "devices": [{"type": "cuda", "vram_total": 8, "vram_free": 7, "torch_vram_free": 0}]
    }
    settings: Any = Settings()
    vram = make_vram(reactor, settings, JsonClient(http, reactor, "http://comfy"))
    await vram.start()
    assert vram.snapshot()["probe"] == "comfyui"
    assert json.dumps(vram.snapshot())
    vram.stop()
    await until(clean)


def test_no_probe_at_all() -> None:
    settings: Any = Settings(vram_probe="none")
    vram = make_vram(reactor, settings, None)
    assert result_of(vram.start()) == [None] and not vram.works
    vram.stop()
