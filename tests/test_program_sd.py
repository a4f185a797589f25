"""The whole program with an sd-server of its own: whatever ends the one ends the other, with all of its group."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytest_twisted
from child_kit import guardians, runs, stat
from program_kit import Program, post
from system_kit import until
from twisted.internet.defer import ensureDeferred

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")

#: Seconds in which programs start, on a busy machine.
START = 30.0


@pytest.fixture
def sd_port() -> Iterator[int]:
    """A port that sd-server can listen on, and nobody is given by chance."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def options(folder: Path, port: int, *arguments: str, grace: str) -> list[str]:
    """What has turnstile run the simulated sd-server as a child."""
    command = ["-m", "turnstile.sim.sdserver", "--listen-port", str(port), *arguments]
    return [
        f"--sd-bin={sys.executable}",
        f"--sd-args={shlex.join(command)}",
        f"--sd=http://127.0.0.1:{port}",
        f"--sd-log-dir={folder}",
        f"--sd-stop-grace={grace}",
        "--shutdown-timeout=200ms",
        "--listen-sd=127.0.0.1:0",
    ]


def group_of(leader: int) -> list[int]:
    """Those in a session that live."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in pids if stat(pid)[3:4] == [str(leader)] and runs(pid)]


@pytest.mark.parametrize(
    ("phase", "signals", "grace"),
    [
        ("loading", [signal.SIGTERM], "200ms"),
        ("loading", [signal.SIGKILL], "10m"),
        ("drawing", [signal.SIGTERM], "200ms"),
        ("drawing", [signal.SIGINT], "200ms"),
        ("drawing", [signal.SIGINT, signal.SIGINT], "10m"),
        ("drawing", [signal.SIGKILL], "10m"),
    ],
)
@pytest_twisted.ensureDeferred
async def test_its_end_is_sd_servers(
    tmp_path: Path, sd_port: int, phase: str, signals: list[signal.Signals], grace: str
) -> None:
    load = "100000" if phase == "loading" else "0.1"
    sd = ["--ignore-sigterm", "--grandchild", "--load-time", load]
    more = options(tmp_path, sd_port, *sd, grace=grace)
    program = Program(tmp_path, *more, LOGLEVEL="info")
    leader = 0
    try:
        port = await program.port("sd")
        # Its answer is cut off, or none.
        drawing = ensureDeferred(post(port, "/sdapi/v1/txt2img", {"prompt": "x", "steps": 1 << 20}))
        drawing.addErrback(lambda failure: None)

        def started() -> int:
            found = re.search(r"sd-server starts \(pid (\d+)\)", "\n".join(program.lines()))
            return int(found[1]) if found else 0

        leader = await until(started, "sd-server", START)
        await until(lambda: len(group_of(leader)) == 2, "its child", START)
        if phase == "drawing":
            log = tmp_path / "sd-server.log"
            await until(lambda: "| 2/" in log.read_text(), "the drawing", START)
        (watch,) = guardians(leader)
        left = [*group_of(leader), watch]
        for count, number in enumerate(signals, 1):
            program.process.send_signal(number)
            if count < len(signals):
                await until(lambda: "told to end" in "\n".join(program.lines()), "the stop", START)
        status = await program.ended(START)
        # twistd ends with the SIGINT that it got.
        assert status == (0 if number is signal.SIGTERM else -number)
        if number is signal.SIGKILL:
            await until(lambda: not any(map(runs, left)), "the end of all", START)
        else:
            assert not any(map(runs, left)), "nothing is left, not for a moment"
        assert group_of(leader) == []
        await drawing
    finally:
        await program.kill()
        for pid in group_of(leader) if leader else ():
            os.kill(pid, signal.SIGKILL)
