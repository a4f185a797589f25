"""Scripted misbehaviour of a simulated server.

A rule says which requests it strikes (an `fnmatch` pattern on the path or on ``"METHOD path"``),
how often, and what happens.  The first live rule that matches wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from urllib.parse import unquote_to_bytes

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(eq=False)
class Rule:
    """One fault.  ``times`` is how many strikes are left (None: until cancelled)."""

    kind: str
    match: str = "*"
    times: int | None = None
    code: int = 500
    body: bytes = b""
    content_type: bytes = b"text/plain; charset=utf-8"
    headers: Headers = ()
    after: int | None = None
    rst: bool = False
    seconds: float = 0.0
    size: int = 1
    close: bool = True
    hits: int = 0
    _owner: list[Rule] = field(default_factory=list, repr=False)

    def cancel(self) -> None:
        """Take the rule off; requests that it struck stay struck."""
        if self in self._owner:
            self._owner.remove(self)

    def matches(self, method: str, path: str) -> bool:
        if self.times is not None and self.times <= 0:
            return False
        if " " in self.match:
            return fnmatchcase(f"{method} {path}", self.match)
        return fnmatchcase(path, self.match)


class Faults:
    """The faults of one server; see each method for what its fault looks like on the wire."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []

    def _add(self, rule: Rule) -> Rule:
        rule._owner = self.rules
        self.rules.append(rule)
        return rule

    def hang(self, match: str = "*", times: int | None = None) -> Rule:
        """The request is read and never answered."""
        return self._add(Rule("hang", match, times))

    def status(
        self,
        code: int,
        match: str = "*",
        times: int | None = None,
        *,
        body: bytes = b"simulated failure",
        content_type: bytes = b"text/plain; charset=utf-8",
        headers: Headers = (),
    ) -> Rule:
        """The request is read, then answered with this status and body."""
        return self._add(
            Rule(
                "status",
                match,
                times,
                code=code,
                body=body,
                content_type=content_type,
                headers=headers,
            )
        )

    def drop(
        self,
        match: str = "*",
        times: int | None = None,
        *,
        after: int | None = None,
        rst: bool = False,
    ) -> Rule:
        """Cut the connection: before any answer, or after so many bytes of the answer's body."""
        return self._add(Rule("drop", match, times, after=after, rst=rst))

    def drop_upload(
        self, match: str = "*", times: int | None = None, *, after: int = 0, rst: bool = True
    ) -> Rule:
        """Cut the connection when so many bytes of the request's body have been read."""
        return self._add(Rule("drop_upload", match, times, after=after, rst=rst))

    def delay(self, seconds: float, match: str = "*", times: int | None = None) -> Rule:
        """Wait, then serve the request as usual."""
        return self._add(Rule("delay", match, times, seconds=seconds))

    def garbage(self, match: str = "*", times: int | None = None) -> Rule:
        """A 200 that calls itself JSON and is not."""
        return self.status(200, match, times, body=b"{not json", content_type=b"application/json")

    def trickle(
        self, match: str = "*", times: int | None = None, *, size: int = 1, interval: float = 0.01
    ) -> Rule:
        """The usual answer, its body in pieces of ``size`` bytes, one each ``interval``."""
        return self._add(Rule("trickle", match, times, size=size, seconds=interval))

    def raw(
        self, data: bytes, match: str = "*", times: int | None = None, *, close: bool = True
    ) -> Rule:
        """These very bytes on the wire in place of an answer."""
        return self._add(Rule("raw", match, times, body=data, close=close))

    def clear(self) -> None:
        """Behave from now on."""
        self.rules.clear()

    def spend(self, switch: str) -> bool:
        """Whether the named switch (see `take`) is on, counted as used."""
        struck, left = take(getattr(self, switch))
        setattr(self, switch, left)
        return struck

    def pick(self, method: str, target: bytes) -> Rule | None:
        """The rule that strikes this request, counted as used."""
        if not self.rules:
            return None
        path = unquote_to_bytes(target.split(b"?", 1)[0]).decode("utf-8", "replace")
        for rule in self.rules:
            if rule.matches(method, path):
                rule.hits += 1
                if rule.times is not None:
                    rule.times -= 1
                    if rule.times == 0:
                        rule.cancel()
                return rule
        return None


def take(value: int) -> tuple[bool, int]:
    """Use up one of a switch that is False, True (always) or a number of times left."""
    if value is True or value <= 0:
        return bool(value), value
    return True, value - 1
