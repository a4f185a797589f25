"""llama.cpp's server: which requests need the card; and how the list of its models reads.

Facts from the server's source (server.cpp, server-models.cpp, server-http.cpp) and from running it: in front of several
models (router mode) every POST that names a model loads it, and so do four GETs with ``model=``; a server of one model
may sleep, and whatever needs its context wakes it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from itertools import pairwise
from typing import Any
from urllib.parse import parse_qsl, unquote_to_bytes

import attrs

from turnstile.engines.base import Admission
from turnstile.engines.client import BadAnswer

# -- requests ------------------------------------------------------------------------------------------------------

#: POSTs that load nothing: stopping a model, downloading one, asking which streams are alive.
_NO_CARD_POSTS = frozenset({b"/models/unload", b"/models", b"/v1/streams/lookup"})
#: GETs that the router hands to the model's own process, which it starts for that.
_HANDED_ON = frozenset({b"props", b"metrics", b"slots", b"lora-adapters"})
#: Those of them that need the model's context, so that they wake one that sleeps.
_WAKING = frozenset({b"slots", b"lora-adapters"})
_SAFE_METHODS = frozenset({b"OPTIONS", b"DELETE"})
_READING_METHODS = frozenset({b"GET", b"HEAD"})
_NO = frozenset({"false", "0"})


def classify(method: bytes, target: bytes, *, wakes: bool = True) -> Admission:
    """What a request to llama.cpp's server needs.

    Odd spellings err to a lease: the server decodes percent signs in paths and in names of parameters, and may have
    been given a prefix for all its routes.

    :param wakes: whether a model may be asleep there (``--sleep-idle-seconds``), so that reading its slots wakes it.
    """
    if method in _SAFE_METHODS:
        return Admission.PASS
    path, _, query = target.partition(b"?")
    if method == b"POST":
        return Admission.PASS if path in _NO_CARD_POSTS else Admission.LEASE
    if method not in _READING_METHODS:
        return Admission.LEASE
    page = unquote_to_bytes(path).partition(b"?")[0].partition(b"#")[0].rstrip(b"/")
    page = page.rpartition(b"/")[2].strip().lower()
    if page not in _HANDED_ON:
        return Admission.PASS
    may_wake = wakes and page in _WAKING
    if may_wake or b"#" in target or b"%23" in path:
        # The server takes what follows a "#" for no part of the target, wherever it stands.
        return Admission.LEASE
    if not _names_a_model(query) or _forbids_loading(query):
        return Admission.PASS
    return Admission.LEASE


def _parameters(query: bytes) -> list[tuple[str, str]]:
    return parse_qsl(query.decode("latin-1"), keep_blank_values=True, encoding="latin-1")


def _names_a_model(query: bytes) -> bool:
    return any(key.strip().lower() == "model" for key, _ in _parameters(query))


def _forbids_loading(query: bytes) -> bool:
    # Of several the server takes one that is not for us to say: all have to say no.
    values = [value for key, value in _parameters(query) if key == "autoload"]
    return bool(values) and all(value in _NO for value in values)


# -- the list of models --------------------------------------------------------------------------------------------


class Mode(enum.Enum):
    """How the server was started."""

    #: Without a model: it starts a process of its own for each one that is asked for.
    ROUTER = "router"
    #: With one model, which it cannot be told to unload.
    SINGLE = "single model"


#: What a model's status is while nothing of it is on the card. All else, unknown words too, counts as loaded.
_ABSENT = frozenset({"unloaded", "downloading", "downloaded"})
LOADING, LOADED = "loading", "loaded"
_SLEEP_FLAG = "--sleep-idle-seconds"


@attrs.frozen
class Models:
    """An answer of ``GET /models``.

    :ivar statuses: the models that a router knows, and what each is doing.
    :ivar sleeps: whether one of them sleeps, or was started so that it will.
    """

    mode: Mode
    statuses: Mapping[str, str] = attrs.field(factory=dict)
    sleeps: bool = False

    @property
    def held(self) -> frozenset[str]:
        """The models of a router that may have memory of the card."""
        return frozenset(name for name, status in self.statuses.items() if status not in _ABSENT)

    @property
    def loading(self) -> frozenset[str]:
        """The models that are being loaded."""
        return self._that_are(LOADING)

    @property
    def loaded(self) -> frozenset[str]:
        """The models that are ready for work, or at it."""
        return self._that_are(LOADED)

    def _that_are(self, status: str) -> frozenset[str]:
        return frozenset(name for name, value in self.statuses.items() if value == status)


def parse_models(answer: object) -> Models:
    """Read an answer of ``GET /models``.

    A router tells the status of each model; a server of one model tells none, and lists it a second time for clients
    of Ollama.

    :raises BadAnswer: if it is no such answer; an odd one must not pass for an empty one.
    """
    entries = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(answer, dict) or not isinstance(entries, list):
        raise BadAnswer("no list of models")
    if not entries and "models" not in answer:
        return Models(Mode.ROUTER)
    statuses: dict[str, str] = {}
    sleeps = False
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
            raise BadAnswer("a model without a name")
        status = entry.get("status")
        if status is None:
            continue
        value = status.get("value") if isinstance(status, dict) else status
        if not isinstance(value, str):
            raise BadAnswer("a model without a status")
        statuses[entry["id"]] = value
        sleeps = sleeps or value == "sleeping" or _will_sleep(status)
    if statuses and len(statuses) < len(entries):
        raise BadAnswer("a model without a status")
    return Models(Mode.ROUTER, statuses, sleeps) if statuses else Models(Mode.SINGLE, sleeps=True)


def _will_sleep(status: Any) -> bool:
    args = status.get("args") if isinstance(status, dict) else None
    if not isinstance(args, list):
        # It does not tell.
        return True
    return any(
        flag == _SLEEP_FLAG and not str(value).startswith("-") for flag, value in pairwise(args)
    )
