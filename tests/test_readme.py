"""The README tells of the settings, metrics and commands that exist."""

import re
from pathlib import Path

from twisted.internet.task import Clock

from turnstile.arbiter import Arbiter, Kind, Tenant
from turnstile.card import Card
from turnstile.config import SETTINGS
from turnstile.metrics import Metrics

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
MARKS = (
    "<!-- settings: made from turnstile/config.py, checked by tests/test_readme.py -->\n",
    "<!-- /settings -->\n",
)


def settings_table() -> str:
    rows = ["| variable | option | default | meaning |\n", "|---|---|---|---|\n"]
    for setting in SETTINGS:
        options = ", ".join(f"`--{name}`" for name in (setting.option, *setting.option_aliases))
        names = ", ".join(f"`{name}`" for name in (setting.env, *setting.env_aliases))
        default = f"`{setting.default}`" if setting.default else "empty"
        rows.append(f"| {names} | {options} | {default} | {setting.help.replace('|', '/')} |\n")
    return "".join(rows)


def test_the_settings_are_those_of_the_program() -> None:
    table = README.split(MARKS[0])[1].split(MARKS[1])[0]
    assert table == settings_table(), "run script/readme-settings"


class Shown:
    """An engine that only shows something."""

    def __init__(self, name: str, shows: dict[str, object]) -> None:
        self.tenant = Tenant(name, Kind.SHARED)
        self.snapshot = lambda: shows


def test_the_metrics_exist() -> None:
    metrics = Metrics()
    clock = Clock()
    metrics.connect(Arbiter(clock), Card(clock))
    metrics.set_vram(used=1.0, total=2.0)
    metrics.watch(
        [Shown("sd", {"pid": 1, "starts": 1}), Shown("llamacpp", {"models": {"a": "loaded"}})]
    )
    known = set()
    for family in metrics.registry.collect():
        known.add(family.name)
        known.update(sample.name for sample in family.samples)
        if family.type == "counter":
            known.add(family.name + "_total")
    paragraph = README.split("The metrics of the original")[1].split("\n\n")[0]
    named = re.findall(r"`([a-z_]+)`", paragraph)
    assert len(named) > 15
    assert [name for name in named if "gpu_turnstile_" + name not in known] == []


def test_the_scripts_exist() -> None:
    named = set(re.findall(r"script/([a-z-]+)", README))
    assert {"demo", "test"} <= named
    assert [name for name in named if not (ROOT / "script" / name).exists()] == []
