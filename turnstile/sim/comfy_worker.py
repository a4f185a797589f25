"""ComfyUI's queue, its one worker, and what the nodes of the simulator do.

Facts [seen]: one job at a time, lowest number first; ``execution_success`` precedes the history
entry, ``executing {"node": null}`` and the last ``status`` follow it; ``/free`` sets flags that the
worker reads between jobs; models stay on the card until then; three requests wedge the worker.
"""

from __future__ import annotations

import heapq
import json
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.web.client import Agent, HTTPConnectionPool
from twisted.web.http_headers import Headers

from .card import GIB, Card, OutOfVram
from .comfy_assets import png
from .comfy_client import BytesProducer, collect
from .comfy_ws import ComfySocket, Hub
from .faults import Faults
from .graphs import Graph, order, validate
from .ollama_runner import RAMP_STEPS, wake
from .server import EngineSim

HISTORY_SIZE = 10_000
FILES_KEPT = 200


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

    def __init__(self, worker: ComfyWorker) -> None:
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


class Interrupted(Exception):
    """The running job was told to stop."""


class NodeError(Exception):
    """A node failed; ``kind`` is the Python exception that ComfyUI names."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Wedged(Exception):
    """The worker thread is dead."""


class ComfyWorker(EngineSim):
    """The part of `ComfySim` that knows jobs and the card, and nothing of HTTP routes."""

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
        pool = HTTPConnectionPool(clock, persistent=False)
        self._agent = Agent(clock, pool=pool)
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

    def boot(self) -> None:
        self.spawn(self._worker())

    def reset(self) -> None:
        now = self.clock.seconds()
        for job in [*self.pending, *([self.running] if self.running else [])]:
            job.status, job.ended = "lost", now
        idle_waiters = self._idle_waiters
        self._forget()
        wake(idle_waiters)

    def features(self) -> dict[str, Any]:
        raise NotImplementedError

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

    # -- the worker

    async def _worker(self) -> None:
        try:
            while True:
                while not self._heap and not self._flags:
                    waiter: Deferred[None] = Deferred()
                    self._work_waiters.append(waiter)
                    await waiter
                    await self.sleep(0)  # Answers go out before the work begins.
                if self._heap:
                    await self._work()
                await self._obey_flags()
                self._notify_idle()
        except Wedged:
            self.wedged = True
            self._notify_idle()

    async def _work(self) -> None:
        keys = [entry[:2] for entry in self._heap]
        if len(set(keys)) < len(keys):
            raise Wedged("two pending jobs that cannot be compared")
        job = heapq.heappop(self._heap)[-1]
        self.running = job
        job.status, job.started = "running", self.clock.seconds()
        self._interrupt = False
        self.hub.send("status", self.status())
        if job.extra is None:
            raise Wedged("argument of type 'NoneType' is not iterable")
        self._execution = Deferred.fromCoroutine(self._execute(job))
        try:
            await self._execution
        except CancelledError:
            if job.status != "lost":
                raise
        finally:
            self._execution = self._node = None
        self.running = None
        if job.status == "lost":
            return
        if not self.faults.never_in_history:
            self._record(job)
        self.queue_changed()
        if job.client_id is not None:
            self.hub.send("executing", {"node": None, "prompt_id": job.id}, job.client_id)

    async def _obey_flags(self) -> None:
        flags, self._flags = self._flags, {}
        if not flags:
            return
        if self.free_needs_both_flags and len(flags) < 2:
            return
        self._freeing = True
        await self.sleep(self.free_time)
        self._freeing = False
        if not self.faults.ignore_free:
            self.card.release(self.owner)
            self.frees.append(self.clock.seconds())

    def _record(self, job: Job) -> None:
        self.history.pop(job.id, None)
        while len(self.history) >= HISTORY_SIZE:
            del self.history[next(iter(self.history))]
        success = job.status == "success"
        self.history[job.id] = {
            "prompt": job.item(),
            "outputs": job.results,
            "status": {
                "status_str": "success" if success else "error",
                "completed": success,
                "messages": job.messages,
            },
            "meta": {
                name: {
                    "node_id": name,
                    "display_node": name,
                    "parent_node": None,
                    "real_node_id": name,
                }
                for name in job.results
            },
        }

    # -- execution

    def _greet(self, socket: ComfySocket) -> None:
        self.hub.send("status", {**self.status(), "sid": socket.sid}, socket.sid)
        job = self.running
        if job is not None and job.client_id == socket.sid and self._node is not None:
            self.hub.send("executing", {"node": self._node}, socket.sid)

    def _tell(self, job: Job, event: str, data: dict[str, Any], everyone: bool = False) -> None:
        """An event that goes to the submitter, or to nobody, and into the history."""
        data = {"prompt_id": job.id, **data, "timestamp": int(self.clock.seconds() * 1000)}
        job.messages.append([event, data])
        if everyone:
            self.hub.send(event, data)
        elif job.client_id is not None:
            self.hub.send(event, data, job.client_id)

    async def _execute(self, job: Job) -> None:
        self._tell(job, "execution_start", {})
        self._tell(job, "execution_cached", {"nodes": []})
        executed: list[str] = []
        name = ""
        try:
            for name in order(job.graph, job.outputs):
                if self._interrupt:
                    raise Interrupted
                await self._run_node(job, name)
                executed.append(name)
        except Interrupted:
            self._end(job, "interrupted")
            kind = job.graph[name]["class_type"]
            facts = {"node_id": name, "node_type": kind, "executed": executed}
            self._tell(job, "execution_interrupted", facts, everyone=True)
        except (NodeError, OutOfVram) as error:
            self._end(job, "error")
            oom = "torch.OutOfMemoryError"
            exception = error.kind if isinstance(error, NodeError) else oom
            facts = {
                "node_id": name,
                "node_type": job.graph[name]["class_type"],
                "executed": executed,
                "exception_message": str(error),
                "exception_type": exception,
                "traceback": [],
                "current_inputs": {},
                "current_outputs": [],
            }
            self._tell(job, "execution_error", facts)
            if exception == oom:
                self.card.release(self.owner)  # "Got an OOM, unloading all loaded models" [src].
        else:
            self._end(job, "success")
            self._tell(job, "execution_success", {})

    def _progress(self, job: Job, name: str, value: int, top: int, state: str) -> None:
        """Progress goes to the submitter; to everybody if there is none."""
        entry = {
            "value": value,
            "max": top,
            "state": state,
            "node_id": name,
            "prompt_id": job.id,
            "display_node_id": name,
            "parent_node_id": None,
            "real_node_id": name,
        }
        data = {"prompt_id": job.id, "nodes": {name: entry}}
        self.hub.send("progress_state", data, job.client_id)

    async def _run_node(self, job: Job, name: str) -> None:
        entry = job.graph[name]
        self._node = name
        where = {"node": name, "display_node": name, "prompt_id": job.id}
        if job.client_id is not None:
            self.hub.send("executing", where, job.client_id)
        self._progress(job, name, 0, 1, "running")
        inputs = entry.get("inputs", {})
        shown = await self._do(job, name, entry["class_type"], inputs)
        self._progress(job, name, 1, 1, "finished")
        if shown is not None:
            job.results[name] = shown
            if job.client_id is not None:
                self.hub.send("executed", {**where, "output": shown}, job.client_id)

    async def _do(
        self, job: Job, name: str, kind: str, inputs: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Run one node; returns what it shows in the page, if anything."""
        if kind == "CheckpointLoaderSimple":
            await self._load_checkpoint(str(inputs.get("ckpt_name", "sd.safetensors")))
        elif kind == "KSampler":
            await self._sample(job, name, inputs)
        elif kind in ("SaveImage", "PreviewImage"):
            return self._save(job, kind, inputs)
        elif kind == "SimOllamaCall":
            return await self._call(inputs)
        elif kind == "SimError":
            raise NodeError("RuntimeError", str(inputs.get("message", "simulated error")))
        elif kind == "SimOOM":
            raise NodeError("torch.OutOfMemoryError", "Allocation on device")
        elif kind == "SimSystemExit":
            raise Wedged("SystemExit")
        elif kind == "SimStubborn":
            await self.sleep(float(inputs.get("duration", 0)))
        elif inputs.get("duration"):
            await self._polled_sleep(float(inputs["duration"]))
        return None

    async def _polled_sleep(self, seconds: float) -> None:
        """Sleep as a node that looks out for interruption."""
        if not self._interrupt:
            self._nap = self.sleep(seconds)
            try:
                await self._nap
            except CancelledError:
                if not self._interrupt:
                    raise
            finally:
                self._nap = None
        if self._interrupt:
            await self.sleep(self.interrupt_time)
            raise Interrupted

    async def _load_checkpoint(self, checkpoint: str) -> None:
        label = f"checkpoint {checkpoint}"
        held = self.card.labels(self.owner)
        if label in held:
            return
        size = self.checkpoints.get(checkpoint, self.checkpoint_bytes)
        for other in list(held):  # ComfyUI drops its own models to make room.
            if sum(held.values()) + size <= self.card.total_bytes:
                break
            if other.startswith("checkpoint "):
                self.card.release(self.owner, other)
                del held[other]
        try:
            for step in range(1, RAMP_STEPS + 1):
                self.card.allocate(self.owner, label, size * step // RAMP_STEPS)
                await self.sleep(self.load_time / RAMP_STEPS)
        except OutOfVram:
            self.card.release(self.owner, label)
            raise

    async def _sample(self, job: Job, name: str, inputs: dict[str, Any]) -> None:
        if not any(label.startswith("checkpoint ") for label in self.card.labels(self.owner)):
            await self._load_checkpoint("sd.safetensors")
        self.card.allocate(self.owner, "activations", self.activation_bytes)
        steps = int(inputs.get("steps", 4))
        preview = bytes(int(inputs.get("preview_bytes", self.preview_bytes)))
        for step in range(1, steps + 1):
            await self._polled_sleep(float(inputs.get("step_time", self.step_time)))
            job.steps_done = step
            self._progress(job, name, step, steps, "running")
            data = {"value": step, "max": steps, "prompt_id": job.id, "node": name}
            self.hub.send("progress", data, job.client_id)
            if preview:
                self.hub.send_preview(preview, job.client_id)

    def _save(self, job: Job, kind: str, inputs: dict[str, Any]) -> dict[str, Any]:
        self._serial += 1
        where = "output" if kind == "SaveImage" else "temp"
        prefix = str(inputs.get("filename_prefix", "ComfyUI")).replace("/", "_")
        filename = f"{prefix}_{self._serial:05}_.png"
        while len(self.files) >= FILES_KEPT:
            del self.files[next(iter(self.files))]
        self.files[filename] = png(self._serial, int(inputs.get("image_bytes", 0)))
        return {"images": [{"filename": filename, "subfolder": "", "type": where}]}

    async def _call(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """POST to a language model and wait, as nodes for Ollama do: nothing interrupts it."""
        url = str(inputs["url"])
        body = inputs.get("body", {})
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        texts: list[str] = []
        for turn in range(int(inputs.get("count", 1))):
            if turn:
                await self.sleep(float(inputs.get("pause", 0)))
            try:
                response = await self._agent.request(
                    b"POST",
                    url.encode(),
                    Headers({b"Content-Type": [b"application/json"]}),
                    BytesProducer(data),
                )
                answer = await collect(response)
            except CancelledError:
                raise
            except Exception as error:
                self.nested.append((url, 0))
                if not inputs.get("ignore_errors"):
                    raise NodeError("ConnectionError", str(error)) from None
                continue
            self.nested.append((url, response.code))
            if response.code >= 400 and not inputs.get("ignore_errors"):
                raise NodeError("ollama.ResponseError", answer.decode("utf-8", "replace"))
            texts.append(answer.decode("utf-8", "replace"))
        return {"text": texts}
