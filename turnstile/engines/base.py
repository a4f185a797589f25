"""What every engine module offers to the wiring, and the answer of its classification table."""

from __future__ import annotations

import enum
from typing import Any, Protocol

from twisted.internet.defer import Deferred

from turnstile.arbiter import Tenant
from turnstile.card import Eviction


class Admission(enum.Enum):
    """What a request needs before it may be forwarded."""

    #: It does not touch the card.
    PASS = "pass"
    #: It needs a lease.
    LEASE = "lease"
    #: It needs a lease unless its (small) body shows that it only unloads a model.
    PEEK = "peek"
    #: The engine does not run, and the request must not start it.
    ABSENT = "absent"


class Engine(Protocol):
    """An engine behind turnstile: an evictable tenant with a life of its own."""

    @property
    def tenant(self) -> Tenant: ...

    def evict(self) -> Deferred[Eviction]:
        """See :meth:`turnstile.card.Evictable.evict`."""
        ...

    def start(self) -> Deferred[None]:
        """Look at the engine once; fires when the first look is over, well or badly, within PROBE_TIMEOUT."""
        ...

    def stop(self) -> Deferred[None] | None:
        """End everything that runs in the background; a Deferred fires when a process that it has is gone."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """What the state page shows of this engine."""
        ...
