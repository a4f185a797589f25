"""The simulated host as a program of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request

import pytest

PORTS = ["--ollama-port", "0", "--comfy-port", "0"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_runs_until_told_to_stop(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "turnstile.sim", "--speed", "50", *PORTS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        urls = dict(process.stdout.readline().split() for _ in range(2))
        for name, path in (("ollama", "/api/version"), ("comfyui", "/system_stats")):
            with urllib.request.urlopen(urls[name] + path, timeout=5) as answer:
                assert answer.status == 200
        process.send_signal(number)
        rest, _ = process.communicate(timeout=10)
    assert process.returncode == 0 and rest == ""


def test_a_taken_port_is_one_line() -> None:
    command = [sys.executable, "-m", "turnstile.sim", *PORTS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip().rsplit(":", 1)[1]
        second = subprocess.run(
            [*command[:3], "--ollama-port", port, "--comfy-port", "0"],
            capture_output=True,
            text=True,
            timeout=10,
        )
        process.terminate()
    assert second.returncode != 0 and second.stdout == ""
    assert len(second.stderr.splitlines()) == 1 and port in second.stderr
