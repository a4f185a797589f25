"""Versions of releases: X.Y.Z and nothing else, so that there is one order and no way around it."""

from __future__ import annotations

import re

import attrs

_NUMBER = r"(0|[1-9][0-9]{0,8})"
_RELEASE = re.compile(rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}")


@attrs.frozen(order=True)
class Version:
    """A released version."""

    major: int
    minor: int
    patch: int

    @classmethod
    def parse(cls, text: str) -> Version | None:
        """The version that ``text`` is, ``None`` for anything else: development versions, candidates, nonsense."""
        match = _RELEASE.fullmatch(text)
        return cls(*map(int, match.groups())) if match else None

    @classmethod
    def parse_tag(cls, tag: str) -> Version | None:
        """The version of a tag ``vX.Y.Z``."""
        return cls.parse(tag[1:]) if tag.startswith("v") else None

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"
