"""The Dockerfile and the example beside it agree with the program, and keep to what a linter would ask for."""

import importlib.util
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from turnstile.config import SETTINGS

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "Dockerfile").exists(), reason="not a checkout")


def instructions() -> list[tuple[str, str]]:
    text = (ROOT / "Dockerfile").read_text()
    text = re.sub(r"(?m)^\s*#.*\n", "", text).replace("\\\n", " ")
    found = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    return [(name, " ".join(rest.split())) for name, rest in found]


def values(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def test_only_instructions_that_are_meant():
    known = "FROM ARG ENV WORKDIR COPY RUN LABEL USER EXPOSE HEALTHCHECK STOPSIGNAL ENTRYPOINT"
    assert {name for name, _ in instructions()} <= set(known.split())


def test_base_images_are_pinned_to_the_same_python():
    bases = [value.split()[0] for value in values("FROM")]
    assert len(bases) == 2
    assert re.fullmatch(r"python:3\.\d+-slim-[a-z]+", bases[0])
    assert bases[0] == bases[1]


def test_it_does_not_run_as_root():
    final = instructions()[[name for name, _ in instructions()].index("USER") :]
    assert final[0][1] == "65532:65532"
    # Nothing is done after that but to say what it runs.
    assert {name for name, _ in final} == {
        "USER",
        "EXPOSE",
        "HEALTHCHECK",
        "STOPSIGNAL",
        "ENTRYPOINT",
    }


def test_ports_and_commands():
    ports = {
        setting.default for setting in SETTINGS if setting.env in ("LISTEN_OLLAMA", "LISTEN_COMFY")
    }
    assert {f":{port}" for port in values("EXPOSE")[0].split()} == ports
    # In the form without a shell, so that signals arrive.
    assert values("ENTRYPOINT") == ['["turnstile"]']
    (check,) = values("HEALTHCHECK")
    assert check.endswith('CMD ["python", "-m", "turnstile.healthcheck"]')
    assert importlib.util.find_spec("turnstile.healthcheck")


def test_what_is_copied_is_there_and_not_ignored():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    kept = [line[1:] for line in ignored if line.startswith("!")]
    copied = [
        source
        for value in values("COPY")
        if not value.startswith("--from")
        for source in value.split()[:-1]
    ]
    assert sorted(copied) == sorted(kept)
    assert "*" in ignored
    for source in copied:
        assert (ROOT / source).exists()
        assert not any(fnmatch(source, line) for line in ignored if line[0] not in "*!#")


def test_the_example_sets_what_exists():
    text = (ROOT / "docs" / "compose.yaml").read_text()
    service = text.split("\n  turnstile:\n")[1].split("\n  ollama:\n")[0]
    environment = service.split("environment:\n")[1].split("ports:")[0]
    names = re.findall(r"(?m)^ +([A-Z_]+):", environment)
    assert {"OLLAMA_URL", "COMFY_URL"} <= set(names)
    assert set(names) <= {setting.env for setting in SETTINGS}
    # Clients reach the engines through turnstile only.
    assert re.findall(r"http://(\w+):\d+", text.split("open-webui:\n")[1]) == ["turnstile"] * 2
    for engine in ("ollama", "comfyui"):
        block = text.split(f"\n  {engine}:\n")[1].split("\n\n")[0]
        assert "ports:" not in block
