"""turnstile-peers: tables and JSON of who shares a card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from child_kit import ROOT
from gpushare_kit import VirtualClock, join, new_key

from turnstile.gpushare import Peer
from turnstile.gpushare.look import look_at
from turnstile.gpushare.peers_command import main
from turnstile.gpushare.report import format_table, look_at_all, to_dict


def test_the_form_of_the_page() -> None:
    clock = VirtualClock()
    with (
        new_key() as key,
        join(key, clock, "chat", 2.0) as a,
        join(key, clock, "code", 1.0),
        join(key, clock, "idle", 1.0) as c,
    ):
        for peer in (a, c):
            peer.touch()
        snapshot = look_at(key, clock)
        assert snapshot is not None
        answer = to_dict(snapshot)
        assert answer["gpu_key"] == key and answer["self"] is None
        assert answer["peers"][0] == {
            "pid": os.getpid(),
            "name": "chat",
            "slot": 0,
            "weight": 2.0,
            "share_pct": 66.7,
            "nominal_pct": 50.0,
            "busy_pct": 0.0,
            "active": True,
            "heartbeat_age_ms": 0,
        }
        assert [peer["share_pct"] for peer in answer["peers"]] == [66.7, 0.0, 33.3]
        assert [peer["nominal_pct"] for peer in answer["peers"]] == [50.0, 25.0, 25.0]
        own = to_dict(snapshot, os.getpid())
        assert own["self"]["name"] == "chat" and "heartbeat_age_ms" not in own["self"]
        assert [peer["name"] for peer in own["peers"]] == ["code", "idle"]


def test_the_table() -> None:
    clock = VirtualClock()
    with new_key() as key, join(key, clock, "chat", 2.0) as a, join(key, clock, "a b\tc", 1.0):
        a.touch()
        clock.advance(0.25)
        snapshot = look_at(key, clock)
        assert snapshot is not None
        lines = format_table(snapshot).splitlines()
        assert lines[0] == f"{key}: 2 peers alive"
        assert lines[1].split() == "SLOT PID NAME WEIGHT SHARE BUSY ACTIVE HEARTBEAT".split()
        assert lines[2].split()[:-2] == ["0", str(os.getpid()), *"chat 2 100.0% 0% yes".split()]
        assert "(33.3%)" in lines[3] and "\t" not in lines[3]
        assert lines[1].index("SHARE") == lines[2].index("100.0%")


def test_a_card_without_peers() -> None:
    clock = VirtualClock()
    with new_key() as key:
        join(key, clock).leave()
        snapshot = look_at(key, clock)
        assert snapshot is not None
        assert format_table(snapshot) == f"{key}: 0 peers alive"


def test_what_cannot_be_read_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with new_key() as key:
        Path(f"/dev/shm/opencoti-gpu-{key}").write_bytes(b"x" * 4096)
        found, problems = look_at_all([key])
        assert not found and len(problems) == 1 and key in problems[0]
        assert main(["--gpu", key]) == 1
        out, err = capsys.readouterr()
        assert out == "nobody shares a card here\n"
        assert err.startswith("turnstile-peers: ") and key in err


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    clock = VirtualClock()
    with new_key() as key:
        assert main(["--gpu", key]) == 0
        assert capsys.readouterr().out == "nobody shares a card here\n"
        with join(key, clock, "chat"):
            assert main(["--gpu", key, "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["gpu_key"] == key
            assert main([]) == 0
            assert f"{key}: " in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--watch", "0"], ["--watch", "x"], ["--what"]])
def test_wrong_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(options)
    assert caught.value.code == 2 and capsys.readouterr().err


def test_watching_goes_on_until_it_is_interrupted() -> None:
    with new_key() as key:
        command = [sys.executable, "-m", "turnstile.gpushare.peers_command"]
        process = subprocess.Popen(
            [*command, "--gpu", key, "--json", "--watch", "0.05"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
        try:
            with join(key, VirtualClock(), "chat"):
                assert process.stdout is not None
                for _ in range(3):
                    assert json.loads(process.stdout.readline())["gpu_key"] == key
            process.send_signal(2)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("redirections", ["| head -n 1", ">&-", "2>&- >&-"])
def test_whatever_becomes_of_its_output(redirections: str) -> None:
    command = f"'{sys.executable}' -m turnstile.gpushare.peers_command"
    with new_key() as key, join(key, VirtualClock(), "chat"):
        watch = " --watch 0.05" if "|" in redirections else ""
        done = subprocess.run(
            ["sh", "-c", f"{command} --gpu {key}{watch} {redirections}"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith(f"{key}: ") is ("|" in redirections)


def test_letters_that_a_terminal_has_not() -> None:
    with new_key() as key, Peer.join(key, "\u2603", thread=False):
        done = subprocess.run(
            [sys.executable, "-m", "turnstile.gpushare.peers_command", "--gpu", key],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "latin-1"},
            capture_output=True,
            timeout=60,
        )
    assert done.returncode == 0 and b" ?  " in done.stdout and done.stderr == b""
