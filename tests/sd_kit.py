"""An engine for sd-server in virtual time: processes that are objects, and an API that answers for them."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from engine_kit import Http, Response
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.task import Clock, deferLater

from turnstile.arbiter import Arbiter, Kind, Lease, Tenant
from turnstile.card import Card, Eviction
from turnstile.child.fanout import Fanout
from turnstile.child.process import ExitStatus
from turnstile.engines.client import JsonClient
from turnstile.engines.sdserver import SdEngine

CHAT = Tenant("ollama", Kind.SHARED)
#: Seconds from a signal to the end of a process, and from there to the end of its group.
DYING = 0.03
GROUP = 0.02
#: Greater than any real process id.
PIDS = 5_000_000


class MemoryChild:
    """A child without a process."""

    def __init__(self, host: Host, pid: int) -> None:
        self.host = host
        self.pid = pid
        self.status: ExitStatus | None = None
        self.gone = False
        self.lines: list[str] = []
        self.signals: list[str] = []
        self.listens_at: float | None = (
            None if host.load is None else host.clock.seconds() + host.load
        )
        self.obeys = True
        self.mortal = True
        self._exited: Fanout[ExitStatus] = Fanout()
        self._gone: Fanout[ExitStatus] = Fanout()
        self._deadline: Any = None

    @property
    def listening(self) -> bool:
        return (
            self.status is None
            and self.listens_at is not None
            and self.host.clock.seconds() >= self.listens_at
        )

    def when_exited(self) -> Deferred[ExitStatus]:
        return self._exited.wait()

    def when_gone(self) -> Deferred[ExitStatus]:
        return self._gone.wait()

    def when_settled(self) -> Deferred[ExitStatus]:
        return self._gone.wait()

    def tail(self, lines: int) -> list[str]:
        return self.lines[-lines:]

    def terminate(self, grace: float) -> Deferred[ExitStatus]:
        if self.status is None:
            if grace <= 0:
                self._kill()
            elif self._deadline is None:
                self.signals.append("TERM")
                if self.obeys:
                    self.host.clock.callLater(DYING, self.exit, ExitStatus(signal=signal.SIGTERM))
                self._deadline = self.host.clock.callLater(grace, self._kill)
        return self.when_gone()

    def _kill(self) -> None:
        self.signals.append("KILL")
        if self.mortal:
            self.host.clock.callLater(DYING, self.exit, ExitStatus(signal=signal.SIGKILL))

    def exit(self, status: ExitStatus) -> None:
        """It ends, by itself or not."""
        if self.status is not None:
            return
        if self._deadline is not None and self._deadline.active():
            self._deadline.cancel()
        self.status = status
        self._exited.fire(status)
        self.host.clock.callLater(GROUP, self._end_of_group)

    def _end_of_group(self) -> None:
        self.gone = True
        assert self.status is not None
        self._gone.fire(self.status)


class Host:
    """Where children are started. ``load``: seconds until they listen; None: they never do."""

    def __init__(self, clock: Clock, load: float | None = 10.0) -> None:
        self.clock = clock
        self.load = load
        self.children: list[MemoryChild] = []
        self.error: Exception | None = None
        #: Is called with each new child.
        self.on_launch: Callable[[MemoryChild], None] = lambda child: None
        #: What a look at the port gets, whatever the child is doing.
        self.foreign: Any = None
        self.jobs: dict[str, Any] = {}
        self.http = Http()
        self.http.answer = self._answer

    def launch(self) -> MemoryChild:
        if self.error is not None:
            raise self.error
        assert all(child.gone for child in self.children), "two processes at once"
        child = MemoryChild(self, PIDS + len(self.children))
        self.children.append(child)
        self.on_launch(child)
        return child

    @property
    def child(self) -> MemoryChild:
        """The latest."""
        return self.children[-1]

    @property
    def looks(self) -> list[str]:
        """The jobs that were looked at."""
        return [path.rpartition("/")[2] for _, path, _ in self.http.calls if "/jobs/" in path]

    def _answer(self, method: str, path: str, payload: Any) -> Any:
        if self.foreign is not None:
            return self.foreign
        if not self.children or not self.child.listening:
            return ConnectionRefusedError()
        if path.startswith("/sdcpp/v1/jobs/"):
            job = self.jobs.get(path.rpartition("/")[2])
            return Response(404, b'{"error":"job not found"}') if job is None else job
        return {"data": []}


class World:
    """The engine with its arbiter, card and host, and a chat engine that leaves at once."""

    def __init__(self, load: float | None = 10.0, **settings: Any) -> None:
        self.clock = Clock()
        self.host = Host(self.clock, load)
        self.arbiter = Arbiter(self.clock)
        self.card = Card(self.clock)
        client = JsonClient(self.host.http, self.clock, "http://127.0.0.1:55557")
        self.engine = SdEngine(
            client,
            self.clock,
            self.arbiter,
            self.card,
            self.host.launch,
            **{
                "idle": 300.0,
                "load_wait": 900.0,
                "stop_grace": 5.0,
                "job_timeout": 600.0,
                "probe_timeout": 5.0,
                "backoff_initial": 1.0,
                "backoff_max": 60.0,
                **settings,
            },
        )
        self.card.register(self.engine, resident=False)
        self.chat = ChatEngine()
        self.card.register(self.chat, resident=False)

    def pass_time(self, seconds: float, step: float = 0.05) -> None:
        """Let time pass."""
        whole, rest = divmod(seconds, step)
        for _ in range(int(whole)):
            self.clock.advance(step)
        self.clock.advance(rest)

    def lease(self) -> Lease:
        """A lease for sd-server, had at once."""
        lease = self.arbiter.try_acquire(self.engine.tenant, "POST /sdapi/v1/txt2img", "test")
        assert lease is not None
        return lease

    def ask(self) -> Deferred[None]:
        """Ask for it as a request does: with the card, until it is there or not."""
        lease = None if self.arbiter.tenant == self.engine.tenant else self.lease()
        d = self.engine.ensure_up()

        def over(result: Any) -> Any:
            if lease is not None:
                lease.release()
            return result

        return d.addBoth(over)

    def up(self) -> None:
        """Have it running, with nobody using it."""
        lease = self.lease()
        self.engine.ensure_up()
        self.pass_time((self.host.load or 0.0) + 1.0)
        assert self.engine.is_up
        lease.release()

    def wait(self, seconds: float) -> Deferred[None]:
        """For coroutines."""
        return deferLater(self.clock, seconds, lambda: None)

    async def draw(self, seconds: float = 2.0) -> None:
        """What the gate of a request does."""
        lease = await self.arbiter.acquire(self.engine.tenant, "POST /sdapi/v1/txt2img", "test")
        try:
            room = self.card.make_room(self.engine.tenant)
            if room is not None:
                await room
            if not self.engine.is_up:
                await self.engine.ensure_up()
            child = self.host.child
            assert child.listening
            self.engine.begin_generation(lease)
            try:
                await self.wait(seconds)
                assert child.listening, "sd-server was stopped under a request"
            finally:
                self.engine.end_generation(lease)
        finally:
            lease.release()

    async def talk(self, seconds: float = 1.0) -> None:
        """A chat."""
        lease = await self.arbiter.acquire(CHAT, "POST /api/chat", "test")
        try:
            room = self.card.make_room(CHAT)
            if room is not None:
                await room
            assert all(child.gone for child in self.host.children)
            self.card.mark_resident(CHAT.name)
            await self.wait(seconds)
        finally:
            lease.release()


class ChatEngine:
    """One that leaves at once."""

    tenant = CHAT

    def evict(self) -> Deferred[Eviction]:
        d: Deferred[Eviction] = Deferred()
        d.callback(Eviction.CONFIRMED)
        return d
