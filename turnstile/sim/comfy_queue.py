"""ComfyUI's queue: what is submitted, waits, is deleted, interrupted, lost.

Facts [seen]: lowest number first; ``status`` is broadcast at every change; ``/free`` only sets
flags; a job with the number and id of one that waits is queued although its POST fails.
"""

from __future__ import annotations

import heapq
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from twisted.internet.defer import Deferred

from .card import GIB, Card
from .comfy_ws import ComfySocket, Hub
from .faults import Faults
from .graphs import Graph, validate
from .ollama_runner import wake
from .server import EngineSim


@dataclass(eq=False)
class Job:
    """A prompt's life.  Times are ``clock.seconds()``.

    ``status``: pending, running, success, error, interrupted, deleted or lost.
    """

    id: str
    number: float
    graph: Graph
    extra: dict[str, Any] | None
    outputs: list[str]
    submitted: float
    status: str = "pending"
    started: float | None = None
    ended: float | None = None
    steps_done: int = 0
    results: dict[str, Any] = field(default_factory=dict)
    messages: list[list[Any]] = field(default_factory=list)

    @property
    def client_id(self) -> str | None:
        return self.extra.get("client_id") if self.extra else None

    def item(self) -> list[Any]:
        """As ``/queue`` and the history show it."""
        return [self.number, self.id, self.graph, self.extra, self.outputs]


class ComfyFaults(Faults):
    """``never_in_history``: jobs end and leave no trace.  ``ignore_free``: VRAM never drops."""

    def __init__(self, worker: ComfyQueue) -> None:
        super().__init__()
        self.never_in_history = False
        self.ignore_free = False
        self._worker = worker

    def lose_job(self, prompt_id: str | None = None) -> str | None:
        """Make a job (the running one by default) vanish from queue and history alike."""
        return self._worker.lose(prompt_id)

    def clear(self) -> None:
        super().clear()
        self.never_in_history = self.ignore_free = False


class ComfyQueue(EngineSim):
    """Jobs and what may be done with them; `ComfyWorker` runs them."""

    owner = "comfyui"
    faults: ComfyFaults

    def __init__(
        self,
        card: Card,
        clock: Any,
        *,
        speed: float = 1.0,
        load_time: float = 2.0,
        free_time: float = 0.1,
        step_time: float = 0.05,
        interrupt_time: float = 0.05,
        preview_bytes: int = 1024,
        checkpoint_bytes: int = 6 * GIB,
        checkpoints: dict[str, int] | None = None,
        activation_bytes: int = 1 * GIB,
        free_needs_both_flags: bool = True,
        max_requests: int = 5000,
    ) -> None:
        super().__init__(card, clock, speed=speed, max_requests=max_requests)
        self.faults = ComfyFaults(self)
        self.load_time = load_time
        self.free_time = free_time
        self.step_time = step_time
        self.interrupt_time = interrupt_time
        self.preview_bytes = preview_bytes
        self.checkpoint_bytes = checkpoint_bytes
        self.checkpoints = checkpoints or {}
        self.activation_bytes = activation_bytes
        self.free_needs_both_flags = free_needs_both_flags
        self.jobs: dict[str, Job] = {}
        self.free_calls: list[tuple[float, bool, bool]] = []
        self.frees: list[float] = []
        self.history: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        self.nested: deque[tuple[str, int]] = deque(maxlen=1000)
        self.hub = Hub(clock, self._greet, self.features)
        self._forget()

    def _forget(self) -> None:
        self.running: Job | None = None
        self.wedged = False
        self.history.clear()
        self._heap: list[tuple[float, str, int, Job]] = []
        self._serial = 0
        self._number = 0
        self._flags: dict[str, bool] = {}
        self._freeing = False
        self._node: str | None = None
        self._interrupt = False
        self._nap: Deferred[None] | None = None
        self._execution: Deferred[None] | None = None
        self._work_waiters: list[Deferred[None]] = []
        self._idle_waiters: list[Deferred[None]] = []

    def reset(self) -> None:
        now = self.clock.seconds()
        for job in [*self.pending, *([self.running] if self.running else [])]:
            job.status, job.ended = "lost", now
        idle_waiters = self._idle_waiters
        self._forget()
        wake(idle_waiters)

    def features(self) -> dict[str, Any]:
        """What ``/features`` answers."""
        raise NotImplementedError

    def _greet(self, socket: ComfySocket) -> None:
        """The first events of a new socket."""
        self.hub.send("status", {**self.status(), "sid": socket.sid}, socket.sid)
        job = self.running
        if job is not None and job.client_id == socket.sid and self._node is not None:
            self.hub.send("executing", {"node": self._node}, socket.sid)

    # -- the queue

    @property
    def pending(self) -> list[Job]:
        """Waiting jobs, in the heap's order as ``/queue`` has them."""
        return [entry[-1] for entry in self._heap]

    @property
    def remaining(self) -> int:
        return len(self._heap) + (self.running is not None)

    async def when_idle(self) -> None:
        """Wait until nothing runs, waits or is being freed."""
        while (self.remaining or self._flags or self._freeing) and not self.wedged:
            waiter: Deferred[None] = Deferred()
            self._idle_waiters.append(waiter)
            await waiter

    def submit(self, graph: Graph, client_id: str | None = None, **more: Any) -> str:
        """Queue a job as somebody else's ``POST /prompt`` would."""
        verdict = validate(graph)
        if verdict.error is not None:
            raise ValueError(verdict.error["message"])
        extra = {} if client_id is None else {"client_id": client_id}
        prompt_id = str(more.get("prompt_id", uuid.uuid4()))
        self.put(
            self.next_number(bool(more.get("front"))), prompt_id, graph, extra, verdict.outputs
        )
        return prompt_id

    def next_number(self, front: bool) -> float:
        number = self._number
        self._number += 1
        return -number if front else number

    def put(
        self,
        number: float,
        prompt_id: str,
        graph: Graph,
        extra: dict[str, Any] | None,
        outputs: list[str],
    ) -> None:
        """Queue a job; raises TypeError, the job queued all the same, where ComfyUI does."""
        job = Job(prompt_id, number, graph, extra, outputs, self.clock.seconds())
        twin = any(entry[:2] == (number, prompt_id) for entry in self._heap)
        self._serial += 1
        heapq.heappush(self._heap, (number, prompt_id, self._serial, job))
        self.jobs[prompt_id] = job
        if twin:
            raise TypeError("'<' not supported between instances of 'dict' and 'dict'")
        self.queue_changed()

    def queue_changed(self) -> None:
        self.hub.send("status", self.status())
        wake(self._work_waiters)
        self._notify_idle()

    def status(self) -> dict[str, Any]:
        return {"status": {"exec_info": {"queue_remaining": self.remaining}}}

    def delete(self, prompt_id: Any) -> None:
        """Take a pending job off; others are left alone."""
        for entry in self._heap:
            if entry[-1].id == prompt_id:
                self._heap.remove(entry)
                heapq.heapify(self._heap)
                self._end(entry[-1], "deleted")
                self.queue_changed()
                return

    def clear_queue(self) -> None:
        for job in self.pending:
            self._end(job, "deleted")
        self._heap.clear()
        self.queue_changed()

    def lose(self, prompt_id: str | None) -> str | None:
        """See `ComfyFaults.lose_job`."""
        job = self.running
        if job is not None and prompt_id in (None, job.id):
            self._end(job, "lost")
            if self._execution is not None:
                self._execution.cancel()
            return job.id
        for entry in self._heap:
            if prompt_id in (None, entry[-1].id):
                self._heap.remove(entry)
                heapq.heapify(self._heap)
                self._end(entry[-1], "lost")
                self._notify_idle()
                return entry[-1].id
        return None

    def interrupt(self, prompt_id: str | None = None) -> None:
        """Stop the running job, if it is the one named."""
        job = self.running
        if job is None or self.wedged or prompt_id not in (None, job.id):
            return
        self._interrupt = True
        if self._nap is not None:
            self._nap.cancel()

    def free(self, unload_models: bool, free_memory: bool) -> None:
        """What ``POST /free`` does: set flags."""
        self.free_calls.append((self.clock.seconds(), unload_models, free_memory))
        if unload_models:
            self._flags["unload_models"] = True
        if free_memory:
            self._flags["free_memory"] = True
        wake(self._work_waiters)

    def _end(self, job: Job, status: str) -> None:
        job.status = status
        job.ended = self.clock.seconds()

    def _notify_idle(self) -> None:
        if not (self.remaining or self._flags or self._freeing) or self.wedged:
            wake(self._idle_waiters)
