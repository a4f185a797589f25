"""Ollama: which requests need the card, how to make it leave, how to know that it left.

Facts from Ollama's source (routes.go, sched.go): ``GET /api/ps`` lists a model until its runner has really stopped;
``POST /api/generate`` with ``keep_alive`` 0 and no prompt answers at once and takes effect when the runner's last
request ends; embedding-only models refuse it and are unloaded by ``POST /api/embed`` with ``keep_alive`` 0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, inlineCallbacks
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger

from turnstile.arbiter import Kind, Tenant
from turnstile.card import Card, Eviction
from turnstile.engines.base import Admission
from turnstile.engines.client import BadAnswer, ClientError, HttpError, JsonClient, Unreachable

#: The longest body that can count as a request to unload.
UNLOAD_BODY_LIMIT = 4096

#: Seconds after an aborted request in which an empty ``/api/ps`` is not believed at once: the runner may be starting
#: and is not listed yet. Measured from the abort; a start that is not listed by then is caught by :meth:`guard`.
SETTLE_TIME = 0.75
#: How many empty answers in a row are needed in that time.
SETTLE_LOOKS = 3
#: Seconds after an abort for which the beginning of an image job is guarded.
ABORT_MEMORY = 30.0

#: Seconds between two looks at first, and the share of the time so far that is waited later: whatever an unload takes,
#: not much more of it is lost before it is noticed.
FIRST_DELAY = 0.003
PATIENCE = 0.06
#: The most seconds one look or one unload may take.
LOOK_TIMEOUT = 5.0
#: Seconds after which a model that is still listed is told to leave again.
RESEND_AFTER = 2.0
#: Seconds of refused connections after which an engine that answered before is taken for gone.
GONE_AFTER = 1.0

# -- classification ------------------------------------------------------------------------------------------------

_PEEKED = frozenset({b"/api/generate", b"/api/chat"})
#: POST routes that do not use the card (routes.go); gigabytes may go through create and blobs.
_NO_CARD = frozenset(
    b"/api/" + name
    for name in (
        b"tags",
        b"show",
        b"ps",
        b"version",
        b"pull",
        b"push",
        b"create",
        b"copy",
        b"delete",
    )
) | {b"/v1/models", b"/"}
_BLOB = re.compile(rb"/api/blobs/sha256(?::|-|%3[Aa])[0-9A-Fa-f]+")
_SAFE_METHODS = frozenset({b"GET", b"HEAD", b"OPTIONS", b"DELETE"})


def classify(method: bytes, target: bytes) -> Admission:
    """What a request to Ollama needs.

    Everything but the known routes, spelled exactly, takes the lock: gin, Ollama's router, decodes percent signs and
    redirects trailing slashes, so an odd spelling of a harmless route costs a wait, never an overlap.
    """
    if method in _SAFE_METHODS:
        return Admission.PASS
    if method == b"POST":
        path = target.partition(b"?")[0]
        if path in _PEEKED:
            return Admission.PEEK
        if path in _NO_CARD or _BLOB.fullmatch(path):
            return Admission.PASS
    return Admission.LEASE


_UNLOAD_KEYS = frozenset({"model", "keep_alive", "stream", "options", "prompt", "messages"})
#: The zeros of Go's ``time.ParseDuration``.
_ZERO = re.compile(r"0|(?:0+(?:ns|us|µs|ms|s|m|h))+")


def is_unload_only(target: bytes, body: bytes) -> bool:
    """Whether a request that :func:`classify` wants to peek at does nothing but unload a model.

    As strict as can be, since a wrong yes lets a model load beside an image job: Go's decoder ignores case in keys,
    takes the last of two equal ones and stops after the first value, so all of that is a no.
    """
    # Most chats say nothing of keep_alive, and need not be parsed.
    if b'"keep_alive"' not in body or len(body) > UNLOAD_BODY_LIMIT:
        return False
    if target.partition(b"?")[0] not in _PEEKED:
        return False
    try:
        data = json.loads(
            body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except (ValueError, RecursionError):
        return False
    if not isinstance(data, dict) or not data.keys() <= _UNLOAD_KEYS:
        return False
    model = data.get("model")
    return (
        isinstance(model, str)
        and model != ""
        and _is_zero(data.get("keep_alive"))
        and isinstance(data.get("stream", False), bool)
        and isinstance(data.get("options", {}), dict)
        and data.get("prompt", "") == ""
        and data.get("messages", []) == []
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _is_zero(value: object) -> bool:
    if isinstance(value, str):
        return _ZERO.fullmatch(value) is not None
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0


# -- the engine ----------------------------------------------------------------------------------------------------


def parse_models(answer: object) -> frozenset[str]:
    """The names of the models in an answer of ``/api/ps``.

    :raises BadAnswer: if it is not such an answer; an odd one must not pass for an empty one.
    """
    models = answer.get("models", ...) if isinstance(answer, dict) else ...
    if models is None:  # a nil slice of Go
        return frozenset()
    if not isinstance(models, list):
        raise BadAnswer("no list of models")
    names = set()
    for entry in models:
        name = (entry.get("model") or entry.get("name")) if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise BadAnswer("a model without a name")
        names.add(name)
    return frozenset(names)


class _Unloader:
    """The unload requests of one eviction: sent side by side, none waited for."""

    def __init__(self, client: JsonClient, clock: IReactorTime, complain: Any) -> None:
        self._client = client
        self._clock = clock
        self._complain = complain
        self._sent: dict[str, float] = {}
        self._running: set[Deferred[None]] = set()
        #: Models whose unload was answered 5xx once.
        self._failed: set[str] = set()

    def ask(self, models: frozenset[str]) -> None:
        """Tell every listed model to leave that was not told lately; forget those that left."""
        now = self._clock.seconds()
        for name in self._sent.keys() - models:
            del self._sent[name]
        for name in sorted(models):
            sent = self._sent.get(name)
            if sent is None or now - sent >= RESEND_AFTER:
                self._sent[name] = now
                d = self._unload(name)
                if not d.called:
                    self._running.add(d)
                    d.addCallback(self._over, d)

    def cancel(self) -> None:
        for d in tuple(self._running):
            d.cancel()

    def _over(self, _: None, d: Deferred[None]) -> None:
        self._running.discard(d)

    @inlineCallbacks
    def _unload(self, name: str) -> Generator[Deferred[Any], Any, None]:
        try:
            try:
                payload = {"model": name, "keep_alive": 0, "stream": False}
                yield self._client.post_json("/api/generate", payload, LOOK_TIMEOUT)
            except HttpError as e:
                if e.status >= 500 and name not in self._failed:
                    # It may have worked all the same, and then embed would load the model again: if it is still
                    # listed the next time, it did not.
                    self._failed.add(name)
                    raise
                # An embedding-only model refuses generate, and embed refuses a missing input.
                payload = {"model": name, "input": "x", "keep_alive": 0}
                yield self._client.post_json("/api/embed", payload, LOOK_TIMEOUT)
        except ClientError as e:
            self._complain("unload", e, model=name)
        except CancelledError:
            pass


class OllamaEngine:
    """Ollama behind turnstile.

    :param client: calls to its API.
    :param card: where residency is kept.
    :param unload_timeout: the most seconds that :meth:`evict` takes.
    :param unload_poll_interval: seconds between looks at ``/api/ps`` once they have slowed down.
    :param probe_timeout: the most seconds that :meth:`start` takes.
    """

    log = Logger()

    def __init__(
        self,
        client: JsonClient,
        clock: IReactorTime,
        card: Card,
        *,
        unload_timeout: float,
        unload_poll_interval: float,
        probe_timeout: float,
    ) -> None:
        self.tenant = Tenant("ollama", Kind.SHARED)
        self._client = client
        self._clock = clock
        self._card = card
        self.unload_timeout = unload_timeout
        self.unload_poll_interval = unload_poll_interval
        self.probe_timeout = probe_timeout
        self.version: str | None = None
        self._models: frozenset[str] | None = None
        self._aborted_at: float | None = None
        self._guard: Deferred[None] | None = None
        self._starting: Deferred[None] | None = None

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> Deferred[None]:
        """Look once: the version for the log, and whether anything is loaded."""
        self._starting = d = self._first_look()
        return d

    @inlineCallbacks
    def _first_look(self) -> Generator[Deferred[Any], Any, None]:
        deadline = self._clock.seconds() + self.probe_timeout
        try:
            answer = yield self._client.get_json("/api/version", self.probe_timeout)
            version = answer.get("version") if isinstance(answer, dict) else None
            self.version = version if isinstance(version, str) else "unknown"
            self.log.info("Ollama {version} answers", version=self.version)
            models = yield self._look(deadline - self._clock.seconds())
        except ClientError as e:
            self.log.warn(
                "Ollama does not answer at {url}: {error}",
                url=self._client.base_url,
                error=_tell(e),
            )
        except CancelledError:
            pass
        else:
            if models:
                self.log.info("Ollama holds {models}", models=", ".join(sorted(models)))
            else:
                self._card.mark_evicted(self.tenant.name)

    def stop(self) -> None:
        """End what runs in the background."""
        self.end_guard()
        if self._starting is not None:
            self._starting.cancel()

    def snapshot(self) -> dict[str, Any]:
        """For the state page: what the latest look saw (``models`` is null before the first)."""
        return {
            "version": self.version,
            "models": None if self._models is None else sorted(self._models),
            "guarding": self._guard is not None,
        }

    def warm(self, model: str) -> Deferred[None]:
        """Load ``model`` and keep it. Has no time limit of its own; cancelling drops the connection."""
        payload = {"model": model, "keep_alive": -1, "stream": False}
        d = self._client.post_json("/api/generate", payload, 24 * 3600.0)
        return d.addCallback(lambda _: None)

    # -- leaving the card ------------------------------------------------------------------------------------------

    def evict(self) -> Deferred[Eviction]:
        """Unload every model until ``/api/ps`` is empty; only that counts, not what the unload calls answer."""
        return self._evict()

    @inlineCallbacks
    def _evict(self) -> Generator[Deferred[Any], Any, Eviction]:
        began = self._clock.seconds()
        deadline = began + self.unload_timeout
        complaints: set[tuple[str, type[BaseException]]] = set()

        def complain(what: str, error: ClientError, **fields: Any) -> None:
            if (what, type(error)) not in complaints:
                complaints.add((what, type(error)))
                self.log.warn(
                    "Ollama: {what} failed: {error}", what=what, error=_tell(error), **fields
                )

        unloader = _Unloader(self._client, self._clock, complain)
        empties = 0
        empty_since = began
        answered = False
        refused_at: float | None = None
        try:
            while (left := deadline - self._clock.seconds()) > 0:
                try:
                    models = yield self._look(min(LOOK_TIMEOUT, left))
                except Unreachable as e:
                    now = self._clock.seconds()
                    refused_at = now if refused_at is None else refused_at
                    if not answered or now - refused_at >= GONE_AFTER:
                        complain("connecting", e)
                        return Eviction.UNREACHABLE
                    empties = 0
                except ClientError as e:
                    complain("/api/ps", e)
                    refused_at, empties = None, 0
                else:
                    answered, refused_at = True, None
                    empties = 0 if models else empties + 1
                    if empties == 1:
                        empty_since = self._clock.seconds()
                    if empties and self._believe(empties, empty_since):
                        return Eviction.CONFIRMED
                    unloader.ask(models)
                now = self._clock.seconds()
                pause = min((now - began) * PATIENCE, self.unload_poll_interval, deadline - now)
                if empties and self._aborted_at is not None:
                    # The look that ends the settle time is made when it ends.
                    pause = min(pause, self._aborted_at + SETTLE_TIME - self._clock.seconds())
                yield deferLater(self._clock, max(FIRST_DELAY, pause))
            self.log.warn(
                "Ollama did not unload within {seconds:g} s",
                seconds=self.unload_timeout,
                models=sorted(self._models or ()),
            )
            return Eviction.TIMED_OUT
        finally:
            unloader.cancel()

    def _look(self, timeout: float) -> Deferred[frozenset[str]]:
        def seen(answer: object) -> frozenset[str]:
            self._models = models = parse_models(answer)
            return models

        return self._client.get_json("/api/ps", timeout).addCallback(seen)

    def _believe(self, empties: int, since: float) -> bool:
        """Whether so many empty answers in a row, the first at ``since``, show that nothing is loaded."""
        aborted = self._aborted_at
        if aborted is None or since - aborted >= SETTLE_TIME:
            return True
        return empties >= SETTLE_LOOKS and self._clock.seconds() - aborted >= SETTLE_TIME

    # -- after aborted requests ------------------------------------------------------------------------------------

    def note_aborted(self) -> None:
        """A request that had been forwarded was cut off: its model may still be loading, listed or not."""
        self._aborted_at = self._clock.seconds()

    def guard(self, seconds: float = 5.0) -> None:
        """Keep an eye on ``/api/ps`` while an image job begins, if a request was aborted lately."""
        self.end_guard()
        aborted = self._aborted_at
        if aborted is not None and self._clock.seconds() - aborted < ABORT_MEMORY:
            self._guard = d = self._watch(self._clock.seconds() + seconds)
            d.addErrback(lambda f: self.log.failure("guarding an image job failed", failure=f))

    def end_guard(self) -> None:
        """The image job ended."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.cancel()

    @inlineCallbacks
    def _watch(self, until: float) -> Generator[Deferred[Any], Any, None]:
        name = self.tenant.name
        try:
            while self._clock.seconds() < until:
                yield deferLater(self._clock, min(0.25, self.unload_poll_interval))
                if name in self._card.resident:
                    continue  # known already (a nested call), so somebody else sees to it
                try:
                    models = yield self._look(LOOK_TIMEOUT)
                except ClientError:
                    continue
                if models and name not in self._card.resident:
                    self.log.warn(
                        "Ollama loaded a model during an image job; unloading it again",
                        models=sorted(models),
                    )
                    self._card.mark_resident(name)
                    self._card.degrade(name, "model re-appeared during an image job")
                    # Not waited for: an ended guard must not take the eviction with it.
                    self._card.evict(name)
        except CancelledError:
            return
        self._guard = None


def _tell(error: Exception) -> str:
    return str(error) or type(error).__name__
