"""A simulated card that processes share, and decode loops on it.

Steps of all processes queue up on the card, first come, first served, and take their time one after the other,
as kernels of one GPU do without any GPU-share. Nobody is kept out: it records who enters while another
is inside.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import itertools
import mmap
import multiprocessing
import os
import random
import signal
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from turnstile.gpushare import Peer, RegistryFullError

STEP_NS = 8_000_000
_FORK = multiprocessing.get_context("fork")


class Card:
    """Made before the processes that use it are forked; each of them calls `open`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(8))
        self._fd = -1

    def open(self) -> None:
        """Use it from this process."""
        self._fd = os.open(self.path, os.O_RDWR)
        self._free_at = memoryview(mmap.mmap(self._fd, 8)).cast("q")

    def compute(self) -> tuple[int, int]:
        """One step. Returns when it was submitted and when the card was done, in monotonic nanoseconds."""
        # The kernel lets go of the lock if the process is killed.
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        entered = time.monotonic_ns()
        done = max(entered, self._free_at[0]) + STEP_NS
        self._free_at[0] = done
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        while (left := done - time.monotonic_ns()) > 0:
            time.sleep(left / 1e9)
        return entered, done


class TorchCard(Card):
    """A real card, or a CPU: steps are products of a matrix and a vector, as decoding one token is.

    torch is imported by the processes that compute only, so they can be forked.
    """

    def __init__(self, path: Path, device: str, products: int) -> None:
        self.path = path
        self.device = device
        self.products = products

    def open(self) -> None:
        """Use it from this process."""
        import torch

        torch.set_num_threads(1)
        with torch.inference_mode():
            size = 8192 if self.device == "cuda" else 512
            kind = torch.float16 if self.device == "cuda" else torch.float32
            # More than the card's cache holds, so each product reads the memory.
            self._matrices = [
                torch.randn(size, size, device=self.device, dtype=kind) / size**0.5
                for _ in range(4)
            ]
            self._vector = torch.randn(size, 1, device=self.device, dtype=kind)
        self.sync = torch.cuda.synchronize if self.device == "cuda" else lambda: None
        self.compute()

    def compute(self) -> tuple[int, int]:
        """One step."""
        import torch

        entered = time.monotonic_ns()
        with torch.inference_mode():
            vector = self._vector
            for number in range(self.products):
                vector = self._matrices[number % len(self._matrices)] @ vector
        self.sync()
        return entered, time.monotonic_ns()


def calibrate(device: str, directory: Path) -> int:
    """How many products take as long as a step of the simulated card, on a card that is idle."""
    found = directory / "products"

    def measure() -> None:
        card = TorchCard(directory / "unused", device, 100)
        card.open()
        times = []
        for _ in range(20):
            entered, done = card.compute()
            times.append(done - entered)
        found.write_text(str(max(round(100 * STEP_NS / sorted(times)[10]), 1)))

    process = _FORK.Process(target=measure)
    process.start()
    process.join()
    return int(found.read_text())


@dataclass
class Steps:
    """What one process did on the card, in monotonic nanoseconds."""

    entered: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    #: When the process went on.
    resumed: list[int] = field(default_factory=list)
    #: How late for its window it entered, or 0.
    stray: list[int] = field(default_factory=list)

    def count(self, since: int, until: int) -> int:
        """Steps that were done in between."""
        return sum(since < done <= until for done in self.done)

    def gaps(self, since: int, until: int) -> list[float]:
        """Milliseconds from one token to the next."""
        times = [t for t in self.resumed if since < t <= until]
        return [(b - a) / 1e6 for a, b in itertools.pairwise(times)]


_RECORD = struct.Struct("qqqq")


def read_steps(path: Path) -> Steps:
    """The steps in a log, also of a process that was killed."""
    steps = Steps()
    values = array.array("q")
    data = path.read_bytes() if path.exists() else b""
    values.frombytes(data[: len(data) - len(data) % _RECORD.size])
    steps.entered[:] = values[0::4]
    steps.done[:] = values[1::4]
    steps.resumed[:] = values[2::4]
    steps.stray[:] = values[3::4]
    return steps


def decode(
    card: Card, log: Path, peer: Peer | None, until: int, *, check_owner: bool = False
) -> None:
    """Step after step until then, paced if there is a ``peer``."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    while time.monotonic_ns() < until:
        stray = 0
        with peer.step() if peer is not None else contextlib.nullcontext():
            if check_owner and peer is not None and peer.slot is not None:
                snapshot = peer.take_snapshot()
                schedule = snapshot.make_schedule()
                if schedule.get_owner(snapshot.taken_us) != peer.slot:
                    window = schedule.get_window(peer.slot)
                    position = snapshot.taken_us % schedule.period_us
                    stray = (position - window.end_us) % schedule.period_us + 1
            entered, done = card.compute()
        os.write(fd, _RECORD.pack(entered, done, time.monotonic_ns(), stray))
    os.close(fd)


class Start:
    """When all begin: once each of them has its card open, which takes torch some time."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._ready = _FORK.Semaphore(0)
        self._go = _FORK.Event()
        self._epoch = _FORK.Value("q", 0)

    def wait(self) -> int:
        """In a worker: be ready, and return when all begin, in monotonic nanoseconds."""
        self._ready.release()
        self._go.wait()
        return self._epoch.value

    def go(self) -> int:
        """In the parent: let them begin; when."""
        for _ in range(self._number):
            if not self._ready.acquire(timeout=300):
                raise RuntimeError("a worker does not get ready")
        self._epoch.value = time.monotonic_ns() + 300_000_000
        self._go.set()
        return self._epoch.value


@dataclass
class Worker:
    """A process that decodes from ``start`` until ``stop``, seconds from when all began."""

    name: str
    weight: float = 1.0
    start: float = 0.0
    stop: float = 20.0
    paced: bool = True
    process: multiprocessing.process.BaseProcess | None = None
    log: Path = Path()

    def run(self, card: Card, key: str, directory: Path, start: Start) -> None:
        """Start its process, which waits for ``start``."""
        self.log = directory / f"{self.name}.steps"
        self.process = _FORK.Process(target=self._work, args=(card, key, start))
        self.process.start()

    def _work(self, card: Card, key: str, start: Start) -> None:
        card.open()
        epoch = start.wait()
        begins = epoch + int(self.start * 1e9)
        time.sleep(max((begins - time.monotonic_ns()) / 1e9, 0))
        peer = Peer.join(key, self.name, self.weight) if self.paced else None
        decode(card, self.log, peer, epoch + int(self.stop * 1e9))
        if peer is not None:
            # As an engine without requests: still there, and idle.
            time.sleep(60)

    def end(self) -> Steps:
        """Be done with it; what it did."""
        assert self.process is not None
        self.process.kill()
        self.process.join()
        return read_steps(self.log)


def run_workers(
    workers: list[Worker], card: Card, key: str, directory: Path
) -> tuple[dict[str, Steps], int]:
    """Run them to the end; what they did, and when they began."""
    start = Start(len(workers))
    for worker in workers:
        worker.run(card, key, directory, start)
    epoch = start.go()
    last = max(worker.stop for worker in workers)
    time.sleep(max((epoch + int(last * 1e9) - time.monotonic_ns()) / 1e9, 0) + 0.1)
    return {worker.name: worker.end() for worker in workers}, epoch


# -- processes that come and go --------------------------------------------------------------------


@dataclass
class Churn:
    """What 16 seats saw, each taken by one process after another."""

    lives: int = 0
    killed: int = 0
    steps: list[Steps] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)


def churn(card: Card, key: str, directory: Path, seconds: float, seed: int) -> Churn:
    """Let processes join, decode, change their weights, leave and be killed."""
    draw = random.Random(seed)
    result = Churn()
    deadline = time.monotonic() + seconds
    seats: list[tuple[multiprocessing.process.BaseProcess, float] | None] = [None] * 16
    ready = [0.0] * 16
    logs: list[Path] = []
    while True:
        now = time.monotonic()
        for number, seat in enumerate(seats):
            if seat is None:
                if now < deadline and now >= ready[number]:
                    life = draw.uniform(1.0, 8.0)
                    logs.append(directory / f"churn.{len(logs)}")
                    process = _FORK.Process(
                        target=_live, args=(card, key, logs[-1], life, draw.random())
                    )
                    process.start()
                    result.lives += 1
                    # Some are killed in mid-life, some even while they join.
                    kill_at = now + draw.choice((life * 0.7, draw.uniform(0, 0.1)))
                    seats[number] = (process, kill_at if draw.random() < 0.4 else 1e18)
                continue
            process, kill_at = seat
            if process.exitcode is None and (now >= kill_at or now >= deadline + 12):
                if now >= deadline + 12:
                    result.troubles.append(f"process {process.pid} does not end")
                os.kill(process.pid or 0, signal.SIGKILL)
                process.join()
                result.killed += 1
            if process.exitcode is not None:
                process.join()
                if process.exitcode not in (0, -signal.SIGKILL):
                    result.troubles.append(f"process {process.pid} ended with {process.exitcode}")
                seats[number] = None
                ready[number] = now + draw.uniform(0.0, 1.0)
        if now >= deadline and not any(seats):
            break
        time.sleep(0.01)
    result.steps = [read_steps(log) for log in logs]
    for log in logs:
        complaints = log.with_suffix(log.suffix + ".trouble")
        if complaints.exists():
            result.troubles += complaints.read_text().splitlines()
    return result


def _live(card: Card, key: str, log: Path, life: float, seed: float) -> None:
    draw = random.Random(seed)
    trouble = log.with_suffix(log.suffix + ".trouble")
    card.open()
    peer = _join(key, draw, trouble)
    if peer is None:
        return
    end = time.monotonic() + life
    while time.monotonic() < end:
        until = time.monotonic_ns() + int(draw.uniform(0.05, 3.0) * 1e9)
        decode(card, log, peer, until, check_owner=True)
        if peer.slot is None:
            trouble.write_text(f"{log.name} lost its slot: {peer.trouble}\n")
        time.sleep(draw.choice((0.0, 0.3, 2.5)))
        peer.weight = draw.choice((0.5, 1.0, 2.0, 4.0))
    peer.leave()


def _join(key: str, draw: random.Random, trouble: Path) -> Peer | None:
    began = time.monotonic()
    while True:
        try:
            return Peer.join(key, "churn", draw.choice((0.5, 1.0, 2.0, 4.0)))
        except RegistryFullError as error:
            # Those who were killed keep their slots for three seconds.
            if time.monotonic() - began > 4.0:
                trouble.write_text(f"no slot for 4 s: {error}\n")
                return None
            time.sleep(0.05)


def measure_overlap(
    steps: list[Steps], since: int = 0, until: int = 1 << 62
) -> tuple[list[float], float]:
    """Stretches with two or more inside, in ms, longest first, and their sum; of steps entered in between."""
    edges = sorted(
        edge
        for one in steps
        for entered, done in zip(one.entered, one.done, strict=True)
        if since < entered <= until
        for edge in ((entered, 0), (done, 1))
    )
    inside, began = 0, 0
    stretches = []
    for at, is_end in edges:
        if is_end and inside == 2:
            stretches.append((at - began) / 1e6)
        if not is_end and inside == 1:
            began = at
        inside += -1 if is_end else 1
    return sorted(stretches, reverse=True), sum(stretches)


@contextlib.contextmanager
def new_key(name: str) -> Iterator[str]:
    """A card of this run's own; its registry goes at the end."""
    key = f"bench-{os.getpid()}-{name}"
    try:
        yield key
    finally:
        with contextlib.suppress(OSError):
            os.unlink(f"/dev/shm/opencoti-gpu-{key}")
