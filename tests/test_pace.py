"""turnstile-pace: a program that knows nothing of its peers runs in its windows, and is never left stopped."""

from __future__ import annotations

import itertools
import math
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from child_kit import ROOT, guardians, runs, stat, state, stopped, until
from gpushare_kit import VirtualClock, join, new_key, path_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pace_kit import BURN, rival

from turnstile.child.guardian import Mode
from turnstile.gpushare import layout, pace_command
from turnstile.gpushare.look import look_at
from turnstile.gpushare.pacer import (
    ACTIVE_FOR,
    LONGEST_STOP,
    LOOK_ALONE,
    LOOK_EVERY,
    PATIENCE,
    RUNS_AFTER,
    Pacer,
)
from turnstile.gpushare.peer import Look
from turnstile.gpushare.usage import Meter, NvmlUsage, SessionUsage, open_nvml
from turnstile.gpushare.wrapper import Freezer, Wrapper

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")


# -- when it is stopped, in virtual time


class World:
    """A program on one CPU, its peer, and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.used = 0.0
        #: The part of the time that the program wants to compute.
        self.appetite = 1.0
        self.alone = False
        #: Each period of 0.12 s: ours from 0.04 to 0.12.
        self.touched: list[float] = []
        self.busy = 0.0
        self.stops: list[float] = []
        self.goes: list[float] = []
        self.ran_outside = 0.0
        self.stopped_inside = 0.0
        self.pacer = Pacer(self, self.stop, self.go, self.cpu, now=lambda: self.now)

    def cpu(self) -> float:
        """As the kernel tells it, in steps of 10 ms."""
        return math.floor(self.used * 100 + 1e-6) / 100

    def look(self) -> Look:
        if self.alone:
            return Look(True, None)
        position = round(self.now * 1e6) % 120_000
        if position < 40_000:
            return Look(False, 40_000 - position)
        return Look(True, 120_000 - position)

    def tick(self) -> float:
        return 0.5

    def touch(self) -> None:
        self.touched.append(self.now)

    def add_busy(self, seconds: float) -> None:
        self.busy += seconds

    def stop(self) -> None:
        assert not self.pacer.stopped
        self.stops.append(self.now)

    def go(self) -> None:
        assert len(self.goes) == len(self.stops) - 1
        self.goes.append(self.now)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            due = self.pacer.step()
            assert 0 <= due <= LOOK_ALONE
            due = max(due, 1e-6)
            if not self.pacer.stopped:
                self.used += due * self.appetite
            if not self.alone:
                if self.look().is_mine:
                    self.stopped_inside += due * self.pacer.stopped
                else:
                    self.ran_outside += due * (not self.pacer.stopped)
            self.now += due


def test_a_program_that_computes_is_stopped_outside_its_windows_only() -> None:
    world = World()
    world.run(0.5)
    world.ran_outside = world.stopped_inside = 0.0
    used = world.used
    world.run(12.0)
    assert world.ran_outside < 0.001 * 12
    assert world.stopped_inside < 0.001 * 12
    assert world.used - used == pytest.approx(8.0, rel=0.02)
    assert world.busy == pytest.approx(world.used, abs=0.2)


@pytest.mark.parametrize("appetite", [0.0, 0.003, 0.02, 0.06])
def test_an_idle_program_is_never_stopped(appetite: float) -> None:
    world = World()
    world.appetite = appetite
    world.run(20.0)
    assert not world.stops and not world.touched


def test_one_that_mostly_waits_for_the_card_is_taken_for_busy_too() -> None:
    world = World()
    world.appetite = 0.2
    world.run(1.0)
    assert world.stops
    touched = len(world.touched)
    world.run(4.0)
    # And goes on to be.
    assert len(world.touched) > touched + 4 and len(world.stops) > 30


def test_alone_it_is_never_stopped() -> None:
    world = World()
    world.alone = True
    world.run(5.0)
    assert world.touched and not world.stops


def test_a_program_that_wakes_up_is_noticed_within_a_few_looks() -> None:
    world = World()
    world.appetite = 0.0
    world.run(3.0)
    world.appetite = 1.0
    woke = world.now
    world.run(1.0)
    assert world.touched[0] - woke <= 4 * LOOK_EVERY


def test_one_that_goes_idle_runs_on_after_a_while() -> None:
    world = World()
    world.run(1.0)
    world.appetite = 0.0
    world.run(ACTIVE_FOR + 0.5)
    stops = len(world.stops)
    assert not world.pacer.stopped
    world.run(2.0)
    assert len(world.stops) == stops


def test_when_the_others_leave_it_runs_on_at_once() -> None:
    world = World()
    world.run(1.0)
    while not world.pacer.stopped:
        world.run(0.001)
    world.alone = True
    left = world.now
    world.run(LONGEST_STOP)
    assert world.goes[-1] - left <= LONGEST_STOP
    assert not world.pacer.stopped


def test_release_lets_it_run() -> None:
    world = World()
    world.run(1.0)
    while not world.pacer.stopped:
        world.run(0.001)
    world.pacer.release()
    assert not world.pacer.stopped and len(world.goes) == len(world.stops)
    world.pacer.release()
    assert len(world.goes) == len(world.stops)


def test_release_holds_for_a_while() -> None:
    world = World()
    world.run(1.0)
    stops = len(world.stops)
    world.pacer.release(2.0)
    world.run(1.99)
    assert len(world.stops) == stops and not world.pacer.stopped
    world.run(0.5)
    assert len(world.stops) > stops
    world.pacer.release(math.inf)
    stops = len(world.stops)
    world.run(5.0)
    assert len(world.stops) == stops


def test_nobody_is_stopped_for_ever() -> None:
    """Whatever the schedule says."""
    world = World()
    world.run(1.0)
    world.look = lambda: Look(False, 10_000)  # type: ignore[method-assign]
    used = world.used
    world.run(20.0)
    assert world.used - used == pytest.approx(20 * RUNS_AFTER / (PATIENCE + RUNS_AFTER), rel=0.3)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 3), st.floats(-4000, 4000)), max_size=8))
def test_whoever_sets_the_clock_the_program_goes_on(steps: list[tuple[float, float]]) -> None:
    clock = VirtualClock()
    with new_key() as key, join(key, clock, "rival", 3.0) as rival, join(key, clock) as peer:
        used = 0.0
        pacer = Pacer(
            peer,
            stop=lambda: None,
            go=lambda: None,
            cpu=lambda: used,
            now=lambda: clock.monotonic_ns() / 1e9,
        )

        def run(seconds: float) -> float:
            """Returns the longest time at a stretch in which it was stopped."""
            nonlocal used
            end = clock.monotonic_ns() + seconds * 1e9
            longest = stopped_for = 0.0
            while clock.monotonic_ns() < end:
                rival.touch()
                rival.tick()
                due = max(pacer.step(), 1e-6)
                if pacer.stopped:
                    stopped_for += due
                    longest = max(longest, stopped_for)
                else:
                    stopped_for = 0.0
                    used += due
                clock.advance(due)
            return longest

        for seconds, jump in steps:
            assert run(seconds) <= PATIENCE + LONGEST_STOP
            clock.set_by(jump)
        before = used
        run(3.0)
        assert used > before
        # And shares again as it should.
        before = used
        assert run(8.0) <= 0.16
        assert used - before == pytest.approx(2.0, rel=0.1)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.001, 1)), max_size=50))
def test_busy_time_is_never_more_than_it_ran(steps: list[tuple[float, float]]) -> None:
    meter = Meter()
    cpu = ran = 0.0
    for used, spent in steps:
        cpu += used
        ran += spent
        meter.feed(cpu, spent)
    assert 0 <= meter.take_busy() <= ran
    assert meter.take_busy() == 0


def test_what_the_card_says_counts_where_the_cpu_is_idle() -> None:
    world = World()
    world.appetite = 0.0
    pacer = Pacer(
        world, lambda: None, lambda: None, lambda: 0.0, lambda: True, now=lambda: world.now
    )
    for _ in range(20):
        world.now += max(pacer.step(), 0.001)
    assert world.touched


# -- what it computes


def put(proc: Path, pid: int, session: int, ticks: int, group: int | None = None) -> None:
    folder = proc / str(pid)
    folder.mkdir(exist_ok=True)
    rest = f"S 1 {group or session} {session} 0 0 0 0 0 0 0 {ticks} 0 0 0"
    (folder / "stat").write_text(f"{pid} (a ) b) {rest}")


def test_cpu_time_is_that_of_the_whole_session(tmp_path: Path) -> None:
    per_second = os.sysconf("SC_CLK_TCK")
    put(tmp_path, 9, 10, 99 * per_second, group=9)
    put(tmp_path, 10, 10, per_second)
    put(tmp_path, 11, 10, 2 * per_second, group=11)
    put(tmp_path, 12, 12, 50 * per_second)
    (tmp_path / "self").mkdir()
    usage = SessionUsage(10, 10, [9], str(tmp_path))
    assert usage.cpu_seconds(0.0) == 3
    assert usage.pids == {10, 11} and usage.groups == {10, 11}
    # New members are found within a second; what one used that is gone still counts.
    put(tmp_path, 13, 10, per_second)
    (tmp_path / "11" / "stat").unlink()
    assert usage.cpu_seconds(0.5) == 3
    assert usage.pids == {10}
    assert usage.cpu_seconds(1.0) == 4
    assert usage.pids == {10, 13}


def test_a_torn_line_is_no_process(tmp_path: Path) -> None:
    (tmp_path / "10").mkdir()
    (tmp_path / "10" / "stat").write_text("10 (x")
    assert SessionUsage(10, 10, proc=str(tmp_path)).cpu_seconds(0.0) == 0


def test_on_a_big_host_others_are_looked_at_once_and_now_and_then(tmp_path: Path) -> None:
    put(tmp_path, 10, 10, 0)
    for pid in range(1000, 1640):
        put(tmp_path, pid, 1, 0)
    usage = SessionUsage(10, 10, proc=str(tmp_path))
    looked: list[int] = []
    read = usage._read
    usage._read = lambda pid: (looked.append(pid), read(pid))[1]  # type: ignore[method-assign, func-returns-value]
    usage.cpu_seconds(0.0)
    assert len(looked) == 641
    looked.clear()
    usage.cpu_seconds(1.0)
    assert len(looked) == 1 + 640 / 32
    # A number that was another's is a member's now.
    put(tmp_path, 1001, 10, 100)
    for second in range(2, 34):
        usage.cpu_seconds(float(second))
    assert 1001 in usage.pids
    # All that is gone is forgotten.
    for pid in range(1000, 1640):
        (tmp_path / str(pid) / "stat").unlink()
        (tmp_path / str(pid)).rmdir()
    usage.cpu_seconds(40.0)
    assert usage.pids == {10} and not usage._others - {1001}


class Nvml(SimpleNamespace):
    """As nvidia-ml-py's module."""

    class NVMLError(Exception):
        pass

    def __init__(self, samples: list[Any]) -> None:
        super().__init__(samples=samples, asked=[])

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetProcessUtilization(self, _device: str, since: int) -> list[Any]:
        self.asked.append(since)
        found = [sample for sample in self.samples if sample.timeStamp > since]
        if not found:
            raise self.NVMLError("not found")
        return found


def test_nvml_tells_for_whom_the_card_computes() -> None:
    sample = SimpleNamespace(pid=7, timeStamp=1000, smUtil=30)
    other = SimpleNamespace(pid=8, timeStamp=2000, smUtil=0)
    nvml = Nvml([sample, other])
    usage = NvmlUsage("GPU-x", nvml)
    assert usage.is_busy(frozenset({7}))
    assert not usage.is_busy(frozenset({7}))  # nothing new
    assert nvml.asked == [0, 2000]
    nvml.samples.append(SimpleNamespace(pid=8, timeStamp=3000, smUtil=0))
    assert not usage.is_busy(frozenset({8}))


def test_nvml_is_not_asked_about_what_is_no_card_of_its_kind() -> None:
    assert open_nvml("metal-0") is None


# -- real processes


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def argv(*options: str) -> list[str]:
    return [sys.executable, "-m", "turnstile.gpushare.pace_command", *options]


def pace(*options: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv(*options), env=environment(), capture_output=True, text=True, timeout=60, **more
    )


@pytest.mark.parametrize("key", ["none", "shared"])
def test_the_exit_code_and_the_streams_are_the_programs(key: str) -> None:
    script = 'read line; echo "got $line"; echo oops >&2; exit 7'
    with new_key() as card:
        done = pace(
            *("--gpu", card if key == "shared" else key, "--quiet", "--", "sh", "-c", script),
            input="hello\n",
        )
    assert (done.returncode, done.stdout, done.stderr) == (7, "got hello\n", "oops\n")


def test_a_line_tells_what_was_joined() -> None:
    with new_key() as card:
        done = pace("--gpu", card, "--weight", "1.5", "--", "true")
        assert done.stderr == (
            f"turnstile-pace: gpu-share: joined /opencoti-gpu-{card} slot 0 (weight 1.5, 1 peer alive)\n"
        )
        snapshot = look_at(card)
        assert snapshot is not None and not snapshot.peers


def test_a_death_by_signal_is_passed_on() -> None:
    with new_key() as card:
        assert pace("--gpu", card, "--", "sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM
        assert pace("--gpu", card, "--", "sh", "-c", "kill -KILL $$").returncode == -signal.SIGKILL


@pytest.mark.parametrize("key", ["none", "shared"])
def test_a_program_that_is_not_there(key: str) -> None:
    with new_key() as card:
        done = pace("--gpu", card if key == "shared" else key, "--quiet", "--", "/not/there")
        assert done.returncode == 127
        assert "cannot run '/not/there'" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        done = pace("--gpu", card if key == "shared" else key, "--quiet", "--", "/")
        assert done.returncode == 126


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--weight", "0", "--", "true"], "--weight"),
        (["--weight", "nan", "--", "true"], "--weight"),
        (["--gpu-share-weight", "-1", "--", "true"], "--weight"),
        (["--on-death", "dance", "--", "true"], "--on-death"),
        ([], "no program"),
        (["--"], "no program"),
    ],
)
def test_wrong_options(options: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        pace_command.main(options)
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err


def test_trouble_with_the_registry_leaves_the_program_unpaced() -> None:
    with new_key() as card:
        Path(f"/dev/shm/opencoti-gpu-{card}").write_bytes(b"something else" * 300)
        done = pace("--gpu", card, "--name", "chat", "--", "sh", "-c", "echo ran")
    assert done.returncode == 0 and done.stdout == "ran\n"
    assert done.stderr.startswith("turnstile-pace: chat runs unpaced: ")


@pytest.mark.parametrize("watched", [False, True])
def test_the_command_line_for_others(watched: bool) -> None:
    command = pace_command.command(
        ["sd-server", "--listen-port", "1"],
        weight=2,
        name="sd",
        gpu="GPU-1",
        on_death="kill",
        watched=watched,
    )
    options = pace_command._parser().parse_args(command[3:])
    assert options.weight == 2.0 and options.name == "sd" and options.gpu == "GPU-1"
    assert options.on_death == "kill" and options.watched is watched
    assert options.program == ["--", "sd-server", "--listen-port", "1"]


def test_it_runs_wherever_it_is_started(tmp_path: Path) -> None:
    """No module of the folder that it is started in is taken for one of Python's."""
    (tmp_path / "select.py").write_text("raise SystemExit('wrong one')\n")
    (tmp_path / "turnstile").mkdir()
    (tmp_path / "turnstile" / "__init__.py").write_text("raise SystemExit('wrong one')\n")
    program = [sys.executable, "-c", "import os; print(os.environ.get('PYTHONPATH'))"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with new_key() as card:
        done = subprocess.run(
            pace_command.command(program, weight=1, gpu=card),
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr


@pytest.mark.parametrize("key", ["none", "shared"])
@pytest.mark.parametrize("redirections", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_files_that_are_closed(key: str, redirections: str, tmp_path: Path) -> None:
    """What is meant for people is not written into whatever got the number of standard error."""
    out = tmp_path / "out"
    with new_key() as card:
        words = argv("--gpu", card if key == "shared" else key, "--", "sh", "-c", f"echo x > {out}")
        script = f"exec {' '.join(map(repr, words))} {redirections}"
        done = subprocess.run(["sh", "-c", script], env=environment(), timeout=60)
        assert done.returncode == 0 and out.read_text() == "x\n"
        if key == "shared":
            assert Path(path_of(card)).read_bytes().startswith(layout.MAGIC)
            snapshot = look_at(card)
            assert snapshot is not None and not snapshot.peers


@linux
@pytest.mark.parametrize("key", ["none", "shared"])
def test_open_files_are_passed_through_and_signals_are_as_usual(key: str) -> None:
    reading, writing = os.pipe()
    script = f"echo deep > /proc/self/fd/{writing}; kill -PIPE $$"
    with new_key() as card:
        done = pace(
            *("--quiet", "--gpu", card if key == "shared" else key, "--", "sh", "-c", script),
            pass_fds=(writing,),
        )
    os.close(writing)
    with os.fdopen(reading) as file:
        assert file.read() == "deep\n"
    assert done.returncode == -signal.SIGPIPE, done.stderr


def test_a_system_without_shared_memory(tmp_path: Path) -> None:
    program = f"""
import sys
from turnstile.gpushare import pace_command, shm
shm._DIRECTORY = {str(tmp_path / "none")!r}
sys.exit(pace_command.main(["--gpu", "x", "--", "sh", "-c", "echo ran; exit 4"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (4, "ran\n")
    assert done.stderr.startswith("turnstile-pace: sh runs unpaced: ")


def test_without_proc_nobody_is_paced(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    became: list[Any] = []

    def become(program: Any) -> None:
        became.append(program)
        raise SystemExit(0)

    monkeypatch.setattr(pace_command, "can_measure", lambda: False)
    monkeypatch.setattr(pace_command, "_become", become)
    monkeypatch.setattr(pace_command, "_prepare", lambda: None)
    with pytest.raises(SystemExit):
        pace_command.main(["--gpu", "x", "--", "true"])
    assert became == [["true"]] and "without /proc" in capfd.readouterr().err


class Paced:
    """A program under turnstile-pace, beside a peer that always computes and has nearly all of the time."""

    def __init__(self, process: subprocess.Popen[bytes], pids: list[int], errors: Any) -> None:
        self.process = process
        self.pids = pids
        self._errors = errors

    @property
    def errors(self) -> str:
        """What was written to standard error."""
        return os.pread(self._errors.fileno(), 1 << 20, 0).decode()

    def expect_to_compute(self) -> None:
        """All of it does, and is not stopped any more."""
        before = [cpu_ticks(pid) for pid in self.pids]
        until(
            lambda: all(cpu_ticks(pid) > was for pid, was in zip(self.pids, before, strict=True)),
            "all of it computes",
        )
        assert not any(map(stopped, self.pids))

    def await_stop(self) -> None:
        until(lambda: all(map(stopped, self.pids)), "all of it stopped outside its window")


@contextmanager
def paced(card: str, script: str = BURN, *options: str, count: int = 2) -> Iterator[Paced]:
    errors = tempfile.TemporaryFile()  # noqa: SIM115
    process = subprocess.Popen(
        argv("--quiet", "--gpu", card, *options, "--", "sh", "-c", script),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=errors,
        process_group=0,
    )
    pids: list[int] = []
    try:
        assert process.stdout is not None
        pids += [int(process.stdout.readline()) for _ in range(count)]
        yield Paced(process, pids, errors)
    finally:
        errors.close()
        for pid in (process.pid, *pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def cpu_ticks(pid: int) -> int:
    fields = stat(pid)
    return int(fields[11]) + int(fields[12]) if fields else -1


@linux
def test_alone_nothing_is_stopped() -> None:
    with new_key() as card, paced(card) as it:
        seen = set()

        def computed_for_long() -> bool:
            seen.update(stat(pid)[0] for pid in it.pids)
            return all(cpu_ticks(pid) >= 30 for pid in it.pids)

        until(computed_for_long, "both have computed", 60)
        assert "T" not in seen


@linux
def test_whatever_kills_the_wrapper_the_program_runs_on() -> None:
    with new_key() as card, rival(card), paced(card) as it:
        it.await_stop()
        it.process.kill()
        it.process.wait()
        until(lambda: not any(map(stopped, it.pids)), "all of it continued")
        until(lambda: not guardians(it.pids[0]), "the guardian is gone")
        it.expect_to_compute()


@linux
def test_where_it_is_to_die_with_the_wrapper_it_does_stopped_or_not() -> None:
    with new_key() as card, rival(card), paced(card, BURN, "--on-death", "kill") as it:
        it.await_stop()
        it.process.kill()
        it.process.wait()
        until(lambda: not any(map(runs, it.pids)), "all of it is gone")


@linux
def test_a_stopped_program_ends_at_sigterm() -> None:
    script = "trap 'exit 3' TERM; echo $$; while :; do :; done"
    with new_key() as card, rival(card), paced(card, script, count=1) as it:
        it.await_stop()
        it.process.terminate()
        assert it.process.wait(30) == 3
        assert not guardians(it.pids[0])


@linux
@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGQUIT"])
def test_signals_are_passed_on(name: str) -> None:
    script = f"trap 'exit 9' {name[3:]}; echo $$; while :; do :; done"
    with new_key() as card, paced(card, script, count=1) as it:
        it.process.send_signal(getattr(signal, name))
        assert it.process.wait(30) == 9


@linux
def test_what_the_shell_has_it_ignore_stays_ignored() -> None:
    script = "echo $$; kill -HUP $$; exit 5"
    command = " ".join(map(repr, argv("--quiet", "--gpu", "KEY", "--", "sh", "-c", script)))
    with new_key() as card:
        done = subprocess.run(
            ["sh", "-c", f"trap '' HUP; exec {command.replace('KEY', card)}"],
            env=environment(),
            capture_output=True,
            timeout=60,
        )
    assert done.returncode == 5


@linux
def test_ctrl_z_stops_both_and_fg_continues_both() -> None:
    with new_key() as card, paced(card) as it:
        it.process.send_signal(signal.SIGTSTP)
        until(lambda: stopped(it.process.pid) and all(map(stopped, it.pids)), "all are stopped")
        it.process.send_signal(signal.SIGCONT)
        until(lambda: not any(map(stopped, [it.process.pid, *it.pids])), "all go on")


@linux
def test_a_terminal_is_passed_through() -> None:
    script = 'test -t 0 && test -t 1 && echo "tty $(stty size)"; read line; echo "got $line"'
    with new_key() as card:
        pid, master = pty.fork()
        if pid == 0:
            os.environ["PYTHONPATH"] = str(ROOT)
            os.execv(sys.executable, argv("--quiet", "--gpu", card, "--", "sh", "-c", script))
        try:
            os.write(master, b"hello\n")
            seen = b""
            while b"got hello" not in seen:
                assert select.select([master], [], [], 30)[0], seen
                with suppress(OSError):  # EIO at the end
                    chunk = os.read(master, 4096)
                    assert chunk, seen
                    seen += chunk
            assert b"tty " in seen
        finally:
            os.close(master)
            assert os.waitpid(pid, 0)[1] == 0


@linux
def test_the_peers_see_it_compute() -> None:
    with new_key() as card, paced(card, BURN, "--name", "burner", "--weight", "2") as it:

        def active() -> bool:
            snapshot = look_at(card)
            return snapshot is not None and any(
                peer.active
                and peer.pid == it.process.pid
                and peer.name == "burner"
                and peer.busy > 0
                for peer in snapshot.peers
            )

        until(active, "it is seen to be active and busy")


@linux
def test_a_guardian_that_is_killed_is_replaced() -> None:
    with new_key() as card, rival(card), paced(card) as it:
        it.await_stop()
        (first,) = guardians(it.pids[0])
        os.kill(first, signal.SIGKILL)
        (second,) = until(
            lambda: [pid for pid in guardians(it.pids[0]) if pid != first], "another one"
        )
        # It watches once it has read its number.
        until(lambda: state(second) == "S", "it watches")
        assert "guardian was killed" in it.errors
        it.await_stop()
        it.process.kill()
        it.process.wait()
        until(lambda: not guardians(it.pids[0]), "the guardian is gone")
        it.expect_to_compute()


@linux
def test_a_rival_that_leaves_or_dies_sets_it_free() -> None:
    with new_key() as card, paced(card) as it:
        with rival(card):
            it.await_stop()
        it.expect_to_compute()
        # One that is killed, in the middle of a step.
        code = "import sys; from turnstile.gpushare import Peer; p = Peer.join(sys.argv[1]); p.begin(); input()"
        victim = subprocess.Popen(
            [sys.executable, "-c", code, card], env=environment(), stdin=subprocess.PIPE
        )
        try:
            it.await_stop()
        finally:
            victim.kill()
            victim.communicate()
        until(lambda: it_runs_for(it, 0.5), "it is not stopped any more")


def it_runs_for(it: Paced, seconds: float) -> bool:
    """Whether none of it is seen to be stopped for so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if any(map(stopped, it.pids)):
            return False
        time.sleep(0.001)
    return True


@linux
def test_what_outlives_the_program_runs_on_unpaced(tmp_path: Path) -> None:
    # The program ends as soon as it may; its child, in its session, computes on.
    script = "sh -c 'while :; do :; done' >/dev/null & echo $$; echo $!; while test -e FILE; do :; done; exit 6"
    flag = tmp_path / "flag"
    flag.touch()
    script = script.replace("FILE", str(flag))
    with new_key() as card, rival(card), paced(card, script) as it:
        it.await_stop()
        flag.unlink()
        assert it.process.wait(30) == 6
        del it.pids[0]
        assert it_runs_for(it, 0.5)
        it.expect_to_compute()


@linux
def test_a_daemon_is_none_of_its_business() -> None:
    script = "setsid sh -c 'while :; do :; done' >/dev/null & echo $$; echo $!; sleep 1; exit 6"
    with new_key() as card, rival(card), paced(card, script) as it:
        assert it.process.wait(30) == 6
        del it.pids[0]
        until(lambda: stat(it.pids[0])[3] == str(it.pids[0]), "a session of its own")
        it.expect_to_compute()


@linux
def test_a_program_that_others_stopped_is_theirs_to_continue() -> None:
    with subprocess.Popen(["sleep", "600"], process_group=0) as child:
        try:
            freezer = Freezer(child.pid, SessionUsage(os.getsid(child.pid), child.pid))
            child.send_signal(signal.SIGSTOP)
            until(lambda: stopped(child.pid), "it is stopped")
            freezer.stop()
            freezer.go()
            assert stopped(child.pid)
            child.send_signal(signal.SIGCONT)
            until(lambda: not stopped(child.pid), "it goes on")
            freezer.stop()
            until(lambda: stopped(child.pid), "it is stopped")
            freezer.go()
            until(lambda: not stopped(child.pid), "it goes on")
        finally:
            child.kill()


@linux
def test_it_goes_on_however_often_its_window_changes() -> None:
    with new_key() as card, paced(card) as it:
        with rival(card) as peer:
            flips = itertools.count(1)

            def flip() -> bool:
                peer.weight = 1.0 + next(flips) % 7
                return all(cpu_ticks(pid) > 30 for pid in it.pids)

            until(flip, "it computes meanwhile", 60)
            assert next(flips) > 100
        it.expect_to_compute()


@linux
def test_when_pacing_fails_the_program_runs_to_its_end() -> None:
    class Broken:
        key = "broken"
        left = False

        def look(self) -> Look:
            raise OSError("no such luck")

        def tick(self) -> float:
            return 0.5

        def leave(self) -> None:
            self.left = True

    # In a process of its own, for the sake of our signal handlers.
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            peer: Any = Broken()
            status = Wrapper(peer, Mode.CONTINUE, ["sh", "-c", "exit 8"]).run()
            assert peer.left
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 8


@linux
@pytest.mark.slow
def test_a_signal_at_any_moment_ends_it_and_leaves_nothing() -> None:
    with new_key() as card, rival(card):
        for step in range(12):
            process = subprocess.Popen(
                argv("--quiet", "--gpu", card, "--", "sleep", "612.25"),
                env=environment(),
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
            time.sleep(step * 0.04)
            process.terminate()
            assert process.wait(30) == -signal.SIGTERM
        until(lambda: not find("612.25"), "no program is left")


def find(word: str) -> list[int]:
    """The processes with this word in their command line."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            if word.encode() in Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0"):
                found.append(int(name))
    return found


def can_unshare() -> bool:
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "true"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


@linux
def test_as_the_first_process_of_a_container() -> None:
    if not can_unshare():
        pytest.skip("no new process namespace to be had")
    # It leaves an orphan behind that ends: nobody but the first process can wait for that.
    script = "(sh -c 'exit 0' & exec true) ; sleep 0.5; cat /proc/[0-9]*/stat | grep -c ') Z' ; kill -TERM $$"
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    with new_key() as card:
        done = subprocess.run(
            [*unshare, *argv("--quiet", "--gpu", card, "--", "sh", "-c", script)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.stdout == "0\n", done
    assert done.returncode == 128 + signal.SIGTERM
