"""sd-server (stable-diffusion.cpp): a child of turnstile's, since only its exit gives back the card.

It is started by the first request that generates (:meth:`SdEngine.ensure_up`), and stopped when another engine needs
the card or when it was idle for long enough. Both are evictions by :class:`turnstile.card.Card`: none happens behind a
generation's back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from twisted.internet.defer import Deferred, TimeoutError, fail, succeed
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from turnstile.arbiter import Arbiter, Kind, Lease, Tenant
from turnstile.card import Card, Eviction
from turnstile.child.listeners import Listener
from turnstile.child.process import Child
from turnstile.durations import format_duration
from turnstile.engines.client import JsonClient
from turnstile.engines.sd_jobs import Job, Outcome, Phase
from turnstile.engines.sd_process import SdProcess, State
from turnstile.engines.sd_routes import Generation, cancelled_job, classify, generation_kind
from turnstile.engines.sd_start import Backoff, Cooling, LoadFailed
from turnstile.engines.sd_watch import JobWatch

#: Seconds after SIGKILL in which the process has to be gone.
KILL_WAIT = 10.0
#: Seconds until the idle release is thought of again, if the moment was a bad one.
IDLE_RETRY = 1.0

JOB_TIMED_OUT = "job timeout: the job may still run"
UNANSWERED = "a job was not answered for and may still run"

JobListener = Callable[[str, float, "str | None", bool], None]


class SdEngine:
    """sd-server behind turnstile.

    :param client: calls to its API.
    :param launch: starts the program; may raise OSError.
    :param idle: seconds after the end of the last generation until it is stopped; 0: never.
    :param load_wait: seconds until it has to listen.
    :param stop_grace: seconds between SIGTERM and SIGKILL.
    :param job_timeout: seconds without a sign that a job advances until its lease ends.
    :param probe_timeout: the most seconds that :meth:`start` takes.
    :param backoff_initial: seconds until it is started again after it failed twice in a row.
    :param backoff_max: the most seconds of that kind.
    :param capture_limit: the most bytes of the answer to a job's POST that are read.
    :param log_path: where its output goes.
    :param listeners: tells who listens on a port of this machine, unless a process's group does, as far as that is
        known; see :func:`turnstile.child.listeners.listeners_on`.
    """

    log = Logger()

    def __init__(
        self,
        client: JsonClient,
        clock: IReactorTime,
        arbiter: Arbiter,
        card: Card,
        launch: Callable[[], Child],
        *,
        idle: float,
        load_wait: float,
        stop_grace: float,
        job_timeout: float,
        probe_timeout: float,
        backoff_initial: float,
        backoff_max: float,
        capture_limit: int = 64 * 1024,
        log_path: str = "",
        listeners: Callable[[int, int | None], Sequence[Listener]] = lambda port, leader: (),
    ) -> None:
        self.tenant = Tenant("sd", Kind.EXCLUSIVE)
        self._clock = clock
        self._arbiter = arbiter
        self._card = card
        self.idle = idle
        self.capture_limit = capture_limit
        self._probe_timeout = probe_timeout
        self._backoff = Backoff(backoff_initial, backoff_max)
        self._process = SdProcess(
            self,
            client,
            clock,
            launch,
            self._backoff,
            load_wait=load_wait,
            stop_grace=stop_grace,
            log_path=log_path,
            listeners=listeners,
        )
        self._watch = JobWatch(
            client,
            clock,
            self._job_ended,
            self._activity,
            job_timeout=job_timeout,
            capture_limit=capture_limit,
        )
        #: The leases under which it generates.
        self._active: set[Lease] = set()
        self._idle_timer: IDelayedCall | None = None
        self._idle_since = 0.0
        self._evicting = False
        self._stopped = False
        self._hastened = False
        self._listeners: list[JobListener] = []
        #: When a job was last given up that may go on.
        self._doubted_at = -math.inf
        self._past: deque[dict[str, Any]] = deque(maxlen=20)

    def change_limits(
        self,
        *,
        idle: float,
        load_wait: float,
        stop_grace: float,
        job_timeout: float,
        probe_timeout: float,
        backoff_initial: float,
        backoff_max: float,
        capture_limit: int,
    ) -> None:
        """Set what the constructor was given anew; what is under way has the new limits too."""
        self.capture_limit = self._watch.capture_limit = capture_limit
        self._probe_timeout = probe_timeout
        self._backoff.change(backoff_initial, backoff_max)
        self._process.load_wait = load_wait
        self._process.stop_grace = stop_grace
        self._watch.job_timeout = job_timeout
        if idle != self.idle:
            self.idle = idle
            if self._idle_timer is not None:
                self._start_idle(max(0.0, self._idle_since + idle - self._clock.seconds()))
            else:
                self._arm_idle()

    # -- what anyone may look at -----------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """What there is of it."""
        return self._process.state

    @property
    def is_up(self) -> bool:
        """Whether it listens."""
        return self._process.state is State.UP

    @property
    def exists(self) -> bool:
        """Whether there is a process: it may hold memory of the card."""
        return self._process.child is not None

    @property
    def job(self) -> Job | None:
        """The asynchronous job that holds the card."""
        return self._watch.job

    def snapshot(self) -> dict[str, Any]:
        """What the state page shows."""
        now = self._clock.seconds()
        timer, job = self._idle_timer, self._watch.job
        found = {
            **self._process.snapshot(),
            "generations": len(self._active),
            "idle_release_in": None if timer is None else round(timer.getTime() - now, 1),
            "job": None,
            "past_jobs": list(self._past),
        }
        if job is not None:
            found["job"] = {
                "id": job.id,
                "phase": job.phase.value,
                "place": job.place,
                "seconds": round(now - job.began, 1),
                "since_sign": round(now - job.last_sign, 1),
            }
        return found

    def add_job_listener(self, listener: JobListener) -> None:
        """Call ``listener(outcome, seconds, job_id, False)`` at the end of every asynchronous job."""
        self._listeners.append(listener)

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> Deferred[None]:
        """Look whether somebody else is in sd-server's place."""
        self._card.mark_evicted(self.tenant.name)

        def taken(failure: Failure) -> None:
            failure.trap(LoadFailed)
            self.log.warn(
                "{reason}; nothing can be generated until it is gone", reason=str(failure.value)
            )

        return self._process.check_port(self._probe_timeout).addErrback(taken)

    def stop(self) -> Deferred[None]:
        """End the process and all that runs in the background; fires when nothing of it is left."""
        self._stopped = True
        self._disarm_idle()
        self._process.give_up(LoadFailed("turnstile is shutting down", status=503))
        self._watch.end(Outcome.UNKNOWN)
        child = self._process.child
        if child is None:
            return succeed(None)
        self._process.end(child, 0.0 if self._hastened else None)
        return child.when_settled().addCallback(lambda _: None)

    def hasten(self) -> None:
        """Let the stop, under way or to come, wait for nothing."""
        self._hastened = True
        child = self._process.child
        if self._stopped and child is not None:
            self._process.end(child, 0.0)

    # -- the card --------------------------------------------------------------------------------------------------

    @property
    def cooling(self) -> Cooling | None:
        """What :meth:`ensure_up` would fail with: ask before others are made to leave for it."""
        return self._process.cooling

    def ensure_up(self) -> Deferred[None]:
        """Start it, unless it runs; fires when it listens. Fails with :class:`LoadFailed` or :class:`Cooling`.

        Who asks has the card. All who ask meanwhile wait for the same start, which goes on when they are gone.
        """
        if self._stopped:
            return fail(LoadFailed("turnstile is shutting down", status=503))
        return self._process.ensure_up()

    def evict(self) -> Deferred[Eviction]:
        """End the process; that it is reaped, and all of its group gone, is the evidence."""
        self._disarm_idle()
        self._evicting = True
        self._process.give_up(
            LoadFailed("sd-server was stopped while it loaded, for another engine", status=503)
        )
        child = self._process.child
        if child is None:
            self._evicting = False
            return succeed(Eviction.CONFIRMED)
        gone = self._process.end(child)
        gone.addTimeout(self._process.stop_grace + KILL_WAIT, self._clock)

        def over(result: Any) -> Eviction:
            self._evicting = False
            if isinstance(result, Failure):
                result.trap(TimeoutError)
                self.log.error("sd-server (pid {pid}) is still there after SIGKILL", pid=child.pid)
                return Eviction.TIMED_OUT
            return Eviction.CONFIRMED

        return gone.addBoth(over)

    # -- what the process tells ------------------------------------------------------------------------------------

    def starting(self) -> bool:
        """It will take memory from now on. Without the card it may not: its clients may have left since they asked."""
        if self._arbiter.tenant != self.tenant:
            return False
        self._card.mark_resident(self.tenant.name)
        return True

    def listening(self) -> None:
        """It is there; whom it was started for may have left."""
        self._arm_idle()

    def exited(self) -> None:
        """It ended; what it was doing is lost."""
        self._disarm_idle()

    def gone(self) -> None:
        """Its memory is free."""
        if not self._evicting:
            # The card learns of an eviction by its end, after which it looks at the memory.
            self._card.mark_evicted(self.tenant.name)
        job = self._watch.job
        if job is not None and job.phase is not Phase.POSTING:
            self._watch.end(Outcome.LOST)

    # -- generations and the idle release --------------------------------------------------------------------------

    def begin_generation(self, lease: Lease) -> None:
        """A request that generates is about to be forwarded. :meth:`end_generation` must follow."""
        if lease.tenant != self.tenant or not lease.active:
            raise ValueError("not a lease for sd-server that holds")
        self._active.add(lease)
        self._disarm_idle()

    def end_generation(self, lease: Lease) -> None:
        """It is over, whichever way. A client that left does not end the rendering, but nobody waits for that."""
        if lease not in self._active:
            return
        self._active.discard(lease)
        if self.is_up:
            self._backoff.succeeded()
        self._arm_idle()

    def _arm_idle(self) -> None:
        self._idle_since = self._clock.seconds()
        self._start_idle(self.idle)

    def _start_idle(self, seconds: float) -> None:
        self._disarm_idle()
        if self.idle > 0 and self.is_up and not self._active and not self._stopped:
            self._idle_timer = self._clock.callLater(seconds, self._idle_expired)

    def _disarm_idle(self) -> None:
        timer, self._idle_timer = self._idle_timer, None
        if timer is not None and timer.active():
            timer.cancel()

    def _idle_expired(self) -> None:
        self._idle_timer = None
        if self._arbiter.tenant == self.tenant or self._card.switching():
            # A request is on its way to it, or the card is: neither may find it ending.
            self._idle_timer = self._clock.callLater(IDLE_RETRY, self._idle_expired)
            return
        self.log.info(
            "sd-server was idle for {idle} and is stopped", idle=format_duration(self.idle)
        )
        self._card.evict(self.tenant.name)

    # -- asynchronous jobs -----------------------------------------------------------------------------------------

    def begin_job(self, lease: Lease) -> None:
        """A request that begins a job is about to be forwarded. One of the two methods below must follow."""
        self.begin_generation(lease)
        self._watch.begin(lease)

    def post_answered(
        self,
        lease: Lease,
        status: int,
        headers: list[tuple[bytes, bytes]],
        body: bytes,
        complete: bool,
    ) -> None:
        """sd-server answered. From now on the lease is the engine's.

        :param body: as much of the answer as was kept, without transfer coding.
        :param complete: whether the answer came whole and was kept whole.
        """
        in_time = self._watch.answered(lease, status, headers, body, complete)
        if not in_time and self.is_up and not self._stopped:
            # Another job's end may have been taken for this one's, which only begins.
            self._open_doubt(JOB_TIMED_OUT)
        if not self.exists:
            # It answered and ended.
            self._watch.end(Outcome.LOST)

    def post_failed(self, lease: Lease, sent: bool) -> None:
        """No answer came. From now on the lease is the engine's.

        :param sent: whether sd-server may have got the whole body.
        """
        self._watch.failed(lease, sent, self.is_up)

    def note_cancel(self, target: bytes) -> None:
        """A request to cancel a job was answered."""
        self._watch.note_cancel(target)

    def _activity(self) -> object:
        # It prints a bar that grows with every step.
        child = self._process.child
        return None if child is None else child.tail(1)

    def _job_ended(self, job: Job, outcome: Outcome) -> None:
        seconds = self._clock.seconds() - job.began
        bad = outcome in (Outcome.LOST, Outcome.TIMEOUT, Outcome.UNKNOWN) and not self._stopped
        (self.log.warn if bad else self.log.info)(
            "sd-server's job {job}: {outcome} after {seconds:.1f} s",
            job=job.id or "(no id)",
            outcome=outcome.value,
            seconds=seconds,
        )
        if self.is_up and not self._stopped:
            self._doubt(job, outcome)
        self._past.append({"id": job.id, "outcome": outcome.value, "seconds": round(seconds, 1)})
        self.end_generation(job.lease)
        job.lease.release()
        for listener in self._listeners:
            listener(outcome.value, seconds, job.id, False)

    def _doubt(self, job: Job, outcome: Outcome) -> None:
        if outcome is Outcome.TIMEOUT:
            self._open_doubt(JOB_TIMED_OUT)
        elif outcome is Outcome.UNKNOWN:
            self._open_doubt(UNANSWERED)
        elif outcome in (Outcome.SUCCESS, Outcome.ERROR):
            # It does one thing after another, and this one's turn came: what it had before is over as well.
            if job.queued_at is not None and job.queued_at >= self._doubted_at:
                self._card.restore(self.tenant.name, JOB_TIMED_OUT)
                self._card.restore(self.tenant.name, UNANSWERED)

    def _open_doubt(self, reason: str) -> None:
        self._doubted_at = self._clock.seconds()
        self._card.degrade(self.tenant.name, reason)


__all__ = [
    "Cooling",
    "Generation",
    "LoadFailed",
    "SdEngine",
    "State",
    "cancelled_job",
    "classify",
    "generation_kind",
]
