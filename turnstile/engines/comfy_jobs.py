"""ComfyUI's jobs: reading its queue, history, answers and events; nothing here does I/O.

Facts seen on ComfyUI 0.3.64: a job moves from pending to running to history under one mutex, so that one that is
neither in ``/queue`` nor, asked for afterwards, in ``/history/<id>`` is gone; a history entry exists only once a job
has ended; interruption and errors both show as ``status_str`` "error" and differ in their messages.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterable
from typing import Any

import attrs

from turnstile.arbiter import Lease
from turnstile.engines.answers import decode_body
from turnstile.engines.client import BadAnswer


class Outcome(enum.Enum):
    """How a job ended."""

    SUCCESS = "success"
    ERROR = "error"
    INTERRUPTED = "interrupted"
    #: Taken out of the queue before it ran.
    DELETED = "deleted"
    #: Gone without a trace (ComfyUI restarted, its history was cleared): nobody knows whether it was done.
    LOST = "lost"
    #: JOB_TIMEOUT passed; the job may still run.
    TIMEOUT = "timeout"
    #: ComfyUI did not take the job.
    REFUSED = "refused"
    #: In history, but its entry does not say how it ended.
    UNKNOWN = "unknown"
    #: A job that did not come through turnstile is over.
    FOREIGN = "foreign"


# -- the queue -----------------------------------------------------------------------------------------------------


@attrs.frozen
class QueueView:
    """What ``GET /queue`` said: ids only, the pending ones in the order in which they will run."""

    running: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()

    @property
    def ids(self) -> frozenset[str]:
        """Every id."""
        return frozenset(self.running + self.pending)

    def place(self, ids: frozenset[str]) -> int | None:
        """How many jobs are before the first of ``ids``: 0 means running, ``None`` absent."""
        if ids.intersection(self.running):
            return 0
        for place, id_ in enumerate(self.pending, 1):
            if id_ in ids:
                return place
        return None


def parse_queue(answer: object) -> QueueView:
    """Read ``{"queue_running": [[number, id, graph, …]], "queue_pending": […]}``.

    :raises BadAnswer: if it is something else.
    """
    if not isinstance(answer, dict):
        raise BadAnswer("the queue is not an object")
    running = _entries(answer.get("queue_running"))
    # The list is a heap: only its first entry is in its place.
    pending = sorted(_entries(answer.get("queue_pending")), key=lambda entry: entry[0])
    return QueueView(tuple(id_ for _, id_ in running), tuple(id_ for _, id_ in pending))


def _entries(entries: object) -> list[tuple[float, str]]:
    if not isinstance(entries, list):
        raise BadAnswer("the queue has no lists")
    found = []
    for entry in entries:
        if not isinstance(entry, list) or len(entry) < 2:
            raise BadAnswer("an entry of the queue is no list")
        number = entry[0] if isinstance(entry[0], (int, float)) else 0.0
        found.append((number, str(entry[1])))
    return found


# -- history -------------------------------------------------------------------------------------------------------


def parse_history(answer: object, prompt_id: str) -> Outcome | None:
    """How the job ended, ``None`` if it is not in history.

    :raises BadAnswer: if the answer to ``GET /history/<id>`` is something else.
    """
    if not isinstance(answer, dict):
        raise BadAnswer("history is not an object")
    entry = answer.get(prompt_id)
    if entry is None:
        return None
    status = entry.get("status") if isinstance(entry, dict) else None
    if not isinstance(status, dict):
        return Outcome.UNKNOWN
    kind = status.get("status_str")
    if kind == "success" or status.get("completed") is True:
        return Outcome.SUCCESS
    if kind == "error":
        messages = status.get("messages")
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, list) and message and message[0] == "execution_interrupted":
                return Outcome.INTERRUPTED
        return Outcome.ERROR
    return Outcome.UNKNOWN


# -- one job -------------------------------------------------------------------------------------------------------


class Phase(enum.Enum):
    """What a job's lease is held for."""

    POSTING = "posting"
    #: ComfyUI's answer left it open whether the job was queued.
    CHECKING = "checking"
    QUEUED = "queued"
    RUNNING = "running"
    #: The job is over, calls that its nodes made are not.
    NESTED = "waiting for nested calls"
    FREEING = "freeing"


@attrs.define
class Progress:
    """What people see of a running job."""

    value: float
    max: float
    node: str | None


def _keep_told(job: Job, _: object, ids: frozenset[str]) -> frozenset[str]:
    if ids:
        job.told_ids = ids
    return ids


@attrs.define(eq=False)
class Job:
    """A job that holds the card, or the jobs of others together."""

    lease: Lease
    began: float
    foreign: bool = False
    #: Whether ComfyUI may hold models of other jobs, before this one was posted or while it was.
    was_resident: bool = True
    ids: frozenset[str] = attrs.field(default=frozenset(), on_setattr=_keep_told)
    #: The ids to tell people: those of others' jobs are no longer known once these are over.
    told_ids: frozenset[str] = frozenset()
    #: Ids that were in the queue before the job was posted, as far as known.
    before: frozenset[str] = frozenset()
    phase: Phase = Phase.POSTING
    place: int | None = None
    progress: Progress | None = None
    outcome: Outcome | None = None
    #: When there was last a sign that the job advances.
    last_sign: float = 0.0
    started: float | None = None
    #: Looks in a row that found the job nowhere.
    absent: int = 0
    #: Whether ComfyUI was away since the job was last seen.
    broken: bool = False
    #: Looks that still have to find nothing before a job is given up that may not have been queued.
    checks: int = 0
    stall_told: bool = False

    @property
    def prompt_id(self) -> str | None:
        """The id, where there is just one."""
        return next(iter(self.ids)) if len(self.ids) == 1 else None

    @property
    def label(self) -> str:
        """What people know the job by."""
        ids = sorted(self.ids or self.told_ids)
        if not ids:
            return "(without id)"
        return ids[0] if len(ids) == 1 else f"{ids[0]} and {len(ids) - 1} more"

    def snapshot(self, now: float) -> dict[str, Any]:
        """For the state page."""
        return {
            "prompt_id": self.prompt_id,
            "foreign": self.foreign,
            "phase": self.phase.value,
            "queue_position": self.place,
            "progress": "unknown" if self.progress is None else attrs.asdict(self.progress),
            "seconds": round(now - self.began, 3),
            "running_seconds": None if self.started is None else round(now - self.started, 3),
        }

    def sign(self, now: float) -> None:
        """The job advances."""
        self.last_sign = now
        self.stall_told = False

    def seen(self, place: int, now: float) -> bool:
        """The job is in the queue; returns whether its place changed."""
        self.absent = 0
        self.broken = False
        if place == self.place:
            return False
        self.place = place
        if place == 0:
            self.phase = Phase.RUNNING
            self.started = now
        else:
            self.phase = Phase.QUEUED
        self.sign(now)
        return True


#: Looks in a row that must find a job nowhere: the second one is the answer to an id that history shows late.
ABSENCES = 2


def judge(job: Job, view: QueueView, history: Outcome | None) -> Outcome | None:
    """How a job ended that was looked for in ``view`` and, afterwards, in history; ``None`` while it has not.

    ``job.absent`` counts the looks before this one that found it nowhere.
    """
    if view.place(job.ids) is not None:
        return None
    if history is not None:
        return history
    if job.absent + 1 < ABSENCES:
        return None
    # Only a job that was still pending can be deleted; one that ran and is in no history was lost, or its history was
    # cleared: the caller must not be told that it is done.
    if job.place is None or job.place == 0 or job.broken:
        return Outcome.LOST
    return Outcome.DELETED


# -- the answer to POST /prompt ------------------------------------------------------------------------------------

#: The first key of ComfyUI's answer, so that a cut one still tells; anywhere else it might be somebody's node data.
_FIRST_KEY = re.compile(rb'\s*\{\s*"prompt_id"\s*:\s*("(?:[^"\\\x00-\x1f]|\\.)*")')


def find_prompt_id(
    headers: Iterable[tuple[bytes, bytes]], body: bytes, complete: bool, limit: int
) -> str | None:
    """The job's id in the answer to ``POST /prompt``, ``None`` where it cannot be known.

    :param body: as much of the answer as was kept, without transfer coding.
    :param complete: whether that is all of it.
    :param limit: the most bytes that are decoded.
    """
    decoded = decode_body(headers, body, complete, limit)
    if decoded is None:
        return None
    body, complete = decoded
    if complete:
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            return None
        found = answer.get("prompt_id") if isinstance(answer, dict) else None
    else:
        match = _FIRST_KEY.match(body)
        try:
            found = json.loads(match[1]) if match else None
        except ValueError:
            return None
    return found if isinstance(found, str) else None


# -- events --------------------------------------------------------------------------------------------------------

#: Messages of ComfyUI's socket that show that a job advances.
_SIGNS = frozenset(
    {
        "execution_start",
        "execution_cached",
        "executing",
        "executed",
        "progress",
        "progress_state",
        "execution_success",
        "execution_error",
        "execution_interrupted",
    }
)


def parse_event(text: bytes) -> tuple[str, dict[str, Any]] | None:
    """Type and data of a message of ComfyUI's socket, ``None`` for anything else."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(message, dict):
        kind, data = message.get("type"), message.get("data")
        if isinstance(kind, str) and isinstance(data, dict):
            return kind, data
    return None


def apply_event(job: Job, kind: str, data: dict[str, Any], now: float) -> bool:
    """Note an event of a submitter's socket; returns whether it concerns ``job``."""
    if kind not in _SIGNS or data.get("prompt_id") not in job.ids:
        return False
    job.sign(now)
    if kind == "progress":
        job.progress = _progress(data, data.get("node")) or job.progress
    elif kind == "progress_state":
        nodes = data.get("nodes")
        for node, state in nodes.items() if isinstance(nodes, dict) else ():
            if isinstance(state, dict) and state.get("state") == "running":
                job.progress = _progress(state, node) or job.progress
    elif kind == "executing" and isinstance(data.get("node"), str):
        if job.progress is None or job.progress.node != data["node"]:
            job.progress = Progress(0, 1, data["node"])
    return True


def _progress(data: dict[str, Any], node: object) -> Progress | None:
    value, most = data.get("value"), data.get("max")
    if isinstance(value, (int, float)) and isinstance(most, (int, float)):
        return Progress(value, most, node if isinstance(node, str) else None)
    return None


def queue_remaining(data: dict[str, Any]) -> int | None:
    """The number in the data of a ``status`` message."""
    status = data.get("status")
    info = status.get("exec_info") if isinstance(status, dict) else None
    remaining = info.get("queue_remaining") if isinstance(info, dict) else None
    return remaining if isinstance(remaining, int) else None
