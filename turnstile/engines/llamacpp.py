"""llama.cpp's server behind turnstile: how it leaves the card, and how to know that it did.

In front of several models (a *router*) each model is a process of its own, which ``POST /models/unload`` ends and which
is listed until it is gone; with a completion under way it hangs until the router kills it (10 s). A server of *one
model* cannot be told to unload it: see :mod:`turnstile.engines.llama_single`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any
from urllib.parse import quote

from twisted.internet.defer import CancelledError, Deferred, inlineCallbacks
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from turnstile.arbiter import Kind, Tenant
from turnstile.card import LOADED_ELSEWHERE, Card, Eviction
from turnstile.commands import Commands
from turnstile.engines.base import Admission
from turnstile.engines.client import ClientError, HttpError, JsonClient, Unreachable
from turnstile.engines.llama_aborts import Aborts, Stragglers
from turnstile.engines.llama_events import RouterEvents
from turnstile.engines.llama_routes import Mode, Models, classify, parse_models
from turnstile.engines.llama_single import SingleServer, StartFailed, is_loading

FIRST_DELAY = 0.01
BACKOFF = 1.5
#: The most seconds one call may take.
LOOK_TIMEOUT = 5.0
#: Seconds after which a model that is still listed is told to leave again.
RESEND_AFTER = 2.0
#: … and after which one is told again whose unload call failed.
RETRY_AFTER = 0.25
#: Seconds of refused connections after which a server that answered before is taken for gone.
GONE_AFTER = 1.0
NEEDS_KEY = "llama.cpp wants an API key: without LLAMA_API_KEY its models cannot be unloaded"
#: Seconds between looks at a model that is loading.
LOADING_DELAY = 0.25


class _Unloader:
    """The unload requests of one eviction: sent side by side, none waited for."""

    def __init__(self, client: JsonClient, clock: IReactorTime, complain: Any) -> None:
        self._client = client
        self._clock = clock
        self._complain = complain
        self._sent: dict[str, float] = {}
        self._running: set[Deferred[Any]] = set()

    def end_conversation(self, conversation: str) -> None:
        """Stop what a request whose client is gone still generates."""
        path = "/v1/stream?conv_id=" + quote(conversation, safe="")
        # An older server knows no such thing, and another may have ended it: whatever it answers will do.
        self._send(self._client.delete(path, LOOK_TIMEOUT), None)

    def ask(self, models: frozenset[str]) -> None:
        """Tell every listed model to leave that was not told lately; forget those that left."""
        now = self._clock.seconds()
        for name in self._sent.keys() - models:
            del self._sent[name]
        for name in sorted(models):
            sent = self._sent.get(name)
            if sent is None or now - sent >= RESEND_AFTER:
                self._sent[name] = now
                payload = {"model": name}
                self._send(self._client.post_json("/models/unload", payload, LOOK_TIMEOUT), name)

    def cancel(self) -> None:
        for d in tuple(self._running):
            d.cancel()

    def _send(self, d: Deferred[Any], model: str | None) -> None:
        self._running.add(d)

        def failed(failure: Failure) -> None:
            failure.trap(ClientError, CancelledError)
            error = failure.value
            # 400: it left in the meantime.
            gone = isinstance(error, HttpError) and error.status == 400
            if model is not None and isinstance(error, ClientError) and not gone:
                self._complain("unload", error, model=model)
                if model in self._sent:
                    self._sent[model] = self._clock.seconds() - RESEND_AFTER + RETRY_AFTER

        d.addErrback(failed).addBoth(lambda _: self._running.discard(d))


class LlamaEngine:
    """A llama.cpp server.

    :param client: calls to its API; carries the API key, if there is one.
    :param card: where residency is kept.
    :param unload_timeout: the most seconds that :meth:`evict` takes.
    :param unload_poll_interval: seconds between looks once they have slowed down.
    :param probe_timeout: the most seconds that :meth:`start` takes.
    :param load_timeout: the most seconds that loading a model, or starting the server, may take.
    :param commands: runs the two commands.
    :param stop_command: makes a server of one model end; a line for the shell.
    :param start_command: starts it again; a line for the shell.
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
        load_timeout: float,
        commands: Commands | None = None,
        stop_command: str | None = None,
        start_command: str | None = None,
    ) -> None:
        self.tenant = Tenant("llamacpp", Kind.SHARED)
        self._client = client
        self._clock = clock
        self._card = card
        self.unload_timeout = unload_timeout
        self.unload_poll_interval = unload_poll_interval
        self.probe_timeout = probe_timeout
        self.load_timeout = load_timeout
        #: What the latest look saw; ``None`` before the first and after the server was away.
        self._models: Models | None = None
        self.single = SingleServer(
            client,
            clock,
            lambda: card.mark_resident(self.tenant.name),
            commands=commands,
            stop_command=stop_command,
            start_command=start_command,
            load_timeout=load_timeout,
        )
        self._aborts = Aborts(clock)
        self._events = RouterEvents(client, clock, self._rung)
        self._pauses: set[Deferred[None]] = set()
        self._glancing: Deferred[Any] | None = None
        self._glance_again = False
        self._eviction: Deferred[Eviction] | None = None
        #: How many evictions ended; what was seen before one says nothing after it.
        self._evictions = 0
        self._guard: Deferred[None] | None = None
        self._starting: Deferred[None] | None = None
        self._stopped = False

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> Deferred[None]:
        """Look once: how it was started, and whether anything is loaded."""
        self._starting = d = self._first_look()
        return d

    @inlineCallbacks
    def _first_look(self) -> Generator[Deferred[Any], Any, None]:
        try:
            held = yield self._look(self.probe_timeout)
        except ClientError as e:
            if is_loading(e):
                self.log.info("llama.cpp is loading its model")
                return
            if _wants_key(e):
                self.log.warn(NEEDS_KEY)
                return
            self.log.warn(
                "llama.cpp does not answer at {url}: {error}",
                url=self._client.base_url,
                error=_tell(e),
            )
        except CancelledError:
            pass
        else:
            if held:
                self.log.info("llama.cpp holds {models}", models=", ".join(sorted(held)))
            else:
                self._card.mark_evicted(self.tenant.name)

    def stop(self) -> None:
        """End what runs in the background. A server that we stopped stays so."""
        self._stopped = True
        self._events.stop()
        self.end_guard()
        self._ring()
        self.single.stop()
        for d in (self._starting, self._glancing, self._eviction):
            if d is not None:
                d.cancel()

    def snapshot(self) -> dict[str, Any]:
        """For the state page: what the latest look saw (``models`` is null before the first)."""
        models = self._models
        return {
            "mode": None if models is None else models.mode.value,
            "models": None if models is None else dict(sorted(models.statuses.items())),
            **self.single.snapshot(),
            "events": self._events.open,
            "guarding": self._guard is not None,
        }

    # -- requests --------------------------------------------------------------------------------------------------

    def admission(self, method: bytes, target: bytes) -> Admission:
        """What a request needs now; see :func:`classify`."""
        models = self._models
        answer = classify(method, target, wakes=models is None or models.sleeps)
        if answer is Admission.PASS and self.single.is_down:
            # Nobody would answer; unless somebody else has started it.
            self._glance()
            return Admission.ABSENT
        return answer

    @property
    def needs_start(self) -> bool:
        """Whether :meth:`ensure_started` has anything to do."""
        return self.single.is_down

    def ensure_started(self) -> Deferred[None]:
        """Start a server of one model again that was stopped for another engine.

        Those who ask meanwhile share one start, which a cancelled one leaves to go on. Fails with :class:`StartFailed`.
        """
        return self.single.ensure_started()

    def note_aborted(self, conversation: str | None = None) -> None:
        """A request that had been forwarded was cut off.

        :param conversation: its ``X-Conversation-Id``, with which it goes on although nobody is there.
        """
        self._aborts.note(conversation)

    def loaded(self) -> Deferred[None]:
        """Fires once nothing is being loaded any more, well or badly, within ``load_timeout``.

        For after ``POST /models/load``, which is answered when the loading begins. Never fails but by being cancelled.
        """
        return self._until_loaded(self._clock.seconds() + self.load_timeout)

    @inlineCallbacks
    def _until_loaded(self, deadline: float) -> Generator[Deferred[Any], Any, None]:
        delay = FIRST_DELAY
        while (left := deadline - self._clock.seconds()) > 0 and not self._stopped:
            try:
                yield self._look(min(LOOK_TIMEOUT, left))
            except Unreachable:
                return
            except ClientError as e:
                if isinstance(e, HttpError) and not is_loading(e):
                    return
            else:
                if self._models is None or not self._models.loading:
                    return
            yield self._pause(min(delay, deadline - self._clock.seconds()))
            delay = min(delay * BACKOFF, LOADING_DELAY)

    # -- looking ---------------------------------------------------------------------------------------------------

    @inlineCallbacks
    def _look(self, timeout: float) -> Generator[Deferred[Any], Any, frozenset[str]]:
        """The names of what may be in memory.

        A server of one model has no name for it.
        """
        deadline = self._clock.seconds() + timeout
        try:
            answer = yield self._client.get_json("/models", timeout)
            models = parse_models(answer)
        except Unreachable:
            self._models = None
            raise
        before, self._models = self._models, models
        if before is None or before.mode is not models.mode:
            self._met(models)
        if models.mode is Mode.ROUTER:
            return models.held
        asleep = yield self.single.look(deadline - self._clock.seconds())
        return frozenset() if asleep else frozenset({"its model"})

    def _met(self, models: Models) -> None:
        """It answers for the first time, or again, or as something else."""
        if models.mode is Mode.SINGLE:
            self._events.stop()
            self.single.introduce()
            return
        self.log.info("llama.cpp is a router of {count} models", count=len(models.statuses))
        if self.single.stop_command is not None:
            self.log.info("LLAMA_STOP_COMMAND is not used: a router unloads its models")
        if not self._stopped:
            self._events.start()

    def _pause(self, seconds: float) -> Deferred[None]:
        """Some time, or less if an event tells that something changed."""

        def over(result: Any) -> Any:
            self._pauses.discard(pause)
            if timer.active():
                timer.cancel()
            return result

        pause: Deferred[None] = Deferred()
        timer = self._clock.callLater(max(0.0, seconds), pause.callback, None)
        self._pauses.add(pause)
        return pause.addBoth(over)

    def _ring(self) -> None:
        for pause in tuple(self._pauses):
            if not pause.called:
                pause.callback(None)

    # -- leaving the card ------------------------------------------------------------------------------------------

    def evict(self) -> Deferred[Eviction]:
        """Unload every model until the list shows none, the loading ones included; see there for a server of one."""
        d = self._eviction = self._evict()

        def stopped(failure: Failure) -> Eviction:
            failure.trap(CancelledError)
            return Eviction.TIMED_OUT

        def over(outcome: Any) -> Any:
            self._eviction = None
            self._evictions += 1
            return outcome

        return d.addErrback(stopped).addBoth(over)

    @inlineCallbacks
    def _evict(self) -> Generator[Deferred[Any], Any, Eviction]:
        clock = self._clock
        deadline = clock.seconds() + self.unload_timeout
        complaints: set[tuple[str, type[BaseException]]] = set()

        def complain(what: str, error: Exception, **fields: Any) -> None:
            if (what, type(error)) not in complaints:
                complaints.add((what, type(error)))
                self.log.warn(
                    "llama.cpp: {what} failed: {error}", what=what, error=_tell(error), **fields
                )

        unloader = _Unloader(self._client, clock, complain)
        for conversation in self._aborts.take_conversations():
            unloader.end_conversation(conversation)
        leaving = self.single.leave(deadline)
        stragglers = Stragglers(self._client, clock) if self._aborts.recent else None
        delay = FIRST_DELAY
        empty_since: float | None = None
        seen = answered = False
        refused_at: float | None = None
        try:
            while (left := deadline - clock.seconds()) > 0:
                try:
                    held = yield self._look(min(LOOK_TIMEOUT, left))
                except Unreachable as e:
                    now = clock.seconds()
                    refused_at = now if refused_at is None else refused_at
                    if leaving.begun and (yield leaving.gone()):
                        return Eviction.CONFIRMED
                    if not answered or now - refused_at >= GONE_AFTER:
                        complain("connecting", e)
                        return Eviction.UNREACHABLE
                    empty_since = None
                except ClientError as e:
                    refused_at = empty_since = None
                    if _wants_key(e):
                        self.log.warn(NEEDS_KEY)
                        return Eviction.TIMED_OUT
                    if is_loading(e) and self.mode is not Mode.ROUTER:
                        yield leaving.push()
                    else:
                        complain("/models", e)
                else:
                    answered, refused_at = True, None
                    now = clock.seconds()
                    if held:
                        seen, empty_since = True, None
                        if self.mode is Mode.ROUTER:
                            if self._aborts.may_unload and (
                                stragglers is None or (yield stragglers.gone(self._awake()))
                            ):
                                unloader.ask(held)
                        elif not (yield leaving.push()):
                            return Eviction.TIMED_OUT
                    else:
                        empty_since = now if empty_since is None else empty_since
                        if self._aborts.believe(seen, empty_since):
                            return Eviction.CONFIRMED
                pause = min(
                    delay, self._aborts.decisive_in(empty_since), deadline - clock.seconds()
                )
                yield self._pause(max(FIRST_DELAY, pause))
                delay = min(delay * BACKOFF, max(self.unload_poll_interval, FIRST_DELAY))
            self.log.warn(
                "llama.cpp did not leave the card within {seconds:g} s",
                seconds=self.unload_timeout,
                models=sorted(self._models.held) if self._models is not None else [],
            )
            return Eviction.TIMED_OUT
        finally:
            unloader.cancel()
            leaving.over()

    def _awake(self) -> list[str]:
        models = self._models
        return [] if models is None else sorted(models.loaded)

    @property
    def mode(self) -> Mode | None:
        """How the server was started, as far as is known."""
        return None if self._models is None else self._models.mode

    # -- models that others load -----------------------------------------------------------------------------------

    def _rung(self) -> None:
        """A model's status may have changed."""
        self._ring()
        name = self.tenant.name
        if name not in self._card.resident or self._card.leaves(name):
            self._glance()

    def _glance(self) -> None:
        """See whether something was loaded that did not come through us."""
        if self._stopped or self._eviction is not None:
            return
        if self._glancing is not None:
            self._glance_again = True
            return
        self._glance_again = False
        evictions = self._evictions
        self._glancing = d = self._look(LOOK_TIMEOUT)

        def seen(held: frozenset[str]) -> None:
            if held and self._eviction is None and self._evictions == evictions:
                self._found(held)

        def over(result: Any) -> None:
            self._glancing = None
            if isinstance(result, Failure) and not result.check(ClientError, CancelledError):
                self.log.failure("looking at llama.cpp failed", failure=result)
            if self._glance_again:
                self._glance()

        d.addCallback(seen).addBoth(over)

    def _found(self, held: frozenset[str]) -> None:
        """A model is loaded though it should not be there."""
        name = self.tenant.name
        card = self._card
        if card.leaves(name):
            # Its memory is being waited for: what is loaded now is not what left.
            card.mark_resident(name)
        if name in card.resident:
            return
        others = card.resident
        card.mark_resident(name)
        if not others:
            self.log.info("llama.cpp holds {models}", models=", ".join(sorted(held)))
            return
        card.degrade(name, LOADED_ELSEWHERE)
        alone = {tenant.name for tenant in card.tenants if tenant.kind is Kind.EXCLUSIVE}
        if others & alone:
            self.log.warn(
                "llama.cpp loaded a model while {others} had the card; unloading it again",
                others=", ".join(sorted(others)),
                models=sorted(held),
            )
            # Not waited for: it is the card's to end.
            card.evict(name)

    def guard(self, seconds: float = 5.0) -> None:
        """Keep an eye on the models while an image job begins, if a request was aborted lately."""
        self.end_guard()
        if self._aborts.recent:
            self._guard = d = self._watch(self._clock.seconds() + seconds)
            d.addErrback(lambda f: self.log.failure("guarding an image job failed", failure=f))

    def end_guard(self) -> None:
        """The image job ended."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.cancel()

    @inlineCallbacks
    def _watch(self, until: float) -> Generator[Deferred[Any], Any, None]:
        try:
            while self._clock.seconds() < until:
                yield self._pause(min(0.25, self.unload_poll_interval))
                if self.tenant.name not in self._card.resident:
                    self._glance()
        except CancelledError:
            return
        self._guard = None


def _wants_key(error: BaseException) -> bool:
    return isinstance(error, HttpError) and error.status in (401, 403)


def _tell(error: BaseException) -> str:
    return str(error) or type(error).__name__


__all__ = ["LlamaEngine", "Mode", "StartFailed", "classify"]
