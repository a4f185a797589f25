"""Random histories of the arbiter against a naive model of its rules.

The model keeps plain lists and works every question out anew; it is written from the rules, which are:

* leases of two tenants never exist together, an image engine has one lease, LLM engines any number (or up to a limit);
* image requests are first come first served, and while one waits no new LLM lease is given;
* LLM tenants take turns in order of arrival, all who wait for the granted one enter together, and whoever waits for
  another one closes admission;
* after ``image_burst`` image leases in a row that ended with LLM requests waiting, those that wait at that moment get a
  turn, tenant by tenant, and then images again;
* a place in the line is lost by cancelling, by time-out and by shutdown only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import attrs
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from turnstile import arbiter as arbiter_module
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
TENANTS = [OLLAMA, LLAMA, COMFY, SD]

#: A failure is shrunk before it is shown, which takes a while.
pytestmark = pytest.mark.limit(400)


@attrs.define
class Ask:
    """One request, as the model sees it."""

    number: int
    tenant: Tenant
    #: What it does when it is granted: "keep", "flash" (release at once), "cancel" (the oldest waiting image request).
    then: str
    deadline: float | None
    outcome: str | None = None
    #: Its callback is attached only after ``acquire`` has returned.
    ready: bool = True


class Model:
    """The rules, naively."""

    def __init__(self, burst: int, limit: int) -> None:
        self.burst = burst
        self.limit = limit
        self.asks: dict[int, Ask] = {}
        self.holders: list[int] = []
        self.images: list[int] = []
        self.llms: list[int] = []
        #: Those who were admitted together and did not enter yet.
        self.group: list[int] = []
        #: Those of the present turn who did not enter yet.
        self.turn: list[int] = []
        self.run = 0
        self.holds = 0
        self.closed = False
        self.granted: list[int] = []

    def tenant(self) -> Tenant | None:
        return self.asks[self.holders[0]].tenant if self.holders else None

    def _tenant(self, number: int) -> Tenant:
        return self.asks[number].tenant

    def entrant(self) -> int | None:
        """Who may enter now."""
        if self.holds or self.closed:
            return None
        now = self.tenant()
        if now is None:
            if self.group:
                return self.group[0]
            due = self.turn or (self.burst and self.run >= self.burst)
            if self.images and not (self.llms and due):
                return self.images[0]
            if not self.llms:
                return None
            head = self.llms[0]
            if self.images:
                self.turn = self.turn or list(self.llms)
                self.group = [n for n in self.turn if self._tenant(n) == self._tenant(head)]
            else:
                self.group = [n for n in self.llms if self._tenant(n) == self._tenant(head)]
            return head
        if now.kind is Kind.EXCLUSIVE or (self.limit and len(self.holders) >= self.limit):
            return None
        if self.group:
            return self.group[0]
        if self.images or not self.llms or self._tenant(self.llms[0]) != now:
            return None
        return self.llms[0]

    def _forget(self, number: int) -> None:
        for line in (self.images, self.llms, self.group, self.turn):
            if number in line:
                line.remove(number)

    def settle(self) -> None:
        while (number := self.entrant()) is not None:
            self._forget(number)
            self.enter(number)

    def enter(self, number: int) -> None:
        ask = self.asks[number]
        ask.outcome = "granted"
        self.holders.append(number)
        self.granted.append(number)
        self.run = self.run + 1 if ask.tenant.kind is Kind.EXCLUSIVE else 0
        if ask.ready:
            self.react(ask)

    def react(self, ask: Ask) -> None:
        if ask.then == "flash":
            self.end(ask.number)
        elif ask.then == "cancel" and self.images:
            self.leave(self.images[0], "cancelled")

    def end(self, number: int) -> None:
        self.holders.remove(number)
        if not self.holders and not self.llms and self._tenant(number).kind is Kind.EXCLUSIVE:
            self.run = 0

    def leave(self, number: int, why: str) -> None:
        self._forget(number)
        self.asks[number].outcome = why

    # -- what the outside does

    def acquire(self, ask: Ask) -> None:
        self.asks[ask.number] = ask
        if self.closed:
            ask.outcome = "refused"
            return
        if ask.tenant.kind is Kind.EXCLUSIVE:
            self.images.append(ask.number)
            self.group = [n for n in self.group if n in self.turn]
        else:
            self.llms.append(ask.number)
        ask.ready = False
        self.settle()
        ask.ready = True
        if ask.outcome == "granted":
            self.react(ask)
            self.settle()

    def try_acquire(self, ask: Ask) -> bool:
        now = self.tenant()
        free = not self.holds and not self.images and not self.llms
        if now is not None:
            free = free and now == ask.tenant and now.kind is Kind.SHARED
            free = free and not (self.limit and len(self.holders) >= self.limit)
        if free:
            self.asks[ask.number] = ask
            self.enter(ask.number)
        return free

    def release(self, number: int) -> None:
        self.end(number)
        self.settle()

    def cancel(self, number: int) -> None:
        self.leave(number, "cancelled")
        self.settle()

    def expire(self, now: float) -> None:
        waiting = [self.asks[n] for n in (*self.images, *self.llms)]
        due = [a for a in waiting if a.deadline is not None and a.deadline <= now]
        for ask in sorted(due, key=lambda a: (a.deadline, a.number)):
            if ask.outcome is None:
                self.leave(ask.number, "timeout")
                self.settle()

    def close(self) -> None:
        self.closed = True
        for number in (*self.images, *self.llms):
            self.leave(number, "shutdown")

    def successor(self) -> Tenant | None:
        trial = copy.deepcopy(self)
        before = len(trial.granted)
        trial.release(trial.holders[0])
        return trial._tenant(trial.granted[before]) if len(trial.granted) > before else None


class Histories(RuleBasedStateMachine):
    resumes: Bundle[Callable[[], None]] = Bundle("resumes")

    @initialize(burst=st.integers(0, 2), limit=st.integers(0, 2))
    def begin(self, burst: int, limit: int) -> None:
        self.clock = Clock()
        self.arbiter = Arbiter(self.clock, image_burst=burst, max_inflight=limit)
        self.model = Model(burst, limit)
        self.count = self.steps = 0
        self.deferreds: dict[int, Deferred[Lease]] = {}
        self.held: dict[int, Lease] = {}
        self.outcomes: dict[int, str] = {}
        self.order: list[int] = []
        #: What the events alone say.
        self.heard_waiting: dict[str, Tenant] = {}
        self.heard_ended: set[str] = set()
        self.heard_leases: set[Lease] = set()
        self.heard_tenant: Tenant | None = None
        self.arbiter.add_listener(self.hear)

    # -- the listener

    def hear(self, event: Event) -> None:
        arbiter = self.arbiter
        if isinstance(event, Queued):
            label = event.waiter.label
            assert label not in self.heard_waiting and label not in self.heard_ended
            self.heard_waiting[label] = event.waiter.tenant
        elif isinstance(event, Granted):
            lease = event.lease
            assert lease.active and lease in arbiter.leases and arbiter.tenant == lease.tenant
            assert lease.label not in self.heard_ended
            assert event.waited == self.clock.seconds() - lease.asked_at >= 0
            if lease.tenant.kind is Kind.SHARED and arbiter.image_pending:
                assert arbiter.image_burst, "an LLM lease was given past a waiting image request"
            self.heard_waiting.pop(lease.label, None)
            self.heard_ended.add(lease.label)
            assert not self.heard_leases or (
                lease.tenant.kind is Kind.SHARED
                and {other.tenant for other in self.heard_leases} == {lease.tenant}
            )
            self.heard_leases.add(lease)
        elif isinstance(event, Abandoned):
            assert self.heard_waiting.pop(event.waiter.label) == event.waiter.tenant
            self.heard_ended.add(event.waiter.label)
        elif isinstance(event, Released):
            assert not event.lease.active and event.lease not in arbiter.leases
            assert event.held == self.clock.seconds() - event.lease.granted_at
            self.heard_leases.remove(event.lease)
        else:
            assert isinstance(event, Transition)
            assert event.before == self.heard_tenant and event.before != event.after
            assert not self.heard_leases
            self.heard_tenant = event.after

    # -- what happens

    def _granted(self, lease: Lease, number: int, then: str) -> None:
        self.outcomes[number] = "granted"
        self.order.append(number)
        self.held[number] = lease
        if then == "flash":
            del self.held[number]
            lease.release()
        elif then == "cancel":
            oldest = next(self.arbiter.waiting(Kind.EXCLUSIVE), None)
            if oldest is not None:
                oldest.deferred.cancel()

    def _failed(self, failure: Failure, number: int) -> None:
        reasons: dict[type[BaseException], str] = {
            CancelledError: "cancelled",
            WaitTimeout: "timeout",
            ArbiterClosed: "shutdown",
        }
        why = reasons[failure.type]
        if why == "shutdown" and str(number) not in self.heard_ended:
            why = "refused"
        self.outcomes[number] = why

    @rule(tenant=st.sampled_from(TENANTS), then=st.sampled_from(["keep", "flash", "cancel"]))
    def acquire_patiently(self, tenant: Tenant, then: str) -> None:
        self._acquire(tenant, None, then)

    @rule(
        tenant=st.sampled_from(TENANTS),
        timeout=st.integers(0, 4),
        then=st.sampled_from(["keep", "flash", "cancel"]),
    )
    def acquire(self, tenant: Tenant, timeout: int, then: str) -> None:
        self._acquire(tenant, timeout, then)

    def _acquire(self, tenant: Tenant, timeout: int | None, then: str) -> None:
        number, self.count = self.count, self.count + 1
        deadline = None if timeout is None else self.clock.seconds() + timeout
        d = self.deferreds[number] = self.arbiter.acquire(tenant, str(number), "client", timeout)
        d.addCallbacks(self._granted, self._failed, (number, then), errbackArgs=(number,))
        self.model.acquire(Ask(number, tenant, then, deadline))

    @rule(tenant=st.sampled_from(TENANTS))
    def try_acquire(self, tenant: Tenant) -> None:
        number, self.count = self.count, self.count + 1
        if self.model.closed:
            with pytest.raises(ArbiterClosed):
                self.arbiter.try_acquire(tenant, str(number))
            return
        lease = self.arbiter.try_acquire(tenant, str(number))
        assert (lease is not None) == self.model.try_acquire(Ask(number, tenant, "keep", None))
        if lease is not None:
            self._granted(lease, number, "keep")

    @rule(data=st.data())
    def release_one(self, data: st.DataObject) -> None:
        self.release(data, False)

    @rule(data=st.data(), twice=st.booleans())
    def release(self, data: st.DataObject, twice: bool) -> None:
        if self.held:
            number = data.draw(st.sampled_from(sorted(self.held)))
            lease = self.held.pop(number)
            lease.release()
            if twice:
                lease.release()
            self.model.release(number)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        waiting = sorted(set(self.deferreds) - set(self.outcomes))
        if waiting:
            number = data.draw(st.sampled_from(waiting))
            self.deferreds[number].cancel()
            self.model.cancel(number)

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        self.clock.advance(seconds)
        self.model.expire(self.clock.seconds())

    @precondition(lambda self: self.steps > 5 and self.model.holds < 2)
    @rule(target=resumes)
    def hold(self) -> Callable[[], None]:
        self.model.holds += 1
        return self.arbiter.hold()

    @rule(resume=consumes(resumes), twice=st.booleans())
    def resume(self, resume: Callable[[], None], twice: bool) -> None:
        resume()
        if twice:
            resume()
        self.model.holds -= 1
        self.model.settle()

    @precondition(lambda self: self.steps > 30)
    @rule()
    def close(self) -> None:
        self.arbiter.close()
        self.model.close()

    # -- what must always hold

    @invariant()
    def count_steps(self) -> None:
        self.steps += 1

    @invariant()
    def as_the_model_says(self) -> None:
        model, arbiter = self.model, self.arbiter
        assert self.outcomes == {n: a.outcome for n, a in model.asks.items() if a.outcome}
        assert self.order == model.granted
        assert [int(w.label) for w in arbiter.waiting(Kind.EXCLUSIVE)] == model.images
        assert [int(w.label) for w in arbiter.waiting(Kind.SHARED)] == model.llms
        assert {int(lease.label) for lease in arbiter.leases} == set(model.holders)
        assert arbiter.tenant == model.tenant()
        assert arbiter.held == bool(model.holds or model.closed)
        if len(self.held) == 1:
            (lease,) = self.held.values()
            assert arbiter.successor(lease) == model.successor()

    @invariant()
    def one_tenant(self) -> None:
        arbiter = self.arbiter
        tenants = {lease.tenant for lease in arbiter.leases}
        assert len(tenants) <= 1
        assert arbiter.tenant == (tenants.pop() if tenants else None)
        assert arbiter.state == (arbiter.tenant.kind.value if arbiter.tenant else "idle")
        if arbiter.state == "image":
            assert len(arbiter.leases) == 1
        assert arbiter.llm_inflight == (len(arbiter.leases) if arbiter.state == "llm" else 0)
        if arbiter.max_inflight:
            assert arbiter.llm_inflight <= arbiter.max_inflight
        assert arbiter.image_pending == any(True for _ in arbiter.waiting(Kind.EXCLUSIVE))

    @invariant()
    def events_agree_with_state(self) -> None:
        arbiter = self.arbiter
        lines = [w for kind in Kind for w in arbiter.waiting(kind)]
        assert self.heard_waiting == {w.label: w.tenant for w in lines}
        assert self.heard_leases == arbiter.leases
        assert self.heard_tenant == arbiter.tenant
        assert not getattr(arbiter, "_events", None)

    @invariant()
    def books_balance(self) -> None:
        arbiter = self.arbiter
        shared = list(arbiter.waiting(Kind.SHARED))
        assert arbiter._admitted == sum(w.admitted for w in shared)
        assert len({w.tenant for w in shared if w.admitted}) <= 1
        # A turn is the head of the line, since nobody overtakes.
        turns = [w.turn for w in shared]
        assert turns == sorted(turns, reverse=True)
        pending = [w for kind in Kind for w in arbiter.waiting(kind) if w.expiry is not None]
        assert len(self.clock.getDelayedCalls()) == len(pending)

    def teardown(self) -> None:
        if not hasattr(self, "arbiter"):
            return
        while self.model.holds:
            self.model.holds -= 1
        self.arbiter._holds = 0
        self.arbiter.hold()()
        self.model.settle()
        while self.held:
            number = min(self.held)
            self.held.pop(number).release()
            self.model.release(number)
            self.as_the_model_says()
            self.one_tenant()
        assert self.arbiter.state == "idle"
        assert not [w for kind in Kind for w in self.arbiter.waiting(kind)]
        assert set(self.outcomes) == set(self.model.asks)
        assert not self.clock.getDelayedCalls()
        self.events_agree_with_state()


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_the_model_notices_a_planted_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arbiter that lets LLM requests in past a waiting image request is found out."""
    monkeypatch.setattr(arbiter_module.Arbiter, "_close_admission", lambda self: None)
    monkeypatch.setattr(
        arbiter_module.Arbiter,
        "_may_enter",
        lambda self, tenant: self._current in (None, tenant) and self._has_place(),
    )
    case = TestHistories("runTest")
    case.settings = settings(
        max_examples=300,
        stateful_step_count=30,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
    )
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        case.runTest()
