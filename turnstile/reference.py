"""Texts made from the table of settings: the commented configuration file, manual pages, the completion for bash.

``python -m turnstile.reference env|completion`` prints one, ``… man FILE VERSION`` a page made from its template.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from turnstile.config import SETTINGS, Setting

_WIDTH = 78

_ENV_HEAD = """\
turnstile's configuration. Every setting is here, commented out, with its default: take the '#' away to change one.
At least one engine is needed, for example:

  OLLAMA_URL=http://127.0.0.1:11435
  COMFY_URL=http://127.0.0.1:8189

The lines are KEY=VALUE; durations are written 500ms, 1m30s, 1.5h, or in seconds; an empty value means the default.
An option of the command line wins over an environment variable, that over this file. See turnstile.env(5).
"""


def _comment(text: str) -> Iterable[str]:
    for paragraph in text.splitlines():
        lines = textwrap.wrap(
            paragraph.strip(), _WIDTH - 2, break_on_hyphens=False, break_long_words=False
        )
        indent = "  " if paragraph.startswith(" ") else ""
        for line in lines or [""]:
            yield f"# {indent}{line}".rstrip()


def env_file() -> str:
    """The configuration file with every setting commented out, its meaning above and its default in it."""
    lines = list(_comment(_ENV_HEAD))
    for setting in SETTINGS:
        lines += ["", *_comment(setting.help)]
        lines.append(f"#{setting.env}={setting.default}")
    return "\n".join(lines) + "\n"


# -- manual pages ----------------------------------------------------------------------------------


def _roff(text: str) -> str:
    """``text`` with what troff would take for its own made plain."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"(?m)^([.'])", r"\\&\1", text)


def _value(setting: Setting) -> str:
    return f"\\fI{_roff(setting.kind.metavar)}\\fR"


def _default(setting: Setting) -> str:
    return f"Default: \\fB{_roff(setting.default)}\\fR." if setting.default else "Default: empty."


def man_settings() -> str:
    """Every setting as a line of the configuration file, in man(7) macros."""
    lines = []
    for setting in SETTINGS:
        names = ", ".join(f"\\fB{_roff(name)}\\fR" for name in (setting.env, *setting.env_aliases))
        lines += [".TP", f"{names}={_value(setting)}", _roff(setting.help), _default(setting)]
    return "\n".join(lines)


def man_options() -> str:
    """Every setting as an option of the command line, in man(7) macros."""
    lines = []
    for setting in SETTINGS:
        names = ", ".join(
            f"\\fB{_roff('--' + name)}\\fR" for name in (setting.option, *setting.option_aliases)
        )
        lines += [".TP", f"{names} {_value(setting)}", _roff(setting.help)]
        lines.append(f"(\\fB{_roff(setting.env)}\\fR)")
    return "\n".join(lines)


def man_page(template: str, version: str) -> str:
    """A manual page: ``template`` with ``@VERSION@``, ``@OPTIONS@`` and ``@SETTINGS@`` filled in."""
    page = template.replace("@VERSION@", _roff(version))
    return page.replace("@OPTIONS@", man_options()).replace("@SETTINGS@", man_settings())


# -- bash ------------------------------------------------------------------------------------------

_COMPLETION = """\
# bash completion for turnstile
_turnstile() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} option=${{COMP_WORDS[COMP_CWORD-1]}}
    # --option=value comes as three words
    [[ $word == '=' ]] && word=
    [[ $option == '=' ]] && option=${{COMP_WORDS[COMP_CWORD-2]}}
    COMPREPLY=()
    case $option in
{values}
    esac
    mapfile -t COMPREPLY < <(compgen -W '{options}' -- "$word")
}}
complete -F _turnstile turnstile
"""
_WORDS = """\
        {options})
            mapfile -t COMPREPLY < <(compgen -W '{words}' -- "$word")
            return
            ;;"""
_FILES = """\
        {options})
            compopt -o filenames
            mapfile -t COMPREPLY < <(compgen -f -- "$word")
            return
            ;;"""
_ANYTHING = """\
        {options})
            return
            ;;"""


def completion() -> str:
    """What makes bash complete turnstile's options, and the values of those that have a choice."""
    groups: dict[str, list[str]] = {"FILE": ["--config"]}
    for setting in SETTINGS:
        names = [f"--{name}" for name in (setting.option, *setting.option_aliases)]
        groups.setdefault(setting.kind.metavar, []).extend(names)
    values = []
    anything = []
    for metavar, names in groups.items():
        if metavar == "FILE":
            values.append(_FILES.format(options=" | ".join(names)))
        elif "|" in metavar:
            values.append(_WORDS.format(options=" | ".join(names), words=metavar.replace("|", " ")))
        else:
            anything += names
    values.append(_ANYTHING.format(options=" | ".join(anything)))
    options = sorted(
        [name for names in groups.values() for name in names] + ["--help", "--version"]
    )
    return _COMPLETION.format(values="\n".join(values), options=" ".join(options))


def main(arguments: list[str]) -> str:
    """The text that ``arguments`` ask for; raises SystemExit with a reason."""
    match arguments:
        case ["env"]:
            return env_file()
        case ["completion"]:
            return completion()
        case ["man", template, version]:
            return man_page(Path(template).read_text(encoding="utf-8"), version)
    raise SystemExit("usage: python -m turnstile.reference env|completion|man FILE VERSION")


if __name__ == "__main__":
    sys.stdout.write(main(sys.argv[1:]))
