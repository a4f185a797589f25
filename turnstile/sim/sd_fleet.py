"""All the processes that a simulated sd-server is started as, one after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred, DeferredList
from twisted.python.failure import Failure

from .card import Card
from .exchange import RecordedRequest
from .sd_worker import Render, SdFaults
from .sdserver import SdSim


class SdFleet:
    """Starts processes of sd-server in memory, and keeps what is to be known of all of them.

    ``options`` go to `SdSim`.  The faults of `faults` strike the processes that start afterwards;
    those of HTTP strike all.
    """

    owner = "sd"

    def __init__(self, card: Card, clock: Any, **options: Any) -> None:
        self.card = card
        self.clock = clock
        self.options = options
        self.faults = SdFaults()
        self.requests: deque[RecordedRequest] = deque(maxlen=options.get("max_requests", 5000))
        self.processes: list[SdSim] = []
        #: Is called with each process before it starts.
        self.on_start: Callable[[SdSim], None] = lambda process: None

    def start(
        self,
        port: int,
        interface: str = "127.0.0.1",
        say: Callable[[str], None] | None = None,
        **options: Any,
    ) -> SdSim:
        """Start one more process; its port opens when its model is loaded."""
        process = SdSim(
            self.card,
            self.clock,
            faults=self.faults,
            requests=self.requests,
            say=say,
            **{**self.options, **options},
        )
        self.processes.append(process)
        self.on_start(process)
        process.listen(port, interface)
        return process

    @property
    def alive(self) -> list[SdSim]:
        """The processes that have not ended."""
        return [process for process in self.processes if process.exit_status is None]

    @property
    def renders(self) -> list[Render]:
        """Everything that was rendered, by whichever process."""
        return [render for process in self.processes for render in process.renders]

    @property
    def busy(self) -> bool:
        """Whether something is being rendered, or waits for it."""
        return any(not r.done for p in self.alive for r in p.renders)

    @property
    def errors(self) -> list[Failure]:
        return [error for process in self.processes for error in process.errors]

    def requests_for(self, method: str, path: str) -> list[RecordedRequest]:
        """The recorded requests of one method and (percent-decoded) path."""
        return [r for p in self.processes[:1] for r in p.requests_for(method, path)]

    def drop_connections(self, rst: bool = True) -> None:
        """Cut every open connection."""
        for process in self.alive:
            process.drop_connections(rst)

    def stop(self) -> Deferred[None]:
        """End all; nothing of it is left in the reactor or on the card afterwards."""
        stopping = DeferredList([process.stop() for process in self.processes])
        return stopping.addCallback(lambda _: None)
