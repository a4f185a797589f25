"""The texts made from the table of settings hold every setting, and mean what they should to who reads them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from turnstile import reference
from turnstile.config import SETTINGS, Config, load, parse_env_file

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(path.name for path in (ROOT / "man").glob("*.in"))


# -- the configuration file


def test_the_file_sets_nothing():
    assert parse_env_file(reference.env_file().encode(), "made") == []


def test_every_setting_is_in_the_file_once_with_its_default(tmp_path):
    uncommented = re.sub(r"(?m)^#(?=[A-Z])", "", reference.env_file())
    found = parse_env_file(uncommented.encode(), "made")
    assert [(key, value) for _, key, value in found] == [(s.env, s.default) for s in SETTINGS]
    # At least one engine is needed.
    path = tmp_path / "turnstile.env"
    path.write_text(uncommented.replace("OLLAMA_URL=\n", "OLLAMA_URL=http://127.0.0.1:1\n"))
    config = load({"config": str(path)}, {})
    for setting in SETTINGS:
        if setting.env != "OLLAMA_URL":
            assert getattr(config, setting.field) == getattr(Config(), setting.field)


def test_the_file_tells_what_each_setting_means():
    text = " ".join(reference.env_file().replace("# ", "").split())
    for setting in SETTINGS:
        assert " ".join(setting.help.split()) in text
    assert max(map(len, reference.env_file().splitlines())) <= 80


def test_the_example_in_the_file_can_be_used(tmp_path):
    example = re.findall(r"(?m)^#   ([A-Z_]+=\S+)$", reference.env_file())
    assert len(example) == 2
    path = tmp_path / "turnstile.env"
    path.write_text("\n".join(example))
    assert load({"config": str(path)}, {}).comfy_url is not None


# -- manual pages


def page(name: str) -> str:
    return reference.man_page((ROOT / "man" / name).read_text(), "1.2.3~dev4")


def test_the_pages_that_there_have_to_be():
    assert {"turnstile.8.in", "turnstile.env.5.in"} <= set(PAGES)


@pytest.mark.parametrize("name", ["turnstile.8.in", "turnstile.env.5.in"])
def test_pages_are_complete(name):
    text = page(name)
    assert "@" not in text
    assert '"turnstile 1.2.3~dev4"' in text.splitlines()[0]
    plain = text.replace("\\-", "-")
    for setting in SETTINGS:
        assert setting.env in plain
        if name == "turnstile.8.in":
            for option in (setting.option, *setting.option_aliases):
                assert f"\\fB--{option}\\fR" in plain
        else:
            assert setting.default in plain


@pytest.mark.parametrize("name", PAGES)
def test_no_line_of_a_page_is_taken_for_a_request(name):
    known = {
        "TH",
        "IR",
        "SH",
        "SS",
        "TP",
        "PP",
        "B",
        "I",
        "BR",
        "RB",
        "RI",
        "br",
        "RS",
        "RE",
        "nf",
        "fi",
    }
    requests = set(re.findall(r"(?m)^[.'](\S*)", page(name)))
    assert requests <= known


def test_text_that_troff_would_take_for_its_own():
    assert reference._roff(".TH\n'x\na\\b-c") == "\\&.TH\n\\&'x\na\\eb\\-c"


@pytest.mark.skipif(not shutil.which("groff"), reason="needs groff")
@pytest.mark.parametrize("name", PAGES)
def test_groff_has_nothing_to_say(name):
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-z"], input=page(name), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


# -- bash


def complete(*words: str) -> list[str]:
    script = (
        f"{reference.completion()}\ncompopt() {{ :; }}\n"
        f"COMP_WORDS=({' '.join(repr(word) for word in words)})\n"
        f"COMP_CWORD={len(words) - 1}\n_turnstile\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


needs_bash = pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")


@needs_bash
def test_options_are_completed():
    expected = {"--help", "--version", "--config"}
    for setting in SETTINGS:
        expected |= {f"--{name}" for name in (setting.option, *setting.option_aliases)}
    assert set(complete("turnstile", "")) == expected
    assert complete("turnstile", "--oll") == ["--ollama"]


@needs_bash
def test_values_are_completed():
    for setting in SETTINGS:
        choices = setting.kind.metavar.split("|")
        expected = sorted(choices) if len(choices) > 1 else []
        if setting.kind.metavar == "FILE":
            continue
        for option in (setting.option, *setting.option_aliases):
            assert sorted(complete("turnstile", f"--{option}", "")) == expected, option
    assert complete("turnstile", "--llm-busy-mode", "=", "re") == ["reject"]
    assert complete("turnstile", "--llm-busy-mode", "=") == ["wait", "reject"]


@needs_bash
def test_files_are_completed(tmp_path):
    (tmp_path / "some.env").touch()
    assert complete("turnstile", "--config", f"{tmp_path}/so") == [f"{tmp_path}/some.env"]


# -- the command


def test_the_command(tmp_path):
    assert reference.main(["env"]) == reference.env_file()
    assert reference.main(["completion"]) == reference.completion()
    template = tmp_path / "page.in"
    template.write_text("turnstile @VERSION@\n")
    assert reference.main(["man", str(template), "1-2"]) == "turnstile 1\\-2\n"
    with pytest.raises(SystemExit, match="usage"):
        reference.main(["man"])
