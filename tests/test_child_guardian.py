"""The guardian: whatever ends the owner, its child's whole group ends, or runs on, as was agreed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from child_kit import Owner, descriptors, owner, runs, stat, state, stopped, until, writers

from turnstile.child import guardian
from turnstile.child.guardian import Group, Mode, Process, look_at, start_guardian

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")

#: Prints the child's pid, the guardian's and then those that the child prints; does nothing more. The child is the
#: shell script that is the first argument, the mode the second.
OWNER = """
import os, subprocess, sys
from turnstile.child import guardian, shim
from turnstile.child.guardian import Mode
script, mode = sys.argv[1:]
child = subprocess.Popen(shim.command(["sh", "-c", script]))
print(child.pid, flush=True)
watch = guardian.start_guardian(child.pid, Mode(mode))
print(watch.pid, flush=True)
sys.stdin.readline()
watch.done()
print(child.pid, flush=True)
sys.stdin.readline()
"""

#: A child that has a child of its own in its group, and one in a group, one in a session of its own.
FAMILY = """
sleep 600 & echo $!
python3 -c 'import os; os.setpgid(0, 0); os.execvp("sleep", ["sleep", "600"])' & echo $!
python3 -c 'import os; os.setsid(); os.execvp("sleep", ["sleep", "600"])' & echo $!
trap "" TERM HUP INT
while :; do wait; done
"""


def family(parent: Owner) -> tuple[int, list[int]]:
    """The guardian and the child's whole group, once everybody is where it belongs."""
    child, watch = parent.number(), parent.number()
    children = [parent.number() for _ in range(3)]
    near, job, far = children
    until(lambda: stat(near)[2:3] == [str(child)], "the first in the child's group")
    until(lambda: stat(job)[2:3] == [str(job)], "the second in a group of its own")
    until(lambda: stat(far)[3:4] == [str(far)], "the third in a session of its own")
    for pid in children:
        until(lambda pid=pid: Path(f"/proc/{pid}/comm").read_text() == "sleep\n", "sleep")
    return watch, [child, *children]


# -- the owner dies


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_the_owners_death_is_the_end_of_the_whole_group(how: signal.Signals) -> None:
    with owner(OWNER, FAMILY, "kill") as parent:
        watch, group = family(parent)
        assert all(map(runs, [*group, watch]))
        os.kill(parent.pid, how)
        for pid in [*group, watch]:
            until(lambda pid=pid: not runs(pid), "the end of the group, then of the guardian")
        expected = f"turnstile: guardian: the owner is gone: killing process group {group[0]}\n"
        assert parent.errors == expected


def test_a_frozen_group_is_killed_as_well() -> None:
    with owner(OWNER, FAMILY, "kill") as parent:
        _, group = family(parent)
        for pid in group:
            os.kill(pid, signal.SIGSTOP)
            until(lambda pid=pid: stopped(pid), "the stop")
        parent.kill()
        for pid in group:
            until(lambda pid=pid: not runs(pid), "the end")


def test_a_frozen_group_runs_on() -> None:
    with owner(OWNER, FAMILY, "continue") as parent:
        watch, group = family(parent)
        os.killpg(group[0], signal.SIGSTOP)
        for pid in group[2:]:
            os.kill(pid, signal.SIGSTOP)
        for pid in group:
            until(lambda pid=pid: stopped(pid), "the stop")
        parent.kill()
        for pid in group:
            until(lambda pid=pid: not stopped(pid), "the end of the stop")
        until(lambda: not runs(watch), "the guardian's end")
        assert all(map(runs, group)) and not any(map(stopped, group))


def test_what_appears_while_the_group_is_killed_is_killed_too() -> None:
    # Forks as fast as it can, each child in a group or session of its own, some of which fork on.
    forks = """exec python3 -c '
import os, sys
os.setpgid(0, 0) if os.getpgrp() != os.getpid() else None
print(os.getpid(), flush=True)
for number in range(200):
    if os.fork() == 0:
        if number % 3 == 1: os.setpgid(0, 0)
        os.execvp("sleep", ["sleep", "600"])
print(os.getpid(), flush=True)
os.execvp("sleep", ["sleep", "600"])
'"""
    with owner(OWNER, forks, "kill") as parent:
        child = parent.number()
        parent.number()
        assert parent.number() == child

        def session() -> list[int]:
            found = []
            for name in filter(str.isdecimal, os.listdir("/proc")):
                if stat(int(name))[3:4] == [str(child)] and runs(int(name)):
                    found.append(int(name))
            return found

        until(lambda: len(session()) > 10, "some of its children")
        parent.kill()
        until(lambda: not runs(child), "the child's end")
        until(lambda: not session(), "the end of all that it forked")


# -- the owner needs it no longer


def test_a_guardian_that_is_done_touches_nobody() -> None:
    with owner(OWNER, FAMILY, "kill") as parent:
        watch, group = family(parent)
        assert parent.process.stdin is not None
        parent.process.stdin.write("\n")
        parent.process.stdin.flush()
        assert parent.number() == group[0]
        assert not state(watch), "it was waited for"
        parent.kill()
        assert parent.errors == ""
        assert all(map(runs, group)), "nobody told them anything"


def test_a_guardian_whose_group_is_gone_has_nothing_to_do() -> None:
    with owner(OWNER, "exit 0", "kill") as parent:
        child, watch = parent.number(), parent.number()
        until(lambda: state(child) == "Z", "the child's end")
        parent.kill()
        until(lambda: not runs(watch), "the guardian's end")
        assert parent.errors == ""


def test_the_handle() -> None:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        watch = start_guardian(child.pid, Mode.KILL)
        assert watch.alive() and runs(watch.pid)
        watch.done()
        watch.done()
        assert not watch.alive() and child.poll() is None
        # One that was killed itself is noticed, and is no reason for an error at the end.
        watch = start_guardian(child.pid, Mode.KILL)
        os.kill(watch.pid, signal.SIGKILL)
        until(lambda: not watch.alive(), "the guardian's end")
        watch.done()
        assert child.poll() is None
        # To drop the pipe is to die.
        watch = start_guardian(child.pid, Mode.KILL)
        watch._process.stdin.close()  # type: ignore[union-attr]
        assert child.wait() == -signal.SIGKILL
        watch.done()
    finally:
        child.kill()
        child.wait()


def test_process_groups_that_cannot_be_meant() -> None:
    for leader in (-1, 0, 1):
        with pytest.raises(ValueError):
            guardian.command(leader, Mode.KILL)
        with pytest.raises(ValueError):
            Group(leader)


# -- its own life


def test_signals_to_everybody_leave_it_where_it_is() -> None:
    with owner(OWNER, FAMILY, "kill") as parent:
        watch, group = family(parent)
        # It leads a session of its own from here on, and no longer dies of what is sent to all.
        until(lambda: stat(watch)[3:4] == [str(watch)], "the guardian's session")
        until(lambda: state(watch) == "S" and _ignores(watch, signal.SIGTSTP), "its readiness")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGTSTP):
            os.kill(watch, number)
        assert runs(watch) and not stopped(watch)
        parent.kill()
        for pid in [*group, watch]:
            until(lambda pid=pid: not runs(pid), "the end")


def _ignores(pid: int, number: int) -> bool:
    text = Path(f"/proc/{pid}/status").read_text()
    mask = next(line for line in text.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


BUSY_OWNER = """
import os, subprocess, sys
from turnstile.child import guardian
from turnstile.child.guardian import Mode
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(child.pid, flush=True)
watch = guardian.start_guardian(child.pid, Mode.KILL)
print(watch.pid, flush=True)
sleep = ["sleep", "600"]
print(subprocess.Popen(sleep, close_fds=False, start_new_session=True).pid, flush=True)
print(os.posix_spawnp("sleep", sleep, os.environ), flush=True)
pid = os.fork()
if pid == 0:
    os.execvp("sleep", sleep)
print(pid, flush=True)
other = subprocess.Popen(sleep, start_new_session=True)
print(other.pid, flush=True)
print(guardian.start_guardian(other.pid, Mode.KILL).pid, flush=True)
sys.stdin.read()
"""


def test_nobody_but_the_owner_has_the_pipe() -> None:
    with owner(BUSY_OWNER) as parent:
        child, watch, *others = (parent.number() for _ in range(7))
        until(lambda: Path(f"/proc/{others[2]}/comm").read_text() == "sleep\n", "the fork's exec")
        pipe = descriptors(watch)[0]
        assert pipe.startswith("pipe:")
        assert writers(pipe) == {parent.pid}
        # What it has open itself, once Python is done reading its program: the pipe, and the standard streams.
        until(lambda: set(descriptors(watch)) == {0, 1, 2}, "the standard streams only")
        assert descriptors(watch)[1] == "/dev/null"
        parent.kill()
        until(lambda: not runs(child), "the child's end, whatever else runs on")
        assert all(map(runs, others[:3]))


# -- groups, on a /proc of our own


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "meminfo").write_text("no process")
    monkeypatch.setattr(guardian, "_PROC", str(tmp_path))
    write(tmp_path, os.getpid(), parent=1)
    return tmp_path


def write(
    proc: Path,
    pid: int,
    state: str = "S",
    parent: int = 1,
    group: int | None = None,
    session: int | None = None,
    threads: int = 1,
    birth: int = 7,
    name: str = "x",
) -> None:
    group = pid if group is None else group
    session = group if session is None else session
    (proc / str(pid)).mkdir(exist_ok=True)
    (proc / str(pid) / "stat").write_text(
        f"{pid} ({name}) {state} {parent} {group} {session} 0 -1 4194304 1 0 0 0 0 0 0 0 20 0"
        f" {threads} 0 {birth} 1000 10 18446744073709551615 1 1\n"
    )


def pids(processes: list[Process]) -> list[int]:
    return sorted(process.pid for process in processes)


def test_a_process_is_read_whatever_its_name(proc: Path) -> None:
    for name in ("x", "a b", "x) S 1 2 3 (y", ")", "("):
        write(proc, 500, "R", 3, 4, 5, threads=6, birth=8, name=name)
        process = look_at(500)
        assert process is not None
        found = (process.state, process.parent, process.group, process.session)
        assert found == ("R", 3, 4, 5)
        assert (process.threads, process.birth) == (6, 8)
    for text in ("", "500 (x", "500 (x) S 1"):
        (proc / "500" / "stat").write_text(text)
        assert look_at(500) is None


def test_who_belongs_to_a_group(proc: Path) -> None:
    write(proc, 500)
    write(proc, 501, parent=500, group=500)
    write(proc, 502, parent=1, group=500)
    write(proc, 503, parent=1, group=503, session=500)
    write(proc, 504, parent=501, group=504)
    write(proc, 505, parent=504, group=505)
    write(proc, 600)
    write(proc, 601, parent=600, group=600)
    assert pids(Group(500).members()) == [500, 501, 502, 503, 504, 505]


def test_a_leader_belongs_to_its_group_before_it_leads_it(proc: Path) -> None:
    write(proc, 500, parent=400, group=400)
    write(proc, 400)
    assert pids(Group(500).members()) == [500]


def test_the_dead_do_not_count_but_leaders_whose_threads_run_on_do(proc: Path) -> None:
    write(proc, 500, "Z", threads=3)
    write(proc, 501, "Z", group=500)
    write(proc, 502, "X", group=500)
    write(proc, 503, "D", group=500)
    assert pids(Group(500).members()) == [500, 503]


def test_who_was_seen_once_is_followed_after_its_parents_death(proc: Path) -> None:
    write(proc, 500)
    write(proc, 501, parent=500, group=501, birth=9)
    write(proc, 502, parent=501, group=502, birth=9)
    group = Group(500)
    assert pids(group.members()) == [500, 501, 502]
    write(proc, 500, "Z")
    write(proc, 501, parent=1, group=501, birth=9)
    assert pids(group.members()) == [501, 502]
    # The number is somebody else's now.
    write(proc, 501, parent=1, group=501, birth=10)
    write(proc, 502, parent=1, group=502, birth=9)
    assert pids(group.members()) == [502]


def test_a_number_that_was_given_to_another_process_means_nobody(
    proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda *what: sent.append(what))
    monkeypatch.setattr(os, "kill", lambda *what: sent.append(what))
    write(proc, 500)
    group = Group(500)
    write(proc, 500, birth=8)
    write(proc, 501, parent=500, group=500, birth=8)
    assert group.members() == [] and group.signal(signal.SIGKILL) is False
    late = Group(502)
    write(proc, 502)
    assert late.members() == [] and late.signal(signal.SIGKILL) is False
    assert sent == []


def test_a_signal_goes_to_the_process_group_at_once_and_to_the_others_one_by_one(
    proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, int, int]] = []

    def kill(pid: int, number: int) -> None:
        sent.append(("kill", pid, number))
        if pid == 504:
            raise PermissionError

    monkeypatch.setattr(os, "killpg", lambda pid, number: sent.append(("killpg", pid, number)))
    monkeypatch.setattr(os, "kill", kill)
    for pid, group in ((500, 500), (501, 500), (503, 503), (504, 504)):
        write(proc, pid, parent=500, group=group, session=500)
    assert Group(500).signal(15) is True
    assert sorted(sent) == [("kill", 503, 15), ("kill", 504, 15), ("killpg", 500, 15)]


def test_where_nobody_can_look_the_process_group_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guardian, "_PROC", str(tmp_path))
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        group = Group(child.pid)
        assert pids(group.members()) == [child.pid]
        assert group.signal(signal.SIGKILL)
        child.wait()
        assert group.members() == [] and not group.signal(signal.SIGKILL)
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        child.wait()
