"""sd-server under turnstile-pace, as turnstile's own child: nothing of it is lost with the wrapper in between."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from child_kit import runs, stat, stopped
from gpushare_kit import new_key
from pace_kit import BURN, port, rival
from program_kit import Program, post
from system_kit import reactor, tick
from twisted.internet.defer import ensureDeferred

from turnstile.child.logfile import RotatingLog
from turnstile.child.process import Child, ExitStatus, Spawner
from turnstile.gpushare.look import look_at
from turnstile.gpushare.pace_command import command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")


async def until(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    """As the kit's, while the reactor runs."""
    deadline = reactor.seconds() + seconds
    while not (value := condition()):
        assert reactor.seconds() < deadline, f"it never came true: {what}"
        await tick(0.003)
    return value


def in_session(leader: int) -> list[int]:
    """Those in a session that live."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in pids if stat(pid)[3:4] == [str(leader)] and runs(pid)]


class Paced:
    """A child of this process's reactor."""

    def __init__(self, child: Child, pids: list[int]) -> None:
        self.child = child
        self.pids = pids

    async def stop(self) -> None:
        await until(lambda: all(map(stopped, self.pids)), "all of it stopped")


@asynccontextmanager
async def paced(
    folder: Path, card: str, script: str = BURN, count: int = 2
) -> AsyncIterator[Paced]:
    program = command(
        ["sh", "-c", script], weight=1, gpu=card, name="sd", on_death="kill", watched=True
    )
    child = Spawner(reactor).spawn(program, None, RotatingLog(folder / "sd.log"))
    try:

        def pids() -> list[int]:
            found = [int(line) for line in child.tail(9) if line.isdecimal()]
            return found if len(found) == count else []

        found = await until(pids, "its pids")
        yield Paced(child, found)
    finally:
        await child.terminate(0)
        await child.when_settled()
        assert in_session(child.pid) == []


@pytest_twisted.ensureDeferred
async def test_it_is_a_peer_and_its_log_is_its_own(tmp_path: Path) -> None:
    with new_key() as card:
        async with paced(tmp_path, card, "echo $$; sleep 0.2; echo oops >&2; exit 3", 1) as it:
            assert await it.child.when_gone() == ExitStatus(code=3)
            lines = it.child.tail(9)
            assert lines[0].startswith(f"turnstile-pace: gpu-share: joined /opencoti-gpu-{card} ")
            assert lines[-1] == "oops"


@pytest_twisted.ensureDeferred
async def test_it_is_one_session_with_the_wrapper(tmp_path: Path) -> None:
    with new_key() as card, rival(card):
        async with paced(tmp_path, card) as it:
            assert sorted(in_session(it.child.pid)) == sorted([it.child.pid, *it.pids])
            await it.stop()
            # The wrapper itself is not.
            assert not stopped(it.child.pid)
            snapshot = look_at(card)
            assert snapshot is not None
            assert {peer.name: peer.pid for peer in snapshot.peers}["sd"] == it.child.pid


@pytest.mark.parametrize("frozen", [False, True])
@pytest_twisted.ensureDeferred
async def test_it_ends_at_sigterm_stopped_or_not(tmp_path: Path, frozen: bool) -> None:
    script = "trap 'echo told; trap - TERM; kill -TERM $$' TERM; echo $$; while :; do :; done"
    with new_key() as card, rival(card):
        async with paced(tmp_path, card, script, 1) as it:
            if frozen:
                await it.stop()
            assert await it.child.terminate(600.0) == ExitStatus(signal=signal.SIGTERM)
            assert it.child.tail(9).count("told") == 1


@pytest_twisted.ensureDeferred
async def test_one_that_does_not_obey_is_killed_with_all_of_its_group(tmp_path: Path) -> None:
    with new_key() as card, rival(card):
        async with paced(tmp_path, card, f"trap '' TERM; {BURN}") as it:
            await it.stop()
            status = await it.child.terminate(0.2)
            assert status == ExitStatus(signal=signal.SIGKILL)
            assert not any(map(runs, it.pids))


@pytest_twisted.ensureDeferred
async def test_what_it_leaves_behind_is_ended_before_it_counts_as_gone(tmp_path: Path) -> None:
    script = "(trap '' TERM HUP; exec sleep 600) & echo $$; echo $!; sleep 0.1; exit 5"
    with new_key() as card:
        async with paced(tmp_path, card, script) as it:
            assert await it.child.when_gone() == ExitStatus(code=5)
            assert not any(map(runs, it.pids))


@pytest_twisted.ensureDeferred
async def test_the_wrapper_dies_alone(tmp_path: Path) -> None:
    with new_key() as card, rival(card):
        async with paced(tmp_path, card) as it:
            await it.stop()
            os.kill(it.child.pid, signal.SIGKILL)
            assert await it.child.when_gone() == ExitStatus(signal=signal.SIGKILL)
            assert not any(map(runs, it.pids))


@pytest_twisted.ensureDeferred
async def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    with new_key() as card:
        program = command(["/no/such/sd-server"], weight=1, gpu=card, watched=True)
        child = Spawner(reactor).spawn(program, None, RotatingLog(tmp_path / "sd.log"))
        assert await child.when_gone() == ExitStatus(code=127)
        assert "cannot run '/no/such/sd-server'" in child.tail(1)[0]
        await child.when_settled()


# -- the whole program


@contextmanager
def burning_sd(folder: Path) -> Iterator[str]:
    """A program that is the simulated sd-server, and whose child computes."""
    path = folder / "sd-server"
    path.write_text(
        "#!/bin/sh\n"
        "sh -c 'while :; do :; done' &\n"
        f'exec {shlex.quote(sys.executable)} -m turnstile.sim.sdserver "$@"\n'
    )
    path.chmod(0o755)
    yield str(path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest_twisted.ensureDeferred
async def test_the_end_of_turnstile_is_its_end_while_it_is_stopped(
    tmp_path: Path, number: signal.Signals
) -> None:
    with new_key() as card, burning_sd(tmp_path) as sd, port() as sd_port, ExitStack() as stack:
        program = Program(
            tmp_path,
            f"--sd-bin={sd}",
            "--sd-args=--load-time 0.1",
            f"--sd=http://127.0.0.1:{sd_port}",
            f"--sd-log-dir={tmp_path}",
            "--sd-weight=2",
            f"--gpu-key={card}",
            "--shutdown-timeout=200ms",
            "--listen-sd=127.0.0.1:0",
            LOGLEVEL="info",
        )
        left: list[int] = []
        try:
            listens = await program.port("sd")
            drawing = ensureDeferred(
                post(listens, "/sdapi/v1/txt2img", {"prompt": "x", "steps": 1 << 20})
            )
            drawing.addErrback(lambda failure: None)
            await until(lambda: "sd-server listens after" in "\n".join(program.lines()), "a start")
            line = next(line for line in program.lines() if "sd-server starts (pid" in line)
            leader = int(line.partition("(pid ")[2].partition(")")[0])
            left = in_session(leader)
            assert len(left) == 3
            # Not before: with so little time it would take long to start.
            stack.enter_context(rival(card))
            await until(lambda: sum(map(stopped, left)) == 2, "sd-server stopped, and its child")
            began = reactor.seconds()
            program.process.send_signal(number)
            await program.ended(30.0)
            await until(lambda: not any(map(runs, left)), "the end of all")
            # What had to be waited for is not the grace of ten seconds.
            assert reactor.seconds() - began < 8.0
            assert in_session(leader) == []
            await drawing
        finally:
            await program.kill()
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
