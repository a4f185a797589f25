"""sd-server's asynchronous jobs: a queue of their own before the mutex, and a memory of the past."""

from __future__ import annotations

import base64
from collections import deque
from dataclasses import dataclass
from typing import Any

from twisted.internet.defer import Deferred

from .exchange import HttpError
from .ollama_runner import wake
from .sd_worker import Render, SdWorker, sd_error

MAX_PENDING = 64
#: Simulated seconds for which a finished job can be asked for, and again as long for which its id
#: is known to be expired.
JOB_TTL = 600.0


@dataclass(eq=False)
class Job:
    """One asynchronous job."""

    id: str
    kind: str
    created: float
    steps: int | None = None
    images: int = 1
    status: str = "queued"
    started: float | None = None
    completed: float | None = None
    result: list[bytes] | None = None
    error: dict[str, str] | None = None


class SdJobs(SdWorker):
    """The part of `SdSim` that knows jobs and nothing of HTTP routes."""

    def __init__(self, *args: Any, job_ttl: float = JOB_TTL, **options: Any) -> None:
        super().__init__(*args, **options)
        self.job_ttl = job_ttl
        self.jobs: dict[str, Job] = {}
        self.expired: dict[str, float] = {}
        self.queue: deque[Job] = deque()
        self._job_waiters: list[Deferred[None]] = []
        self._next_id = 0

    def boot(self) -> None:
        super().boot()
        self.spawn(self._work_off())

    @property
    def pending(self) -> int:
        """How many jobs are queued or generating."""
        return sum(job.completed is None for job in self.jobs.values())

    def submit(self, kind: str, steps: int | None = None, images: int = 1) -> Job:
        """Queue a job; raises the answer for a full queue."""
        self.purge()
        if self.pending >= MAX_PENDING:
            raise sd_error(429, "job queue is full")
        now = self.clock.seconds()
        job = Job(f"job_{int(now):x}_{self._next_id:08x}", kind, now, steps, images)
        self._next_id += 1
        self.jobs[job.id] = job
        self.queue.append(job)
        wake(self._job_waiters)
        return job

    def find_job(self, job_id: str) -> Job:
        """A job by its id; raises the answer for one that is not there."""
        self.purge()
        job = self.jobs.get(job_id)
        if job is None:
            raise self._no_job(job_id)
        return job

    def _no_job(self, job_id: str) -> HttpError:
        if job_id in self.expired:
            return sd_error(410, "job expired")
        return sd_error(404, "job not found")

    def cancel_job(self, job: Job) -> None:
        """Take a queued job out; raises the answer for one that generates."""
        if job.status == "generating":
            raise sd_error(409, "job is currently generating and cannot be interrupted yet")
        if job.status == "queued":
            self.queue.remove(job)
            job.status, job.completed = "cancelled", self.clock.seconds()
            job.error = {"code": "cancelled", "message": "job cancelled by client"}

    def lose_job(self, job_id: str) -> None:
        """Forget a job although it may be running."""
        job = self.jobs.pop(job_id)
        if job in self.queue:
            self.queue.remove(job)

    def purge(self) -> None:
        """Forget what is too old."""
        now, ttl = self.clock.seconds(), self.real(self.job_ttl)
        self.expired = {name: end for name, end in self.expired.items() if end > now}
        for job in list(self.jobs.values()):
            if job.completed is not None and now - job.completed >= ttl:
                del self.jobs[job.id]
                self.expired[job.id] = now + ttl

    async def _work_off(self) -> None:
        while True:
            while not self.queue:
                waiter: Deferred[None] = Deferred()
                self._job_waiters.append(waiter)
                await waiter
            job = self.queue.popleft()
            job.status, job.started = "generating", self.clock.seconds()
            await self._do(job, self.render(job.kind, job.steps, job.images))

    async def _do(self, job: Job, render: Render) -> None:
        try:
            job.result = await render.over()
            job.status = "completed"
        except HttpError:
            job.status = "failed"
            message = "generate_image returned no results"
            job.error = {"code": "generation_failed", "message": message}
        job.completed = self.clock.seconds()

    def describe(self, job: Job) -> dict[str, Any]:
        """What the server says of a job."""
        place = self.queue.index(job) + 1 if job in self.queue else 0
        return {
            "id": job.id,
            "kind": job.kind,
            "status": job.status,
            "created": int(job.created),
            "started": None if job.started is None else int(job.started),
            "completed": None if job.completed is None else int(job.completed),
            "queue_position": place,
            "result": self._outcome(job),
            "error": job.error,
        }

    @staticmethod
    def _outcome(job: Job) -> dict[str, Any] | None:
        if job.result is None:
            return None
        data = [base64.b64encode(image).decode() for image in job.result]
        if job.kind == "vid_gen":
            shape = {"output_format": "webm", "mime_type": "video/webm", "fps": 16}
            return {**shape, "frame_count": len(data), "b64_json": data[0]}
        images = [{"index": index, "b64_json": item} for index, item in enumerate(data)]
        return {"output_format": "png", "images": images}
