"""What a request that was cut off may still do to a llama.cpp server, and for how long that has to be reckoned with.

Seen at the real server: for a moment its process goes on computing, and a router then cannot end it before its own
time-out. A request that waits for another model to leave loads its own as soon as that is gone, even if its client left
meanwhile. One that carries a conversation id goes on generating when its client is gone, until it is told to stop.
"""

from __future__ import annotations

import math

from twisted.internet.interfaces import IReactorTime

#: Seconds after an abort until a model is told to leave: before that its process may still be computing.
ABORT_PAUSE = 0.25
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
