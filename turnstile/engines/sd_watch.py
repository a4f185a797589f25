"""Watching the asynchronous job that holds the card, from its POST to its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from turnstile.arbiter import Lease
from turnstile.engines.client import ClientError, HttpError, JsonClient
from turnstile.engines.sd_jobs import Job, JobView, Outcome, Phase, find_job_id, look_at_job
from turnstile.engines.sd_routes import cancelled_job

#: The most seconds that one look may take.
LOOK_TIMEOUT = 5.0
#: Seconds between looks; and after a POST, or a look that found no job.
DELAY = 0.5
SOON = 0.05
#: Looks in a row that must not find a job.
MISSES = 2


class JobWatch:
    """Watches one job at a time.

    :param ended: told of a job's end, once.
    :param activity: something that changes while sd-server makes progress.
    :param job_timeout: seconds without a sign of progress until a job is given up.
    :param capture_limit: the most bytes of the answer to its POST that are read.
    """

    log = Logger()

    def __init__(
        self,
        client: JsonClient,
        clock: IReactorTime,
        ended: Callable[[Job, Outcome], None],
        activity: Callable[[], object],
        *,
        job_timeout: float,
        capture_limit: int,
    ) -> None:
        self._client = client
        self._clock = clock
        self._ended = ended
        self._activity = activity
        self.job_timeout = job_timeout
        self.capture_limit = capture_limit
        self.job: Job | None = None
        self._timer: IDelayedCall | None = None
        self._look: Deferred[Any] | None = None

    def begin(self, lease: Lease) -> None:
        """A request that begins a job is about to be forwarded."""
        now = self._clock.seconds()
        self.job = Job(lease, now, now)
        self._set_timer(self.job_timeout)

    def answered(
        self,
        lease: Lease,
        status: int,
        headers: list[tuple[bytes, bytes]],
        body: bytes,
        complete: bool,
    ) -> bool:
        """sd-server answered it; false if that came after it was given up, though it has begun a job."""
        taken = 200 <= status < 300
        job = self._posted(lease)
        if job is None:
            return not taken
        if not taken:
            self.log.info("sd-server refused a job ({status})", status=status)
            self.end(Outcome.REFUSED)
            return True
        job.id = find_job_id(headers, body, complete, self.capture_limit)
        if job.id is None:
            self.end(Outcome.UNKNOWN)
            return True
        job.phase = Phase.QUEUED
        job.last_sign = job.queued_at = self._clock.seconds()
        self.log.info("sd-server's job {job}: queued", job=job.id)
        self._set_timer(SOON)
        return True

    def failed(self, lease: Lease, sent: bool, there: bool) -> None:
        """No answer came.

        :param sent: whether sd-server may have got the whole body.
        :param there: whether it still runs.
        """
        if self._posted(lease) is not None:
            taken = Outcome.UNKNOWN if there else Outcome.LOST
            self.end(taken if sent else Outcome.REFUSED)

    def note_cancel(self, target: bytes) -> None:
        """A request to cancel a job was answered: it may have been this one."""
        job = self.job
        if job is not None and job.id is not None and self._look is None:
            if cancelled_job(b"POST", target) == job.id.lower():
                self._set_timer(0.0)

    def end(self, outcome: Outcome) -> None:
        """The job is over, if there is one."""
        job, self.job = self.job, None
        timer, self._timer = self._timer, None
        if timer is not None and timer.active():
            timer.cancel()
        look, self._look = self._look, None
        if look is not None:
            look.cancel()
        if job is not None:
            self._ended(job, outcome)

    def _posted(self, lease: Lease) -> Job | None:
        job = self.job
        if job is None or job.lease is not lease:
            # It was ended by its time-out, or by the stop.
            lease.release()
            return None
        return job if job.phase is Phase.POSTING else None

    def _set_timer(self, seconds: float) -> None:
        timer = self._timer
        if timer is not None and timer.active():
            timer.cancel()
        self._timer = self._clock.callLater(seconds, self._expired)

    def _expired(self) -> None:
        self._timer = None
        job = self.job
        assert job is not None
        if job.id is None:
            self.end(Outcome.TIMEOUT)
            return
        look = self._look = look_at_job(self._client, self._clock, job.id, LOOK_TIMEOUT)

        def over(result: Any) -> None:
            if self.job is not job:
                return
            self._look = None
            if isinstance(result, Failure):
                self._not_seen(job, result)
            else:
                self._seen(job, result)

        look.addBoth(over)
        look.addErrback(lambda f: self.log.failure("the watch of a job failed", failure=f))

    def _seen(self, job: Job, view: JobView) -> None:
        if view.outcome is not None:
            self.end(view.outcome)
            return
        job.misses = 0
        job.place = view.place
        job.phase = Phase.QUEUED if view.status == "queued" else Phase.GENERATING
        seen = (view, self._activity())
        if seen != job.seen:
            job.seen = seen
            job.last_sign = self._clock.seconds()
        self._again(job, DELAY)

    def _not_seen(self, job: Job, failure: Failure) -> None:
        failure.trap(ClientError)
        error = failure.value
        if isinstance(error, HttpError) and error.status in (404, 410):
            job.misses += 1
            if job.misses >= MISSES:
                self.end(Outcome.LOST)
            else:
                self._again(job, SOON)
            return
        self.log.debug("sd-server's job {job}: {error}", job=job.id, error=str(error))
        self._again(job, DELAY)

    def _again(self, job: Job, delay: float) -> None:
        left = job.last_sign + self.job_timeout - self._clock.seconds()
        if left <= 0:
            self.end(Outcome.TIMEOUT)
        else:
            self._set_timer(min(delay, left))
