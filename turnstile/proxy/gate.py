"""What the data path asks about a request that needs the card, without knowing what an engine is."""

from __future__ import annotations

import enum
from typing import Protocol

from twisted.internet.defer import Deferred

from turnstile.proxy.http1 import Headers


class Ending(enum.Enum):
    """How the forwarding of a gated request ended."""

    #: The whole answer was passed on.
    DONE = "done"
    #: The client left first; the upstream request was cut off.
    CLIENT_GONE = "client gone"
    #: The upstream's connection ended before its answer did.
    UPSTREAM_LOST = "upstream lost"
    #: The request was not forwarded (refused, waited too long, shutdown).
    NOT_SENT = "not sent"


class Busy(Exception):
    """The card cannot be had: the answer for the client.

    :ivar retry_after: seconds for Retry-After; ``None``: none is sent.
    """

    def __init__(self, message: str, status: int, retry_after: int | None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.retry_after = retry_after


class Gate(Protocol):
    """One request's claim on the card. The order of calls is

    ``enter`` -> ``prepare`` -> (connect) -> ``room`` -> ``forwarding`` -> ``answered``/``captured``… -> ``end``,

    with ``leave`` and another ``enter`` where the upstream could not be reached. ``end`` is called exactly once, last,
    whatever happened.
    """

    #: How many bytes of the answer's body to hand to ``captured``; 0: none.
    capture: int
    #: Once its body is sent the request is carried through even if the client leaves.
    detached: bool
    #: Whether :meth:`prepare` has anything to do.
    prepares: bool

    def enter(self) -> Deferred[None] | None:
        """Get a lease; ``None`` if it was had at once. Cancellable. Fails with :class:`Busy`."""
        ...

    def prepare(self) -> Deferred[None] | None:
        """Have the upstream run; ``None`` if nothing is to be done. Cancellable. Fails with :class:`Busy`."""
        ...

    def leave(self) -> None:
        """Give the lease back for the time of a back-off: the upstream cannot be reached."""
        ...

    def contended(self) -> bool:
        """Whether others wait for what this request has."""
        ...

    def room(self) -> Deferred[None] | None:
        """Make the other tenants leave the card; ``None`` if nobody is there. Cancellable."""
        ...

    def forwarding(self) -> None:
        """The request is about to be sent."""
        ...

    def answered(self, status: int, fields: Headers) -> None:
        """The upstream's answer began."""
        ...

    def captured(self, body: bytes, complete: bool) -> None:
        """The answer's body, free of its framing, or its first ``capture`` bytes (then not ``complete``)."""
        ...

    def end(self, ending: Ending, *, body_sent: bool) -> None:
        """The forwarding is over. ``body_sent``: the upstream may have the whole request."""
        ...
