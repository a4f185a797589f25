"""Watching ComfyUI: one look at a time, at events or, where there are none, at intervals.

A look reads ``/queue`` first and ``/history/<id>`` after it; only a look that got its answers counts. While nothing is
watched the loop sleeps until the event socket tells of a change.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol
from urllib.parse import quote

from twisted.internet.defer import CancelledError, Deferred, inlineCallbacks
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from turnstile.card import Card
from turnstile.engines.client import (
    BadAnswer,
    ClientError,
    HttpError,
    JsonClient,
    TimedOut,
    Unreachable,
)
from turnstile.engines.comfy_events import ConnectEvents, EventStream
from turnstile.engines.comfy_free import TOLERANCE, reserved_memory
from turnstile.engines.comfy_jobs import (
    Job,
    Outcome,
    Phase,
    QueueView,
    judge,
    parse_event,
    parse_history,
    parse_queue,
    queue_remaining,
)

LOOK_TIMEOUT = 5.0
#: Seconds of refused connections after which the process counts as gone, and the time between looks meanwhile.
GONE_AFTER = 5.0
REFUSED_DELAY = 0.25
#: Seconds until the look that confirms an absence, and until the next one for a job that may not have been queued.
ABSENT_DELAY = 0.1
CHECK_DELAY = 0.25
#: While the socket is up, looks at intervals only catch one that has gone silent.
SILENT_FACTOR = 5.0
SILENT_DELAY = 5.0
#: Seconds without any sign after which a job counts as stalled: the worker takes a pending one at once.
STALL_PENDING = 10.0
STALL_RUNNING = 120.0
#: How ``/history/<id>`` is answered if the id, which clients may choose, makes no route or too long a one. Such a job
#: is judged by the queue alone: it must not keep the card until JOB_TIMEOUT.
NO_SUCH_ROUTE = frozenset({400, 404, 405, 414, 431})


class Owner(Protocol):
    """What the watch reports to."""

    job_timeout: float

    @property
    def job(self) -> Job | None: ...

    def job_ended(self, job: Job, outcome: Outcome) -> None: ...

    def foreign_changed(self) -> None: ...

    def process_gone(self) -> None: ...

    def free_leftovers(self, force: bool = False) -> None: ...

    def tap(self, text: bytes) -> None: ...

    def note_stats(self, stats: object) -> None: ...


class Watch:
    """Knows the queue, whose jobs are in it, and when the owner's job is over.

    :param poll_interval: seconds between looks while the event socket is down.
    """

    log = Logger()

    def __init__(
        self,
        client: JsonClient,
        clock: IReactorTime,
        card: Card,
        name: str,
        connect_events: ConnectEvents,
        owner: Owner,
        *,
        poll_interval: float,
        probe_timeout: float,
    ) -> None:
        self._client = client
        self._clock = clock
        self._card = card
        self._name = name
        self._owner = owner
        self.poll_interval = poll_interval
        self.probe_timeout = probe_timeout
        self._events = EventStream(clock, connect_events, self._event, self._events_changed)
        self.version: str | None = None
        self.view = QueueView()
        #: Ids in the queue that did not come through us, and ids of ours whose lease ended before they did.
        self.foreign: frozenset[str] = frozenset()
        self.abandoned: frozenset[str] = frozenset()
        self._loop: Deferred[None] | None = None
        self._bell: Deferred[None] | None = None
        self._timer: IDelayedCall | None = None
        self._stopped = False
        self._rung = False
        self._refused_since: float | None = None
        #: The kind of the latest look's error, so that each is logged once in a row.
        self._doubt: type[BaseException] | None = None
        self._last_status = 0.0

    # -- life ------------------------------------------------------------------------------------------------------

    @property
    def events_state(self) -> str:
        """The state of the event socket."""
        return self._events.state

    def start(self) -> Deferred[None]:
        """Look once and go on in the background; fires after the first look."""
        first: Deferred[None] = Deferred()
        self._loop = self._attend(first)
        self._loop.addErrback(
            lambda f: None if f.check(CancelledError) else self.log.failure("", failure=f)
        )
        self._events.start()
        return first

    def stop(self) -> None:
        """End the loop and the socket."""
        self._events.stop()
        # Whoever waited for the first look may stop us from within it, when there is nothing to cancel.
        self._stopped = True
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.cancel()

    def ring(self) -> None:
        """Something may have changed: look, and look again if a look is under way."""
        self._rung = True
        bell, self._bell = self._bell, None
        if bell is not None:
            bell.callback(None)

    def kick(self) -> None:
        """A job begins: the event socket is wanted now."""
        self._events.kick()

    def abandon(self, ids: frozenset[str]) -> None:
        """Jobs of ours that go on without a lease; never taken for foreign ones."""
        self.abandoned |= ids

    def expect(self, prompt_id: str) -> None:
        """A job that is not anybody's was queued; the next look tells whether it still is."""
        self._set_foreign(self.foreign | {prompt_id})

    def end_job(self, prompt_id: str) -> None:
        """Interrupt a job, or take it out of the queue; not waited for.

        Versions that know no prompt_id interrupt whatever runs, so that is only sent while it is this job that runs.
        """
        path: str = "/queue"
        payload: dict[str, Any] = {"delete": [prompt_id]}
        if prompt_id in self.view.running:
            path, payload = "/interrupt", {"prompt_id": prompt_id}

        def failed(failure: Failure) -> None:
            failure.trap(ClientError)
            self.log.warn("image job {prompt_id}: it could not be ended", prompt_id=prompt_id)

        self._client.post_json(path, payload, LOOK_TIMEOUT).addErrback(failed)

    @inlineCallbacks
    def _attend(self, first: Deferred[None]) -> Generator[Deferred[Any], Any, None]:
        try:
            yield self._first_look()
        except CancelledError:
            raise
        except Exception:
            # Whatever it was: without this loop no job would ever end.
            self.log.failure("the first look at ComfyUI failed")
        finally:
            first.callback(None)
        while not self._stopped:
            self._rung = False
            try:
                self._expire()
                yield self._look()
            except CancelledError:
                raise
            except Exception:
                # A periodic body logs and goes on.
                self.log.failure("looking at ComfyUI failed")
            if not self._rung:
                yield self._pause()

    def _pause(self) -> Deferred[None]:
        def end(_: object = None) -> None:
            timer, self._timer = self._timer, None
            if timer is not None and timer.active():
                timer.cancel()
            self._bell = None

        bell: Deferred[None] = Deferred(end)
        self._bell = bell
        delay = self._delay()
        if delay is not None:
            self._timer = self._clock.callLater(max(delay, 0.01), self.ring)
        bell.addCallback(end)
        return bell

    def _delay(self) -> float | None:
        """Seconds until the next look, if no event comes before; ``None``: only an event matters."""
        job = self._watched()
        if job is None and not self.foreign and not self.abandoned:
            # What an event told of was not seen: there may be jobs of others.
            return self.poll_interval if self._doubt is not None else None
        delay = self.poll_interval
        if self._refused_since is not None:
            delay = REFUSED_DELAY
        elif self._doubt is None and self._events.is_open:
            delay = max(SILENT_FACTOR * delay, SILENT_DELAY)
        if job is not None:
            if self._doubt is None and self._refused_since is None:
                if job.phase is Phase.CHECKING:
                    delay = min(delay, CHECK_DELAY)
                elif job.absent:
                    delay = min(delay, ABSENT_DELAY)
            delay = min(delay, job.last_sign + self._owner.job_timeout - self._clock.seconds())
        return delay

    def _watched(self) -> Job | None:
        """The job whose end is looked for."""
        job = self._owner.job
        if job is None or job.outcome is not None or job.phase is Phase.POSTING:
            return None
        return job

    def _expire(self) -> None:
        job = self._watched()
        if job is not None and self._clock.seconds() >= job.last_sign + self._owner.job_timeout:
            self._owner.job_ended(job, Outcome.TIMEOUT)

    # -- looking ---------------------------------------------------------------------------------------------------

    @inlineCallbacks
    def _first_look(self) -> Generator[Deferred[Any], Any, None]:
        deadline = self._clock.seconds() + self.probe_timeout
        try:
            stats = yield self._client.get_json("/system_stats", self.probe_timeout)
            self._owner.note_stats(stats)
            system = stats.get("system") if isinstance(stats, dict) else None
            version = system.get("comfyui_version") if isinstance(system, dict) else None
            self.version = version if isinstance(version, str) else "unknown"
            self.log.info("ComfyUI {version} answers", version=self.version)
            view = yield self.look_at_queue(deadline - self._clock.seconds())
        except ClientError as e:
            self.log.warn(
                "ComfyUI does not answer at {url}: {error}",
                url=self._client.base_url,
                error=str(e) or type(e).__name__,
            )
            return
        reserved = reserved_memory(stats)
        if not view.ids and reserved is not None and reserved <= TOLERANCE:
            self._card.mark_evicted(self._name)

    @inlineCallbacks
    def look_at_queue(self, timeout: float) -> Generator[Deferred[Any], Any, QueueView]:
        """Read the queue and note whose jobs are in it; fails with ``ClientError``."""
        answer = yield self._client.get_json("/queue", timeout)
        view = parse_queue(answer)
        self._refused_since = None
        self._assess(view)
        return view

    def _assess(self, view: QueueView) -> None:
        self.view = view
        if self.abandoned and not self.abandoned <= view.ids:
            self.abandoned &= view.ids
            if not self.abandoned:
                self.log.info("a job that was given up has ended")
                self._owner.free_leftovers(force=True)
        job = self._owner.job
        if job is not None and job.phase in (Phase.POSTING, Phase.CHECKING):
            # What is new may be the job that is being posted.
            return
        own = job.ids if job is not None and not job.foreign else frozenset[str]()
        self._set_foreign(view.ids - own - self.abandoned)

    def _set_foreign(self, foreign: frozenset[str]) -> None:
        if foreign != self.foreign:
            self.foreign = foreign
            self._owner.foreign_changed()

    @inlineCallbacks
    def _look(self) -> Generator[Deferred[Any], Any, None]:
        job = self._watched()
        history: Outcome | None = None
        try:
            view = yield self.look_at_queue(LOOK_TIMEOUT)
            if job is not None and not job.foreign and view.place(job.ids) is None:
                for id_ in job.ids:
                    found = yield self._history(id_)
                    history = history or found
        except Unreachable:
            self._refused()
            return
        except ClientError as e:
            self._note_doubt(e)
            return
        if self._doubt is not None:
            self._doubt = None
            self.log.info("ComfyUI answers again")
        if job is not None and job is self._watched():
            self._apply(job, view, history)

    @inlineCallbacks
    def _history(self, prompt_id: str) -> Generator[Deferred[Any], Any, Outcome | None]:
        if not prompt_id:
            return None
        try:
            path = "/history/" + quote(prompt_id, safe="")
        except UnicodeEncodeError:
            return None  # half of a surrogate pair: JSON can say it, a URL can't
        try:
            answer = yield self._client.get_json(path, LOOK_TIMEOUT)
        except HttpError as e:
            if e.status in NO_SUCH_ROUTE:
                return None
            raise
        return parse_history(answer, prompt_id)

    def _apply(self, job: Job, view: QueueView, history: Outcome | None) -> None:
        """What a look means for the job that was watched when it began."""
        now = self._clock.seconds()
        if job.phase is Phase.CHECKING:
            new = view.ids - job.before - self.abandoned
            if new:
                job.ids = new
                job.phase = Phase.QUEUED
                self.log.info("image job {prompt_id}: queued after all", prompt_id=job.label)
            else:
                job.checks -= 1
                if job.checks <= 0:
                    self._owner.job_ended(job, Outcome.REFUSED)
                return
        if job.foreign:
            job.ids = self.foreign
        outcome = judge(job, view, history)
        if job.foreign and not job.ids:
            outcome = Outcome.FOREIGN
        if outcome is not None:
            self._owner.job_ended(job, outcome)
            return
        place = view.place(job.ids)
        if place is None:
            job.absent += 1
        elif job.seen(place, now):
            self.log.info(
                "image job {prompt_id}: {phase}",
                prompt_id=job.label,
                phase=job.phase.value,
                place=place,
            )
        else:
            self._watch_for_stall(job, view, now)

    def _watch_for_stall(self, job: Job, view: QueueView, now: float) -> None:
        quiet = now - max(job.last_sign, self._last_status)
        if not job.stall_told and quiet >= (STALL_RUNNING if view.running else STALL_PENDING):
            job.stall_told = True
            self.log.warn(
                "image job {prompt_id}: no sign that it advances for {seconds:.0f} s;"
                " ComfyUI may be stuck (JOB_TIMEOUT ends the wait)",
                prompt_id=job.label,
                seconds=quiet,
            )

    def _refused(self) -> None:
        """Nobody listens: after a while the process is gone, and its queue with it."""
        now = self._clock.seconds()
        if self._refused_since is None:
            self._refused_since = now
        job = self._watched()
        if job is not None:
            job.broken = True
        if now - self._refused_since < GONE_AFTER:
            return
        self.view = QueueView()
        self.abandoned = frozenset()
        self._owner.process_gone()
        self._set_foreign(frozenset())
        if job is not None:
            self._owner.job_ended(job, Outcome.LOST)

    def _note_doubt(self, error: ClientError) -> None:
        """An answer that says nothing: neither here nor gone."""
        self._refused_since = None
        job = self._watched()
        if job is not None and not isinstance(error, (TimedOut, BadAnswer, HttpError)):
            job.broken = True
        if self._doubt is not type(error):
            self._doubt = type(error)
            self.log.warn(
                "ComfyUI gives no answer: {error}", error=str(error) or type(error).__name__
            )

    # -- events ----------------------------------------------------------------------------------------------------

    def _event(self, text: bytes) -> None:
        if b'"status"' not in text[:64]:
            self._owner.tap(text)
            return
        event = parse_event(text)
        if event is None or event[0] != "status":
            self._owner.tap(text)
            return
        self._last_status = self._clock.seconds()
        remaining = queue_remaining(event[1])
        job = self._owner.job
        if remaining and job is None:
            # Work, and not ours; known even where looking at the queue fails.
            self._card.mark_resident(self._name)
        elif remaining and job is not None:
            # Ours or not: should ours be refused, this one has left models all the same.
            job.was_resident = True
        idle = self._watched() is None and not self.view.ids
        if not (idle and remaining == 0):
            self.ring()

    def _events_changed(self, up: bool) -> None:
        self.log.info("ComfyUI's event socket is {state}", state="open" if up else "closed")
        job = self._owner.job
        if job is not None and not up:
            job.was_resident = True
            if job is self._watched():
                job.broken = True
        self.ring()
