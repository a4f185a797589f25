"""Residency: how one tenant makes room for the next, and when the promise of one tenant is not kept."""

from __future__ import annotations

import pytest
from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.task import Clock
from twisted.logger import globalLogPublisher
from twisted.python.failure import Failure

from turnstile.arbiter import Kind, Tenant
from turnstile.card import (
    CAME_BACK,
    DID_NOT_LEAVE,
    EVICT_RETRY_AFTER,
    NOT_TRIED,
    UNREACHABLE,
    Card,
    Degraded,
    Eviction,
)


class FakeEngine:
    """An engine whose evictions end when the test says so, or at once with ``answer``."""

    def __init__(self, name: str, kind: Kind = Kind.SHARED, answer: Eviction | None = None) -> None:
        self.tenant = Tenant(name, kind)
        self.answer = answer
        self.calls = 0
        self.pending: list[Deferred[Eviction]] = []

    def evict(self) -> Deferred[Eviction]:
        self.calls += 1
        if self.answer is not None:
            return succeed(self.answer)
        d: Deferred[Eviction] = Deferred()
        self.pending.append(d)
        return d

    def end(self, outcome: Eviction = Eviction.CONFIRMED) -> None:
        self.pending.pop(0).callback(outcome)


class Host:
    """A card with three engines."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.card = Card(self.clock)
        self.ollama = FakeEngine("ollama")
        self.llama = FakeEngine("llamacpp")
        self.comfy = FakeEngine("comfyui", Kind.EXCLUSIVE)
        for engine in (self.ollama, self.llama, self.comfy):
            self.card.register(engine, resident=False)
        self.said: list[tuple[str, str, bool]] = []
        self.evictions: list[tuple[str, Eviction, float]] = []
        self.card.add_listener(self._hear)
        self.card.add_eviction_listener(lambda *what: self.evictions.append(what))

    def _hear(self, interval: Degraded) -> None:
        self.said.append((interval.culprit, interval.reason, interval.ended is None))

    def room(self, engine: FakeEngine) -> list[str]:
        """Ask for room; the list gets an entry once it was made."""
        made: list[str] = []
        d = self.card.make_room(engine.tenant)
        if d is None:
            made.append("at once")
        else:
            d.addCallbacks(lambda _: made.append("made"), lambda f: made.append(f.type.__name__))
        return made

    def open(self) -> list[tuple[str, str]]:
        return [(interval.culprit, interval.reason) for interval in self.card.degraded]


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def logged() -> object:
    events: list[dict[str, object]] = []
    globalLogPublisher.addObserver(events.append)
    yield events
    globalLogPublisher.removeObserver(events.append)


# -- the ordinary switch ----------------------------------------------------------------------------------------------


def test_nobody_to_evict_is_answered_at_once(host: Host) -> None:
    assert host.card.make_room(host.ollama.tenant) is None
    host.card.mark_resident("ollama")
    assert host.card.make_room(host.ollama.tenant) is None
    assert not host.ollama.calls


def test_unknown_engines_count_as_resident(host: Host) -> None:
    late = FakeEngine("sd-server", Kind.EXCLUSIVE)
    host.card.register(late)
    assert host.card.resident == {"sd-server"}
    made = host.room(host.ollama)
    assert not made and host.card.switching()
    late.end()
    assert made == ["made"] and not host.card.resident and not host.card.switching()


def test_every_other_engine_leaves_one_after_the_other(host: Host) -> None:
    for name in ("ollama", "llamacpp", "comfyui"):
        host.card.mark_resident(name)
    made = host.room(host.comfy)
    assert (host.llama.calls, host.ollama.calls) == (1, 0)
    host.clock.advance(2)
    host.llama.end()
    assert not made and host.ollama.calls == 1
    host.clock.advance(3)
    host.ollama.end()
    assert made == ["made"] and not host.comfy.calls
    assert host.card.resident == {"comfyui"}
    assert host.evictions == [
        ("llamacpp", Eviction.CONFIRMED, 2),
        ("ollama", Eviction.CONFIRMED, 3),
    ]
    assert not host.said


def test_waiters_of_one_tenant_share_the_switch(host: Host) -> None:
    host.card.mark_resident("comfyui")
    one, two = host.room(host.ollama), host.room(host.ollama)
    assert host.comfy.calls == 1
    host.comfy.end()
    assert one == two == ["made"] and host.comfy.calls == 1


def test_one_of_them_may_leave(host: Host) -> None:
    host.card.mark_resident("comfyui")
    first = host.card.make_room(host.ollama.tenant)
    assert first is not None
    errors: list[Failure] = []
    first.addErrback(errors.append)
    two = host.room(host.ollama)
    first.cancel()
    assert errors[0].check(CancelledError) and not two
    host.comfy.end()
    assert two == ["made"] and host.comfy.calls == 1


def test_the_switch_goes_on_without_those_who_asked(host: Host) -> None:
    """What was begun is finished, so that residency stays known; nobody further is evicted for nobody."""
    host.card.mark_resident("llamacpp")
    host.card.mark_resident("ollama")
    d = host.card.make_room(host.comfy.tenant)
    assert d is not None
    d.addErrback(lambda _: None)
    d.cancel()
    host.llama.end()
    assert host.card.resident == {"ollama"} and not host.ollama.calls
    assert not host.card.switching()
    again = host.room(host.comfy)
    host.ollama.end()
    assert again == ["made"]


def test_one_who_comes_while_the_others_have_left_is_served(host: Host) -> None:
    host.card.mark_resident("llamacpp")
    host.card.mark_resident("ollama")
    d = host.card.make_room(host.comfy.tenant)
    assert d is not None
    d.addErrback(lambda _: None)
    d.cancel()
    made = host.room(host.comfy)
    host.llama.end()
    host.ollama.end()
    assert made == ["made"] and not host.card.resident


def test_two_tenants_switch_one_after_the_other(host: Host) -> None:
    host.card.mark_resident("llamacpp")
    one, two = host.room(host.ollama), host.room(host.comfy)
    host.card.mark_resident("ollama")
    assert host.llama.calls == 1 and not host.ollama.calls
    host.llama.end()
    assert one == ["made"] and not two and host.ollama.calls == 1
    host.ollama.end()
    assert two == ["made"] and not host.card.resident


def test_a_thousand_joined_waiters_drain(host: Host) -> None:
    host.card.mark_resident("comfyui")
    made = [host.room(host.ollama) for _ in range(1000)]
    host.comfy.end()
    assert made == [["made"]] * 1000 and host.comfy.calls == 1


def test_a_thousand_who_ask_for_an_eviction_drain(host: Host) -> None:
    host.card.mark_resident("comfyui")
    outcomes: list[Eviction] = []
    for _ in range(1000):
        host.card.evict("comfyui").addCallback(outcomes.append)
    host.comfy.end()
    assert outcomes == [Eviction.CONFIRMED] * 1000 and host.comfy.calls == 1


def test_waiters_may_cancel_each_other(host: Host) -> None:
    host.card.mark_resident("comfyui")
    deferreds = [host.card.make_room(host.ollama.tenant) for _ in range(3)]
    ends: list[object] = []
    for d in deferreds:
        assert d is not None
        d.addBoth(ends.append)
    assert deferreds[0] is not None and deferreds[1] is not None
    deferreds[0].addCallback(lambda _: deferreds[1].cancel())  # type: ignore[union-attr]
    host.comfy.end()
    assert len(ends) == 3
    assert [isinstance(end, Failure) for end in ends] == [False, True, False]


def test_a_waiter_may_ask_again_inside_its_answer(host: Host) -> None:
    host.card.mark_resident("comfyui")
    second: list[list[str]] = []
    d = host.card.make_room(host.ollama.tenant)
    assert d is not None
    d.addCallback(lambda _: host.card.mark_resident("comfyui"))
    d.addCallback(lambda _: second.append(host.room(host.ollama)))
    host.comfy.end()
    assert second == [[]] and host.comfy.calls == 2
    host.comfy.end()
    assert second == [["made"]]


# -- evict one --------------------------------------------------------------------------------------------------------


def test_evicting_one_that_is_not_there_is_done_at_once(host: Host) -> None:
    outcomes: list[Eviction] = []
    host.card.evict("comfyui").addCallback(outcomes.append)
    assert outcomes == [Eviction.CONFIRMED] and not host.comfy.calls


def test_evict_queues_behind_a_switch_and_finds_the_work_done(host: Host) -> None:
    host.card.mark_resident("comfyui")
    made = host.room(host.ollama)
    outcomes: list[Eviction] = []
    host.card.evict("comfyui").addCallback(outcomes.append)
    host.comfy.end()
    assert made == ["made"] and outcomes == [Eviction.CONFIRMED] and host.comfy.calls == 1


def test_cancelling_evict_leaves_the_eviction_to_finish(host: Host, logged: list[object]) -> None:
    host.card.mark_resident("comfyui")
    d = host.card.evict("comfyui")
    d.addErrback(lambda f: f.trap(CancelledError))
    d.cancel()
    assert host.card.resident == {"comfyui"} and not host.said
    host.comfy.end()
    assert not host.card.resident and not host.said and not logged


def test_evict_tells_its_outcome(host: Host) -> None:
    host.card.mark_resident("comfyui")
    outcomes: list[Eviction] = []
    host.card.evict("comfyui").addCallback(outcomes.append)
    host.comfy.end(Eviction.TIMED_OUT)
    assert outcomes == [Eviction.TIMED_OUT]
    assert host.open() == [("comfyui", DID_NOT_LEAVE)]


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_failed_eviction_is_not_tried_again_for_a_while(host: Host) -> None:
    host.card.mark_resident("ollama")
    made = host.room(host.comfy)
    host.clock.advance(60)
    host.ollama.end(Eviction.TIMED_OUT)
    assert made == ["made"] and host.open() == [("ollama", DID_NOT_LEAVE)]
    host.card.mark_resident("comfyui")
    host.clock.advance(EVICT_RETRY_AFTER - 1)
    assert host.room(host.comfy) == ["at once"] and host.ollama.calls == 1
    assert ("ollama", NOT_TRIED) in host.open()


def test_then_one_probe_is_made_for_all(host: Host) -> None:
    host.card.mark_resident("ollama")
    host.room(host.comfy)
    host.ollama.end(Eviction.TIMED_OUT)
    host.clock.advance(EVICT_RETRY_AFTER)
    made = [host.room(host.comfy) for _ in range(5)]
    assert host.ollama.calls == 2
    host.ollama.end(Eviction.TIMED_OUT)
    assert made == [["made"]] * 5 and host.ollama.calls == 2
    assert host.room(host.comfy) == ["at once"] and host.ollama.calls == 2
    host.clock.advance(EVICT_RETRY_AFTER)
    probe = host.room(host.comfy)
    host.ollama.end()
    assert probe == ["made"] and not host.open() and not host.card.resident


def test_a_success_closes_the_breaker(host: Host) -> None:
    host.card.mark_resident("ollama")
    host.room(host.comfy)
    host.ollama.end(Eviction.TIMED_OUT)
    host.card.mark_evicted("ollama")
    host.card.mark_resident("ollama")
    assert not host.room(host.comfy) and host.ollama.calls == 2


def test_the_others_still_leave_if_one_does_not(host: Host) -> None:
    host.card.mark_resident("llamacpp")
    host.card.mark_resident("ollama")
    made = host.room(host.comfy)
    host.llama.end(Eviction.TIMED_OUT)
    assert not made
    host.ollama.end()
    assert made == ["made"] and host.card.resident == {"llamacpp"}
    # The interval must not end with the other's success: the new tenant is about to load beside the one that stayed.
    assert host.open() == [("llamacpp", DID_NOT_LEAVE)]


def test_a_broken_breaker_does_not_spare_the_others(host: Host) -> None:
    host.card.mark_resident("llamacpp")
    host.room(host.comfy)
    host.llama.end(Eviction.TIMED_OUT)
    host.card.mark_resident("ollama")
    made = host.room(host.comfy)
    assert host.llama.calls == 1 and host.ollama.calls == 1
    assert ("llamacpp", NOT_TRIED) in host.open()
    host.ollama.end()
    assert made == ["made"]


def test_a_degraded_interval_begins_and_ends_once(host: Host) -> None:
    host.card.mark_resident("ollama")
    host.room(host.comfy)
    host.clock.advance(5)
    host.ollama.end(Eviction.TIMED_OUT)
    host.card.degrade("ollama", DID_NOT_LEAVE)
    host.clock.advance(5)
    host.card.mark_evicted("ollama")
    host.card.restore("ollama", DID_NOT_LEAVE)
    assert host.said == [("ollama", DID_NOT_LEAVE, True), ("ollama", DID_NOT_LEAVE, False)]
    (interval,) = host.card.history
    assert (interval.began, interval.ended) == (5, 10) and host.card.degraded_total == 1


def test_the_interval_ends_when_the_culprit_has_the_card_alone(host: Host) -> None:
    host.card.mark_resident("ollama")
    host.room(host.comfy)
    host.ollama.end(Eviction.TIMED_OUT)
    host.card.mark_resident("comfyui")
    made = host.room(host.ollama)
    assert host.open() == [("ollama", DID_NOT_LEAVE)]
    host.comfy.end()
    assert made == ["made"] and not host.open()
    # Next time it is told again, since it is not tried yet.
    host.room(host.comfy)
    assert host.open() == [("ollama", NOT_TRIED)]
    assert host.room(host.ollama) == ["at once"] and not host.open()


def test_an_unreachable_engine_is_gone_but_doubtful(host: Host) -> None:
    host.card.mark_resident("ollama")
    made = host.room(host.comfy)
    host.ollama.end(Eviction.UNREACHABLE)
    assert made == ["made"] and not host.card.resident
    assert host.open() == [("ollama", UNREACHABLE)]
    assert host.room(host.comfy) == ["at once"] and host.ollama.calls == 1
    host.clock.advance(9)
    host.card.mark_resident("ollama")
    assert not host.open() and host.card.history[0].ended == 9


def test_unreachable_after_a_failure_replaces_the_doubt(host: Host) -> None:
    host.card.mark_resident("ollama")
    host.room(host.comfy)
    host.ollama.end(Eviction.TIMED_OUT)
    host.room(host.comfy)
    host.clock.advance(EVICT_RETRY_AFTER)
    host.room(host.comfy)
    host.ollama.end(Eviction.UNREACHABLE)
    assert host.open() == [("ollama", UNREACHABLE)]
    # Back again, it is evicted like any other: the old failure is of a process that is gone.
    host.card.mark_resident("ollama")
    assert not host.open() and not host.room(host.comfy) and host.ollama.calls == 3


class Raises(FakeEngine):
    def evict(self) -> Deferred[Eviction]:
        super().evict()
        raise ZeroDivisionError


class Fails(FakeEngine):
    def evict(self) -> Deferred[Eviction]:
        super().evict().errback(ZeroDivisionError())
        return self.pending.pop()


@pytest.mark.parametrize("engine", [Raises("bad"), Fails("bad")], ids=["raises", "fails"])
def test_an_engine_that_raises_counts_as_one_that_does_not_leave(
    engine: FakeEngine, host: Host, logged: list[dict[str, object]]
) -> None:
    engine.calls = 0
    host.card.register(engine)
    assert host.room(host.comfy) == ["made"]
    assert host.open() == [("bad", DID_NOT_LEAVE)] and host.card.resident == {"bad"}
    assert host.evictions == [("bad", Eviction.TIMED_OUT, 0)]
    assert host.room(host.comfy) == ["at once"] and engine.calls == 1
    outcomes: list[Eviction] = []
    host.card.evict("bad").addCallback(outcomes.append)
    assert outcomes == [Eviction.TIMED_OUT] and not host.card.switching()
    assert all(e["log_failure"].check(ZeroDivisionError) for e in logged)  # type: ignore[attr-defined]
    assert len(logged) == 2


def test_a_failing_listener_does_no_harm(host: Host, logged: list[dict[str, object]]) -> None:
    def boom(*_: object) -> None:
        raise ZeroDivisionError

    host.card._listeners.insert(0, boom)
    host.card._eviction_listeners.insert(0, boom)
    host.card.mark_resident("ollama")
    made = host.room(host.comfy)
    host.ollama.end(Eviction.TIMED_OUT)
    assert made == ["made"] and host.said == [("ollama", DID_NOT_LEAVE, True)]
    assert len(host.evictions) == 1 and len(logged) == 2


# -- races ------------------------------------------------------------------------------------------------------------


def test_a_tenant_that_is_being_evicted_waits_for_that(host: Host) -> None:
    """The image job that wanted the room has gone; a chat gets the card while its engine is still told to leave."""
    host.card.mark_resident("ollama")
    image = host.card.make_room(host.comfy.tenant)
    assert image is not None
    image.addErrback(lambda _: None)
    image.cancel()
    chat = host.room(host.ollama)
    assert not chat
    host.ollama.end()
    assert chat == ["made"]
    host.card.mark_resident("ollama")
    assert host.card.resident == {"ollama"}
    assert not host.room(host.comfy) and host.ollama.calls == 2


def test_the_same_with_an_eviction_by_name(host: Host) -> None:
    host.card.mark_resident("llamacpp")
    host.card.mark_resident("comfyui")
    # A switch is under way, an eviction of ComfyUI waits behind it, and then comes a job for ComfyUI.
    host.room(host.ollama)
    host.card.evict("comfyui")
    host.comfy.end(Eviction.TIMED_OUT)
    job = host.room(host.comfy)
    assert not job
    host.llama.end()
    host.comfy.end()
    assert job == ["made"]


def test_work_during_an_eviction_outlives_its_confirmation(host: Host) -> None:
    """The engine got work after it had shown that it was empty: it stays resident."""
    host.card.mark_resident("ollama")
    outcomes: list[Eviction] = []
    host.card.evict("ollama").addCallback(outcomes.append)
    host.card.mark_resident("ollama")
    host.ollama.end()
    assert outcomes == [Eviction.CONFIRMED] and host.card.resident == {"ollama"}
    assert not host.room(host.comfy)


def test_unreachable_is_no_news_of_an_engine_that_got_work_meanwhile(host: Host) -> None:
    host.card.mark_resident("ollama")
    host.card.evict("ollama")
    host.card.mark_resident("ollama")
    host.ollama.end(Eviction.UNREACHABLE)
    assert host.card.resident == {"ollama"} and not host.open()


def test_the_engines_own_word_during_an_eviction_counts(host: Host) -> None:
    host.card.mark_resident("ollama")
    host.card.evict("ollama")
    host.card.mark_resident("ollama")
    host.card.mark_evicted("ollama")
    host.ollama.end()
    assert not host.card.resident


def test_an_engine_that_comes_back_during_the_switch_is_evicted_again(host: Host) -> None:
    host.card.mark_resident("llamacpp")
    host.card.mark_resident("ollama")
    made = host.room(host.comfy)
    host.llama.end()
    host.card.mark_resident("llamacpp")
    host.ollama.end()
    assert not made and host.llama.calls == 2
    host.llama.end()
    assert made == ["made"] and not host.card.resident and not host.said


def test_one_that_keeps_coming_back_does_not_hold_up_others_for_ever(host: Host) -> None:
    class Ghost(FakeEngine):
        def evict(self) -> Deferred[Eviction]:
            d = super().evict()
            host.card.mark_resident("ghost")
            return d

    ghost = Ghost("ghost", answer=Eviction.CONFIRMED)
    host.card.register(ghost)
    assert host.room(host.comfy) == ["made"]
    assert ghost.calls == 2 and host.open() == [("ghost", CAME_BACK)]
    host.card.mark_evicted("ghost")
    assert not host.open()


def test_one_who_joins_a_switch_that_is_at_its_end_gets_one_of_its_own(host: Host) -> None:
    nested: list[list[str]] = []

    class Asks(FakeEngine):
        def evict(self) -> Deferred[Eviction]:
            d = super().evict()
            nested.append(host.room(self))
            return d

    asks = Asks("asks")
    host.card.register(asks)
    host.card.mark_resident("llamacpp")
    first = host.room(asks)
    host.card.evict("asks")
    # The end of the switch begins the eviction, before those who waited for the switch are told.
    host.llama.end()
    assert first == ["made"] and nested == [[]]
    asks.end()
    assert nested == [["made"]]


def test_a_mark_for_an_unknown_engine_changes_nothing(host: Host) -> None:
    with pytest.raises(KeyError):
        host.card.mark_resident("nobody")
    assert not host.card.resident
