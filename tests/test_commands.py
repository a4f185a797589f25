"""Commands of the user's: what they print, time-outs that reach all of them, and what they must not inherit."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from twisted.internet import reactor as _reactor

from turnstile.commands import OUTPUT_LIMIT, CommandFailed, ShellCommands, ask, clean_environment

reactor: Any = _reactor


def test_what_it_prints() -> None:
    assert ask("echo one; echo two >&2; echo 3 | cat", 30.0) == "one\n3\n"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("echo no card here >&2; exit 3", "exit code 3: no card here"),
        ("exit 7", "exit code 7"),
        ("definitely-not-a-command", "exit code 127"),
        ("kill -9 $$", "exit code -9"),
        ("head -c 200000 /dev/zero; sleep 600", "prints too much"),
        ("head -c 200000 /dev/zero >&2; sleep 600", "prints too much"),
    ],
)
def test_failures_say_why(command: str, why: str) -> None:
    assert OUTPUT_LIMIT < 200_000
    with pytest.raises(CommandFailed, match=why):
        ask(command, 60.0)


def gone(pid: int) -> bool:
    """Whether the process has ended, reaped or not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def until_begun(begun: Path, run: Callable[[float], object]) -> None:
    """Run with ever longer time-outs until one was long enough for the shell to begin."""
    for timeout in (0.3, 3.0, 30.0):
        with pytest.raises(CommandFailed, match="took longer"):
            run(timeout)
        if begun.exists():
            return
    pytest.fail("the shell did not begin")


@pytest.mark.limit(200)
@pytest.mark.parametrize("kept", ["", ">/dev/null 2>&1"], ids=["holds the pipe", "holds nothing"])
def test_a_time_out_reaches_all_of_it(tmp_path: Path, kept: str) -> None:
    begun, pipe = tmp_path / "begun", tmp_path / "pipe"
    os.mkfifo(pipe)
    # A reader of the pipe sees its end when the last writer is gone.
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        command = f"exec 9>{pipe}; sleep 600 {kept} & trap '' TERM; touch {begun}; sleep 600"
        until_begun(begun, lambda timeout: ask(command, timeout))
        os.set_blocking(reader, True)
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)


def test_what_closes_its_outputs_is_bounded_too() -> None:
    with pytest.raises(CommandFailed, match="took longer"):
        ask("exec >&- 2>&-; sleep 600", 0.3)


def test_nothing_of_ours_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "WATCHDOG_USEC"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TURNSTILE_TEST", "kept")
    printed = ask("env; cat", 30.0)
    assert "TURNSTILE_TEST=kept" in printed
    assert "LISTEN_" not in printed and "NOTIFY_" not in printed and "WATCHDOG_" not in printed
    assert clean_environment({"LISTEN_FDS": "2", "A": "b"}) == {"A": "b"}


@pytest_twisted.ensureDeferred
async def test_commands_tell_their_exit_code() -> None:
    commands = ShellCommands(reactor)
    assert await commands.run("exit 0", 30.0) == 0
    assert await commands.run("exit 5", None) == 5


@pytest.mark.limit(200)
@pytest_twisted.ensureDeferred
async def test_a_command_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    commands = ShellCommands(reactor)
    for timeout in (0.3, 3.0, 30.0):
        with pytest.raises(CommandFailed, match="took longer"):
            await commands.run(f"echo $$ >{pids}; sleep 600", timeout)
        if pids.exists():
            break
    assert gone(int(pids.read_text()))


@pytest_twisted.ensureDeferred
async def test_a_cancelled_command_runs_on(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    d = ShellCommands(reactor).run(f"echo $$ >{pipe}; exec sleep 600", None)
    readable = select.poll()
    readable.register(reader, select.POLLIN)
    assert readable.poll(60_000)
    pid = int(os.read(reader, 100))
    os.close(reader)
    cancelled: list[object] = []
    d.addErrback(cancelled.append)
    d.cancel()
    assert cancelled and not gone(pid)
    os.kill(pid, signal.SIGKILL)
