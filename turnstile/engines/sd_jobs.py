"""sd-server's asynchronous jobs: their ids, how they stand, and when they are over."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

import attrs
from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure
from twisted.web.client import ResponseDone
from twisted.web.http import PotentialDataLoss

from turnstile.arbiter import Lease
from turnstile.engines.answers import decode_body
from turnstile.engines.client import BadAnswer, Broken, JsonClient, TimedOut

#: How much of an answer about a job is read: the result of one that is completed, or a preview, may be megabytes, and
#: what is looked for comes before it.
PREFIX_LIMIT = 256 * 1024


class Phase(enum.Enum):
    """Where a job is between its POST and the lease's end."""

    POSTING = "posting"
    QUEUED = "queued"
    GENERATING = "generating"


class Outcome(enum.Enum):
    """How a job ended."""

    SUCCESS = "success"
    ERROR = "error"
    CANCELLED = "cancelled"
    #: sd-server does not know it any more, or ended.
    LOST = "lost"
    #: No sign of progress for JOB_TIMEOUT.
    TIMEOUT = "timeout"
    #: sd-server did not take it.
    REFUSED = "refused"
    #: It may have taken it; nobody was told an id.
    UNKNOWN = "unknown"


#: The words of sd-server's status for a job that is over.
_OVER = {
    "completed": Outcome.SUCCESS,
    "failed": Outcome.ERROR,
    "cancelled": Outcome.CANCELLED,
}


@attrs.define(eq=False)
class Job:
    """A job that holds the card.

    :ivar last_sign: when it was last seen to advance.
    :ivar seen: what it looked like then.
    :ivar queued_at: when sd-server was seen to have it.
    :ivar misses: how often in a row sd-server did not know it.
    """

    lease: Lease
    began: float
    last_sign: float
    phase: Phase = Phase.POSTING
    id: str | None = None
    seen: object = None
    queued_at: float | None = None
    misses: int = 0
    place: int | None = None


@attrs.frozen
class JobView:
    """What sd-server says of a job.

    :ivar outcome: ``None`` while it is not over.
    :ivar place: in sd-server's own line, from 1; 0: none.
    """

    status: str
    outcome: Outcome | None = None
    place: int = 0


# -- reading answers -----------------------------------------------------------------------------------------------

_ID = re.compile(r'"id"\s*:\s*"([A-Za-z0-9_-]+)"')
_STATUS = re.compile(r'"status"\s*:\s*"(\w+)"')
_COMPLETED = re.compile(r'"completed"\s*:\s*(null|[0-9.]+)')
_PLACE = re.compile(r'"queue_position"\s*:\s*(\d+)')


def find_job_id(
    headers: Iterable[tuple[bytes, bytes]], body: bytes, complete: bool, limit: int
) -> str | None:
    """The id in the answer to a POST that begins a job, ``None`` where it cannot be known.

    :param body: as much of the answer as was kept, without transfer coding.
    :param complete: whether that is all of it.
    :param limit: the most bytes that are decoded.
    """
    decoded = decode_body(headers, body, complete, limit)
    if decoded is None:
        return None
    text, complete = decoded[0].decode("utf-8", "replace"), decoded[1]
    if complete:
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            return None
        found = answer.get("id") if isinstance(answer, dict) else None
        return found if isinstance(found, str) and found else None
    match = _ID.search(text)
    return match[1] if match else None


def parse_job(body: bytes, complete: bool) -> JobView:
    """Read an answer of ``GET /sdcpp/v1/jobs/ID``, or its beginning.

    :raises BadAnswer: if it does not say how the job stands.
    """
    text = body.decode("utf-8", "replace")
    if complete:
        try:
            answer: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadAnswer(f"not JSON: {type(error).__name__}") from None
        status = answer.get("status") if isinstance(answer, dict) else None
        if not isinstance(status, str):
            raise BadAnswer("a job without a status")
        place = answer.get("queue_position")
        return JobView(status, _OVER.get(status), place if isinstance(place, int) else 0)
    # Strings hold no bare quotes, and no object in it but the job has these members. They may come in alphabetical
    # order, so that the status is behind the result.
    match = _STATUS.search(text)
    if match:
        place_match = _PLACE.search(text)
        return JobView(match[1], _OVER.get(match[1]), int(place_match[1]) if place_match else 0)
    match = _COMPLETED.search(text)
    if match:
        done = match[1] != "null"
        return JobView("completed" if done else "generating", Outcome.SUCCESS if done else None)
    raise BadAnswer(f"no status in the first {len(body)} bytes")


class _Prefix(Protocol):
    """Gathers the beginning of a body, and leaves the rest."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.done: Deferred[tuple[bytes, bool]] = Deferred(lambda _: self._drop())

    def dataReceived(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > PREFIX_LIMIT:
            self._end((bytes(self._data[:PREFIX_LIMIT]), False))
            self._drop()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if reason.check(ResponseDone, PotentialDataLoss):
            self._end((bytes(self._data), True))
        else:
            self._end(Failure(Broken(type(reason.value).__name__)))

    def _end(self, result: tuple[bytes, bool] | Failure) -> None:
        if not self.done.called:
            self.done.callback(result)

    def _drop(self) -> None:
        transport = self.transport
        if transport is not None:
            getattr(transport, "abortConnection", transport.loseConnection)()


def look_at_job(
    client: JsonClient, clock: IReactorTime, job_id: str, timeout: float
) -> Deferred[JobView]:
    """Ask how a job stands; fails with :class:`~turnstile.engines.client.ClientError`."""

    def read(response: Any) -> Deferred[tuple[bytes, bool]]:
        prefix = _Prefix()
        response.deliverBody(prefix)
        return prefix.done.addTimeout(timeout, clock)

    def late(failure: Failure) -> JobView:
        failure.trap(TimeoutError)
        raise TimedOut(f"no whole answer within {timeout:g} s")

    d = client.open("/sdcpp/v1/jobs/" + quote(job_id, safe=""), timeout)
    return d.addCallback(read).addCallbacks(lambda found: parse_job(*found), late)
