"""What a request that was cut off may still do to a llama.cpp server, and for how long that has to be reckoned with.

Seen at the real server: behind a router a stream is given up with the next token that cannot be delivered, and an
answer in one piece is computed to its end. Told to end meanwhile, the model's process hangs until the router kills it
(10 s by default), so it is worth waiting a little to see whether it stops by itself. A request that waits for another
model to leave loads its own as soon as that is gone, even if its client left meanwhile. One that carries a conversation
id goes on generating when its client is gone, until it is told to stop.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from typing import Any
from urllib.parse import quote

from twisted.internet.defer import Deferred, inlineCallbacks
from twisted.internet.interfaces import IReactorTime

from turnstile.engines.client import ClientError, HttpError, JsonClient

#: Seconds after an abort until a model is told to leave: most have stopped computing by then.
ABORT_PAUSE = 0.25
#: Seconds for which one that still computes is left to end by itself, between looks at it, and that one may take.
BUSY_WAIT = 1.5
BUSY_LOOK = 0.1
BUSY_LOOK_TIMEOUT = 1.0
#: Seconds after an abort in which an empty list of models is not believed: one may be about to load …
SETTLE_TIME = 0.5
#: … and for which a list must stay empty that was not, if a request was aborted lately.
EMPTY_TIME = 0.25
#: Seconds after an abort for which it may still have such effects.
ABORT_MEMORY = 30.0
#: How many conversations that may go on without their client are remembered.
CONVERSATIONS = 32


class Aborts:
    """Remembers the requests that were cut off."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._latest: float | None = None
        self._conversations: list[str] = []

    def note(self, conversation: str | None = None) -> None:
        """One was cut off just now.

        :param conversation: its ``X-Conversation-Id``.
        """
        self._latest = self._clock.seconds()
        if conversation:
            if conversation in self._conversations:
                self._conversations.remove(conversation)
            self._conversations.append(conversation)
            del self._conversations[:-CONVERSATIONS]

    def take_conversations(self) -> list[str]:
        """Those that may still be going on, to be stopped now, which counts as an abort of its own."""
        taken, self._conversations = self._conversations, []
        if taken:
            self.note()
        return taken

    @property
    def recent(self) -> bool:
        """Whether one may still have effects."""
        return self._age() < ABORT_MEMORY

    @property
    def may_unload(self) -> bool:
        """Whether the computing of the latest has ended."""
        return self._age() >= ABORT_PAUSE

    def believe(self, seen: bool, empty_since: float) -> bool:
        """Whether a list of models that has been empty since then shows that nothing is loaded.

        :param seen: whether it was not empty before, in the same eviction.
        """
        if not self.recent:
            return True
        if self._age() < SETTLE_TIME:
            return False
        return not seen or self._clock.seconds() - empty_since >= EMPTY_TIME

    def decisive_in(self, empty_since: float | None) -> float:
        """Seconds until a look may decide what one before cannot; infinite if time changes nothing."""
        if self._latest is None:
            return math.inf
        now = self._clock.seconds()
        moments = [self._latest + ABORT_PAUSE, self._latest + SETTLE_TIME]
        if empty_since is not None:
            moments.append(empty_since + EMPTY_TIME)
        return min((moment - now for moment in moments if moment > now), default=math.inf)

    def _age(self) -> float:
        return math.inf if self._latest is None else self._clock.seconds() - self._latest


class Stragglers:
    """During one eviction: whether models still compute for clients that left."""

    def __init__(self, client: JsonClient, clock: IReactorTime) -> None:
        self._client = client
        self._clock = clock
        self._until = clock.seconds() + BUSY_WAIT
        self._next = 0.0
        self._gone = False

    @inlineCallbacks
    def gone(self, models: Iterable[str]) -> Generator[Deferred[Any], Any, bool]:
        """Whether none of ``models`` computes any more, or has for too long.

        They must be loaded: the question would wake one that sleeps.
        """
        now = self._clock.seconds()
        self._gone = self._gone or now >= self._until
        if self._gone or now < self._next:
            return self._gone
        self._next = now + BUSY_LOOK
        for name in models:
            if (yield self._computes(name)):
                return False
        self._gone = True
        return True

    @inlineCallbacks
    def _computes(self, model: str) -> Generator[Deferred[Any], Any, bool]:
        path = f"/slots?model={quote(model, safe='')}&autoload=false"
        try:
            slots = yield self._client.get_json(path, BUSY_LOOK_TIMEOUT)
        except HttpError:
            return False  # there is no such page, or the model has left
        except ClientError:
            return True  # it is too busy to answer
        entries = slots if isinstance(slots, list) else ()
        return any(isinstance(slot, dict) and slot.get("is_processing") is True for slot in entries)
