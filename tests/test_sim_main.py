"""The simulated host as a program of its own."""

from __future__ import annotations

import shlex
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


def test_every_engine_and_a_program_that_is_started_on_its_card() -> None:
    ports = [*PORTS, "--llama-port", "0", "--engines", "llamacpp,sd,ollama"]
    command = [sys.executable, "-m", "turnstile.sim", "--speed", "50", *ports]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = dict(process.stdout.readline().rstrip().split(" ", 1) for _ in range(5))
        assert list(told) == ["ollama", "llamacpp", "sd", "sd-bin", "sd-args"]
        with urllib.request.urlopen(told["llamacpp"] + "/health", timeout=5) as answer:
            assert answer.status == 200
        sd = [told["sd-bin"], *shlex.split(told["sd-args"])]
        with subprocess.Popen(sd, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            log = ""
            while told["sd"].removeprefix("http://") not in log:
                log = child.stdout.readline()
                assert log, "it ended"
            with urllib.request.urlopen(told["sd"] + "/v1/models", timeout=5) as answer:
                assert answer.status == 200
            process.terminate()
            child.communicate(timeout=10)
            assert child.returncode == 0
    assert process.returncode == 0


def test_an_unknown_engine_is_an_error() -> None:
    command = [sys.executable, "-m", "turnstile.sim", "--engines", "ollama,vllm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and "no such engine: vllm" in done.stderr


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
