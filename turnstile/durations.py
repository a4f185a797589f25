"""Durations as people write them: ``500ms``, ``1m30s``, ``1.5h``, or plain seconds (``90``)."""

import re
from decimal import ROUND_HALF_UP, Decimal

_NANOSECONDS = {
    "ns": 1,
    "us": 1_000,
    "\u00b5s": 1_000,  # micro sign
    "\u03bcs": 1_000,  # Greek mu
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}
_NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_PLAIN = re.compile(rf"\+?({_NUMBER})")
_UNITS = re.compile(rf"\+?(?:{_NUMBER}(?:ns|us|\u00b5s|\u03bcs|ms|s|m|h))+")
_PART = re.compile(rf"({_NUMBER})(ns|us|\u00b5s|\u03bcs|ms|s|m|h)")
_LONGEST = 64


def parse_duration(text: str) -> float:
    """Return the seconds that ``text`` stands for, a finite number and not negative.

    Raises `ValueError` with a reason for anything else.
    """
    text = text.strip()
    if len(text) > _LONGEST:
        raise ValueError("a duration of more than 64 characters")
    if text.startswith("-"):
        raise ValueError(f"{text!r}: a duration can't be negative")
    total = Decimal(0)
    if plain := _PLAIN.fullmatch(text):
        total = Decimal(plain[1]) * _NANOSECONDS["s"]
    elif _UNITS.fullmatch(text):
        for number, unit in _PART.findall(text):
            total += Decimal(number) * _NANOSECONDS[unit]
    else:
        raise ValueError(f"{text!r} is not a duration (like 500ms, 1m30s, or 90 for seconds)")
    return int(total.to_integral_value(ROUND_HALF_UP)) / 1_000_000_000


def format_duration(seconds: float) -> str:
    """Write ``seconds`` the short way: ``1m30s``, ``500ms``, ``0s``.

    Exact to the nanosecond, so that `parse_duration` gives the same number back.
    """
    nanoseconds = round(seconds * 1_000_000_000)
    if nanoseconds < 1_000_000_000:
        for unit in ("ms", "us", "ns"):
            if nanoseconds and nanoseconds % _NANOSECONDS[unit] == 0:
                return f"{nanoseconds // _NANOSECONDS[unit]}{unit}"
    parts = []
    hours, nanoseconds = divmod(nanoseconds, _NANOSECONDS["h"])
    minutes, nanoseconds = divmod(nanoseconds, _NANOSECONDS["m"])
    if hours:
        parts.append(f"{hours}h")
    if minutes:
        parts.append(f"{minutes}m")
    if nanoseconds or not parts:
        whole, fraction = divmod(nanoseconds, 1_000_000_000)
        digits = f".{fraction:09d}".rstrip("0") if fraction else ""
        parts.append(f"{whole}{digits}s")
    return "".join(parts)
