"""GPU-share's registry: slots are claimed, kept and left, whoever dies or stops at whatever instruction."""

import contextlib
import math
import os
import random
import signal
import sys
import threading

import pytest
from gpushare_kit import (
    EPOCH_US,
    VirtualClock,
    WatchedWords,
    new_key,
    path_of,
    slots_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from turnstile.gpushare import layout, shm
from turnstile.gpushare.errors import RegistryFullError, SegmentError
from turnstile.gpushare.look import look_at
from turnstile.gpushare.registry import Registry, check_weight
from turnstile.gpushare.snapshot import take_snapshot

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /dev/shm")

ME = os.getpid()


@pytest.fixture
def key():
    with new_key() as key:
        yield key


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def registry(key, clock):
    registry = Registry.open(key, clock=clock)
    yield registry
    registry.close()


def base(index):
    return layout.get_slot_offset(index)


def put_peer(registry, index, pid, *, age_s=0.0, weight=1.0, active=0, boot_us=77):
    """A slot as a program of another make leaves it."""
    words = registry.segment.words
    words.store_i64(base(index) + layout.BOOT_US, boot_us)
    words.store_f32(base(index) + layout.WEIGHT, weight)
    words.store_u32(base(index) + layout.ACTIVE, active)
    words.store_bytes(base(index) + layout.NAME, layout.encode_name(f"other {pid}"))
    words.store_i64(
        base(index) + layout.HEARTBEAT_US, registry._clock.wall_us() - round(age_s * 1e6)
    )
    words.store_u32(base(index) + layout.PID, pid)


# -- one slot


def test_a_claim_is_seen_as_it_is(registry, clock, key):
    assert registry.take_snapshot().peers == ()
    slot = registry.claim("qwen3-4b", 1.5)
    (peer,) = registry.take_snapshot().peers
    assert peer == (0, ME, "qwen3-4b", 1.5, False, 0.0, EPOCH_US + 1, EPOCH_US + 1, True)
    slot.set_active(True)
    slot.set_weight(0.1)
    slot.set_busy(0.25)
    clock.advance(0.5)
    assert slot.beat(clock.wall_us())
    (peer,) = registry.take_snapshot().peers
    assert peer.active and peer.busy == 0.25
    assert peer.weight == pytest.approx(0.1) and peer.weight == check_weight(0.1)
    assert peer.heartbeat_us == EPOCH_US + 500_000
    assert peer.boot_us == EPOCH_US + 1
    # The same from outside.
    assert look_at(key, clock) == registry.take_snapshot()
    clock.advance(1.0)
    snapshot = registry.take_snapshot()
    assert snapshot.get_age_ms(snapshot.peers[0]) == 1000
    slot.release()
    assert registry.take_snapshot().peers == ()
    assert slots_of(registry) == {}
    assert look_at(key, clock).peers == ()
    # Never unlinked.
    assert os.path.exists(path_of(key))


def test_nobody_ever_joined(key, clock):
    assert look_at(key, clock) is None


def test_slots_are_taken_in_order_and_free_ones_first(registry, clock):
    slots = [registry.claim(f"n{i}", 1.0, pid=100 + i) for i in range(4)]
    assert [slot.index for slot in slots] == [0, 1, 2, 3]
    slots[1].release()
    clock.advance(3.5)  # 0, 2 and 3 die
    assert registry.claim("a", 1.0).index == 1
    assert registry.claim("b", 1.0).index == 4


def test_sixteen_and_no_more(registry, clock):
    slots = [registry.claim(f"n{i}", 1.0, pid=100 + i) for i in range(16)]
    with pytest.raises(
        RegistryFullError, match=r"all 16 slots are taken .* n0 \(100\).*n15 \(115\)"
    ):
        registry.claim("late", 1.0)
    clock.advance(1.0)
    for slot in slots[1:]:
        assert slot.beat(clock.wall_us())
    clock.advance(2.0 + 2e-6)
    taken = registry.claim("late", 1.0)
    assert taken.index == 0
    assert slots_of(registry)[0] == ME
    # The former owner learns of it and harms nobody.
    before = registry.segment.copy()
    assert not slots[0].beat(clock.wall_us())
    slots[0].set_active(True)
    slots[0].set_weight(9.0)
    slots[0].release()
    assert registry.segment.copy() == before


def test_a_heartbeat_counts_for_three_seconds(registry, clock):
    registry.claim("n", 1.0)
    clock.advance(3.0 - 1e-6)
    snapshot = registry.take_snapshot()
    assert len(snapshot.peers) == 1
    assert snapshot.stale_us == clock.wall_us() + 3
    clock.advance(2e-6)
    assert len(registry.take_snapshot().peers) == 1
    clock.advance(1e-6)
    assert clock.wall_us() == snapshot.stale_us
    assert registry.take_snapshot().peers == ()


def test_what_the_last_owner_left_is_gone(registry, clock):
    put_peer(registry, 0, 4242, age_s=3.5, weight=9.0, active=1)
    slot = registry.claim("new", 1.0)
    assert slot.index == 1  # free ones first
    for index in range(1, 16):
        put_peer(registry, index, 4242, age_s=3.5, weight=9.0, active=1)
    slot = registry.claim("new", 2.0)
    assert slot.index == 0
    (peer,) = registry.take_snapshot().peers
    assert (peer.pid, peer.name, peer.weight, peer.active, peer.busy) == (
        ME,
        "new",
        2.0,
        False,
        0.0,
    )
    assert peer.ours


def test_a_reused_pid_and_equal_pids_of_containers(registry, clock):
    """Two processes may have one pid: of the past, or in another container."""
    first = registry.claim("first", 1.0, pid=1)
    second = registry.claim("second", 1.0, pid=1)
    assert (first.index, second.index) == (0, 1)
    clock.advance(2.0)
    assert second.beat(clock.wall_us())
    clock.advance(2.0)
    for index in range(2, 16):
        put_peer(registry, index, 1, boot_us=index)
    # The first one's slot goes to a third of that pid; the first sees that it is not its own.
    third = registry.claim("third", 3.0, pid=1)
    assert third.index == 0
    assert not first.beat(clock.wall_us())
    assert second.beat(clock.wall_us())
    assert third.beat(clock.wall_us())
    peers = {peer.slot: peer.name for peer in registry.take_snapshot().peers}
    assert peers[0] == "third" and peers[1] == "second"


@pytest.mark.parametrize(
    "weight",
    [math.nan, math.inf, -math.inf, 0, -0.0, -1, 1e39, 1e300, 1e-60, None, "2"],
)
def test_weights_that_are_none(registry, weight):
    with pytest.raises(ValueError, match="not a weight"):
        registry.claim("n", weight)
    assert slots_of(registry) == {}
    slot = registry.claim("n", 1)
    with pytest.raises(ValueError, match="not a weight"):
        slot.set_weight(weight)
    assert registry.take_snapshot().peers[0].weight == 1.0


@pytest.mark.parametrize("weight", [math.nan, math.inf, 0.0, -2.0])
def test_weights_of_others_that_are_none_count_as_one(registry, weight):
    put_peer(registry, 3, 4242, weight=weight, active=1)
    (peer,) = registry.take_snapshot().peers
    assert peer.weight == 1.0
    assert not peer.ours


def test_busy_is_within_bounds(registry, clock):
    slot = registry.claim("n", 1.0)
    for busy, shown in ((-1.0, 0.0), (1.5, 1.0), (0.123456, 0.123456)):
        slot.set_busy(busy)
        assert slot.beat(clock.wall_us())
        assert registry.take_snapshot().peers[0].busy == shown
    registry.segment.words.store_u32(base(0) + layout.BUSY_PPM, 0xFFFFFFFF)
    assert registry.take_snapshot().peers[0].busy == 1.0


def test_shares(registry):
    for index, weight in enumerate((2.0, 1.0, 1.0)):
        slot = registry.claim(f"n{index}", weight)
        slot.set_active(index < 2)
    snapshot = registry.take_snapshot()
    assert snapshot.get_shares() == pytest.approx({0: 2 / 3, 1: 1 / 3, 2: 0.0})
    assert snapshot.get_nominal_shares() == {0: 0.5, 1: 0.25, 2: 0.25}
    assert [w.slot for w in snapshot.make_schedule().windows] == [0, 1]
    assert snapshot.get(2).name == "n2"
    assert snapshot.get(3) is None


# -- clocks that somebody sets


def test_a_clock_set_back_leaves_no_ghost(registry, clock):
    slot = registry.claim("alive", 1.0)
    registry.claim("dead", 1.0, pid=4242)
    clock.set_by(-3600)
    assert slot.beat(clock.wall_us())
    (peer,) = registry.take_snapshot().peers
    assert peer.name == "alive"
    # A little into the future is still good: others' beats are on their way.
    clock.set_by(-2.9)
    assert len(registry.take_snapshot().peers) == 1


def test_a_heartbeat_of_the_future_comes_to_life(registry, clock):
    registry.claim("n", 1.0)
    clock.set_by(-10.0)
    snapshot = registry.take_snapshot()
    assert snapshot.peers == ()
    clock.advance((snapshot.stale_us - clock.wall_us()) / 1e6)
    assert len(registry.take_snapshot().peers) == 1
    clock.advance(-1e-6)
    assert len(registry.take_snapshot().peers) == 0


def test_a_clock_set_ahead_makes_all_look_dead_until_they_beat(registry, clock):
    slots = [registry.claim(f"n{i}", 1.0) for i in range(16)]
    clock.set_by(3600)
    assert registry.take_snapshot().peers == ()
    assert all(slot.beat(clock.wall_us()) for slot in slots)
    assert len(registry.take_snapshot().peers) == 16


def test_a_clock_that_stands_still_still_tells_takeovers(registry, clock):
    slot = registry.claim("n", 1.0)
    for _ in range(3):
        assert slot.beat(clock.wall_us())
    registry.segment.words.store_i64(base(0) + layout.HEARTBEAT_US, clock.wall_us() - 5_000_000)
    assert not slot.beat(clock.wall_us())


# -- programs of another make


def test_a_slot_taken_by_pid_alone_is_noticed(registry, clock):
    slot = registry.claim("n", 1.0)
    words = registry.segment.words
    assert words.swap_u32(base(0) + layout.PID, ME, 4242)
    words.store_i64(base(0) + layout.BOOT_US, 5)
    assert not slot.beat(clock.wall_us())
    slot.release()
    assert slots_of(registry) == {0: 4242}


def test_what_others_scribbled_is_written_again(registry, clock):
    slot = registry.claim("n", 2.0)
    slot.set_active(True)
    words = registry.segment.words
    words.store_f32(base(0) + layout.WEIGHT, 9.0)
    words.store_u32(base(0) + layout.ACTIVE, 0)
    words.store_bytes(base(0) + layout.NAME, b"\xff" * 48)
    assert slot.beat(clock.wall_us())
    (peer,) = registry.take_snapshot().peers
    assert (peer.name, peer.weight, peer.active) == ("n", 2.0, True)


def test_without_libatomic_others_are_refused(key, clock):
    registry = Registry(shm.open_segment(key, swaps=lambda: None), clock)
    ours = registry.claim("ours", 1.0)
    assert registry.claim("ours too", 1.0).index == 1
    assert ours.beat(clock.wall_us())
    put_peer(registry, 5, 4242)
    before = registry.segment.copy()
    with pytest.raises(SegmentError, match=r"'other 4242' \(pid 4242\).*install libatomic"):
        registry.claim("third", 1.0)
    assert registry.segment.copy() == before
    # Those that are in stay in: only claims could collide.
    assert ours.beat(clock.wall_us())
    clock.advance(3.1)
    assert registry.claim("third", 1.0).index == 2  # it died
    registry.close()


# -- killed at any instruction


def run_in_child(key, clock, kill_after):
    """Join, beat, work and leave in a child that is killed after so many bytecode instructions of the package.

    Returns how many there were if it came to the end, else None.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        count = 0

        def trace(frame, event, argument):
            nonlocal count
            if "/turnstile/gpushare/" not in frame.f_code.co_filename:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                count += 1
                if count == kill_after:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        try:
            shm.find_swaps()  # looked for once in a process
            sys.settrace(trace)
            registry = Registry.open(key, clock=clock)
            slot = registry.claim("claimant", 2.0)
            slot.set_active(True)
            slot.set_busy(0.5)
            slot.beat(clock.wall_us())
            slot.release()
            registry.close()
            sys.settrace(None)
            os.write(write, str(count).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    assert bool(told) != (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)
    return int(told) if told else None


def fill_with_the_dead(key, clock):
    registry = Registry.open(key, clock=clock)
    for index in range(16):
        put_peer(registry, index, 50_000 + index, age_s=10.0, weight=7.0, active=1)
    registry.close()


def check_that_nobody_is_wedged(key, clock):
    """Newcomers get in at once, and within three seconds every slot can be had."""
    registry = Registry.open(key, clock=clock)
    first = registry.claim("first", 1.0, pid=60_000)
    assert slots_of(registry)[first.index] == 60_000
    clock.advance(1.5)
    assert first.beat(clock.wall_us())
    clock.advance(1.5 + 2e-6)
    assert first.beat(clock.wall_us())
    # Whatever was left has died by now.
    assert [peer.name for peer in registry.take_snapshot().peers] == ["first"]
    slots = [first, *(registry.claim(f"n{i}", 1.0, pid=60_001 + i) for i in range(15))]
    assert sorted(slot.index for slot in slots) == list(range(16))
    with pytest.raises(RegistryFullError):
        registry.claim("one too many", 1.0)
    clock.advance(0.5)
    assert all(slot.beat(clock.wall_us()) for slot in slots)
    assert slots_of(registry) == {slot.index: slot._pid for slot in slots}
    for slot in slots:
        slot.release()
    assert slots_of(registry) == {}
    registry.close()


SITUATIONS = ("new", "created in place", "there already", "all dead")


def set_situation(situation, key, clock, monkeypatch):
    monkeypatch.setattr(shm, "_CREATION_SECONDS", 0.0)
    if situation == "created in place":
        monkeypatch.setattr(shm, "_create_unnamed", lambda: None)
    elif situation == "there already":
        Registry.open(key, clock=clock).close()
    elif situation == "all dead":
        fill_with_the_dead(key, clock)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_killed_at_drawn_instructions(situation, monkeypatch):
    instructions = None
    points = random.Random(situation)
    for attempt in range(25):
        with new_key() as key, monkeypatch.context() as patch:
            clock = VirtualClock()
            set_situation(situation, key, clock, patch)
            kill_after = points.randrange(1, instructions + 1) if instructions else None
            told = run_in_child(key, clock, kill_after)
            if attempt == 0:
                instructions = told
                assert instructions > 300
            else:
                assert told is None
            check_that_nobody_is_wedged(key, clock)


@pytest.mark.slow
@pytest.mark.limit(1800)
@pytest.mark.skipif(
    not os.environ.get("TURNSTILE_EVERY_INSTRUCTION"),
    reason="takes many minutes; TURNSTILE_EVERY_INSTRUCTION=1 runs it",
)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_killed_at_every_instruction(situation, monkeypatch):
    kill_after = 0
    while True:
        kill_after += 1
        with new_key() as key, monkeypatch.context() as patch:
            clock = VirtualClock()
            set_situation(situation, key, clock, patch)
            told = run_in_child(key, clock, kill_after)
            check_that_nobody_is_wedged(key, clock)
        if told is not None:
            break
    assert kill_after > 300


# -- several at once, in any order


class Turns:
    """Lets one of several threads make one access to memory at a time, in an order that is drawn."""

    def __init__(self, draw, clock, leaps):
        self._draw = draw
        self._clock = clock
        self._leaps = leaps
        self._condition = threading.Condition()
        self._waiting = {}
        self._running = 0
        self._local = threading.local()
        self._over = False
        self.failures = []

    def before(self, operation):
        name = getattr(self._local, "name", None)
        if name is None:
            return
        with self._condition:
            self._waiting[name] = operation
            self._running -= 1
            self._condition.notify_all()
            while name in self._waiting:
                assert not self._over, "given up"
                assert self._condition.wait(60), "nobody lets it go on"

    def run(self, actions):
        def call(name, action):
            self._local.name = name
            self.before("start")
            try:
                action()
            except BaseException as error:
                self.failures.append((name, error))
            finally:
                with self._condition:
                    self._running -= 1
                    self._condition.notify_all()

        threads = [
            threading.Thread(target=call, args=(i, action)) for i, action in enumerate(actions)
        ]
        self._running = len(threads)
        for thread in threads:
            thread.start()
        try:
            with self._condition:
                while True:
                    while self._running:
                        assert self._condition.wait(60)
                    if not self._waiting:
                        break
                    if self._leaps and self._draw(st.integers(0, 9)) == 0:
                        self._clock.advance(self._draw(st.sampled_from((0.0001, 1.0, 2.9, 3.1))))
                    chosen = self._draw(st.sampled_from(sorted(self._waiting)))
                    self._running += 1
                    del self._waiting[chosen]
                    self._condition.notify_all()
        finally:
            with self._condition:
                self._over = True
                self._condition.notify_all()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()


def claim_in_turns(data, leaps, actors):
    draw = data.draw
    with new_key() as key, pytest.MonkeyPatch.context() as patch:
        # What the lock would order is to go wrong if it can.
        patch.setattr(shm.Segment, "lock", lambda self: contextlib.nullcontext())
        patch.setattr(shm, "Words", WatchedWords)
        clock = VirtualClock()
        keeper = Registry.open(key, clock=clock)
        taken = draw(st.integers(0, 16 - actors))
        others = [keeper.claim(f"other {i}", 1.0, pid=70_000 + i) for i in range(taken)]
        for index in range(taken, 16):
            if draw(st.booleans()):
                put_peer(keeper, index, 50_000 + index, age_s=9.0, weight=7.0, active=1)
        turns = Turns(draw, clock, leaps)
        patch.setattr(WatchedWords, "before", staticmethod(turns.before))
        owned = {}
        registries = [Registry.open(key, clock=clock) for _ in range(actors)]

        def act(number):
            registry = registries[number]
            slot = registry.claim(f"actor {number}", 1.0 + number, pid=80_000 + number)
            for _ in range(draw_counts[number]):
                slot.set_active(True)
                if not slot.beat(clock.wall_us()):
                    return
            if leaves[number]:
                slot.release()
            else:
                owned[number] = slot

        def act_foreign(number):
            """As a program of another make: by the pid alone, and no heartbeat before."""
            words = registries[number].segment.words
            for index in range(16):
                if words.swap_u32(base(index) + layout.PID, 0, 90_000):
                    words.store_i64(base(index) + layout.BOOT_US, 5)
                    words.store_i64(base(index) + layout.HEARTBEAT_US, clock.wall_us())
                    foreign.append(index)
                    return

        foreign = []
        draw_counts = [draw(st.integers(0, 2)) for _ in range(actors)]
        leaves = [draw(st.integers(0, 3)) == 0 for _ in range(actors)]
        actions = [lambda number=number: act(number) for number in range(actors)]
        if not leaps and draw(st.booleans()):
            actions[-1] = lambda: act_foreign(actors - 1)
        turns.run(actions)
        patch.setattr(WatchedWords, "before", staticmethod(lambda operation: None))
        assert turns.failures == []
        # Everybody beats once more; who then still believes in a slot is its only owner.
        kept = {number: slot for number, slot in owned.items() if slot.beat(clock.wall_us())}
        pids = slots_of(keeper)
        assert len({slot.index for slot in kept.values()}) == len(kept)
        for number, slot in kept.items():
            assert pids[slot.index] == 80_000 + number
        if not leaps:
            assert kept == owned
            assert [pids[index] for index in foreign] == [90_000] * len(foreign)
            assert all(other.beat(clock.wall_us()) for other in others)
            assert not {slot.index for slot in kept.values()} & {other.index for other in others}
            live = take_snapshot(keeper.segment.words, key, clock.wall_us()).peers
            assert {peer.slot for peer in live} >= {slot.index for slot in kept.values()}
            shown = {peer.slot: (peer.name, peer.weight) for peer in live}
            for number, slot in kept.items():
                assert shown[slot.index] == (f"actor {number}", 1.0 + number)
        for registry in (*registries, keeper):
            registry.close()


@settings(max_examples=60)
@given(st.data(), st.integers(2, 4))
def test_claims_in_any_order_of_accesses(data, actors):
    claim_in_turns(data, leaps=False, actors=actors)


@settings(max_examples=60)
@given(st.data(), st.integers(2, 4))
def test_claimants_that_stand_still_for_seconds(data, actors):
    claim_in_turns(data, leaps=True, actors=actors)
