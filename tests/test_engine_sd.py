"""sd-server behind turnstile, in virtual time: its process, its idle release, its jobs, its ends."""

from __future__ import annotations

import random
import signal
from typing import Any

import pytest
from engine_kit import Response, result_of
from sd_kit import CHAT, DYING, GROUP, PIDS, MemoryChild, World
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.error import ConnectionRefusedError
from twisted.logger import globalLogPublisher
from twisted.python.failure import Failure

from turnstile.arbiter import Kind, Tenant
from turnstile.card import Eviction
from turnstile.child.listeners import Listener
from turnstile.child.process import ExitStatus
from turnstile.engines.sdserver import Cooling, LoadFailed, State

SEGV = ExitStatus(signal=signal.SIGSEGV)


def error(results: list[Any]) -> Any:
    """The only result, an error."""
    (failure,) = results
    assert isinstance(failure, Failure)
    return failure.value


# -- starting


def test_it_is_started_once_for_all_who_ask() -> None:
    w = World(load=10.0)
    w.lease()
    assert w.engine.state is State.DOWN and not w.engine.exists
    results = [result_of(w.ask()) for _ in range(3)]
    assert w.engine.state is State.LOADING and w.engine.exists and w.card.resident == {"sd"}
    w.pass_time(9.9)
    assert results == [[], [], []]
    w.pass_time(0.5)
    assert results == [[None]] * 3 and len(w.host.children) == 1
    assert w.engine.state is State.UP and w.engine.is_up
    assert result_of(w.ask()) == [None] and len(w.host.children) == 1


def test_one_who_goes_away_leaves_the_loading_going_on() -> None:
    w = World(load=10.0)
    lease = w.lease()
    first, second = w.ask(), w.ask()
    first.addErrback(lambda f: f.trap(CancelledError))
    first.cancel()
    results = result_of(second)
    second.cancel()
    lease.release()
    assert isinstance(error(results), CancelledError)
    w.pass_time(5.0)
    assert w.engine.state is State.LOADING
    # The next one profits.
    lease = w.lease()
    third = result_of(w.ask())
    w.pass_time(6.0)
    assert third == [None] and len(w.host.children) == 1


def test_a_start_that_nobody_waits_for_any_more_is_undone_when_idle() -> None:
    w = World(load=10.0, idle=60.0)
    lease = w.lease()
    w.ask().addErrback(lambda f: None).cancel()
    lease.release()
    w.pass_time(10.5 + 59.0)
    assert w.engine.is_up
    w.pass_time(1.5)
    assert w.engine.state is State.DOWN and w.host.child.signals == ["TERM"]


@pytest.mark.parametrize("then", ["nobody", "chat"])
def test_it_is_not_started_without_the_card(then: str) -> None:
    """Whom it was for may leave, and another tenant come, before there is a process that could be told to leave."""
    w = World()
    look: Deferred[Any] = Deferred()
    w.host.foreign = look
    lease = w.lease()
    w.ask().addErrback(lambda f: f.trap(CancelledError)).cancel()
    lease.release()
    if then == "chat":
        assert w.arbiter.try_acquire(CHAT) is not None
        assert w.card.make_room(CHAT) is None
    look.errback(ConnectionRefusedError())
    assert w.host.children == [] and w.engine.state is State.DOWN
    assert w.card.resident == set()


def test_it_is_started_for_the_next_one_that_waits() -> None:
    w = World()
    look: Deferred[Any] = Deferred()
    w.host.foreign = look
    lease = w.lease()
    w.ask().addErrback(lambda f: f.trap(CancelledError)).cancel()
    lease.release()
    results = result_of(w.ask())
    w.host.foreign = None
    look.errback(ConnectionRefusedError())
    w.pass_time(11.0)
    assert results == [None] and w.engine.is_up


def test_looks_are_many_at_first_and_then_few() -> None:
    w = World(load=600.0)
    w.ask()
    w.pass_time(1.0)
    assert 6 < len(w.host.http.calls) < 15
    w.pass_time(599.5)
    assert w.engine.is_up and len(w.host.http.calls) < 2600


def test_a_crash_while_it_loads() -> None:
    w = World()
    results = result_of(w.ask())
    w.host.child.lines = ["loading", "out of memory"]
    w.pass_time(3.0)
    w.host.child.exit(ExitStatus(code=1))
    assert results == [] and w.engine.state is State.STOPPING
    w.pass_time(GROUP)
    failed = error(results)
    assert isinstance(failed, LoadFailed) and failed.status == 502
    assert str(failed) == "sd-server ended by itself while it loaded: exit code 1"
    assert failed.tail == ["loading", "out of memory"]
    assert w.engine.state is State.DOWN and w.card.resident == set() and w.card.degraded == ()
    assert w.engine.snapshot()["last_exit"] == "exit code 1"
    # The first failure is forgiven.
    assert result_of(w.ask()) == [] and len(w.host.children) == 2


def test_it_does_not_listen_in_time() -> None:
    w = World(load=None, load_wait=60.0)
    results = result_of(w.ask())
    w.host.child.lines = ["loading"]
    w.pass_time(59.9)
    assert results == []
    w.pass_time(0.15)
    failed = error(results)
    assert isinstance(failed, LoadFailed) and failed.status == 504 and failed.tail == ["loading"]
    assert str(failed) == "sd-server did not listen on 127.0.0.1:55557 within 1m"
    assert w.host.child.signals == ["TERM"] and w.engine.state is State.STOPPING
    # Whoever asks now waits for the end of that one, and then for the next.
    w.host.load = 1.0
    again = result_of(w.ask())
    w.pass_time(2.0)
    assert again == [None] and len(w.host.children) == 2


def test_a_look_that_hangs_does_not_outlast_the_time_to_load() -> None:
    w = World(load_wait=12.0)
    w.host.on_launch = lambda child: setattr(w.host, "foreign", Deferred())
    results = result_of(w.ask())
    w.pass_time(11.5)
    assert results == []
    w.pass_time(1.0)
    assert error(results).status == 504


@pytest.mark.parametrize("answer", [Response(404, b""), Response(200, b"<html>"), {"data": []}])
def test_any_answer_shows_that_it_listens(answer: Any) -> None:
    w = World(load=None)
    w.host.on_launch = lambda child: setattr(w.host, "foreign", answer)
    results = result_of(w.ask())
    w.pass_time(0.1)
    assert results == [None]


def test_one_that_listens_before_it_has_loaded_says_so() -> None:
    w = World(load=None)
    w.host.on_launch = lambda child: setattr(w.host, "foreign", Response(503, b""))
    results = result_of(w.ask())
    w.pass_time(5.0)
    assert results == []
    w.host.foreign = {"data": []}
    w.pass_time(0.5)
    assert results == [None]


def test_a_program_that_cannot_be_started() -> None:
    w = World()
    w.host.error = OSError(28, "No space left on device")
    failed = error(result_of(w.ask()))
    assert str(failed) == "sd-server can't be started: No space left on device"
    assert isinstance(failed, LoadFailed) and failed.status == 502
    assert w.engine.state is State.DOWN and w.card.resident == set()


def test_an_error_of_ours_is_no_end_of_it() -> None:
    w = World()
    w.host.error = RuntimeError("a mistake")
    events: list[Any] = []
    globalLogPublisher.addObserver(events.append)
    try:
        failed = error(result_of(w.ask()))
    finally:
        globalLogPublisher.removeObserver(events.append)
    assert isinstance(failed, LoadFailed)
    assert any("log_failure" in event for event in events)
    w.host.error = None
    results = result_of(w.ask())
    w.pass_time(11.0)
    assert results == [None]


# -- who else may be in its place


@pytest.mark.parametrize("answer", [{"data": []}, Response(404, b""), Response(200, b"x")])
def test_somebody_elses_server_is_told_and_never_used(answer: Any) -> None:
    found = {55557: [Listener(77, "sd-server")]}
    w = World(listeners=lambda port, leader: found.get(port, []))
    w.host.foreign = answer
    failed = error(result_of(w.ask()))
    assert isinstance(failed, LoadFailed) and failed.status == 502
    assert "127.0.0.1:55557" in str(failed) and "sd-server (pid 77) listens there" in str(failed)
    assert w.host.children == [] and w.card.resident == set()
    # It was no failure of sd-server's: as soon as the place is free it is started.
    for _ in range(5):
        assert isinstance(error(result_of(w.ask())), LoadFailed)
    w.host.foreign = None
    found.clear()
    results = result_of(w.ask())
    w.pass_time(11.0)
    assert results == [None]


def test_something_that_hangs_in_its_place() -> None:
    w = World()
    w.host.foreign = Deferred()
    results = result_of(w.ask())
    w.pass_time(6.0)
    assert "something listens there" in str(error(results)) and w.host.children == []


def test_one_that_took_its_place_while_it_loaded_is_never_used() -> None:
    asked: list[tuple[int, int | None]] = []

    def listeners(port: int, leader: int | None) -> list[Listener]:
        asked.append((port, leader))
        return [Listener(1, "intruder")]

    w = World(load=5.0, listeners=listeners)
    results = result_of(w.ask())
    w.pass_time(6.0)
    assert asked == [(55557, PIDS)]
    assert "intruder (pid 1) listens there" in str(error(results))
    assert w.host.child.signals == ["TERM"]


def test_at_the_start_an_occupied_place_is_told() -> None:
    w = World(listeners=lambda port, leader: [Listener(77, "sd-server")])
    w.host.foreign = {}
    events: list[Any] = []
    globalLogPublisher.addObserver(events.append)
    try:
        assert result_of(w.engine.start()) == [None]
        w.host.foreign = None
        assert result_of(w.engine.start()) == [None]
    finally:
        globalLogPublisher.removeObserver(events.append)
    (event,) = events
    assert "sd-server (pid 77)" in event["reason"]


# -- crashes


def test_an_end_of_its_own_is_noticed_and_the_next_request_starts_it_again() -> None:
    """E03: an inference error ends the whole server."""
    w = World(load=1.0)
    results = result_of(ensureDeferred(w.draw(5.0)))
    w.pass_time(3.0)
    w.host.child.exit(SEGV)
    assert w.engine.state is State.STOPPING and not w.engine.is_up
    w.pass_time(0.1)
    assert w.engine.state is State.DOWN and w.card.resident == set()
    # Its request ends by the loss of its connection, which is the gate's to see.
    w.pass_time(5.0)
    assert isinstance(error(results), AssertionError) and w.arbiter.tenant is None
    results = result_of(ensureDeferred(w.draw(5.0)))
    w.pass_time(7.0)
    assert results == [None] and len(w.host.children) == 2


def test_it_is_started_again_only_when_the_group_of_the_one_before_is_gone() -> None:
    w = World(load=1.0)
    w.up()
    w.lease()
    w.host.child.exit(SEGV)
    results = result_of(w.ask())
    assert len(w.host.children) == 1
    w.pass_time(2.0)
    assert results == [None] and len(w.host.children) == 2


def crash(w: World) -> Any:
    """A start that ends in a crash, and what came of asking for it."""
    results = result_of(w.ask())
    w.pass_time(0.5)
    if not results:
        w.host.child.exit(ExitStatus(code=1))
        w.pass_time(0.1)
    return error(results)


def test_crash_loops_back_off() -> None:
    w = World(backoff_initial=4.0, backoff_max=10.0)
    for pause in (0.0, 4.0, 8.0, 10.0, 10.0):
        assert isinstance(crash(w), LoadFailed)
        assert w.engine.snapshot()["retry_in"] == pytest.approx(pause, abs=0.2)
        if pause:
            cooling = error(result_of(w.ask()))
            assert isinstance(cooling, Cooling) and cooling.seconds == pytest.approx(pause, abs=0.2)
            assert "exit code 1" in str(cooling)
            w.pass_time(cooling.seconds + 0.01)
    assert len(w.host.children) == 5


def test_a_generation_that_ended_well_ends_the_backing_off() -> None:
    w = World(load=1.0, backoff_initial=1000.0, backoff_max=1000.0)
    assert isinstance(crash(w), LoadFailed)
    for _ in range(4):
        # Each draws one image and crashes afterwards: no loop.
        results = result_of(ensureDeferred(w.draw(1.0)))
        w.pass_time(3.0)
        assert results == [None]
        w.host.child.exit(SEGV)
        w.pass_time(0.1)
    assert isinstance(crash(w), LoadFailed)
    assert isinstance(crash(w), Cooling)


def test_one_that_is_told_to_end_is_no_crash() -> None:
    w = World(load=1.0)
    for _ in range(5):
        w.up()
        assert result_of(w.card.evict("sd")) == []
        w.pass_time(1.0)
    snapshot = w.engine.snapshot()
    assert (snapshot["starts"], snapshot["crashes"], snapshot["failures_in_a_row"]) == (5, 0, 0)


# -- leaving the card


def test_it_leaves_for_a_chat_and_comes_back_for_the_next_image() -> None:
    w = World(load=2.0)
    first = result_of(ensureDeferred(w.draw()))
    talk = result_of(ensureDeferred(w.talk()))
    second = result_of(ensureDeferred(w.draw()))
    w.pass_time(20.0)
    assert first == talk == second == [None]
    # Images go first: the second was drawn by the same process.
    assert [child.signals for child in w.host.children] == [["TERM"]]
    third = result_of(ensureDeferred(w.draw()))
    w.pass_time(20.0)
    assert third == [None] and len(w.host.children) == 2 and w.card.degraded == ()


def test_nothing_to_evict() -> None:
    w = World()
    assert result_of(w.engine.evict()) == [Eviction.CONFIRMED]


def test_the_evidence_is_that_the_whole_group_is_gone() -> None:
    w = World(load=1.0)
    w.up()
    results = result_of(w.engine.evict())
    w.clock.advance(DYING)
    assert w.host.child.status is not None and results == []
    assert w.engine.state is State.STOPPING
    w.clock.advance(GROUP)
    assert results == [Eviction.CONFIRMED] and w.engine.state is State.DOWN


def test_one_that_does_not_obey_is_killed() -> None:
    w = World(load=1.0, stop_grace=5.0)
    w.up()
    w.host.child.obeys = False
    results = result_of(w.engine.evict())
    w.pass_time(4.9)
    assert results == [] and w.host.child.signals == ["TERM"]
    w.pass_time(0.3)
    assert results == [Eviction.CONFIRMED] and w.host.child.signals == ["TERM", "KILL"]


def test_one_that_cannot_even_be_killed_delays_others_for_a_while_only() -> None:
    w = World(load=1.0, stop_grace=5.0)
    w.up()
    child = w.host.child
    child.obeys = child.mortal = False
    results = result_of(w.card.evict("sd"))
    w.pass_time(14.9)
    assert results == []
    w.pass_time(0.2)
    assert results == [Eviction.TIMED_OUT]
    assert w.engine.state is State.STOPPING and w.card.resident == {"sd"}
    assert [interval.culprit for interval in w.card.degraded] == ["sd"]
    # It is gone at last.
    child.exit(ExitStatus(signal=signal.SIGKILL))
    w.pass_time(1.0)
    assert w.engine.state is State.DOWN and w.card.resident == set() and w.card.degraded == ()


def test_it_leaves_while_it_loads() -> None:
    w = World(load=100.0)
    lease = w.lease()
    w.ask().addErrback(lambda f: None).cancel()
    lease.release()
    w.pass_time(50.0)
    talk = result_of(ensureDeferred(w.talk()))
    assert w.host.child.signals == ["TERM"]
    w.pass_time(2.0)
    assert talk == [None] and w.engine.state is State.DOWN
    assert w.engine.snapshot()["crashes"] == 0


def test_who_waits_for_a_start_that_is_given_up_is_told() -> None:
    w = World(load=100.0)
    results = result_of(w.ask())
    w.pass_time(5.0)
    assert result_of(w.engine.evict()) == []
    failed = error(results)
    assert isinstance(failed, LoadFailed) and failed.status == 503
    # And so is who waits for the end of the one before.
    results = result_of(w.ask())
    assert w.engine.state is State.STOPPING and results == []
    w.engine.evict()
    assert error(results).status == 503
    w.pass_time(1.0)
    assert w.engine.state is State.DOWN and len(w.host.children) == 1


def test_it_leaves_before_it_is_started() -> None:
    w = World()
    look: Deferred[Any] = Deferred()
    w.host.foreign = look
    results = result_of(w.ask())
    assert w.engine.state is State.LOADING and not w.engine.exists
    assert result_of(w.engine.evict()) == [Eviction.CONFIRMED]
    assert error(results).status == 503 and w.host.children == []
    assert w.engine.state is State.DOWN


# -- the idle release


def test_the_idle_timer_runs_from_the_end_of_a_render_not_from_its_start() -> None:
    """A timer of five minutes, a load of ten, a render of two and a half."""
    w = World(load=600.0, idle=300.0)
    results = result_of(ensureDeferred(w.draw(149.0)))
    w.pass_time(600.0 + 149.0 + 1.0, step=0.25)
    assert results == [None] and w.host.child.signals == []
    ended = w.clock.seconds()
    assert w.engine.snapshot()["idle_release_in"] == pytest.approx(300.0, abs=2.0)
    w.pass_time(298.0, step=0.25)
    assert w.engine.is_up
    w.pass_time(3.0)
    assert w.engine.state is State.DOWN and w.card.resident == set()
    assert w.clock.seconds() - ended == pytest.approx(301.0)


def test_a_render_longer_than_the_timer() -> None:
    w = World(load=1.0, idle=10.0)
    results = result_of(ensureDeferred(w.draw(300.0)))
    w.pass_time(302.0)
    assert results == [None] and w.host.child.signals == []
    w.pass_time(10.0)
    assert w.host.child.signals == ["TERM"]


def test_observation_does_not_keep_it() -> None:
    # A request that needs no lease tells the engine nothing.
    w = World(load=1.0, idle=10.0)
    w.up()
    w.pass_time(8.0)
    assert w.engine.is_up
    w.pass_time(3.0)
    assert w.engine.state is State.DOWN


def test_every_generation_starts_the_time_anew() -> None:
    w = World(load=1.0, idle=10.0)
    for _ in range(5):
        results = result_of(ensureDeferred(w.draw(1.0)))
        w.pass_time(9.0)
        assert results == [None] and w.engine.is_up
    assert len(w.host.children) == 1


def change(w: World, idle: float) -> None:
    """What SIGHUP does, with another SD_IDLE."""
    w.engine.change_limits(
        idle=idle,
        load_wait=900.0,
        stop_grace=10.0,
        job_timeout=900.0,
        probe_timeout=5.0,
        backoff_initial=1.0,
        backoff_max=60.0,
        capture_limit=65536,
    )


def test_a_changed_idle_time_counts_from_the_end_of_the_last_generation() -> None:
    w = World(load=1.0, idle=100.0)
    w.up()
    w.pass_time(30.0)
    change(w, 50.0)
    w.pass_time(19.0)
    assert w.engine.is_up
    w.pass_time(3.0)
    assert w.engine.state is State.DOWN
    w.up()
    change(w, 0.0)
    w.pass_time(1000.0, step=10.0)
    assert w.engine.is_up
    change(w, 5.0)
    w.pass_time(6.0)
    assert w.engine.state is State.DOWN


def test_no_idle_release_if_none_is_wanted() -> None:
    w = World(load=1.0, idle=0.0)
    w.up()
    w.pass_time(100_000.0, step=100.0)
    assert w.engine.is_up and w.engine.snapshot()["idle_release_in"] is None


def test_connections_that_end_in_every_way_leave_it_idle() -> None:
    """B01: several generations, whose clients end differently; the count is back at zero."""
    w = World(load=1.0, idle=10.0)
    w.up()
    lease = w.lease()
    for _ in range(6):
        w.engine.begin_generation(lease)
        assert w.engine.snapshot()["generations"] == 1
        w.engine.end_generation(lease)
        w.engine.end_generation(lease)
    assert w.engine.snapshot()["generations"] == 0
    lease.release()
    w.pass_time(11.5)
    assert w.engine.state is State.DOWN


def test_a_request_on_its_way_holds_the_release_up() -> None:
    w = World(load=1.0, idle=10.0)
    w.up()
    w.pass_time(8.5)
    lease = w.lease()
    w.pass_time(20.0)
    assert w.engine.is_up, "it has the card, and may be connecting"
    lease.release()
    w.pass_time(1.5)
    assert w.engine.state is State.DOWN


def test_a_switch_under_way_holds_the_release_up() -> None:
    w = World(load=1.0, idle=10.0)
    hanging: Deferred[Eviction] = Deferred()
    w.up()
    other = Tenant("comfyui", Kind.EXCLUSIVE)

    class Other:
        tenant = other

        def evict(self) -> Deferred[Eviction]:
            return hanging

    w.card.register(Other(), resident=True)
    waiter = w.card.make_room(CHAT)
    assert waiter is not None and w.card.switching()
    waiter.cancel()
    w.pass_time(15.0)
    assert w.engine.is_up
    hanging.callback(Eviction.CONFIRMED)
    w.pass_time(1.5)
    assert w.engine.state is State.DOWN


def test_a_release_and_a_request_at_the_same_moment() -> None:
    """A01: each request gets the child or a fresh one, never one that is on its way out."""
    rng = random.Random(1)
    w = World(load=0.2, idle=1.0)
    starts = 0
    for _ in range(200):
        results = result_of(ensureDeferred(w.draw(0.1)))
        w.pass_time(0.6, step=0.005)
        assert results == [None]
        # The last one ended some time ago; the next comes at one second after its end, give or take 50 ms.
        timer = w.engine._idle_timer
        assert timer is not None
        w.pass_time(timer.getTime() - w.clock.seconds() - 0.06, step=0.005)
        w.pass_time(rng.uniform(0.01, 0.11), step=0.001)
        starts = len(w.host.children)
    assert 60 < starts < 180, "both sides of the moment were met"
    # And others get the card too.
    talk = result_of(ensureDeferred(w.talk()))
    w.pass_time(3.0)
    assert talk == [None] and w.card.degraded == () and w.arbiter.tenant is None


def test_a_lease_of_somebody_else_is_refused() -> None:
    w = World()
    chat = w.arbiter.try_acquire(CHAT, "x", "y")
    assert chat is not None
    with pytest.raises(ValueError):
        w.engine.begin_generation(chat)
    chat.release()
    lease = w.lease()
    lease.release()
    with pytest.raises(ValueError):
        w.engine.begin_generation(lease)


# -- asynchronous jobs

ACCEPTED = b'{"created":1,"id":"job_1_00000001","kind":"img_gen","status":"queued"}'
ID = "job_1_00000001"


class Jobs(World):
    """sd-server is up, and was given a job."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"load": 1.0, **settings})
        self.up()
        self.told: list[tuple[str, str | None]] = []
        self.engine.add_job_listener(lambda how, s, id_, _: self.told.append((how, id_)))
        self.job_lease = self.lease()
        self.engine.begin_job(self.job_lease)

    def stand(self, status: str, place: int = 0) -> None:
        """Let the job stand so from now on."""
        self.host.jobs[ID] = {"id": ID, "status": status, "queue_position": place}

    def accept(self) -> None:
        self.stand("queued", 1)
        self.engine.post_answered(self.job_lease, 202, [], ACCEPTED, True)


@pytest.mark.parametrize(
    ("status", "outcome"),
    [("completed", "success"), ("failed", "error"), ("cancelled", "cancelled")],
)
def test_the_lease_lasts_until_the_job_is_over(status: str, outcome: str) -> None:
    w = Jobs(idle=60.0)
    w.accept()
    w.pass_time(100.0)
    assert w.job_lease.active and w.engine.job is not None
    assert w.engine.snapshot()["job"]["phase"] == "queued"
    w.stand("generating")
    w.pass_time(200.0)
    assert w.job_lease.active and w.engine.snapshot()["job"]["phase"] == "generating"
    w.stand(status)
    w.pass_time(0.6)
    assert not w.job_lease.active and w.told == [(outcome, ID)] and w.engine.job is None
    assert w.engine.snapshot()["past_jobs"] == [
        {"id": ID, "outcome": outcome, "seconds": pytest.approx(300.0, abs=1.0)}
    ]
    # The time until the release runs from here, and nobody looks at it any more.
    looks = len(w.host.looks)
    w.pass_time(59.0)
    assert w.engine.is_up and len(w.host.looks) == looks
    w.pass_time(2.0)
    assert w.engine.state is State.DOWN and not w.card.history


@pytest.mark.parametrize("status", [400, 429, 500, 302])
def test_a_job_that_is_refused(status: int) -> None:
    w = Jobs()
    w.engine.post_answered(w.job_lease, status, [], b'{"error":"x"}', True)
    assert not w.job_lease.active and w.told == [("refused", None)] and w.host.looks == []


def test_a_job_that_was_not_sent_to_its_end() -> None:
    w = Jobs()
    w.engine.post_failed(w.job_lease, sent=False)
    assert not w.job_lease.active and w.told == [("refused", None)] and w.card.degraded == ()


def test_a_job_that_nobody_knows_the_id_of_ends_with_a_doubt() -> None:
    for end in ("cut", "none"):
        w = Jobs()
        if end == "cut":
            w.engine.post_answered(w.job_lease, 202, [], b'{"created":1', False)
        else:
            w.engine.post_failed(w.job_lease, sent=True)
        assert not w.job_lease.active and w.told == [("unknown", None)]
        assert [interval.culprit for interval in w.card.degraded] == ["sd"]
        # The next chat ends it and the doubt.
        talk = result_of(ensureDeferred(w.talk()))
        w.pass_time(2.0)
        assert talk == [None] and w.card.degraded == ()


def test_a_doubt_ends_with_the_next_job_too() -> None:
    w = Jobs()
    w.engine.post_failed(w.job_lease, sent=True)
    assert w.card.degraded != ()
    w.job_lease = w.lease()
    w.engine.begin_job(w.job_lease)
    w.accept()
    w.stand("completed")
    w.pass_time(1.0)
    assert w.told[-1] == ("success", ID) and w.card.degraded == ()


@pytest.mark.parametrize("status", [404, 410])
def test_a_job_that_is_not_known_any_more_is_lost(status: int) -> None:
    w = Jobs()
    w.accept()
    w.pass_time(1.0)
    w.host.jobs[ID] = Response(status, b"{}")
    w.pass_time(0.7)
    assert w.told == [("lost", ID)] and not w.job_lease.active


def test_one_look_that_does_not_find_it_proves_nothing() -> None:
    w = Jobs()
    w.accept()
    for _ in range(5):
        w.pass_time(1.0)
        del w.host.jobs[ID]
        looks = len(w.host.looks)
        while len(w.host.looks) == looks:
            w.pass_time(0.01)
        w.stand("generating")
        w.pass_time(1.0)
    assert w.job_lease.active


@pytest.mark.parametrize(
    "answer", [Response(500, b""), Response(200, b"[]"), Response(200, b"", ValueError()), ...]
)
def test_looks_that_fail_prove_nothing(answer: Any) -> None:
    w = Jobs(job_timeout=100.0)
    w.accept()
    w.pass_time(1.0)
    w.host.jobs[ID] = Deferred() if answer is ... else answer
    w.pass_time(90.0)
    assert w.job_lease.active and len(w.host.looks) > 10
    w.stand("completed")
    w.pass_time(6.0)
    assert w.told == [("success", ID)]


def test_a_crash_in_mid_job_loses_it() -> None:
    w = Jobs()
    w.accept()
    w.pass_time(5.0)
    w.host.child.exit(SEGV)
    w.pass_time(GROUP)
    assert w.told == [("lost", ID)] and not w.job_lease.active and w.card.degraded == ()
    w.pass_time(10.0)
    assert w.host.looks and len(w.host.children) == 1


def test_a_crash_before_the_answer() -> None:
    w = Jobs()
    w.host.child.exit(SEGV)
    w.pass_time(GROUP)
    assert w.job_lease.active
    w.engine.post_failed(w.job_lease, sent=True)
    assert w.told == [("lost", None)] and not w.job_lease.active


def test_a_crash_right_after_the_answer() -> None:
    w = Jobs()
    w.host.child.exit(SEGV)
    w.pass_time(GROUP)
    w.accept()
    assert w.told == [("lost", ID)] and not w.job_lease.active


def test_a_job_that_does_not_advance_is_given_up() -> None:
    w = Jobs(job_timeout=100.0)
    w.accept()
    w.pass_time(50.0)
    w.stand("generating")
    w.pass_time(99.0)
    assert w.job_lease.active
    w.pass_time(2.0)
    assert w.told == [("timeout", ID)] and not w.job_lease.active
    assert [interval.reason for interval in w.card.degraded] == [
        "job timeout: the job may still run"
    ]


def test_its_place_in_the_line_and_its_bar_are_signs_that_it_advances() -> None:
    w = Jobs(job_timeout=100.0)
    w.accept()
    for place in (3, 2, 1):
        w.stand("queued", place)
        w.pass_time(90.0)
    w.stand("generating")
    for step in range(20):
        w.host.child.lines.append(f"|==>  | {step}/20 - 70.00s/it")
        w.pass_time(90.0)
        assert w.engine.snapshot()["job"]["since_sign"] < 100.0
    assert w.job_lease.active
    w.pass_time(101.0)
    assert w.told == [("timeout", ID)]


def test_a_post_that_is_not_answered_is_given_up() -> None:
    w = Jobs(job_timeout=100.0)
    w.pass_time(99.0)
    assert w.job_lease.active
    w.pass_time(2.0)
    assert w.told == [("timeout", None)] and not w.job_lease.active and w.card.degraded != ()
    # The late answer changes nothing.
    w.accept()
    w.engine.post_failed(w.job_lease, sent=True)
    w.pass_time(2.0)
    assert w.told == [("timeout", None)] and w.host.looks == []


def test_after_a_cancel_it_is_looked_at_at_once() -> None:
    w = Jobs()
    w.accept()
    w.pass_time(1.0)
    w.stand("cancelled")
    for target in (b"/sdcpp/v1/jobs/job_2/cancel", b"/sdcpp/v1/jobs/" + ID.encode()):
        w.engine.note_cancel(target)
        w.clock.advance(0)
        assert w.job_lease.active
    w.engine.note_cancel(b"/sdcpp/v1/jobs/" + ID.encode() + b"/cancel")
    w.clock.advance(0)
    assert w.told == [("cancelled", ID)] and not w.job_lease.active
    w.engine.note_cancel(b"/sdcpp/v1/jobs/" + ID.encode() + b"/cancel")


def test_jobs_one_after_another_stay_with_one_process() -> None:
    w = Jobs(idle=5.0)
    for _ in range(3):
        w.accept()
        w.pass_time(10.0)
        w.stand("completed")
        w.pass_time(1.0)
        assert not w.job_lease.active
        w.job_lease = w.lease()
        w.engine.begin_job(w.job_lease)
    w.engine.post_failed(w.job_lease, sent=False)
    assert len(w.host.children) == 1
    w.pass_time(6.0)
    assert w.engine.state is State.DOWN


# -- the end


def test_the_stop_waits_until_nothing_is_left() -> None:
    w = Jobs(stop_grace=5.0)
    w.accept()
    w.host.child.obeys = False
    results = result_of(w.engine.stop())
    assert not w.job_lease.active and w.card.degraded == ()
    w.pass_time(4.9)
    assert results == []
    w.pass_time(0.3)
    assert results == [None] and w.host.child.signals == ["TERM", "KILL"]
    assert w.clock.getDelayedCalls() == []
    assert error(result_of(w.ask())).status == 503


def test_the_stop_of_one_that_loads() -> None:
    w = World(load=100.0)
    waiting = result_of(w.ask())
    w.pass_time(5.0)
    results = result_of(w.engine.stop())
    assert error(waiting).status == 503
    w.pass_time(1.0)
    assert results == [None] and w.clock.getDelayedCalls() == []


def test_the_stop_of_nothing() -> None:
    w = World()
    assert result_of(w.engine.stop()) == [None]
    w.engine.hasten()


def test_the_stop_of_one_that_is_being_evicted() -> None:
    w = World(load=1.0)
    w.up()
    evicted = result_of(w.card.evict("sd"))
    results = result_of(w.engine.stop())
    w.pass_time(1.0)
    assert evicted == [Eviction.CONFIRMED] and results == [None]
    assert w.host.child.signals == ["TERM"] and w.clock.getDelayedCalls() == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_stop_that_is_hastened_waits_for_no_grace(when: str) -> None:
    w = World(load=1.0, stop_grace=600.0)
    w.up()
    w.host.child.obeys = False
    if when == "before":
        w.engine.hasten()
        assert w.engine.is_up
    results = result_of(w.engine.stop())
    if when == "after":
        w.pass_time(1.0)
        assert results == []
        w.engine.hasten()
    w.pass_time(0.1)
    assert results == [None] and w.host.child.signals[-1] == "KILL"


def test_the_snapshot() -> None:
    w = World(load=10.0, log_path="/var/log/x/sd-server.log")
    assert w.engine.snapshot() == {
        "state": "down",
        "pid": None,
        "uptime": None,
        "loading_for": None,
        "last_load_seconds": None,
        "starts": 0,
        "crashes": 0,
        "last_exit": None,
        "failures_in_a_row": 0,
        "retry_in": 0.0,
        "log": "/var/log/x/sd-server.log",
        "generations": 0,
        "idle_release_in": None,
        "job": None,
        "past_jobs": [],
    }
    w.ask()
    w.pass_time(5.0)
    snapshot = w.engine.snapshot()
    assert (snapshot["state"], snapshot["pid"], snapshot["loading_for"]) == ("loading", PIDS, 5.0)
    w.pass_time(10.0)
    snapshot = w.engine.snapshot()
    assert (snapshot["state"], snapshot["loading_for"]) == ("up", None)
    assert 10.0 <= snapshot["last_load_seconds"] <= 10.3
    assert snapshot["uptime"] == pytest.approx(5.0, abs=0.3)
    assert snapshot["idle_release_in"] == pytest.approx(295.0, abs=0.3)


def test_the_memory_child_is_as_the_real_one() -> None:
    w = World(load=1.0)
    child = w.host.launch()
    assert isinstance(child, MemoryChild)
    exited, gone = result_of(child.when_exited()), result_of(child.when_gone())
    ended = result_of(child.terminate(1.0))
    w.clock.advance(DYING)
    assert exited == [child.status] and gone == ended == []
    w.clock.advance(GROUP)
    assert exited == gone == ended
