"""Children of a real reactor: started, ended as a whole, reaped, and gone with it whatever ends it."""

from __future__ import annotations

import os
import signal
import stat as st
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import child_kit
import pytest
import pytest_twisted
from child_kit import descriptors, guardians, holders, owner, runs, state, stopped, writers
from system_kit import reactor, tick
from twisted.internet.defer import CancelledError, DeferredList
from twisted.internet.protocol import ProcessProtocol

from turnstile.child import process as process_module
from turnstile.child.logfile import RotatingLog
from turnstile.child.process import Child, ExitStatus, Spawner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")

#: Tells that it is there, and lives until it is told to leave.
OBEYS = "echo ready; exec sleep 600"
IGNORES = 'trap "" TERM HUP INT; echo ready; while :; do sleep 600 & wait; done'
#: Prints the pid of its own child, which does not act on SIGTERM.
PARENT = '(trap "" TERM; exec sleep 600) & echo ready $!; exec sleep 600'


async def until(condition: Callable[[], Any], what: str) -> Any:
    """As the kit's, while the reactor runs."""
    deadline = reactor.seconds() + child_kit.PATIENCE
    while not (value := condition()):
        assert reactor.seconds() < deadline, f"it never came true: {what}"
        await tick(0.003)
    return value


class Nursery:
    """Starts children, and remembers them."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "logs" / "child.log"
        self.children: list[Child] = []

    def __call__(self, *program: str, env: dict[str, str] | None = None) -> Child:
        child = Spawner(reactor).spawn(program, env, RotatingLog(self.path))
        self.children.append(child)
        return child

    async def ready(self, script: str) -> tuple[Child, list[int]]:
        """A shell script that printed ``ready`` and perhaps some pids."""
        child = self("sh", "-c", script)
        await until(lambda: any(line.startswith("ready") for line in child.tail(9)), "readiness")
        line = next(line for line in child.tail(9) if line.startswith("ready"))
        return child, [int(word) for word in line.split()[1:]]


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path)
    yield nursery
    ends = [child.terminate(0) for child in nursery.children]
    ends += [child.when_settled() for child in nursery.children]
    pytest_twisted.blockon(DeferredList(ends).addTimeout(child_kit.PATIENCE, reactor))
    assert all(d.called for d in ends)
    for child in nursery.children:
        assert not state(child.pid) and not guardians(child.pid), "reaped, and its guardian too"


# -- an end of its own


@pytest_twisted.ensureDeferred
async def test_an_end_of_its_own(spawn: Nursery) -> None:
    child = spawn("sh", "-c", "echo out; echo err >&2; exit 3")
    assert child.status is None
    order: list[str] = []
    for name in ("settled", "gone", "exited"):
        getattr(child, f"when_{name}")().addCallback(lambda _, name=name: order.append(name))
    status = await child.when_settled()
    assert status == child.status == ExitStatus(code=3)
    assert order == ["exited", "gone", "settled"]
    assert child.tail(5) == ["out", "err"] and child.tail(1) == ["err"] and child.tail(0) == []
    # Who comes later gets it as well.
    assert await child.when_exited() == await child.when_gone() == status
    assert await child.terminate(5.0) == status


@pytest_twisted.ensureDeferred
async def test_a_crash(spawn: Nursery) -> None:
    child = spawn("sh", "-c", "kill -SEGV $$")
    status = await child.when_gone()
    assert status == ExitStatus(signal=signal.SIGSEGV)
    assert str(status) == "killed by SIGSEGV" and str(ExitStatus(code=1)) == "exit code 1"


@pytest_twisted.ensureDeferred
async def test_a_program_that_does_not_exist(spawn: Nursery) -> None:
    child = spawn("/no/such/sd-server", "-m", "x")
    assert await child.when_gone() == ExitStatus(code=127)
    assert child.tail(5) == [
        "turnstile: cannot run '/no/such/sd-server': No such file or directory"
    ]


@pytest_twisted.ensureDeferred
async def test_what_it_leaves_behind_is_ended_before_it_counts_as_gone(spawn: Nursery) -> None:
    child, (orphan,) = await spawn.ready('(trap "" TERM; exec sleep 600) & echo ready $!')
    assert await child.when_gone() == ExitStatus(code=0)
    assert not runs(orphan)


# -- an end that it is told


@pytest_twisted.ensureDeferred
async def test_one_that_obeys(spawn: Nursery) -> None:
    child, _ = await spawn.ready(OBEYS)
    assert await child.terminate(child_kit.PATIENCE) == ExitStatus(signal=signal.SIGTERM)


@pytest_twisted.ensureDeferred
async def test_one_that_takes_its_leave_in_its_own_way(spawn: Nursery) -> None:
    child, _ = await spawn.ready(
        'trap "echo bye; exit 7" TERM; echo ready; while :; do sleep 600 & wait; done'
    )
    assert await child.terminate(child_kit.PATIENCE) == ExitStatus(code=7)
    assert child.tail(1) == ["bye"]


@pytest_twisted.ensureDeferred
async def test_one_that_does_not_obey_is_killed(spawn: Nursery) -> None:
    child, _ = await spawn.ready(IGNORES)
    assert await child.terminate(0.05) == ExitStatus(signal=signal.SIGKILL)


@pytest_twisted.ensureDeferred
async def test_less_patience_later(spawn: Nursery) -> None:
    child, _ = await spawn.ready(IGNORES)
    first = child.terminate(3600.0)
    second = child.terminate(7200.0)
    await tick(0.02)
    assert child.status is None
    assert await child.terminate(0) == ExitStatus(signal=signal.SIGKILL)
    assert await first == await second


@pytest_twisted.ensureDeferred
async def test_its_own_children_end_with_it(spawn: Nursery) -> None:
    child, (grandchild,) = await spawn.ready(PARENT)
    assert runs(grandchild)
    await child.terminate(child_kit.PATIENCE)
    assert not runs(grandchild)


@pytest_twisted.ensureDeferred
async def test_one_that_is_frozen_can_still_obey(spawn: Nursery) -> None:
    child, _ = await spawn.ready(OBEYS)
    os.killpg(child.pid, signal.SIGSTOP)
    await until(lambda: stopped(child.pid), "the stop")
    assert await child.terminate(child_kit.PATIENCE) == ExitStatus(signal=signal.SIGTERM)


@pytest_twisted.ensureDeferred
async def test_one_that_is_told_before_it_is_the_program(spawn: Nursery) -> None:
    child = spawn("sh", "-c", IGNORES)
    assert (await child.terminate(child_kit.PATIENCE)).signal in (signal.SIGTERM, signal.SIGKILL)


@pytest_twisted.ensureDeferred
async def test_one_of_many_who_wait_goes_away(spawn: Nursery) -> None:
    child, _ = await spawn.ready(OBEYS)
    for wait in (child.when_exited, child.when_gone, child.when_settled):
        waiting = wait()
        waiting.cancel()
        with pytest.raises(CancelledError):
            await waiting
    end = child.terminate(child_kit.PATIENCE)
    end.cancel()
    with pytest.raises(CancelledError):
        await end
    assert await child.when_gone() == ExitStatus(signal=signal.SIGTERM)


# -- what it gets and what it doesn't


@pytest_twisted.ensureDeferred
async def test_it_has_its_standard_streams_and_nothing_else(spawn: Nursery) -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    try:
        child, _ = await spawn.ready(OBEYS)
        log = str(spawn.path)
        # sleep itself reads its locale first.
        expected = {0: "/dev/null", 1: log, 2: log}
        await until(lambda: descriptors(child.pid) == expected, "the standard streams alone")
    finally:
        os.close(read)
        os.close(write)


@pytest_twisted.ensureDeferred
async def test_the_guardians_pipe_is_ours_alone(spawn: Nursery) -> None:
    child, _ = await spawn.ready(PARENT)
    (watch,) = await until(lambda: guardians(child.pid), "the guardian")
    pipe = descriptors(watch)[0]
    assert pipe.startswith("pipe:")
    await spawn.ready(OBEYS)
    # One that the reactor makes by fork, not posix_spawn: it is told a directory.
    forked = reactor.spawnProcess(
        ProcessProtocol(), "sleep", ["sleep", "600"], env=None, path="/", childFDs={}
    )
    try:
        await until(lambda: len(descriptors(forked.pid)) == 0, "the fork's exec")
        assert writers(pipe) == {os.getpid()}
        assert set(holders(pipe)) == {os.getpid(), watch}
    finally:
        forked.signalProcess("KILL")
    await until(lambda: not state(forked.pid), "its end")


@pytest_twisted.ensureDeferred
async def test_the_environment(spawn: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/x")
    monkeypatch.setenv("OF_TURNSTILE", "x")
    child = spawn("sh", "-c", 'echo "[$OF_TURNSTILE$NOTIFY_SOCKET]"')
    await child.when_gone()
    assert child.tail(1) == ["[x]"]
    child = spawn("/bin/sh", "-c", 'echo "[$OF_TURNSTILE$NOTIFY_SOCKET$MINE]"', env={"MINE": "y"})
    await child.when_gone()
    assert child.tail(1) == ["[y]"]


@pytest_twisted.ensureDeferred
async def test_its_log_is_for_the_owners_eyes(spawn: Nursery) -> None:
    child = spawn("echo", "what a user typed")
    await child.when_gone()
    assert st.S_IMODE(spawn.path.stat().st_mode) == 0o600
    assert st.S_IMODE(spawn.path.parent.stat().st_mode) == 0o700
    first, second = spawn.path.read_text().splitlines()
    assert first.endswith(": starting echo 'what a user typed'") and second == "what a user typed"


@pytest_twisted.ensureDeferred
async def test_no_descriptor_is_left(spawn: Nursery) -> None:
    child = spawn("true")
    await child.when_settled()
    before = set(descriptors(os.getpid()))
    for _ in range(5):
        child = spawn("true")
        await child.when_settled()
    assert set(descriptors(os.getpid())) == before


def test_a_log_that_cannot_be_opened_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    before = set(descriptors(os.getpid()))
    with pytest.raises(OSError):
        Spawner(reactor).spawn(["true"], None, RotatingLog(tmp_path / "file" / "x.log"))
    with pytest.raises(ValueError):
        Spawner(reactor).spawn([""], None, RotatingLog(tmp_path / "x.log"))
    assert set(descriptors(os.getpid())) == before


class _NoMore:
    """A reactor that can start only so many processes."""

    def __init__(self, more: int) -> None:
        self._more = more

    def __getattr__(self, name: str) -> Any:
        return getattr(reactor, name)

    def spawnProcess(self, *args: Any, **kwargs: Any) -> Any:
        if self._more == 0:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        self._more -= 1
        return reactor.spawnProcess(*args, **kwargs)


@pytest_twisted.ensureDeferred
async def test_without_a_guardian_there_is_no_child(tmp_path: Path) -> None:
    before = set(descriptors(os.getpid()))
    marker = tmp_path / "ran"
    for more in (0, 1):
        with pytest.raises(BlockingIOError):
            log = RotatingLog(tmp_path / "x.log")
            Spawner(_NoMore(more)).spawn(["touch", str(marker)], None, log)
        await until(lambda: set(descriptors(os.getpid())) <= before, "the descriptors' end")
    assert not marker.exists()


@pytest_twisted.ensureDeferred
async def test_a_guardian_that_was_killed_is_replaced(spawn: Nursery) -> None:
    child, _ = await spawn.ready(OBEYS)
    seen = set()
    for _ in range(2):
        (watch,) = await until(lambda: set(guardians(child.pid)) - seen, "a guardian")
        seen.add(watch)
        os.kill(watch, signal.SIGKILL)
    await until(lambda: set(guardians(child.pid)) - seen, "a third guardian")
    assert runs(child.pid)
    # And one that is killed just before it is told that it may go.
    os.kill(guardians(child.pid)[0], signal.SIGKILL)
    child.terminate(child_kit.PATIENCE)
    assert await child.when_settled() == ExitStatus(signal=signal.SIGTERM)


@pytest_twisted.ensureDeferred
async def test_the_log_is_rotated_while_it_writes(
    spawn: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "LOG_LOOK", 0.01)
    child = Spawner(reactor).spawn(
        ["sh", "-c", "i=0; while :; do i=$((i+1)); echo line $i of many; done"],
        None,
        RotatingLog(spawn.path, max_bytes=20_000, backups=2),
    )
    spawn.children.append(child)
    await until(Path(f"{spawn.path}.2").exists, "the second older file")
    await child.terminate(0)
    assert not Path(f"{spawn.path}.3").exists()
    lines = child.tail(20)
    numbers = [int(line.split()[1]) for line in lines]
    assert numbers == list(range(numbers[0], numbers[0] + 20))


# -- the end of the owner

TWISTD = """
import os, sys
sys.path.insert(0, {root!r})
from twisted.application import service
from twisted.internet import reactor
from turnstile import exitcode
from turnstile.child.logfile import RotatingLog
from turnstile.child.process import Spawner

class Owner(service.Service):
    def startService(self):
        super().startService()
        exitcode.exit_0_on_sigterm(reactor)
        exitcode.hasten_on_second_sigint(reactor, lambda: self.running, lambda: self.child.terminate(0))
        self.child = Spawner(reactor).spawn(["sh", "-c", {script!r}], None, RotatingLog({log!r}))
        self.look()
    def look(self):
        ready = [line for line in self.child.tail(9) if line.startswith("ready")]
        if not ready:
            reactor.callLater(0.01, self.look)
            return
        with open({report!r} + ".new", "w") as file:
            print(os.getpid(), self.child.pid, *ready[0].split()[1:], file=file)
        os.rename({report!r} + ".new", {report!r})
    def stopService(self):
        super().stopService()
        self.child.terminate({grace!r})
        return self.child.when_settled()

application = service.Application("owner")
Owner().setServiceParent(application)
"""

STUBBORN = (
    '(trap "" TERM INT HUP; exec sleep 600) & echo ready $!; trap "" TERM HUP INT;'
    " while :; do wait; done"
)

RUN = """
import sys
from twisted.scripts.twistd import run
sys.argv = ["twistd", *sys.argv[1:]]
run()
"""


@pytest.mark.parametrize(
    ("signals", "grace", "script"),
    [
        ([signal.SIGTERM], 600.0, PARENT),
        ([signal.SIGTERM], 0.1, STUBBORN),
        ([signal.SIGINT], 0.1, STUBBORN),
        ([signal.SIGINT, signal.SIGINT], 600.0, STUBBORN),
        ([signal.SIGKILL], 600.0, STUBBORN),
        ([signal.SIGABRT], 600.0, STUBBORN),
    ],
)
@pytest.mark.parametrize("daemon", [False, True])
def test_twistds_end_is_its_childs(
    tmp_path: Path, signals: list[signal.Signals], grace: float, script: str, daemon: bool
) -> None:
    report, tac, log = tmp_path / "report", tmp_path / "owner.tac", tmp_path / "log"
    text = TWISTD.format(
        root=str(child_kit.ROOT),
        script=script,
        log=str(tmp_path / "child.log"),
        report=str(report),
        grace=grace,
    )
    tac.write_text(text)
    arguments = ["--pidfile", str(tmp_path / "pid"), "--logfile", str(log)]
    if not daemon:
        arguments.append("--nodaemon")
    with owner(RUN, *arguments, "--python", str(tac), cwd=tmp_path) as twistd:
        child_kit.until(report.exists, "its readiness")
        pid, *group = map(int, report.read_text().split())
        twistd.seen += [pid, *group]
        watch = child_kit.until(lambda: guardians(group[0]), "the guardian")
        assert all(map(runs, [pid, *group]))
        for count, number in enumerate(signals, 1):
            os.kill(pid, number)
            if count < len(signals):
                child_kit.until(lambda: "SIGINT" in log.read_text(), "the first signal")
        child_kit.until(lambda: not runs(pid), "the owner's end")
        orderly = signals[-1] in (signal.SIGTERM, signal.SIGINT)
        left = [other for other in (*group, *watch) if runs(other)]
        assert not (orderly and left), (
            "a stop in good order leaves nothing behind, not for a moment"
        )
        for other in (*group, *watch):
            child_kit.until(lambda other=other: not runs(other), "the end of its child")
