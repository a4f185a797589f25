"""ComfyUI: which requests queue a job, and the life of a job from its POST to the card's release.

The order of a job: the data path calls :meth:`ComfyEngine.begin_post`, forwards the body and then tells what came of
it; from there on the engine holds the lease, watches the job (:mod:`turnstile.engines.comfy_watch`), frees ComfyUI or
hands the card over to the next job, and releases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, inlineCallbacks
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from turnstile.arbiter import (
    Arbiter,
    ArbiterClosed,
    Event,
    Kind,
    Lease,
    Queued,
    Tenant,
    Transition,
)
from turnstile.card import Card, Eviction
from turnstile.engines.client import JsonClient
from turnstile.engines.comfy_events import ConnectEvents
from turnstile.engines.comfy_foreign import BESIDE, Adoption
from turnstile.engines.comfy_free import Freer, Memory, device_memory
from turnstile.engines.comfy_jobs import (
    Job,
    Outcome,
    Phase,
    apply_event,
    find_prompt_id,
    parse_event,
)
from turnstile.engines.comfy_nested import NestedCalls
from turnstile.engines.comfy_routes import classify
from turnstile.engines.comfy_watch import Watch

#: Text frames above this size are outputs, not progress.
TAP_LIMIT = 256 * 1024
#: Looks that must find no new job before one whose POST got no whole answer is given up. A POST that was cut off may
#: still be on its way into the queue.
CHECKS_AFTER_ANSWER = 1
CHECKS_AFTER_FAILURE = 3

JobListener = Callable[[str, float, "str | None", bool], None]

JOB_TIMED_OUT = "job timeout: the job may still run"
UNANSWERED = "job timeout: the prompt was not answered and may still be queued"


class ComfyEngine:
    """ComfyUI behind turnstile.

    :param connect_events: how to connect to its event socket; see :mod:`turnstile.engines.comfy_events`.
    :param job_timeout: seconds without a sign that a job advances until its lease ends.
    :param job_timeout_action: ``release``, or ``interrupt`` to end the job too.
    :param history_poll_interval: seconds between looks while the event socket is down.
    :param free_between_jobs: free after every job, even if the next is ComfyUI's too.
    :param evict_nested: unloads the engine that nodes of a job called; by default the card evicts it.
    :param nested_tenant: that engine's name.
    """

    log = Logger()

    def __init__(
        self,
        client: JsonClient,
        clock: IReactorTime,
        arbiter: Arbiter,
        card: Card,
        connect_events: ConnectEvents,
        *,
        job_timeout: float,
        job_timeout_action: str,
        history_poll_interval: float,
        free_timeout: float,
        probe_timeout: float,
        prompt_capture_limit: int,
        free_between_jobs: bool = False,
        evict_nested: Callable[[], Deferred[Any]] | None = None,
        nested_tenant: str = "ollama",
    ) -> None:
        self.tenant = Tenant("comfyui", Kind.EXCLUSIVE)
        self._client = client
        self._clock = clock
        self._arbiter = arbiter
        self._card = card
        self.job_timeout = job_timeout
        self.job_timeout_action = job_timeout_action
        self.free_timeout = free_timeout
        self.prompt_capture_limit = prompt_capture_limit
        self.free_between_jobs = free_between_jobs
        self._watch = Watch(
            client,
            clock,
            card,
            self.tenant.name,
            connect_events,
            self,
            poll_interval=history_poll_interval,
            probe_timeout=probe_timeout,
        )
        self._freer = Freer(client, clock, self._watch.look_at_queue, self.note_stats)
        #: The card's memory when ComfyUI was last asked.
        self.memory: Memory | None = None
        self._memory_listeners: list[Callable[[Memory | None], None]] = []
        if evict_nested is None:

            def evict_nested() -> Deferred[Any]:
                return card.evict(nested_tenant)

        self._nested = NestedCalls(
            clock, card, nested_tenant, evict_nested, lambda: self._job is not None
        )
        self._job: Job | None = None
        self._adoption = Adoption(arbiter, card, self.tenant, self._adopted)
        self._eviction: Deferred[Eviction] | None = None
        self._posts = 0
        #: Ends a POST whose answer does not come.
        self._post_expiry: IDelayedCall | None = None
        #: Leases that ended before the answer came.
        self._unanswered: set[Lease] = set()
        #: Models were left for a next job that may not come.
        self._left_loaded = False
        self._stopped = False
        self._listeners: list[JobListener] = []
        self._past: deque[dict[str, Any]] = deque(maxlen=20)
        arbiter.add_listener(self._arbiter_event, Queued, Transition)

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> Deferred[None]:
        """Look once, then keep watching."""
        return self._watch.start()

    def stop(self) -> None:
        """End what runs in the background; the lease of a job ends with it."""
        self._stopped = True
        self._watch.stop()
        self._cancel_post_expiry()
        self._nested.stop()
        self._adoption.cancel()
        if self._eviction is not None:
            self._eviction.cancel()
        job, self._job = self._job, None
        if job is not None:
            job.lease.release()

    def change_limits(
        self,
        *,
        job_timeout: float,
        job_timeout_action: str,
        history_poll_interval: float,
        free_timeout: float,
        probe_timeout: float,
        prompt_capture_limit: int,
        free_between_jobs: bool,
    ) -> None:
        """Set what the constructor was given anew; a job that is under way has the new limits too."""
        self.job_timeout = job_timeout
        self.job_timeout_action = job_timeout_action
        self.free_timeout = free_timeout
        self.prompt_capture_limit = prompt_capture_limit
        self.free_between_jobs = free_between_jobs
        self._watch.poll_interval = history_poll_interval
        self._watch.probe_timeout = probe_timeout
        expiry, job = self._post_expiry, self._job
        if expiry is not None and expiry.active() and job is not None:
            expiry.reset(max(0.0, job.began + job_timeout - self._clock.seconds()))
        self._watch.ring()

    def add_job_listener(self, listener: JobListener) -> None:
        """Call ``listener(outcome, seconds, prompt_id, handed_over)`` at the end of every job."""
        self._listeners.append(listener)

    def add_memory_listener(self, listener: Callable[[Memory | None], None]) -> None:
        """Call ``listener`` whenever ComfyUI told how much of the card is used (``None``: it cannot tell)."""
        self._memory_listeners.append(listener)

    def note_stats(self, stats: object) -> None:
        """An answer of ``/system_stats``."""
        self.memory = device_memory(stats, self._clock.seconds())
        for listener in self._memory_listeners:
            listener(self.memory)

    @property
    def job(self) -> Job | None:
        """The job that holds the card."""
        return self._job

    # -- POST /prompt ----------------------------------------------------------------------------------------------

    def begin_post(self, lease: Lease) -> None:
        """The body of a prompt is about to be forwarded. One of the two methods below must follow."""
        name = self.tenant.name
        if lease.tenant != self.tenant or not lease.active:
            raise ValueError("not a lease for ComfyUI that holds")
        now = self._clock.seconds()
        self._posts += 1
        self._left_loaded = False
        self._job = Job(
            lease,
            now,
            # One that could not be reached when it was to leave counts as empty, and need not be.
            was_resident=name in self._card.resident
            or any(interval.culprit == name for interval in self._card.degraded),
            before=self._watch.view.ids,
            last_sign=now,
        )
        self._cancel_post_expiry()
        self._post_expiry = self._clock.callLater(self.job_timeout, self._post_expired, self._job)
        self._card.mark_resident(name)
        self._watch.kick()
        self.log.info("image job: forwarded to ComfyUI", waited=lease.granted_at - lease.asked_at)

    def post_answered(
        self,
        lease: Lease,
        status: int,
        headers: list[tuple[bytes, bytes]],
        body: bytes,
        complete: bool,
    ) -> None:
        """ComfyUI answered. From now on the lease is the engine's.

        :param body: as much of the answer as was kept, without transfer coding.
        :param complete: whether the answer came whole and was kept whole.
        """
        id_ = None
        if 200 <= status < 300:
            id_ = find_prompt_id(headers, body, complete, self.prompt_capture_limit)
        job = self._posted(lease, id_)
        if job is None:
            return
        if 200 <= status < 300:
            if id_ is not None:
                job.ids = frozenset({id_})
                job.phase = Phase.QUEUED
                job.sign(self._clock.seconds())
                self.log.info("image job {prompt_id}: queued", prompt_id=id_)
                self._watch.ring()
                return
            self._check(job, CHECKS_AFTER_ANSWER, "the answer tells no prompt_id")
        elif status >= 500:
            # Seen: 500 for a job with an id and number that another pending one has, which is queued all the same.
            self._check(job, CHECKS_AFTER_ANSWER, f"status {status}")
        else:
            self.log.info("image job: ComfyUI refused it ({status})", status=status)
            self.job_ended(job, Outcome.REFUSED)

    def post_failed(self, lease: Lease, sent: bool) -> None:
        """No answer came. From now on the lease is the engine's.

        :param sent: whether ComfyUI may have got the whole body.
        """
        job = self._posted(lease)
        if job is None:
            return
        if sent:
            self._check(job, CHECKS_AFTER_FAILURE, "no answer")
        else:
            self.log.info("image job: not sent to its end")
            self.job_ended(job, Outcome.REFUSED)

    def _posted(self, lease: Lease, prompt_id: str | None = None) -> Job | None:
        if lease in self._unanswered:
            self._answered_late(lease, prompt_id)
            return None
        job = self._job
        if job is None or job.lease is not lease or self._stopped:
            lease.release()
            return None
        if job.phase is not Phase.POSTING:
            return None
        self._cancel_post_expiry()
        return job

    def _post_expired(self, job: Job) -> None:
        """ComfyUI hangs: neither the caller's patience nor its absence may keep the card for ever."""
        self._post_expiry = None
        if job.phase is Phase.POSTING:
            self._unanswered.add(job.lease)
            self._card.degrade(self.tenant.name, UNANSWERED, lasting=True)
            self.job_ended(job, Outcome.TIMEOUT)

    def _answered_late(self, lease: Lease, prompt_id: str | None) -> None:
        """The answer to a prompt whose lease JOB_TIMEOUT ended: should it be queued, it is one more foreign job."""
        self._unanswered.discard(lease)
        self._card.mark_resident(self.tenant.name)
        if not self._stopped:
            if prompt_id is not None:
                self._watch.expect(prompt_id)
            self._watch.ring()
        if not self._unanswered:
            self._card.restore(self.tenant.name, UNANSWERED)

    def _cancel_post_expiry(self) -> None:
        expiry, self._post_expiry = self._post_expiry, None
        if expiry is not None and expiry.active():
            expiry.cancel()

    def _check(self, job: Job, checks: int, why: str) -> None:
        """ComfyUI may have queued the job: see what its queue says before the card is given away."""
        self.log.info("image job: looking for it in the queue ({why})", why=why)
        job.phase = Phase.CHECKING
        job.checks = checks
        # Whatever it was, it may have run.
        job.was_resident = True
        self._watch.ring()

    # -- the end of a job ------------------------------------------------------------------------------------------

    def job_ended(self, job: Job, outcome: Outcome) -> None:
        """A job is over; the watch calls this."""
        if job is self._job and job.outcome is None:
            job.outcome = (
                Outcome.FOREIGN if job.foreign and outcome is not Outcome.TIMEOUT else outcome
            )
            d = self._finish(job)
            d.addErrback(lambda f: self.log.failure("the end of an image job failed", failure=f))

    @inlineCallbacks
    def _finish(self, job: Job) -> Generator[Deferred[Any], Any, None]:
        assert job.outcome is not None
        seconds = self._clock.seconds() - job.began
        log = self.log.warn if job.outcome in (Outcome.LOST, Outcome.TIMEOUT) else self.log.info
        log(
            "image job {prompt_id}: {outcome} after {seconds:.1f} s",
            prompt_id=job.label,
            outcome=job.outcome.value,
            seconds=seconds,
        )
        handed_over = False
        try:
            if job.outcome is Outcome.TIMEOUT:
                self._give_up(job)
            else:
                job.phase = Phase.NESTED
                left = job.last_sign + self.job_timeout - self._clock.seconds()
                yield self._nested.finish(left)
                handed_over = yield self._clear(job)
        finally:
            if self._job is job:
                self._job = None
            self._report(job, seconds, handed_over)
            job.lease.release()
            self._watch.ring()

    @inlineCallbacks
    def _clear(self, job: Job) -> Generator[Deferred[Any], Any, bool]:
        """Free ComfyUI, unless its models are wanted next; returns whether they were left for the next job."""
        name = self.tenant.name
        if self._stopped:
            return False
        same = self._arbiter.successor(job.lease) == self.tenant
        if self._watch.foreign:
            # Its queue is not empty: it would free between two jobs of others.
            self._left_loaded = True
            self._ask_for_foreign()
            return same
        if job.outcome is Outcome.REFUSED and not job.was_resident:
            self._card.mark_evicted(name)
            return False
        if same and not self.free_between_jobs:
            self._left_loaded = True
            self.log.info("image job {prompt_id}: handed over to the next", prompt_id=job.label)
            return True
        job.phase = Phase.FREEING
        began = self._clock.seconds()
        outcome: Eviction = yield self._card.evict(name)
        self.log.info(
            "image job {prompt_id}: ComfyUI freed ({outcome}) in {seconds:.2f} s",
            prompt_id=job.label,
            outcome=outcome.value,
            seconds=self._clock.seconds() - began,
        )
        return False

    def _give_up(self, job: Job) -> None:
        """The job took too long: it goes on without the lease."""
        self._card.degrade(self.tenant.name, JOB_TIMED_OUT)
        self._watch.abandon(job.ids)
        self._nested.give_up()
        if self.job_timeout_action == "interrupt" and not job.foreign:
            for id_ in job.ids:
                self._watch.end_job(id_)

    def _report(self, job: Job, seconds: float, handed_over: bool) -> None:
        assert job.outcome is not None
        self._past.append(
            {
                "prompt_id": job.prompt_id,
                "outcome": job.outcome.value,
                "seconds": round(seconds, 3),
                "handed_over": handed_over,
            }
        )
        for listener in self._listeners:
            try:
                listener(job.outcome.value, seconds, job.prompt_id, handed_over)
            except Exception:
                self.log.failure("a listener of image jobs failed")

    # -- jobs of others --------------------------------------------------------------------------------------------

    def foreign_changed(self) -> None:
        """The jobs in the queue that are not ours changed; the watch calls this."""
        foreign = self._watch.foreign
        if not foreign:
            if self._adoption.asked:
                # They were over before the card could be had; their models are still there.
                self._adoption.cancel()
                self.free_leftovers(force=True)
        elif self._job is None or not self._job.foreign:
            self._ask_for_foreign(alone=self._job is None)
        else:
            self._job.ids = foreign
            self._job.sign(self._clock.seconds())

    def process_gone(self) -> None:
        """ComfyUI ended, and with it every job that ran beside others; the watch calls this."""
        name = self.tenant.name
        self._card.restore(name, JOB_TIMED_OUT)
        self._card.restore(name, BESIDE)

    def _ask_for_foreign(self, *, alone: bool = False) -> None:
        if not self._stopped:
            self._adoption.ask(self._watch.foreign, alone=alone)

    def _adopted(self, lease: Lease) -> None:
        """The card was had for jobs of others."""
        if self._stopped or not self._watch.foreign:
            lease.release()
            return
        now = self._clock.seconds()
        self._left_loaded = False
        self._job = Job(
            lease, now, foreign=True, ids=self._watch.foreign, phase=Phase.QUEUED, last_sign=now
        )
        self._watch.ring()
        self._step_aside()

    def _step_aside(self) -> None:
        """A foreign job lets a prompt of ours pass, which joins it in ComfyUI's own queue."""
        job = self._job
        if (
            job is not None
            and job.foreign
            and job.outcome is None
            and self._arbiter.successor(job.lease) == self.tenant
        ):
            self._job = None
            self._left_loaded = True
            self._ask_for_foreign()
            job.lease.release()

    def _arbiter_event(self, event: Event) -> None:
        if isinstance(event, Queued):
            if event.waiter.tenant == self.tenant and self._job is not None and self._job.foreign:
                self._step_aside()
        elif isinstance(event, Transition) and event.before == self.tenant and event.after is None:
            self.free_leftovers()

    def free_leftovers(self, force: bool = False) -> None:
        """Free what was left for a next job that did not come after all (``force``: or by one that was given up)."""
        self._left_loaded = self._left_loaded or force
        if not self._left_loaded or self._stopped or self._job or self._adoption.asked:
            return
        if self.tenant.name not in self._card.resident or self._watch.foreign:
            return
        try:
            lease = self._arbiter.try_acquire(self.tenant, "freeing")
        except ArbiterClosed:
            return
        if lease is None:
            if force and self._arbiter.tenant not in (None, self.tenant):
                # Others have the card beside it already.
                self._card.evict(self.tenant.name)
            return
        self._left_loaded = False
        self._card.evict(self.tenant.name).addBoth(lambda _: lease.release())

    # -- leaving the card ------------------------------------------------------------------------------------------

    def evict(self) -> Deferred[Eviction]:
        """Free ComfyUI and wait for evidence; see :mod:`turnstile.engines.comfy_free`."""
        posts = self._posts
        d = self._eviction = self._freer.free(self.free_timeout, lambda: self._posts != posts)

        def stopped(failure: Any) -> Eviction:
            failure.trap(CancelledError)
            return Eviction.TIMED_OUT

        def over(outcome: Any) -> Any:
            self._eviction = None
            return outcome

        return d.addErrback(stopped).addBoth(over)

    # -- what the relay and nested calls tell ----------------------------------------------------------------------

    def tap(self, text: bytes) -> None:
        """A text frame of a relayed socket: progress for people, and a sign that the job advances."""
        job = self._job
        if job is None or not job.ids or b'"prompt_id"' not in text or len(text) > TAP_LIMIT:
            return
        event = parse_event(text)
        if event is not None and apply_event(job, *event, self._clock.seconds()):
            kind, data = event
            if kind == "execution_interrupted" or (
                kind == "executing" and data.get("node") is None
            ):
                self._watch.ring()

    def enter_nested(self) -> Callable[[], None] | None:
        """Count a call of a node inside the lease of the job that holds the card, if there is one."""
        job = self._job
        if job is None or job.phase is Phase.FREEING or job.outcome is Outcome.TIMEOUT:
            return None
        return self._nested.enter()

    # -- what people see -------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """For the state page."""
        view = self._watch.view
        return {
            "version": self._watch.version,
            "events": self._watch.events_state,
            "queue": {"running": len(view.running), "pending": len(view.pending)},
            "foreign": sorted(self._watch.foreign),
            "abandoned": sorted(self._watch.abandoned),
            "job": None if self._job is None else self._job.snapshot(self._clock.seconds()),
            "nested_calls": self._nested.count,
            "reserved_floor": self._freer.floor.least,
            "vram": self._memory_snapshot(),
            "last_jobs": list(self._past),
        }

    def _memory_snapshot(self) -> dict[str, Any] | None:
        memory = self.memory
        if memory is None:
            return None
        age = round(self._clock.seconds() - memory.at, 3)
        return {"used": memory.used, "total": memory.total, "age": age}


__all__ = ["ComfyEngine", "JobListener", "classify"]
