"""Files of ``KEY=VALUE`` lines, as systemd and a shell read them."""

import re
from collections.abc import Mapping

from turnstile.addresses import ConfigError

_LINE = re.compile(r"(?:export[ \t]+)?(?P<key>[^=]*?)[ \t]*=[ \t]*(?P<value>.*)", re.DOTALL)
KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DOUBLE_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"(.*)', re.DOTALL)
_SINGLE_QUOTED = re.compile(r"'([^']*)'(.*)", re.DOTALL)
_COMMENT = re.compile(r"[ \t]+#.*\Z|\A#.*\Z", re.DOTALL)


def parse_env_file(data: bytes, name: str) -> list[tuple[int, str, str]]:
    """Line number, key and value of each setting in an env file; ``name`` is for messages.

    ``KEY=VALUE`` lines, with or without ``export``; blank lines; comments from a ``#`` at the start
    of a line or after a blank. Values may be quoted: ``'as it is'``, or ``"with \\\\ \\" \\$"``.
    """
    found = []
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            key, value = _parse_line(raw.removesuffix(b"\r")) or ("", "")
        except ValueError as error:
            raise ConfigError(f"{name}:{number}: {error}") from None
        if key:
            found.append((number, key, value))
    return found


def _parse_line(raw: bytes) -> tuple[str, str] | None:
    try:
        line = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    if any((ord(char) < 0x20 and char != "\t") or ord(char) == 0x7F for char in line):
        raise ValueError("a control character")
    line = line.strip(" \t")
    if not line or line.startswith("#"):
        return None
    match = _LINE.fullmatch(line)
    if match is None:
        raise ValueError("not a KEY=VALUE line")
    key, rest = match["key"], match["value"]
    if not KEY.fullmatch(key):
        raise ValueError(f"{key!r} can't be the name of a setting")
    quoted = None
    if rest.startswith('"'):
        quoted = _DOUBLE_QUOTED.fullmatch(rest)
    elif rest.startswith("'"):
        quoted = _SINGLE_QUOTED.fullmatch(rest)
    else:
        return key, _COMMENT.sub("", rest).rstrip(" \t")
    if quoted is None:
        raise ValueError(f"the value of {key} has no closing quote")
    if _COMMENT.sub("", quoted[2]).strip(" \t"):
        raise ValueError(f"text after the closing quote of {key}")
    value = quoted[1]
    return key, re.sub(r'\\([\\"$`])', r"\1", value) if rest.startswith('"') else value


def format_env_file(values: Mapping[str, str]) -> str:
    """Write an env file that `parse_env_file` reads back the same, as systemd and a shell do."""
    lines = []
    for key, value in values.items():
        if not KEY.fullmatch(key):
            raise ValueError(f"{key!r} can't be the name of a setting")
        if any((ord(char) < 0x20 and char != "\t") or ord(char) == 0x7F for char in value):
            raise ValueError(f"the value of {key} contains control characters")
        if not re.fullmatch(r"[A-Za-z0-9_./:@%+,=\[\]-]*", value):
            escaped = re.sub(r'([\\"$`])', r"\\\1", value)
            value = f'"{escaped}"'
        lines.append(f"{key}={value}\n")
    return "".join(lines)
