"""A GPU-share peer: when it waits, what it publishes, and what becomes of it in forks, execs and exits."""

import contextlib
import gc
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest
from gpushare_kit import EPOCH_US, VirtualClock, join, new_key, path_of, slots_of

from turnstile.gpushare import GpuShareError, Peer, layout, peer, shm
from turnstile.gpushare.errors import SegmentError
from turnstile.gpushare.look import look_at
from turnstile.gpushare.peer import Look
from turnstile.gpushare.registry import Registry

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /dev/shm")


@pytest.fixture
def key():
    with new_key() as key:
        yield key


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def pair(key, clock):
    """Two that compute, 2:1: the first's window is the first 80 ms of 120."""
    peers = join(key, clock, "two", 2.0), join(key, clock, "one", 1.0)
    clock.advance(-clock.wall_us() % 120_000 / 1e6)
    for one in peers:
        one.tick()
        one.touch()
    yield peers
    for one in peers:
        one.leave()


def seen(key, clock):
    return {peer.name: peer for peer in look_at(key, clock).peers}


def run_script(script, *arguments, wrapper=(), **options):
    options.setdefault("timeout", 100)
    return subprocess.run(
        [*wrapper, sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        **options,
    )


# -- joining and leaving


def test_the_line_for_the_log(key, clock):
    first = join(key, clock, "a", 1.5)
    assert first.describe() == (
        f"gpu-share: joined /opencoti-gpu-{key} slot 0 (weight 1.5, 1 peer alive)"
    )
    second = join(key, clock, "b")
    assert second.describe().endswith("slot 1 (weight 1, 2 peers alive)")
    assert (second.key, second.slot, second.weight) == (key, 1, 1.0)
    second.leave()
    second.leave()
    assert (second.key, second.slot) == (None, None)
    assert second.describe() == "gpu-share: not registered, no card"
    assert second.take_snapshot().peers == ()
    with first:
        assert list(seen(key, clock)) == ["a"]
    assert seen(key, clock) == {}


def test_the_name_is_the_programs_by_default(key, clock, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/serve", "--port=1"])
    with join(key, clock, name=""):
        assert list(seen(key, clock)) == ["serve"]
    monkeypatch.setattr(sys, "argv", [""])
    with join(key, clock, name=""):
        assert list(seen(key, clock)) == ["python"]


def test_where_there_is_no_shared_memory(key, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "name", "nt")
        with pytest.raises(GpuShareError, match="POSIX shared memory"):
            Peer.join(key)


@pytest.mark.parametrize("gpu", ["none", "cpu", ""])
def test_without_a_card_nothing_is_paced(gpu, clock):
    before = shm.list_keys()
    with Peer.join(gpu, "n", clock=clock) as alone:
        assert alone.slot is None
        with alone.step():
            clock.advance(0.01)
        assert alone.look() == Look(True, None)
        assert alone.tick() == 0.5
        alone.weight = 3.0
        alone.touch()
        alone.add_busy(1.0)
    assert shm.list_keys() == before


def test_what_cannot_be_joined(key, clock):
    with pytest.raises(ValueError, match="not a weight"):
        join(key, clock, weight=-1.0)
    assert not os.path.exists(path_of(key))
    with pytest.raises(SegmentError, match="not a card's key"):
        join("a/b", clock)
    with pytest.raises(GpuShareError, match="no group 'no-such-group'"):
        Peer.join(key, group="no-such-group")
    everybody = [join(key, clock, f"n{i}") for i in range(16)]
    with pytest.raises(GpuShareError, match="all 16 slots"):
        join(key, clock)
    for one in everybody:
        one.leave()
    assert seen(key, clock) == {}


def test_groups_by_name_and_number(key, clock):
    import grp

    gid = os.getegid()
    assert peer._find_group(None) is None
    assert peer._find_group(gid) == gid
    assert peer._find_group(str(gid)) == gid
    assert peer._find_group(grp.getgrgid(gid).gr_name) == gid
    with Peer.join(key, group=gid, clock=clock, thread=False):
        assert os.stat(path_of(key)).st_mode & 0o777 == 0o660


# -- turns


def test_alone_it_never_waits(key, clock):
    with join(key, clock) as alone:
        began = clock.passed_us
        for _ in range(1000):
            with alone.step():
                pass
            assert alone.look() == Look(True, None)
        assert clock.passed_us == began


def test_a_look_at_the_very_end_of_a_window(pair, clock, monkeypatch):
    """Time passes between two looks at the clock; it is not the whole next window that is left."""
    two, _ = pair
    clock.advance(0.079999)
    assert two.look() == Look(True, 1)
    times = iter([clock.wall_us(), clock.wall_us() + 1])
    monkeypatch.setattr(two, "_wall_us", lambda: next(times))
    assert two.look() == Look(False, 40_000)


def test_an_idle_peer_costs_nothing(key, clock):
    idle, busy = join(key, clock, "idle", 9.0), join(key, clock, "busy")
    began = clock.passed_us
    with busy.step():
        pass
    assert clock.passed_us == began
    assert not seen(key, clock)["idle"].active
    assert seen(key, clock)["busy"].active
    idle.leave()
    busy.leave()


def test_a_step_waits_for_its_window(pair, clock):
    two, one = pair
    start = clock.wall_us()
    assert two.look() == Look(True, 80_000)
    assert one.look() == Look(False, 80_000)
    assert (two.wait_us(), one.wait_us()) == (0, 80_000)
    with two.step():
        assert clock.wall_us() == start
    with one.step():
        assert clock.wall_us() == start + 80_000
        clock.advance(0.008)
    assert one.look() == Look(True, 32_000)
    with two.step():
        assert clock.wall_us() == start + 120_000


def test_the_wait_comes_before_a_step_not_after_it(pair, clock):
    """So the last token of an answer is not held back, nor any other."""
    two, _ = pair
    start = clock.wall_us()
    with two.step():
        clock.advance(0.085)
    assert clock.wall_us() == start + 85_000
    with two.step():
        assert clock.wall_us() == start + 120_000


def test_a_change_counts_from_the_next_step(pair, clock, key):
    two, one = pair
    one.weight = 2.0
    assert two.look() == Look(True, 40_000)
    one.weight = 1.0
    third = join(key, clock, "third", 1.0)
    assert two.look() == Look(True, 80_000)
    third.touch()
    # 2/1/1: 160 ms, of which the first has 80 and the others 40.
    base = clock.wall_us() % 160_000
    assert base == 0
    assert (two.wait_us(), one.wait_us(), third.wait_us()) == (0, 80_000, 120_000)
    third.leave()
    assert (two.wait_us(), one.wait_us()) == (0, 80_000)


def test_who_does_not_compute_any_more_is_left_out_after_two_seconds(pair, clock):
    two, one = pair
    clock.advance(1.9)
    for each in pair:
        each.tick()
    two.touch()
    assert two.look().lasts_us is not None
    due = one.tick()
    assert due <= 0.1
    clock.advance(due)
    one.tick()
    two.tick()
    assert two.look() == Look(True, None)
    # It comes back with its next step.
    one.touch()
    assert two.look() != Look(True, None)


def test_a_long_step_does_not_look_idle(pair, clock, key):
    two, _ = pair
    two.open()
    for _ in range(10):
        clock.advance(0.5)
        two.tick()
        assert seen(key, clock)["two"].active
    two.end()
    for _ in range(4):
        clock.advance(0.5)
        two.tick()
    assert not seen(key, clock)["two"].active


def test_a_touch_while_it_is_being_made_idle(pair, clock, key, monkeypatch):
    """The step takes it for active still, so nobody else would set it again."""
    two, _ = pair
    clock.advance(2.1)
    real = two._set_active

    def set_active(active):
        if not active:
            two._touched_ns = clock.monotonic_ns()  # what another thread does just now
        real(active)

    monkeypatch.setattr(two, "_set_active", set_active)
    two.tick()
    assert two._active
    assert seen(key, clock)["two"].active


def test_the_dead_are_left_out_after_three_seconds(pair, clock):
    two, one = pair
    for _ in range(6):
        clock.advance(0.5)
        two.tick()
        two.touch()
        assert two._plan is None or two.look() is not None
    clock.advance(1e-5)
    assert two.look() == Look(True, None)
    del one


def test_nobody_who_wakes_late_is_starved(pair, clock):
    """It may be late for the window each time; then it steps outside of it, once."""
    _, one = pair
    late = iter([0.045, 0.09])

    def sleep(seconds):
        clock.advance(seconds + next(late, 0.0))

    one._clock = SimpleNamespace(sleep=sleep)
    began = clock.passed_us
    one.begin()
    # Slept 50 ms and 45, was inside then (95 is in 80 to 120): no waiting for the next one.
    assert clock.passed_us - began == 95_000
    one.end()
    clock.advance(0.03)  # 125: outside; 75 ms to go, in slices of 50 and 25
    late = iter([0.0, 0.09])
    one.begin()
    assert clock.passed_us - began == 125_000 + 75_000 + 90_000
    assert one.wait_us() > 0
    one.end()


def test_no_wait_is_longer_than_a_period_whatever_the_clock_does(pair, clock, key):
    _, one = pair
    for leap in (3600, -3600, 0.05, -0.05, -2.0, 2.0):
        began = clock.passed_us
        for number, seconds in enumerate(one.pauses()):
            clock.advance(seconds)
            if number == 0:
                clock.set_by(leap)
            assert number < 50
        assert clock.passed_us - began <= 400_000
        one.tick()
        pair[0].tick()
        assert set(seen(key, clock)) == {"two", "one"}
        clock.advance(-clock.wall_us() % 120_000 / 1e6)


def test_churn_does_not_keep_anybody_waiting_for_ever(pair, clock):
    two, one = pair
    began = clock.passed_us
    for seconds in one.pauses():
        clock.advance(min(seconds, 0.01))
        two.weight = two.weight + 1.0  # the plan is another one each time
    assert clock.passed_us - began <= 1_050_000


# -- measuring


def test_busy_is_the_time_in_steps_through_their_sync(pair, clock, key):
    two, _ = pair
    synced = []

    def sync():
        clock.advance(0.02)
        synced.append(clock.passed_us)

    for _ in range(40):
        clock.advance(-clock.wall_us() % 120_000 / 1e6)
        two.tick()
        with two.step(sync=sync):
            clock.advance(0.01)
    assert len(synced) == 40
    assert seen(key, clock)["two"].busy == pytest.approx(0.25, abs=0.03)
    for _ in range(5):
        clock.advance(0.5)
        two.tick()
    assert seen(key, clock)["two"].busy == 0.0


def test_steps_within_steps_count_once(key, clock):
    with join(key, clock) as alone:
        alone.tick()
        for _ in range(4):
            with alone.step():
                clock.advance(0.1)
                with alone.step():
                    clock.advance(0.3)
                clock.advance(0.1)
            alone.tick()
        assert seen(key, clock)["peer"].busy == 1.0


def test_busy_that_others_measured(key, clock):
    with join(key, clock) as alone:
        alone.tick()
        alone.add_busy(0.1)
        clock.advance(0.5)
        alone.tick()
        assert seen(key, clock)["peer"].busy == pytest.approx(0.2)


def test_a_step_that_did_not_begin(key, clock):
    with join(key, clock) as alone, pytest.raises(RuntimeError, match="did not begin"):
        alone.end()


def test_an_error_in_a_step_is_the_callers(key, clock):
    synced = []
    with join(key, clock) as alone:
        with pytest.raises(ZeroDivisionError), alone.step(sync=lambda: synced.append(1)):
            clock.advance(0.1)
            raise ZeroDivisionError
        assert synced == []

        def broken():
            raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError, match="out of memory"), alone.step(sync=broken):
            pass
        assert alone._depth == 0


# -- staying alive


def test_the_heartbeat_goes_on_by_itself(key):
    """In real time, but with no hurry."""
    with Peer.join(key, "n") as one:
        first = look_at(key).peers[0].heartbeat_us
        deadline = time.monotonic() + 60
        while look_at(key).peers[0].heartbeat_us == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with one.step():
            assert look_at(key).peers[0].active
        thread = one._thread
        assert thread.daemon
    thread.join(60)
    assert not thread.is_alive()
    assert look_at(key).peers == ()


def test_a_peer_that_is_forgotten_does_not_live_on(key):
    one = Peer.join(key, "n")
    thread = one._thread
    del one
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_a_failing_beat_does_not_end_the_thread(key, monkeypatch, caplog):
    failed = threading.Event()
    real = Peer.tick

    def tick(self):
        if not failed.is_set():
            failed.set()
            raise OSError("of no consequence")
        return real(self)

    monkeypatch.setattr(Peer, "tick", tick)
    monkeypatch.setattr(layout, "BEAT_US", 1000)
    with Peer.join(key, "n"):
        first = look_at(key).peers[0].heartbeat_us
        assert failed.wait(60)
        deadline = time.monotonic() + 60
        while look_at(key).peers[0].heartbeat_us == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert "of no consequence" in caplog.text


def test_when_the_next_tick_is_due(key, clock):
    with join(key, clock) as one:
        one.tick()
        beaten = seen(key, clock)["peer"].heartbeat_us
        clock.advance(0.2)
        assert one.tick() == pytest.approx(0.3, abs=1e-5)
        assert seen(key, clock)["peer"].heartbeat_us == beaten
        clock.advance(0.3)
        assert one.tick() == 0.5
        assert seen(key, clock)["peer"].heartbeat_us == clock.wall_us()


def test_a_step_beats_if_the_thread_does_not_get_to(pair, clock, key):
    """A step that keeps the interpreter's lock for a minute, a stopped process, a suspended laptop."""
    two, one = pair
    clock.advance(60.0)
    assert seen(key, clock) == {}
    assert two.wait_us() == 0
    assert list(seen(key, clock)) == ["two"]
    one.wait_us()
    assert set(seen(key, clock)) == {"two", "one"}


def test_a_slot_that_was_lost_is_replaced(pair, clock, key):
    two, one = pair
    clock.advance(10)
    newcomers = [join(key, clock, f"n{i}") for i in range(15)]
    assert {newcomer.slot for newcomer in newcomers} == {*range(15)} - {0, 1} | {0, 15}
    assert two.slot == 0  # as it believes
    two.touch()
    two.wait_us()
    assert two.slot == 1
    assert seen(key, clock)["two"].active
    assert seen(key, clock)["two"].weight == 2.0
    # The other finds none, says so, goes on unpaced, and gets one when there is one.
    one.touch()
    assert one.wait_us() == 0
    assert one.slot is None
    assert "all 16 slots" in one.trouble
    assert "all 16 slots" in one.describe()
    newcomers[4].leave()
    one.tick()
    assert one.slot == 6
    assert one.trouble == ""
    for newcomer in newcomers:
        newcomer.leave()


def test_memory_that_was_unlinked_is_left(pair, clock, key):
    """As systemd's RemoveIPC= does when a user's last session ends."""
    two, one = pair
    os.unlink(path_of(key))
    two.tick()
    assert list(seen(key, clock)) == ["two"]
    assert two.look() == Look(True, None)
    one.tick()
    assert set(seen(key, clock)) == {"two", "one"}
    assert seen(key, clock)["one"].active
    assert two.look() != Look(True, None)


def test_memory_that_cannot_be_had_again(pair, clock, key, caplog):
    two, _ = pair
    os.unlink(path_of(key))
    with open(path_of(key), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(b"x" * 4096)
    for _ in range(3):
        two.tick()
        clock.advance(0.5)
    assert two.slot is None
    assert "not a GPU-share registry" in two.trouble
    assert caplog.text.count("no part in GPU-share for now") == 1
    assert two.wait_us() == 0
    os.unlink(path_of(key))
    two.tick()
    assert two.trouble == ""
    assert list(seen(key, clock)) == ["two"]


def test_leaving_while_another_thread_steps(key):
    one = Peer.join(key, "n")
    stop = threading.Event()
    failures = []
    started = threading.Event()

    def steps():
        try:
            while not stop.is_set():
                with one.step():
                    started.set()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=steps) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert started.wait(60)
    one.leave()
    stop.set()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert one._depth == 0
    assert look_at(key).peers == ()


# -- fork, exec, exit


def test_a_forked_child_is_no_peer(key):
    done = run_script(
        """
        import os, sys
        from turnstile.gpushare import Peer
        from turnstile.gpushare.look import look_at
        key = sys.argv[1]
        one = Peer.join(key, "parent", 2.0)
        with one.step():
            child = os.fork()
            if not child:
                assert one.slot is None and one.key is None
                assert one.take_snapshot().peers == ()
        if not child:
            for _ in range(100):
                with one.step():
                    pass
            one.weight = 9.0
            one.tick()
            # It may join for itself.
            own = Peer.join(key, "child")
            assert [p.name for p in own.take_snapshot().peers] == ["parent", "child"]
            assert own.slot == 1
            sys.exit(7)  # with all that is done at exit
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        (peer,) = look_at(key).peers
        assert (peer.name, peer.weight, peer.pid) == ("parent", 2.0, os.getpid())
        assert one.slot == 0 and one._thread.is_alive()
        with one.step():
            pass
        print("fine")
        """,
        key,
    )
    assert done.stdout == "fine\n", done.stderr
    assert look_at(key).peers == ()


def test_a_fork_while_the_lock_is_held(key, clock):
    """By the heartbeat thread, which the child does not have."""
    one = join(key, clock)
    held, release = threading.Event(), threading.Event()

    def hold():
        with one._lock:
            held.set()
            release.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            with one.step():
                pass
            one.leave()
            os._exit(5)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    release.set()
    thread.join(60)
    assert one.slot == 0
    one.leave()


def test_multiprocessing_children_are_no_peers(key):
    done = run_script(
        """
        import multiprocessing, sys
        from turnstile.gpushare import Peer
        from turnstile.gpushare.look import look_at
        one = Peer.join(sys.argv[1], "parent")
        def work(queue):
            with one.step():
                queue.put(one.slot)
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=work, args=(queue,))
        child.start()
        assert queue.get(timeout=60) is None
        child.join()
        assert child.exitcode == 0
        assert [p.name for p in look_at(sys.argv[1]).peers] == ["parent"]
        print("fine")
        """,
        key,
    )
    assert done.stdout == "fine\n", done.stderr


def test_nothing_is_left_after_exec(key):
    done = run_script(
        """
        import os, sys
        from turnstile.gpushare import Peer
        one = Peer.join(sys.argv[1], "n")
        with open("/proc/self/maps") as maps:
            assert "/dev/shm/" in maps.read()
        os.execv("/bin/sh", ["sh", "-c", "cat /proc/self/maps; ls -l /proc/self/fd; echo end"])
        """,
        key,
    )
    assert done.stdout.endswith("end\n"), done.stderr
    assert "/dev/shm" not in done.stdout
    # The slot is as that of any process that is gone: it dies of age.
    (left,) = look_at(key).peers
    later = VirtualClock(left.heartbeat_us + layout.DEAD_US + 1)
    assert look_at(key, later).peers == ()


@pytest.mark.parametrize(
    "ending", ["pass", "sys.exit(0)", "raise RuntimeError", "os.kill(os.getpid(), 2)"]
)
def test_it_leaves_at_exit(key, ending):
    run_script(
        f"""
        import os, sys
        from turnstile.gpushare import Peer
        one = Peer.join(sys.argv[1], "n")
        {ending}
        """,
        key,
    )
    registry = Registry.open(key)
    assert slots_of(registry) == {}
    registry.close()


def test_killed_it_leaves_its_slot_to_age(key):
    done = run_script(
        """
        import os, sys
        from turnstile.gpushare import Peer
        one = Peer.join(sys.argv[1], "n")
        os.kill(os.getpid(), 9)
        """,
        key,
    )
    assert done.returncode == -9
    registry = Registry.open(key)
    assert list(slots_of(registry)) == [0]
    registry.close()


# -- what it costs


def test_importing_it_brings_the_standard_library_only():
    done = run_script(
        """
        import sys
        before = set(sys.modules)
        import turnstile.gpushare
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        foreign = new - set(sys.stdlib_module_names) - {"turnstile"}
        assert not foreign, foreign
        # Nor what takes long of that, and is not needed by all.
        slow = {"asyncio", "ctypes", "dataclasses", "hashlib", "importlib.metadata", "json", "logging"}
        assert not slow & set(sys.modules), slow & set(sys.modules)
        key = sys.argv[1]
        with turnstile.gpushare.Peer.join(key) as peer:
            with peer.step():
                pass
        foreign = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
        print(sorted(foreign - {"__main__"}))
        """,
        "none",
    )
    allowed = {"turnstile", "sitecustomize", "_distutils_hack"}
    assert done.returncode == 0, done.stderr
    left = set(eval(done.stdout)) - allowed
    assert not {name for name in left if not name.startswith("__editable__")}


STRACED = """
import os, sys
from turnstile.gpushare import Peer
one = Peer.join(sys.argv[1], "n", thread=False)
def steps(number):
    for _ in range(number):
        with one.step():
            pass
def looks(number):
    for _ in range(number):
        if not one.wait_us():
            one.open()
            one.end()
steps(1000)
os.write(1, b"BEGIN")
steps(5000)
os.write(1, b"END")
# With another one that computes, all but the sleep.
other = Peer.join(sys.argv[1], "other", thread=False)
other.touch()
looks(1000)
assert one._plan is not None
os.write(1, b"BEGIN")
looks(5000)
other.touch()
other.weight = 2.0
looks(5000)
os.write(1, b"END")
one.leave()
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace here")
def test_a_step_makes_no_system_call_but_to_sleep(key, tmp_path):
    trace = tmp_path / "trace"
    done = run_script(STRACED, key, wrapper=("strace", "-f", "-o", str(trace)))
    if done.stdout != "BEGINEND" * 2:
        assert "Traceback" not in done.stderr, done.stderr
        pytest.skip(f"strace does not work here: {done.stderr[-200:]}")
    calls = trace.read_text().splitlines()
    begins = [i for i, line in enumerate(calls) if 'write(1, "BEGIN"' in line]
    ends = [i for i, line in enumerate(calls) if 'write(1, "END"' in line]
    for begin, end in zip(begins, ends, strict=True):
        between = [line for line in calls[begin + 1 : end] if "--- SIG" not in line]
        if between and all("clock_gettime" in line for line in between):
            pytest.skip("this machine's clock cannot be read without a system call")
        assert between == []


def test_the_epoch_of_these_tests_starts_every_period():
    assert all(EPOCH_US % period == 0 for period in (80_000, 100_000, 160_000, 400_000))
