"""The arbiter, case by case."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.logger import globalLogPublisher
from twisted.python.failure import Failure

from turnstile.arbiter import (
    Abandoned,
    Arbiter,
    ArbiterClosed,
    Event,
    Granted,
    Kind,
    Lease,
    Queued,
    Released,
    Tenant,
    Transition,
    WaitTimeout,
)

OLLAMA = Tenant("ollama", Kind.SHARED)
LLAMA = Tenant("llamacpp", Kind.SHARED)
COMFY = Tenant("comfyui", Kind.EXCLUSIVE)
SD = Tenant("sd-server", Kind.EXCLUSIVE)


class Desk:
    """An arbiter, and what became of each request by its label."""

    def __init__(self, *, image_burst: int = 0, max_inflight: int = 0) -> None:
        self.clock = Clock()
        self.arbiter = Arbiter(self.clock, image_burst=image_burst, max_inflight=max_inflight)
        self.leases: dict[str, Lease] = {}
        self.errors: dict[str, type[BaseException]] = {}
        self.order: list[str] = []
        self.asked: dict[str, Deferred[Lease]] = {}
        self.events: list[Event] = []
        self.arbiter.add_listener(self.events.append)

    def ask(
        self,
        tenant: Tenant,
        label: str,
        timeout: float | None = None,
        then: Callable[[Lease], object] | None = None,
    ) -> Deferred[Lease]:
        def granted(lease: Lease) -> None:
            self.order.append(label)
            self.leases[label] = lease
            if then is not None:
                then(lease)

        def failed(failure: Failure) -> None:
            self.errors[label] = failure.type

        d = self.asked[label] = self.arbiter.acquire(tenant, label, timeout=timeout)
        d.addCallback(granted)
        d.addErrback(failed)
        return d

    def ask_all(self, *requests: tuple[Tenant, str]) -> None:
        for tenant, label in requests:
            self.ask(tenant, label)

    def end(self, *labels: str) -> None:
        for label in labels:
            self.leases[label].release()

    def story(self) -> list[str]:
        """The events in short."""
        said = []
        for event in self.events:
            if isinstance(event, Queued):
                said.append(f"queued {event.waiter.label}")
            elif isinstance(event, Abandoned):
                said.append(f"abandoned {event.waiter.label} {event.why}")
            elif isinstance(event, Granted):
                said.append(f"granted {event.lease.label}")
            elif isinstance(event, Released):
                said.append(f"released {event.lease.label}")
            else:
                names = [t.name if t else "idle" for t in (event.before, event.after)]
                said.append(" -> ".join(names))
        return said


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def logged() -> object:
    events: list[dict[str, object]] = []
    globalLogPublisher.addObserver(events.append)
    yield events
    globalLogPublisher.removeObserver(events.append)


# -- the seed's table -------------------------------------------------------------------------------------------------


def test_llm_requests_run_together(desk: Desk) -> None:
    desk.ask_all((OLLAMA, "a"), (OLLAMA, "b"), (OLLAMA, "c"))
    assert desk.order == ["a", "b", "c"]
    assert (desk.arbiter.state, desk.arbiter.llm_inflight) == ("llm", 3)
    desk.end("a", "c")
    assert (desk.arbiter.state, desk.arbiter.llm_inflight) == ("llm", 1)
    desk.end("b")
    assert (desk.arbiter.state, desk.arbiter.llm_inflight) == ("idle", 0)


def test_an_image_waits_for_llms_to_drain(desk: Desk) -> None:
    desk.ask_all((OLLAMA, "a"), (OLLAMA, "b"), (COMFY, "i"))
    assert desk.arbiter.image_pending
    desk.end("a")
    assert desk.order == ["a", "b"]
    desk.end("b")
    assert desk.order == ["a", "b", "i"]
    assert desk.arbiter.state == "image" and not desk.arbiter.image_pending


def test_new_llms_block_while_an_image_is_pending(desk: Desk) -> None:
    desk.ask_all((OLLAMA, "a"), (COMFY, "i"), (OLLAMA, "b"))
    assert desk.order == ["a"]
    desk.end("a")
    assert desk.order == ["a", "i"]
    desk.end("i")
    assert desk.order == ["a", "i", "b"]


def test_images_are_first_come_first_served_across_engines(desk: Desk) -> None:
    desk.ask_all((COMFY, "1"), (SD, "2"), (COMFY, "3"), (SD, "4"))
    for label in "1234":
        assert desk.order[-1] == label and len(desk.arbiter.leases) == 1
        desk.end(label)
    assert desk.arbiter.state == "idle"


def test_a_cancelled_waiter_leaves_without_a_trace(desk: Desk) -> None:
    desk.ask_all((COMFY, "i"), (OLLAMA, "a"), (OLLAMA, "b"))
    desk.asked["a"].cancel()
    assert desk.errors == {"a": CancelledError}
    assert [w.label for w in desk.arbiter.waiting(Kind.SHARED)] == ["b"]
    desk.end("i")
    assert desk.order == ["i", "b"] and desk.arbiter.llm_inflight == 1


def test_a_cancelled_image_reopens_admission(desk: Desk) -> None:
    desk.ask_all((OLLAMA, "a"), (COMFY, "i"), (OLLAMA, "b"), (OLLAMA, "c"))
    desk.asked["i"].cancel()
    assert desk.order == ["a", "b", "c"]


def test_the_second_image_keeps_admission_closed(desk: Desk) -> None:
    desk.ask_all((OLLAMA, "a"), (COMFY, "i"), (COMFY, "j"), (OLLAMA, "b"))
    desk.asked["i"].cancel()
    assert desk.order == ["a"]
    desk.end("a")
    assert desk.order == ["a", "j"]


def test_waiting_ends_after_its_time(desk: Desk) -> None:
    desk.ask(COMFY, "i")
    desk.ask(OLLAMA, "a", timeout=10)
    desk.clock.advance(9)
    assert not desk.errors
    desk.clock.advance(1)
    assert desk.errors == {"a": WaitTimeout}
    desk.end("i")
    assert desk.arbiter.state == "idle" and not desk.clock.getDelayedCalls()


def test_an_image_that_timed_out_reopens_admission(desk: Desk) -> None:
    desk.ask(OLLAMA, "a")
    desk.ask(COMFY, "i", timeout=5)
    desk.ask(OLLAMA, "b", timeout=5)
    desk.clock.advance(5)
    assert desk.errors == {"i": WaitTimeout}
    assert desk.order == ["a", "b"] and not desk.clock.getDelayedCalls()


def test_a_grant_stops_the_clock(desk: Desk) -> None:
    desk.ask(COMFY, "i")
    desk.ask(OLLAMA, "a", timeout=10)
    desk.end("i")
    assert not desk.clock.getDelayedCalls()
    desk.clock.advance(20)
    assert desk.leases["a"].active and not desk.errors


def test_reject_mode_never_waits_and_never_overtakes(desk: Desk) -> None:
    arbiter = desk.arbiter
    first = arbiter.try_acquire(OLLAMA)
    assert first is not None and arbiter.try_acquire(OLLAMA) is not None
    assert arbiter.try_acquire(LLAMA) is None and arbiter.try_acquire(COMFY) is None
    desk.ask(COMFY, "i")
    assert arbiter.try_acquire(OLLAMA) is None
    for lease in arbiter.leases:
        lease.release()
    assert arbiter.state == "image"
    assert arbiter.try_acquire(OLLAMA) is None and arbiter.try_acquire(COMFY) is None


def test_reject_mode_does_not_overtake_another_tenant(desk: Desk) -> None:
    desk.ask_all((OLLAMA, "a"), (LLAMA, "b"))
    assert desk.arbiter.try_acquire(OLLAMA) is None


def test_release_twice_is_release_once(desk: Desk) -> None:
    desk.ask_all((OLLAMA, "a"), (OLLAMA, "b"), (COMFY, "i"))
    lease = desk.leases["a"]
    lease.release()
    lease.release()
    assert desk.arbiter.llm_inflight == 1 and desk.order == ["a", "b"]
    assert not lease.active


def test_cancelling_a_fired_grant_changes_nothing(desk: Desk) -> None:
    desk.ask(OLLAMA, "a").cancel()
    assert desk.leases["a"].active and desk.arbiter.llm_inflight == 1


# -- several tenants --------------------------------------------------------------------------------------------------


def test_two_llm_engines_never_hold_leases_together(desk: Desk) -> None:
    desk.ask_all((OLLAMA, "a"), (LLAMA, "b"))
    assert desk.order == ["a"] and desk.arbiter.tenant == OLLAMA
    desk.end("a")
    assert desk.order == ["a", "b"] and desk.arbiter.tenant == LLAMA


def test_a_waiter_of_another_tenant_closes_admission(desk: Desk) -> None:
    desk.ask_all((OLLAMA, "a"), (LLAMA, "b"), (OLLAMA, "c"))
    assert desk.order == ["a"]
    desk.end("a")
    assert desk.order == ["a", "b"]
    desk.end("b")
    assert desk.order == ["a", "b", "c"]


def test_all_waiters_of_the_granted_tenant_enter_together(desk: Desk) -> None:
    desk.ask_all(
        (COMFY, "i"), (LLAMA, "x"), (OLLAMA, "a"), (LLAMA, "y"), (OLLAMA, "b"), (LLAMA, "z")
    )
    desk.end("i")
    assert desk.order == ["i", "x", "y", "z"]
    desk.ask(LLAMA, "late")
    desk.end("x", "y", "z")
    assert desk.order == ["i", "x", "y", "z", "a", "b"]
    desk.end("a", "b")
    assert desk.order[-1] == "late"


def test_a_waiter_of_another_tenant_that_leaves_opens_admission(desk: Desk) -> None:
    desk.ask_all((OLLAMA, "a"), (LLAMA, "b"), (OLLAMA, "c"))
    desk.asked["b"].cancel()
    assert desk.order == ["a", "c"]


def test_images_go_first_whoever_waits(desk: Desk) -> None:
    desk.ask_all((OLLAMA, "a"), (LLAMA, "b"), (OLLAMA, "c"), (SD, "i"))
    desk.end("a")
    assert desk.order == ["a", "i"]


def test_a_group_enters_whole_even_if_its_first_member_ends_at_once(desk: Desk) -> None:
    """The first of the group releases inside its grant; the second must not meet another tenant's lease."""
    desk.ask(COMFY, "i")
    desk.ask(OLLAMA, "a", then=lambda lease: lease.release())
    desk.ask_all((LLAMA, "x"), (OLLAMA, "b"), (LLAMA, "y"))
    desk.end("i")
    assert desk.order == ["i", "a", "b"]
    assert {lease.tenant for lease in desk.arbiter.leases} == {OLLAMA}
    desk.end("b")
    assert desk.order == ["i", "a", "b", "x", "y"]
    assert {lease.tenant for lease in desk.arbiter.leases} == {LLAMA}


# -- limits -----------------------------------------------------------------------------------------------------------


def test_max_inflight_limits_llm_leases() -> None:
    desk = Desk(max_inflight=2)
    desk.ask_all((OLLAMA, "a"), (OLLAMA, "b"), (OLLAMA, "c"), (OLLAMA, "d"))
    assert desk.order == ["a", "b"] and desk.arbiter.try_acquire(OLLAMA) is None
    desk.end("b")
    assert desk.order == ["a", "b", "c"]
    desk.asked["d"].cancel()
    desk.end("a")
    assert desk.arbiter.llm_inflight == 1 and desk.arbiter.try_acquire(OLLAMA) is not None


def test_a_limited_group_stays_together() -> None:
    desk = Desk(max_inflight=1)
    desk.ask_all((COMFY, "i"), (OLLAMA, "a"), (LLAMA, "x"), (OLLAMA, "b"))
    desk.end("i")
    desk.ask(OLLAMA, "late")
    for label in ("a", "b", "x", "late"):
        assert desk.order[-1] == label
        desk.end(label)
    assert desk.arbiter.state == "idle"


def test_an_image_goes_before_the_rest_of_a_limited_group() -> None:
    desk = Desk(max_inflight=1)
    desk.ask_all((OLLAMA, "a"), (OLLAMA, "b"), (COMFY, "i"))
    desk.end("a")
    assert desk.order == ["a", "i"]


# -- image burst ------------------------------------------------------------------------------------------------------


def run_images(desk: Desk, limit: int) -> None:
    """End whatever holds the card, one lease at a time, until nothing is left."""
    for _ in range(limit):
        for label in list(desk.leases):
            desk.end(label)


def test_without_burst_images_always_go_first() -> None:
    desk = Desk()
    desk.ask_all((COMFY, "1"), (OLLAMA, "a"), (COMFY, "2"), (COMFY, "3"))
    run_images(desk, 5)
    assert desk.order == ["1", "2", "3", "a"]


def test_burst_gives_the_llm_line_a_turn() -> None:
    desk = Desk(image_burst=2)
    desk.ask_all((COMFY, "1"), (OLLAMA, "a"), (COMFY, "2"), (OLLAMA, "b"), (COMFY, "3"))
    desk.end("1")
    assert desk.order == ["1", "2"]
    desk.end("2")
    assert desk.order == ["1", "2", "a", "b"]
    # Whoever comes during the turn waits for the images.
    desk.ask(OLLAMA, "late")
    desk.end("a", "b")
    assert desk.order == ["1", "2", "a", "b", "3"]
    desk.end("3")
    assert desk.order[-1] == "late"


def test_a_turn_takes_in_the_waiters_of_every_tenant_of_that_moment() -> None:
    desk = Desk(image_burst=1)
    desk.ask_all((COMFY, "1"), (OLLAMA, "a"), (LLAMA, "x"), (OLLAMA, "b"), (COMFY, "2"))
    desk.end("1")
    assert desk.order == ["1", "a", "b"]
    desk.ask_all((OLLAMA, "late"), (LLAMA, "later"))
    desk.end("a", "b")
    assert desk.order == ["1", "a", "b", "x"]
    desk.end("x")
    assert desk.order == ["1", "a", "b", "x", "2"]


def test_two_llm_engines_cannot_keep_images_out_by_turns() -> None:
    """A turn is of those who waited when it began: newcomers do not prolong it, whichever engine they are for."""
    desk = Desk(image_burst=1, max_inflight=1)
    desk.ask_all((COMFY, "1"), (OLLAMA, "a0"), (LLAMA, "b0"), (COMFY, "2"))
    desk.end("1")
    for n in range(1, 5):
        desk.ask_all((OLLAMA, f"a{n}"), (LLAMA, f"b{n}"))
        desk.end(desk.order[-1])
        if desk.order[-1] == "2":
            break
    assert desk.order == ["1", "a0", "b0", "2"]


def test_images_without_llm_waiters_do_not_count_for_the_burst() -> None:
    desk = Desk(image_burst=2)
    desk.ask_all((COMFY, "1"), (COMFY, "2"), (COMFY, "3"), (COMFY, "4"), (COMFY, "5"))
    desk.end("1", "2")
    desk.ask(OLLAMA, "a")
    desk.end("3")
    assert desk.order[-1] == "4"
    desk.end("4")
    assert desk.order[-1] == "a"


# -- successor --------------------------------------------------------------------------------------------------------


def test_successor_looks_at_the_head_only(desk: Desk) -> None:
    desk.ask_all((COMFY, "1"))
    lease = desk.leases["1"]
    assert desk.arbiter.successor(lease) is None
    desk.ask(OLLAMA, "a")
    assert desk.arbiter.successor(lease) == OLLAMA
    desk.ask_all((SD, "2"), (COMFY, "3"))
    assert desk.arbiter.successor(lease) == SD
    desk.asked["2"].cancel()
    assert desk.arbiter.successor(lease) == COMFY


def test_successor_knows_of_turns_holds_and_other_leases() -> None:
    desk = Desk(image_burst=1)
    desk.ask_all((COMFY, "1"), (COMFY, "2"), (OLLAMA, "a"))
    assert desk.arbiter.successor(desk.leases["1"]) == OLLAMA
    resume = desk.arbiter.hold()
    assert desk.arbiter.successor(desk.leases["1"]) is None
    resume()
    desk.end("1")
    desk.ask(OLLAMA, "b")
    assert desk.arbiter.successor(desk.leases["1"]) is None
    assert desk.arbiter.successor(desk.leases["a"]) == COMFY
    assert desk.order == ["1", "a"]


# -- start and stop ---------------------------------------------------------------------------------------------------


def test_nothing_is_granted_while_held(desk: Desk) -> None:
    one, two = desk.arbiter.hold(), desk.arbiter.hold()
    desk.ask_all((OLLAMA, "a"), (COMFY, "i"))
    assert desk.arbiter.try_acquire(OLLAMA) is None and desk.arbiter.held
    one()
    one()
    assert not desk.order and desk.arbiter.held
    two()
    assert desk.order == ["i"] and not desk.arbiter.held


def test_leases_may_end_while_held(desk: Desk) -> None:
    desk.ask_all((OLLAMA, "a"), (COMFY, "i"))
    resume = desk.arbiter.hold()
    desk.end("a")
    assert desk.arbiter.state == "idle" and desk.arbiter.image_pending
    resume()
    assert desk.arbiter.state == "image"


def test_a_hold_taken_inside_a_grant_stops_the_line(desk: Desk) -> None:
    resumes: list[Callable[[], None]] = []
    desk.ask(COMFY, "i")
    desk.ask(OLLAMA, "a", then=lambda _: resumes.append(desk.arbiter.hold()))
    desk.ask(OLLAMA, "b")
    desk.end("i")
    assert desk.order == ["i", "a"]
    resumes[0]()
    assert desk.order == ["i", "a", "b"]


def test_close_refuses_everybody_and_leaves_leases_alone(desk: Desk) -> None:
    desk.ask(OLLAMA, "a")
    desk.ask(COMFY, "i", timeout=10)
    desk.ask(OLLAMA, "b", timeout=10)
    desk.arbiter.close()
    assert desk.errors == {"i": ArbiterClosed, "b": ArbiterClosed}
    assert desk.leases["a"].active and not desk.clock.getDelayedCalls()
    desk.ask(OLLAMA, "late")
    assert desk.errors["late"] is ArbiterClosed
    with pytest.raises(ArbiterClosed):
        desk.arbiter.try_acquire(OLLAMA)
    desk.end("a")
    assert desk.arbiter.state == "idle" and desk.order == ["a"]
    desk.arbiter.close()


# -- events -----------------------------------------------------------------------------------------------------------


def test_the_events_of_a_day(desk: Desk) -> None:
    desk.ask(OLLAMA, "a")
    desk.clock.advance(1)
    desk.ask_all((COMFY, "i"), (OLLAMA, "b"))
    desk.clock.advance(2)
    desk.asked["b"].cancel()
    desk.end("a")
    desk.clock.advance(3)
    desk.end("i")
    assert desk.story() == [
        "idle -> ollama",
        "granted a",
        "queued i",
        "queued b",
        "abandoned b cancelled",
        "released a",
        "ollama -> idle",
        "idle -> comfyui",
        "granted i",
        "released i",
        "comfyui -> idle",
    ]
    granted = [e for e in desk.events if isinstance(e, Granted)]
    assert [e.waited for e in granted] == [0, 2]
    assert [e.held for e in desk.events if isinstance(e, Released)] == [3, 3]
    assert [e.at for e in desk.events if isinstance(e, Transition)] == [0, 3, 3, 6]


def test_events_come_in_order_to_all_even_if_a_listener_acts() -> None:
    """What a listener causes is told to everybody after what it was told."""
    desk = Desk()
    warm = desk.arbiter.try_acquire(OLLAMA, "warm")
    assert warm is not None
    desk.events.clear()

    def give_way(event: Event) -> None:
        if isinstance(event, Queued):
            warm.release()

    late: list[Event] = []
    desk.arbiter._listeners[Queued].insert(0, give_way)
    desk.arbiter.add_listener(late.append)
    desk.ask(COMFY, "i")
    assert desk.story() == [
        "queued i",
        "released warm",
        "ollama -> idle",
        "idle -> comfyui",
        "granted i",
    ]
    assert late == desk.events


# -- misuse and re-entrance -------------------------------------------------------------------------------------------


def test_two_thousand_waiters_that_release_at_once(desk: Desk) -> None:
    desk.ask(COMFY, "i")
    for n in range(2000):
        tenant = (OLLAMA, LLAMA, COMFY)[n % 3]
        desk.ask(tenant, str(n), then=lambda lease: lease.release())
    desk.end("i")
    assert len(desk.order) == 2001 and not desk.errors
    assert desk.arbiter.state == "idle"


def test_two_thousand_waiters_that_give_up_at_once(desk: Desk) -> None:
    desk.ask(COMFY, "i")
    for n in range(2000):
        desk.ask(OLLAMA if n % 2 else COMFY, str(n), timeout=5)
    desk.clock.advance(5)
    assert len(desk.errors) == 2000
    desk.end("i")
    assert desk.arbiter.state == "idle" and not desk.clock.getDelayedCalls()


def test_a_grant_may_ask_again(desk: Desk) -> None:
    desk.ask(COMFY, "i")
    desk.ask(OLLAMA, "a", then=lambda _: desk.ask(OLLAMA, "c"))
    desk.ask(LLAMA, "x")
    desk.ask(OLLAMA, "b", then=lambda _: desk.ask(COMFY, "j"))
    desk.end("i")
    assert desk.order == ["i", "a", "b"]
    desk.end("a", "b")
    assert desk.order == ["i", "a", "b", "j"]
    desk.end("j")
    assert desk.order[-1] == "x"


def test_reject_mode_works_inside_a_grant(desk: Desk) -> None:
    got: list[Lease | None] = []
    desk.ask(COMFY, "i")
    desk.ask(OLLAMA, "a", then=lambda _: got.append(desk.arbiter.try_acquire(OLLAMA)))
    desk.end("i")
    assert got[0] is not None and desk.arbiter.llm_inflight == 2


def test_a_grant_may_cancel_others(desk: Desk) -> None:
    desk.ask(COMFY, "i")
    desk.ask(OLLAMA, "a", then=lambda _: desk.asked["b"].cancel())
    desk.ask_all((OLLAMA, "b"), (OLLAMA, "c"))
    desk.end("i")
    assert desk.order == ["i", "a", "c"] and desk.errors == {"b": CancelledError}


def test_a_time_out_whose_consequence_cancels_it(desk: Desk, logged: list[object]) -> None:
    """An image that times out lets an LLM request in, which cancels the image's Deferred."""
    desk.ask(OLLAMA, "a")
    desk.ask(COMFY, "i", timeout=5)
    desk.ask(OLLAMA, "b", then=lambda _: desk.asked["i"].cancel())
    desk.clock.advance(5)
    assert desk.order == ["a", "b"] and desk.errors == {"i": CancelledError}
    assert not logged


def test_closing_survives_waiters_that_cancel_each_other(desk: Desk) -> None:
    desk.ask(COMFY, "i")
    desk.ask_all((COMFY, "j"), (OLLAMA, "a"), (OLLAMA, "b"))
    desk.asked["j"].addBoth(lambda _: desk.asked["b"].cancel())

    def cancel_on_leaving(event: Event) -> None:
        if isinstance(event, Abandoned) and event.waiter.label == "a":
            event.waiter.deferred.cancel()

    desk.arbiter.add_listener(cancel_on_leaving)
    desk.arbiter.close()
    assert desk.errors == {"j": ArbiterClosed, "b": CancelledError, "a": CancelledError}
    assert not list(desk.arbiter.waiting(Kind.SHARED))


def test_a_listener_that_cancels_the_request_that_is_being_granted(desk: Desk) -> None:
    def cancel(event: Event) -> None:
        if isinstance(event, Granted) and event.lease.label == "a":
            desk.asked["a"].cancel()

    desk.arbiter.add_listener(cancel)
    desk.ask_all((COMFY, "i"), (OLLAMA, "a"), (OLLAMA, "b"))
    desk.end("i")
    assert desk.errors == {"a": CancelledError}
    assert desk.order == ["i", "b"] and desk.arbiter.llm_inflight == 1


def test_a_failing_callback_does_not_wedge_the_line(desk: Desk) -> None:
    def boom(_: object) -> None:
        raise ZeroDivisionError

    desk.ask(COMFY, "i")
    failing = desk.arbiter.acquire(OLLAMA, "a")
    failing.addCallback(boom)
    desk.ask(OLLAMA, "b")
    desk.end("i")
    assert desk.order == ["i", "b"]
    caught: list[Failure] = []
    failing.addErrback(caught.append)
    assert caught[0].check(ZeroDivisionError)


def test_a_failing_listener_is_logged_and_does_no_harm(
    desk: Desk, logged: list[dict[str, object]]
) -> None:
    def boom(_: Event) -> None:
        raise ZeroDivisionError

    after: list[Event] = []
    desk.arbiter.add_listener(boom)
    desk.arbiter.add_listener(after.append)
    desk.ask_all((OLLAMA, "a"), (COMFY, "i"), (OLLAMA, "b"), (COMFY, "j"))
    desk.asked["j"].cancel()
    desk.end("a")
    desk.end("i")
    desk.end("b")
    assert desk.arbiter.state == "idle" and desk.order == ["a", "i", "b"]
    assert after == desk.events
    failures = [event["log_failure"] for event in logged]
    assert len(failures) == len(desk.events)
    assert all(isinstance(f, Failure) and f.check(ZeroDivisionError) for f in failures)
