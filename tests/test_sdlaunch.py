"""How sd-server is started: which file, which arguments, where its output goes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from turnstile import sdlaunch
from turnstile.config import Config, ConfigError, Upstream
from turnstile.gpushare import pace_command


def program(path: Path, mode: int = 0o755) -> str:
    path.write_text("#!/bin/sh\n")
    path.chmod(mode)
    return str(path)


def test_a_name_is_looked_up_on_the_path(tmp_path: Path) -> None:
    name = program(tmp_path / "sd-server")
    assert sdlaunch.find_program("sd-server", f"/nonexistent:{tmp_path}") == name
    with pytest.raises(ConfigError, match="not on PATH"):
        sdlaunch.find_program("sd-server", "/nonexistent")


def test_a_path_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = program(tmp_path / "sd")
    assert sdlaunch.find_program(name, None) == name
    monkeypatch.chdir(tmp_path)
    # Still there when the directory is another one.
    assert sdlaunch.find_program("./sd", "") == name
    for path, mode, reason in (("x", None, "does not exist"), ("y", 0o644, "executed")):
        file = tmp_path / path
        if mode is not None:
            program(file, mode)
        with pytest.raises(ConfigError, match=reason):
            sdlaunch.find_program(str(file), None)
    with pytest.raises(ConfigError, match="executed"):
        sdlaunch.find_program(str(tmp_path), None)


@pytest.mark.parametrize(
    ("configured", "environ", "expected"),
    [
        ("/a", {"LOGS_DIRECTORY": "/l", "HOME": "/h"}, "/a"),
        (None, {"LOGS_DIRECTORY": "/l:/m", "HOME": "/h"}, "/l"),
        (None, {"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/stadi"),
        (None, {"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/stadi"),
        # The specification wants relative ones ignored.
        (None, {"XDG_CACHE_HOME": "x", "HOME": "/h"}, "/h/.cache/stadi"),
        (None, {}, None),
        (None, {"HOME": "x"}, None),
    ],
)
def test_where_the_output_goes(configured: Any, environ: Any, expected: str | None) -> None:
    if expected is None:
        with pytest.raises(ConfigError, match="SD_LOG_DIR is not set"):
            sdlaunch.log_directory(configured, environ)
    else:
        assert sdlaunch.log_directory(configured, environ) == expected


def test_the_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    sdlaunch.make_directory(str(path))
    assert os.stat(path).st_mode & 0o777 == 0o700
    sdlaunch.make_directory(str(path))
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "b"):
        with pytest.raises(ConfigError, match="SD_LOG_DIR"):
            sdlaunch.make_directory(str(bad))


class Recorder:
    """A spawner that notes what it is to start."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def spawn(self, program: Any, env: Any, log: Any) -> Any:
        self.calls.append((program, env, str(log.path)))
        return "child"


@pytest.mark.parametrize(
    ("more", "card"),
    [
        ({}, "auto"),
        ({"gpu": "1"}, "1"),
        ({"gpu": "1", "gpu_key": "pci-0", "gpu_share_group": "gpu"}, "pci-0"),
    ],
)
def test_one_that_shares_the_card_is_paced(tmp_path: Path, more: Any, card: str) -> None:
    spawner = Recorder()
    config = Config(
        sd_args=("-m", "a b"),
        sd_url=Upstream.parse("http://127.0.0.1:5"),
        sd_weight=2.5,
        sd_log_dir=str(tmp_path),
        **more,
    )
    sdlaunch.make_launch(config, None, {}, spawner)()
    command = list(spawner.calls[0][0])
    options = pace_command._parser().parse_args(command[3:])
    assert options.weight == 2.5 and options.gpu == card
    assert options.group == more.get("gpu_share_group")
    assert options.watched and options.on_death == "kill"
    assert options.program == ["--", "sd-server", "-m", "a b", "--listen-port", "5"]


def test_what_is_started(tmp_path: Path) -> None:
    spawner = Recorder()
    config = Config(
        sd_args=("-m", "a b"),
        sd_url=Upstream.parse("http://127.0.0.1:5"),
        sd_bin="sd-server",
        sd_log_dir=str(tmp_path / "logs"),
    )
    launch = sdlaunch.make_launch(config, None, {}, spawner)
    assert launch() == "child" and launch() == "child"
    command = ("sd-server", "-m", "a b", "--listen-port", "5")
    assert spawner.calls == [(command, None, str(tmp_path / "logs" / "sd-server.log"))] * 2
    assert launch.program == command and launch.log_path == spawner.calls[0][2]
