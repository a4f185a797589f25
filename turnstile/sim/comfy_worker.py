"""ComfyUI's one worker, and what the nodes of the simulator do.

Facts [seen]: one job at a time; ``execution_success`` precedes the history entry,
``executing {"node": null}`` and the last ``status`` follow it; the flags of ``/free`` are read
between jobs; models stay on the card until then; three requests wedge the worker.
"""

from __future__ import annotations

import heapq
import json
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.web.client import Agent, HTTPConnectionPool
from twisted.web.http_headers import Headers

from .card import Card, OutOfVram
from .comfy_assets import png
from .comfy_client import BytesProducer, collect
from .comfy_queue import ComfyQueue, Job
from .graphs import order
from .ollama_runner import RAMP_STEPS

HISTORY_SIZE = 10_000
FILES_KEPT = 200


class Interrupted(Exception):
    """The running job was told to stop."""


class NodeError(Exception):
    """A node failed; ``kind`` is the Python exception that ComfyUI names."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Wedged(Exception):
    """The worker thread is dead."""


class ComfyWorker(ComfyQueue):
    """The part of `ComfySim` that runs jobs on the card, and knows nothing of HTTP routes."""

    def __init__(self, card: Card, clock: Any, **queueing: Any) -> None:
        super().__init__(card, clock, **queueing)
        pool = HTTPConnectionPool(clock, persistent=False)
        self._agent = Agent(clock, pool=pool)

    def boot(self) -> None:
        self.spawn(self._worker())

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
        try:
            shown = await self._do(job, name, entry["class_type"], inputs)
        except (TypeError, ValueError, KeyError) as error:
            raise NodeError(type(error).__name__, str(error)) from None
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
