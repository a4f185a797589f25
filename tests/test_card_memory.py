"""How the card waits for the memory that an engine left, and what it makes of a probe that disagrees with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_card import FakeEngine
from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock

from turnstile.arbiter import Kind
from turnstile.card import (
    DID_NOT_LEAVE,
    GONE_WAIT,
    MEMORY_NOT_BACK,
    UNREACHABLE,
    Card,
    Eviction,
)
from turnstile.vram import Back, Reading, Vram
from turnstile.vram.reading import GIB


class Memory:
    """A probe whose waits end when the test says so."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.waits: list[tuple[bool, float, Callable[[], bool]]] = []
        self.pending: list[Deferred[Back]] = []
        self.works = True
        self.still: Callable[[], bool] = lambda: False

    def leaving(self) -> None:
        self.said.append("leaving")

    def note_empty(self, still: Callable[[], bool]) -> None:
        self.said.append("empty")
        self.still = still

    def returned(
        self, certain: bool, patience: float, overtaken: Callable[[], bool]
    ) -> Deferred[Back] | None:
        if not self.works:
            return None
        self.waits.append((certain, patience, overtaken))
        self.pending.append(Deferred())
        return self.pending[-1]

    def end(self, how: Back) -> None:
        self.pending.pop(0).callback(how)


class Host:
    def __init__(self) -> None:
        self.clock = Clock()
        self.memory = Memory()
        self.card = Card(self.clock, memory=self.memory)
        self.ollama = FakeEngine("ollama", answer=Eviction.CONFIRMED)
        self.comfy = FakeEngine("comfyui", Kind.EXCLUSIVE, answer=Eviction.CONFIRMED)
        self.sd = FakeEngine("sd", Kind.EXCLUSIVE, answer=Eviction.CONFIRMED)
        for engine in (self.ollama, self.comfy, self.sd):
            self.card.register(engine, resident=False)
        self.evictions: list[tuple[str, Eviction, float]] = []
        self.card.add_eviction_listener(lambda *what: self.evictions.append(what))

    def room(self, engine: FakeEngine) -> list[str]:
        made: list[str] = []
        d = self.card.make_room(engine.tenant)
        if d is None:
            made.append("at once")
        else:
            d.addCallback(lambda _: made.append("made"))
        return made

    def open(self) -> list[tuple[str, str]]:
        return [(interval.culprit, interval.reason) for interval in self.card.degraded]


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.mark.parametrize("how", [Back.FLOOR, Back.FREE, Back.STABLE, Back.UNKNOWN])
def test_room_is_made_when_the_memory_is_back(host: Host, how: Back) -> None:
    host.card.mark_resident("ollama")
    made = host.room(host.comfy)
    host.clock.advance(2.0)
    assert made == [] and host.card.resident == {"ollama"} and host.card.switching()
    [(certain, patience, _)] = host.memory.waits
    assert certain and patience == float("inf")
    host.memory.end(how)
    assert made == ["made"] and not host.card.resident and not host.card.degraded
    # The engine took no time; the memory's is told by the probe.
    assert host.evictions == [("ollama", Eviction.CONFIRMED, 0.0)]
    assert host.memory.said == ["leaving", "empty"]


def test_after_a_free_the_memory_is_waited_for_too(host: Host) -> None:
    host.card.mark_resident("comfyui")
    outcomes: list[Eviction] = []
    host.card.evict("comfyui").addCallback(outcomes.append)
    # A chat that comes meanwhile waits as well.
    made = host.room(host.ollama)
    assert outcomes == [] and made == []
    host.memory.end(Back.FLOOR)
    assert outcomes == [Eviction.CONFIRMED] and made == ["made"] and len(host.memory.waits) == 1


def test_without_a_probe_nothing_is_waited_for(host: Host) -> None:
    host.memory.works = False
    host.card.mark_resident("ollama")
    assert host.room(host.comfy) == ["made"]


def test_memory_that_does_not_come_back_is_a_doubt(host: Host) -> None:
    host.card.mark_resident("ollama")
    made = host.room(host.comfy)
    host.memory.end(Back.TIMED_OUT)
    assert made == ["made"] and not host.card.resident
    assert host.open() == [("ollama", MEMORY_NOT_BACK)]
    # It ends with the next wait that does not.
    host.card.mark_resident("comfyui")
    made = host.room(host.ollama)
    host.memory.end(Back.STABLE)
    assert made == ["made"] and not host.card.degraded


def test_an_engine_that_did_not_leave_is_not_waited_for(host: Host) -> None:
    host.ollama.answer = Eviction.TIMED_OUT
    host.card.mark_resident("ollama")
    assert host.room(host.comfy) == ["made"]
    assert not host.memory.waits and host.open() == [("ollama", DID_NOT_LEAVE)]


@pytest.mark.parametrize("how", [Back.FREE, Back.TIMED_OUT, Back.UNKNOWN])
def test_one_that_nobody_answers_for_is_waited_for_a_little(host: Host, how: Back) -> None:
    host.ollama.answer = Eviction.UNREACHABLE
    host.card.mark_resident("ollama")
    made = host.room(host.comfy)
    [(certain, patience, _)] = host.memory.waits
    assert not certain and patience == GONE_WAIT
    host.memory.end(how)
    assert made == ["made"] and host.open() == [("ollama", UNREACHABLE)]


def test_nobody_answers_and_nothing_is_used(host: Host) -> None:
    host.ollama.answer = Eviction.UNREACHABLE
    host.card.mark_resident("ollama")
    made = host.room(host.comfy)
    host.memory.end(Back.FLOOR)
    assert made == ["made"] and not host.card.degraded and not host.card.resident
    assert host.evictions == [("ollama", Eviction.CONFIRMED, 0.0)]


def test_memory_that_others_hold_is_not_waited_for(host: Host) -> None:
    """Of several the last to leave is waited for: before that nobody can tell whose memory it is."""
    host.card.mark_resident("ollama")
    host.card.mark_resident("comfyui")
    made = host.room(host.sd)
    assert host.comfy.calls == host.ollama.calls == 1 and len(host.memory.waits) == 1
    host.memory.end(Back.FLOOR)
    assert made == ["made"]


def test_a_tenant_that_is_there_itself_hides_what_the_other_left(host: Host) -> None:
    host.card.mark_resident("ollama")
    host.card.mark_resident("comfyui")
    assert host.room(host.ollama) == ["made"]
    assert not host.memory.waits and host.card.resident == {"ollama"}


def test_work_that_comes_meanwhile_ends_the_wait(host: Host) -> None:
    host.card.mark_resident("comfyui")
    outcomes: list[Eviction] = []
    host.card.evict("comfyui").addCallback(outcomes.append)
    [(_, _, overtaken)] = host.memory.waits
    assert not overtaken()
    host.card.mark_resident("comfyui")
    assert overtaken()
    host.memory.end(Back.UNKNOWN)
    assert outcomes == [Eviction.CONFIRMED] and host.card.resident == {"comfyui"}


def test_a_stop_ends_the_wait(host: Host) -> None:
    host.card.mark_resident("comfyui")
    host.card.evict("comfyui")
    [(_, _, overtaken)] = host.memory.waits
    host.card.stop()
    assert overtaken()


def test_a_card_that_was_empty_all_the_time(host: Host) -> None:
    host.card.mark_resident("ollama")
    host.card.mark_evicted("ollama")
    still = host.memory.still
    assert host.memory.said == ["empty"] and still()
    host.card.mark_resident("comfyui")
    assert not still()
    host.card.mark_evicted("comfyui")
    # Somebody was there in between.
    assert not still() and host.memory.still()


def test_a_card_that_is_not_empty_is_not_learned_from(host: Host) -> None:
    host.card.mark_resident("ollama")
    host.card.mark_resident("comfyui")
    host.card.mark_evicted("ollama")
    assert host.memory.said == []


class Probe:
    """A real watch's probe."""

    name = "probe"
    used = GIB

    def open(self) -> Deferred[str]:
        return succeed("a card")

    def read(self) -> Deferred[Reading]:
        return succeed(Reading(self.used, 24 * GIB))


def test_a_switch_is_as_fast_as_before_where_the_memory_is_back_at_once() -> None:
    clock, probe = Clock(), Probe()
    vram = Vram(clock, [probe], wait=45.0, free=2 * GIB)
    vram.start()
    card = Card(clock, memory=vram)
    ollama = FakeEngine("ollama", answer=Eviction.CONFIRMED)
    comfy = FakeEngine("comfyui", Kind.EXCLUSIVE)
    card.register(ollama, resident=False)
    card.register(comfy, resident=False)
    for _ in range(3):
        card.mark_resident("ollama")
        made: list[object] = []
        d = card.make_room(comfy.tenant)
        assert d is not None
        d.addCallback(made.append)
        assert made == [None] and clock.seconds() == 0.0
    # And waits where it is not.
    card.mark_resident("ollama")
    probe.used = 15 * GIB
    d = card.make_room(comfy.tenant)
    assert d is not None
    d.addCallback(made.append)
    clock.pump([0.01] * 50)
    assert len(made) == 1 and card.resident == {"ollama"}
    probe.used = GIB
    clock.pump([0.01] * 50)
    assert len(made) == 2 and not card.resident
    vram.stop()
    assert not clock.getDelayedCalls()
