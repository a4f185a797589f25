"""The systemd units: which of them a configuration asks for, and that they agree with the program."""

import configparser
from pathlib import Path

import pytest

import turnstile
from turnstile import exitcode, units
from turnstile.config import load, parse_listen
from turnstile.service import LISTENERS

FOLDER = Path(turnstile.__file__).parent / "systemd"
OLLAMA = {"ollama": "http://127.0.0.1:11435"}
COMFY = {"comfy": "http://127.0.0.1:8189"}


def unit(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text())
    return parser


@pytest.mark.parametrize(
    "options,expected",
    [
        (OLLAMA, ["turnstile-ollama.socket", "turnstile.service"]),
        (COMFY, ["turnstile-comfy.socket", "turnstile.service"]),
        (
            OLLAMA | COMFY,
            ["turnstile-ollama.socket", "turnstile-comfy.socket", "turnstile.service"],
        ),
        # A listener that was put elsewhere is turnstile's own to open.
        (OLLAMA | {"listen-ollama": "127.0.0.1:11434"}, ["turnstile.service"]),
        (
            OLLAMA | COMFY | {"listen-comfy": ":8080"},
            ["turnstile-ollama.socket", "turnstile.service"],
        ),
        # The default, said aloud.
        (
            OLLAMA | {"listen-ollama": "0.0.0.0:11434"},
            ["turnstile.service"],
        ),
        (OLLAMA | {"listen-ollama": "11434"}, ["turnstile-ollama.socket", "turnstile.service"]),
        # No socket is made for it.
        (
            OLLAMA | {"listen-ollama-nested": "11436"},
            ["turnstile-ollama.socket", "turnstile.service"],
        ),
    ],
)
def test_wanted_units(options, expected):
    assert units.wanted_units(load(options, {}, "/nonexistent")) == expected


def test_the_command(tmp_path, monkeypatch):
    path = tmp_path / "turnstile.env"
    path.write_text("OLLAMA_URL=http://127.0.0.1:1\n")
    # What is set where the package is installed says nothing about the service.
    monkeypatch.setenv("COMFY_URL", "http://127.0.0.1:2")
    assert units.main([str(path)]) == "turnstile-ollama.socket\nturnstile.service\n"
    path.write_text("OLLAMA=1\n")
    with pytest.raises(SystemExit, match="unknown setting OLLAMA"):
        units.main([str(path)])
    path.write_text("")
    with pytest.raises(SystemExit, match="no engine"):
        units.main([str(path)])


def test_every_unit_is_there():
    assert {path.name for path in FOLDER.glob("*.*")} == {units.SERVICE, *units.SOCKETS.values()}


@pytest.mark.parametrize("setting,name", units.SOCKETS.items())
def test_sockets_are_where_their_listeners_would_be(setting, name):
    (listener,) = [key for key, (known, _) in LISTENERS.items() if known == setting]
    socket = unit(FOLDER / name)["Socket"]
    assert socket["FileDescriptorName"] == listener
    assert socket["Service"] == units.SERVICE
    # Of all IPv4 interfaces, in systemd's words.
    assert parse_listen(socket["ListenStream"].replace("0.0.0.0", "")) == units._DEFAULTS[setting]


def test_the_service_agrees_with_the_program():
    service = unit(FOLDER / units.SERVICE)["Service"]
    assert service["Type"] == "notify"
    assert service["RestartPreventExitStatus"] == str(exitcode.EXIT_CONFIG)
    assert service["ExecStart"] == "/usr/bin/twistd --nodaemon --pidfile= turnstile"


@pytest.mark.parametrize("path", sorted((FOLDER / "drop-ins").glob("*")), ids=lambda p: p.name)
def test_drop_ins_say_what_they_are_for(path):
    text = path.read_text()
    assert path.suffix == ".conf"
    assert text.startswith("# ")
    assert unit(path).sections() == ["Service"]
    manual = Path(turnstile.__file__).parent.parent / "man" / "turnstile.8.in"
    assert f".B {path.name}".replace("-", "\\-") in manual.read_text()
