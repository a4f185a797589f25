"""The process of sd-server: started, waited for until it listens, ended; never two at once."""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

from twisted.internet.defer import Deferred, fail, inlineCallbacks, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from turnstile.child.fanout import Fanout
from turnstile.child.listeners import Listener
from turnstile.child.process import Child, ExitStatus
from turnstile.durations import format_duration
from turnstile.engines.client import BadAnswer, ClientError, HttpError, JsonClient, Unreachable
from turnstile.engines.sd_start import Backoff, Cooling, LoadFailed

#: What is asked to see whether it listens, and the most seconds that one look may take.
PROBE = "/v1/models"
LOOK_TIMEOUT = 5.0
#: Seconds between looks while it loads, first and longest.
FIRST_DELAY = 0.02
LONGEST_DELAY = 0.25
BACKOFF = 1.5
#: How many lines of its output go with an error, and how many of these into turnstile's own log.
TAIL = 50
LOGGED_TAIL = 5


class State(enum.Enum):
    """What there is of sd-server."""

    DOWN = "down"
    LOADING = "loading"
    UP = "up"
    STOPPING = "stopping"


class Owner(Protocol):
    """Who is told of the process's life."""

    def starting(self) -> bool:
        """A process is about to be there; false: it may not, since whom it was for is gone."""
        ...

    def listening(self) -> None:
        """It listens."""
        ...

    def exited(self) -> None:
        """It ended; more of its group may be there."""
        ...

    def gone(self) -> None:
        """Nothing of it is there any more."""
        ...


class SdProcess:
    """All the processes that sd-server is in the course of time. Its state is that of the child, and kept nowhere else.

    :param client: calls to its API.
    :param launch: starts the program; may raise OSError.
    :param load_wait: seconds until it has to listen.
    :param stop_grace: seconds between SIGTERM and SIGKILL.
    :param log_path: where its output goes.
    :param listeners: tells who listens on a port of this machine, unless a process's group does, as far as that is
        known; see :func:`turnstile.child.listeners.listeners_on`.
    """

    log = Logger()

    def __init__(
        self,
        owner: Owner,
        client: JsonClient,
        clock: IReactorTime,
        launch: Callable[[], Child],
        backoff: Backoff,
        *,
        load_wait: float,
        stop_grace: float,
        log_path: str,
        listeners: Callable[[int, int | None], Sequence[Listener]],
    ) -> None:
        self._owner = owner
        self._client = client
        self._clock = clock
        self._launch = launch
        self._backoff = backoff
        self.load_wait = load_wait
        self.stop_grace = stop_grace
        self._log_path = log_path
        self._listeners = listeners
        parts = urlsplit(client.base_url)
        self._address = parts.netloc
        self._port = parts.port or 80

        self.child: Child | None = None
        #: When the child was started, and since when it listens.
        self._began = 0.0
        self._up_since: float | None = None
        #: Whether the child was told to end.
        self._ending = False
        #: A start under way: who waits for it, its work, and why that is given up.
        self._loading: Fanout[None] | None = None
        self._work: Deferred[Any] | None = None
        self._why: LoadFailed | None = None

        self._starts = 0
        self._crashes = 0
        self._last_exit: str | None = None
        self._load_seconds: float | None = None

    # -- what anyone may look at -----------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """What there is of it."""
        child = self.child
        if child is None:
            return State.DOWN if self._loading is None else State.LOADING
        if self._ending or child.status is not None:
            return State.STOPPING
        return State.LOADING if self._up_since is None else State.UP

    def snapshot(self) -> dict[str, Any]:
        """What the state page shows."""
        now = self._clock.seconds()
        state, child, since = self.state, self.child, self._up_since
        return {
            "state": state.value,
            "pid": None if child is None else child.pid,
            "uptime": None if since is None else round(now - since, 1),
            "loading_for": round(now - self._began, 1)
            if state is State.LOADING and child
            else None,
            "last_load_seconds": self._load_seconds,
            "starts": self._starts,
            "crashes": self._crashes,
            "last_exit": self._last_exit,
            "failures_in_a_row": self._backoff.failures,
            "retry_in": round(self._backoff.left(now), 1),
            "log": self._log_path,
        }

    # -- starting it -----------------------------------------------------------------------------------------------

    @property
    def cooling(self) -> Cooling | None:
        """Why, and for how long, it is not started now, should it not run."""
        left = self._backoff.left(self._clock.seconds())
        return Cooling(left, self._backoff.reason) if left > 0 and self.child is None else None

    def ensure_up(self) -> Deferred[None]:
        """Start it, unless it runs; fires when it listens. Fails with :class:`LoadFailed` or :class:`Cooling`.

        All who ask meanwhile wait for the same start, which goes on when they are gone.
        """
        if self.state is State.UP:
            return succeed(None)
        loading = self._loading
        if loading is None:
            left = self._backoff.left(self._clock.seconds())
            if left > 0:
                return fail(Cooling(left, self._backoff.reason))
            loading = self._loading = Fanout()
            self._begin_loading(loading)
        return loading.wait()

    def _begin_loading(self, loading: Fanout[None]) -> None:
        self._why = None
        work = self._work = self._load()

        def over(result: Any) -> None:
            self._loading = self._work = None
            loading.fire(self._failed(result) if isinstance(result, Failure) else None)

        work.addBoth(over)

    @inlineCallbacks
    def _load(self) -> Generator[Deferred[Any], Any, None]:
        if self.child is not None:
            # The one before is on its way out; what it holds is not free until then.
            yield self.child.when_gone()
        yield self.check_port(LOOK_TIMEOUT)
        if not self._owner.starting():
            raise LoadFailed("sd-server is not started: nobody waits for it any more", status=503)
        self._began = self._clock.seconds()
        try:
            child = self._launch()
        except (OSError, ValueError) as error:
            self._owner.gone()
            reason = f"sd-server can't be started: {getattr(error, 'strerror', None) or error}"
            self._count_failure(reason, ())
            raise LoadFailed(reason) from None
        self.child, self._ending, self._up_since = child, False, None
        self._starts += 1
        self.log.info("sd-server starts (pid {pid})", pid=child.pid, log=self._log_path)
        child.when_exited().addCallback(self._exited, child)
        child.when_gone().addCallback(self._gone, child)
        yield self._until_it_listens(child)
        now = self._up_since = self._clock.seconds()
        self._load_seconds = round(now - self._began, 3)
        self.log.info("sd-server listens after {seconds:.1f} s", seconds=now - self._began)
        self._owner.listening()

    @inlineCallbacks
    def _until_it_listens(self, child: Child) -> Generator[Deferred[Any], Any, None]:
        deadline = self._began + self.load_wait
        delay = FIRST_DELAY
        while True:
            left = deadline - self._clock.seconds()
            if left <= 0:
                wait = format_duration(self.load_wait)
                reason = f"sd-server did not listen on {self._address} within {wait}"
                raise self._stillborn(child, reason, 504)
            answers = yield self._answers(min(LOOK_TIMEOUT, left))
            if answers:
                break
            yield deferLater(self._clock, min(delay, left))
            delay = min(delay * BACKOFF, LONGEST_DELAY)
        found = self._listeners(self._port, child.pid)
        if found:
            raise self._stillborn(child, self._taken(found))

    def _stillborn(self, child: Child, reason: str, status: int = 502) -> LoadFailed:
        tail = child.tail(TAIL)
        self._count_failure(reason, tail)
        return LoadFailed(reason, tail, status)

    @inlineCallbacks
    def _answers(self, timeout: float) -> Generator[Deferred[Any], Any, bool]:
        try:
            yield self._client.get_json(PROBE, timeout)
        except BadAnswer:
            pass
        except HttpError as error:
            # 503: it listens before it has loaded.
            return error.status != 503
        except ClientError:
            return False
        return True

    @inlineCallbacks
    def check_port(self, timeout: float) -> Generator[Deferred[Any], Any, None]:
        """Make sure that nobody is in its place: no process of others, nor one that another turnstile left.

        Fails with :class:`LoadFailed`, after ``timeout`` seconds at most.
        """
        try:
            yield self._client.get_json(PROBE, timeout)
        except Unreachable:
            return
        except ClientError:
            pass
        raise LoadFailed(self._taken(self._listeners(self._port, None)))

    def _taken(self, found: Sequence[Listener]) -> str:
        who = ", ".join(map(str, found)) or "something"
        return f"{self._address}, sd-server's place, is taken: {who} listens there, not started by turnstile"

    def give_up(self, why: LoadFailed) -> None:
        """End a start under way; who waits for it gets ``why``."""
        if self._work is not None and self._why is None:
            self._why = why
            self._work.cancel()

    def _failed(self, failure: Failure) -> Failure:
        why, self._why = self._why, None
        if why is not None:
            failure = Failure(why)
        elif not failure.check(LoadFailed):
            self.log.failure("sd-server could not be started", failure=failure)
            failure = Failure(LoadFailed("sd-server could not be started"))
        if self.child is not None:
            self.end(self.child)
        return failure

    def _count_failure(self, reason: str, tail: Sequence[str]) -> None:
        self._backoff.failed(self._clock.seconds(), reason)
        self.log.warn("{reason}", reason=reason, log=self._log_path, tail=list(tail)[-LOGGED_TAIL:])

    # -- its end ---------------------------------------------------------------------------------------------------

    def end(self, child: Child, grace: float | None = None) -> Deferred[ExitStatus]:
        """Tell it to end; fires when it is gone with all of its group.

        :param grace: seconds until it is killed, if not the usual ones.
        """
        if not self._ending and child.status is None:
            self._ending = True
            self.log.info("sd-server (pid {pid}) is told to end", pid=child.pid)
        return child.terminate(self.stop_grace if grace is None else grace)

    def _exited(self, status: ExitStatus, child: Child) -> None:
        self._last_exit = str(status)
        if self._ending:
            self.log.info(
                "sd-server (pid {pid}) ended: {status}", pid=child.pid, status=str(status)
            )
        else:
            self._crashes += 1
            when = " while it loaded" if self._up_since is None else ""
            self._count_failure(f"sd-server ended by itself{when}: {status}", child.tail(TAIL))
        self._owner.exited()

    def _gone(self, status: ExitStatus, child: Child) -> None:
        unasked, loaded = not self._ending, self._up_since is not None
        self.child, self._ending, self._up_since = None, False, None
        self._owner.gone()
        if unasked and not loaded:
            reason = f"sd-server ended by itself while it loaded: {status}"
            self.give_up(LoadFailed(reason, child.tail(TAIL)))
