"""For the tests of GPU-share: a clock that is set by hand, registries of their own, memory that can be watched."""

import contextlib
import heapq
import itertools
import os
import random
import uuid
from collections.abc import Callable, Generator

from turnstile.gpushare import layout
from turnstile.gpushare.atomic import Words
from turnstile.gpushare.peer import Peer
from turnstile.gpushare.registry import Registry
from turnstile.gpushare.shm import PREFIX

DIRECTORY = "/dev/shm/"
#: A period of any length starts here: a multiple of 80 to 400 ms, and of a second.
EPOCH_US = 1_700_000_400_000_000


class VirtualClock:
    """A clock that stands still until it is moved; the wall clock can be set as well."""

    def __init__(self, wall_us: int = EPOCH_US) -> None:
        self._wall_offset_us = wall_us
        self.passed_us = 0

    def wall_us(self) -> int:
        return self._wall_offset_us + self.passed_us

    def monotonic_ns(self) -> int:
        return 1_000_000_000 + self.passed_us * 1000

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.passed_us += round(seconds * 1e6)

    def advance(self, seconds: float) -> None:
        self.passed_us += round(seconds * 1e6)

    def set_by(self, seconds: float) -> None:
        """Somebody sets the wall clock."""
        self._wall_offset_us += round(seconds * 1e6)


@contextlib.contextmanager
def new_key():
    """The key of a card that nobody else has; its registry goes at the end, whatever happened to it."""
    key = f"test-{os.getpid()}-{uuid.uuid4().hex[:12]}"
    try:
        yield key
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path_of(key))


def path_of(key):
    return f"{DIRECTORY}{PREFIX}{key}"


def join(key, clock, name="peer", weight=1.0) -> Peer:
    """A peer that is driven by hand."""
    return Peer.join(key, name, weight, clock=clock, thread=False)


def slots_of(registry: Registry):
    """{slot: pid} of all slots that are not free."""
    words = registry.segment.words
    found = {}
    for index in range(layout.SLOT_COUNT):
        pid = words.load_u32(layout.get_slot_offset(index) + layout.PID)
        if pid:
            found[index] = pid
    return found


class WatchedWords(Words):
    """Words that call ``before(operation)`` ahead of every access that others could see."""

    before: Callable[[str], None] = staticmethod(lambda operation: None)

    def _watch(name):  # type: ignore[misc]
        plain = getattr(Words, name)

        def watched(self, *arguments):
            self.before(name)
            return plain(self, *arguments)

        return watched

    store_u32 = _watch("store_u32")
    store_i64 = _watch("store_i64")
    store_f32 = _watch("store_f32")
    store_bytes = _watch("store_bytes")
    swap_u32 = _watch("swap_u32")
    swap_i64 = _watch("swap_i64")
    del _watch


class VirtualCard:
    """A card on which steps of all peers queue up; it records who entered while another was inside.

    It lets anybody in at any time: keeping order is the peers' own job.
    """

    def __init__(self) -> None:
        self.free_at_us = 0
        #: (peer, entered, done), in the order of entry
        self.steps: list[tuple[str, int, int]] = []

    def enter(self, who: str, now_us: int, step_us: int) -> int:
        """When a step that enters now is done."""
        done_us = max(now_us, self.free_at_us) + step_us
        self.free_at_us = done_us
        self.steps.append((who, now_us, done_us))
        return done_us

    def measure_overlap(self, after_us: int = 0) -> tuple[int, int]:
        """For how long two peers or more were inside: at a stretch, and in all."""
        return measure_overlap(
            [(entered, done) for _, entered, done in self.steps if entered >= after_us]
        )


def measure_overlap(steps) -> tuple[int, int]:
    """Of ``steps``, (start, end) each: the longest stretch that lies in two or more, and the sum of all."""
    # At one moment, starts come before ends: no break.
    edges = sorted(edge for start, end in steps for edge in ((start, 0), (end, 1)))
    inside = since = longest = total = 0
    for time, is_end in edges:
        if is_end and inside == 2:
            longest = max(longest, time - since)
            total += time - since
        if not is_end and inside == 1:
            since = time
        inside += -1 if is_end else 1
    return longest, total


class World:
    """Peers as processes would be, on a virtual clock: each is a generator that yields seconds to wait."""

    def __init__(self, key: str, seed: int = 0, late_us: int = 0) -> None:
        self.key = key
        self.clock = VirtualClock()
        self.card = VirtualCard()
        self.random = random.Random(seed)
        self._late_us = late_us
        self._queue: list[tuple[int, int, Generator[float, None, None]]] = []
        self._order = itertools.count()
        self.peers: dict[str, Peer] = {}
        #: Steps that began in somebody else's window, by what the registry said at that moment.
        self.strays: list[tuple[int, str]] = []
        self._dead: set[str] = set()

    @property
    def now_us(self) -> int:
        return self.clock.wall_us()

    def spawn(self, process: Generator[float, None, None], delay: float = 0.0) -> None:
        heapq.heappush(
            self._queue,
            (self.clock.passed_us + round(delay * 1e6), next(self._order), process),
        )

    def run(self, seconds: float) -> None:
        """Let so much time pass."""
        until = self.clock.passed_us + round(seconds * 1e6)
        while self._queue and self._queue[0][0] <= until:
            at, _, process = heapq.heappop(self._queue)
            self.clock.passed_us = max(self.clock.passed_us, at)
            delay = next(process, None)
            if delay is not None:
                # Nobody is woken exactly on time.
                late = self.random.randrange(self._late_us + 1) / 1e6
                self.spawn(process, delay + late)
        self.clock.passed_us = max(self.clock.passed_us, until)

    def start(self, name: str, weight: float = 1.0) -> Peer:
        """Have a peer join, and its heartbeat go on."""
        peer = join(self.key, self.clock, name, weight)
        self.peers[name] = peer
        self._dead.discard(name)
        self.spawn(self._beats(name, peer))
        return peer

    def kill(self, name: str) -> None:
        """It stops at once, and leaves everything as it is."""
        self._dead.add(name)

    def leave(self, name: str) -> None:
        self._dead.add(name)
        self.peers[name].leave()

    def close(self) -> None:
        for peer in self.peers.values():
            peer.leave()

    def _beats(self, name: str, peer: Peer) -> Generator[float, None, None]:
        while self._lives(name, peer):
            yield peer.tick()

    def decode(
        self,
        name: str,
        step_us: int = 8000,
        until_us: int | None = None,
        paced: bool = True,
        host_us: int = 0,
    ) -> Generator[float, None, None]:
        """Step after step, each followed by some work of the host alone."""
        peer = self.peers[name]
        while self._lives(name, peer) and (until_us is None or self.now_us < until_us):
            if paced:
                peer.touch()
                for seconds in peer.pauses():
                    yield seconds
                    if not self._lives(name, peer):
                        return
                peer.open()
            owners = peer.take_snapshot().make_schedule()
            if owners.windows and owners.get_owner(self.now_us) != peer.slot:
                self.strays.append((self.now_us, name))
            done_us = self.card.enter(name, self.now_us, step_us)
            yield (done_us - self.now_us) / 1e6
            if not self._lives(name, peer):
                return
            if paced:
                peer.end()
            if host_us:
                yield host_us / 1e6

    def _lives(self, name: str, peer: Peer) -> bool:
        return name not in self._dead and self.peers[name] is peer

    def count(self, since_us: int, until_us: int) -> dict[str, int]:
        """Steps of each peer that were done in between."""
        counts = dict.fromkeys(self.peers, 0)
        for name, _, done_us in self.card.steps:
            if since_us < done_us <= until_us:
                counts[name] += 1
        return counts
