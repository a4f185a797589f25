"""The demo as people run it: its story, Ctrl-C at any moment, where its output goes."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

import turnstile
from turnstile.demo.show import clip

COMMAND = [sys.executable, "-m", "turnstile.demo"]
ENVIRON = {**os.environ, "PYTHONPATH": str(Path(turnstile.__file__).parent.parent)}


def start(*options: str, **more: Any) -> subprocess.Popen[str]:
    more.setdefault("stdout", subprocess.PIPE)
    more.setdefault("stderr", subprocess.STDOUT)
    return subprocess.Popen(
        [*COMMAND, *options], text=True, env={**ENVIRON, **more.pop("environ", {})}, **more
    )


@pytest.mark.parametrize("speed", ["4", "40"])
def test_once(speed: str) -> None:
    done = subprocess.run(
        [*COMMAND, "--once", f"--speed={speed}"],
        capture_output=True,
        text=True,
        env=ENVIRON,
        timeout=60,
    )
    assert done.returncode == 0
    assert done.stderr == ""
    head, story, end = done.stdout.strip().split("\n\n")
    assert len(head.splitlines()) == 3 and end == "every step came out right"
    assert all(re.match(r" +\d+\.\d\d s +\d+\.\d GiB  \w", line) for line in story.splitlines())


def told(*options: str) -> str:
    """A story that came out right."""
    done = subprocess.run(
        [*COMMAND, "--once", *options], capture_output=True, text=True, env=ENVIRON, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "" and done.stdout.endswith("\nevery step came out right\n")
    return done.stdout


@pytest.mark.parametrize(
    ("engines", "steps"),
    [
        ("llama,comfy", ["llama.cpp unloaded", "second chat: complete"]),
        ("Ollama, llama.cpp, ComfyUI", ["Ollama unloaded", "llama.cpp and ComfyUI"]),
        ("ollama,llamacpp", ["Ollama: answered", "llama.cpp: answered"]),
        ("comfyui", ["ComfyUI: an image"]),
    ],
)
def test_once_with_other_engines(engines: str, steps: list[str]) -> None:
    story = told("--speed=8", f"--engines={engines}")
    assert all(step in story for step in steps), story


def test_an_unknown_engine() -> None:
    with start("--engines=ollama,vllm") as process:
        out, _ = process.communicate(timeout=20)
    assert process.returncode == 2 and "no such engine: vllm" in out


@pytest.mark.parametrize(
    "step",
    [
        "the engine itself",
        "the card is empty",
        "held, since",
        "ComfyUI freed",
        "second chat: streaming",
    ],
)
def test_ctrl_c_during_the_story(step: str) -> None:
    with start("--once", "--speed=4") as process:
        assert process.stdout is not None
        lines = []
        while step not in (line := process.stdout.readline()):
            assert line, lines
            lines.append(line)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert rest.endswith("\nstopped before the end\n")
    assert "Traceback" not in rest and "WRONG" not in rest and "#" not in rest


@pytest.mark.parametrize("pause", [0.1, 0.3, 0.5, 0.7])
def test_ctrl_c_before_anything_is_there(pause: float) -> None:
    with start() as process:
        time.sleep(pause)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
    # The interpreter itself may not be ready yet.
    assert "demo/__main__.py" not in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_picture(number: signal.Signals) -> None:
    with start("--speed=3") as process:
        assert process.stdout is not None
        while "state  " not in process.stdout.readline():
            pass
        time.sleep(1)
        process.send_signal(number)
        out, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert out.endswith("\nstopped\n") and "Traceback" not in out


@pytest.mark.parametrize("options", [["--once", "--speed=4"], ["--speed=4"]])
def test_a_reader_that_has_seen_enough(options: list[str]) -> None:
    """script/demo | head -3"""
    with start(*options, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        for _ in range(3):
            process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=30) != 0
        assert process.stderr.read() == ""


def on_terminal(rows: int, columns: int, **environ: str) -> str:
    """What the picture looks like in two seconds."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environ = {"COLUMNS": "", "LINES": "", "TERM": "xterm", "NO_COLOR": "", **environ}
    with start("--speed=3", stdout=follower, stderr=follower, environ=environ) as process:
        os.close(follower)
        seen, deadline = b"", time.monotonic() + 20
        while seen.count(b"VRAM") < 4 and time.monotonic() < deadline:
            seen += os.read(leader, 65536)
        process.send_signal(signal.SIGINT)
        try:
            while data := os.read(leader, 65536):
                seen += data
        except OSError:  # Linux's way to say that all others have closed it
            pass
        assert process.wait(timeout=20) == 0
    os.close(leader)
    return seen.decode()


def test_a_small_terminal() -> None:
    out = on_terminal(8, 30)
    picture = out[out.index("state    ") :]
    lines = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", picture).replace("\r", "").split("\n")
    assert max(map(len, lines)) <= 29
    assert max(int(n) for n in re.findall(r"\x1b\[(\d+)A", picture)) <= 7


def test_a_terminal_that_can_do_nothing_and_one_without_colours() -> None:
    assert "\x1b" not in on_terminal(24, 80, TERM="dumb")
    out = on_terminal(24, 80, NO_COLOR="1")
    assert "\x1b[" in out and not re.search(r"\x1b\[[0-9;]*m", out)


def test_a_line_is_cut_without_its_colours() -> None:
    assert clip("\x1b[36mabc\x1b[0md", 2) == "\x1b[36mab\x1b[0m"
    assert clip("abc", 3) == "abc"


def test_a_taken_port() -> None:
    with start("--quiet") as first:
        assert first.stdout is not None
        found = re.search(r"turnstile: http://127.0.0.1:(\d+)", first.stdout.readline())
        assert found is not None
        done = subprocess.run(
            [*COMMAND, f"--ollama-port={found[1]}"],
            capture_output=True,
            text=True,
            env=ENVIRON,
            timeout=30,
        )
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=20)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and "already in use" in done.stderr
