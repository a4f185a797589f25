"""A gate and a policy that record their calls, for tests of the data path; and waiting without polling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet import reactor as _reactor
from twisted.internet.defer import Deferred, succeed
from twisted.web.resource import Resource

from turnstile.engines.base import Admission
from turnstile.proxy.gate import Ending
from turnstile.proxy.http1 import RequestHead

reactor: Any = _reactor
#: Real seconds after which something counts as never coming.
PATIENCE = 15.0


class Watched:
    """Lets tests wait for a condition, which is looked at whenever something happened."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], Any], Deferred[Any]]] = []

    def look(self) -> None:
        """Something happened."""
        for entry in tuple(self._waiting):
            if entry in self._waiting and entry[0]():
                self._waiting.remove(entry)
                # Not from within what is being tested.
                reactor.callLater(0, self._fire, entry[1])

    def _fire(self, d: Deferred[Any]) -> None:
        if not d.called:
            d.callback(None)

    def when(self, condition: Callable[[], Any], what: object = "") -> Deferred[Any]:
        """Fires once ``condition`` holds."""
        if condition():
            return succeed(None)
        d: Deferred[Any] = Deferred()
        self._waiting.append((condition, d))

        def too_late(value: Any, timeout: float) -> Any:
            raise AssertionError(f"it never came true: {what or condition} {self!r}")

        return d.addTimeout(PATIENCE, reactor, too_late)


class FakeGate:
    """Records its calls; a test holds the keys."""

    capture = 0
    detached = False
    prepares = False

    def __init__(self, policy: FakePolicy) -> None:
        self._policy = policy
        self.calls: list[Any] = []
        self.entering: Deferred[None] | None = None
        self.preparing: Deferred[None] | None = None
        self.prepares = policy.prepare is not None
        self.clearing: Deferred[None] | None = None
        self.cancelled = 0
        self.capture = policy.capture
        self.detached = policy.detached

    def contended(self) -> bool:
        return self._policy.contended

    def _call(self, *call: Any) -> None:
        self.calls.append(call[0] if len(call) == 1 else call)
        self._policy.look()

    def _cancelled(self, _: object) -> None:
        self.cancelled += 1
        self._policy.look()

    def enter(self) -> Deferred[None] | None:
        self._call("enter")
        if isinstance(self._policy.enter, Exception):
            raise self._policy.enter
        if self._policy.enter == "now":
            return None
        self.entering = Deferred(self._cancelled)
        self._policy.look()
        return self.entering

    def prepare(self) -> Deferred[None] | None:
        self._call("prepare")
        if self._policy.prepare == "now":
            return None
        self.preparing = Deferred(self._cancelled)
        self._policy.look()
        return self.preparing

    def leave(self) -> None:
        self._call("leave")

    def room(self) -> Deferred[None] | None:
        self._call("room")
        if self._policy.room == "now":
            return None
        self.clearing = Deferred(self._cancelled)
        self._policy.look()
        return self.clearing

    def forwarding(self) -> None:
        self._call("forwarding")

    def answered(self, status: int, fields: Any) -> None:
        self._call("answered", status)

    def captured(self, body: bytes, complete: bool) -> None:
        self._call("captured", body, complete)

    def end(self, ending: Ending, *, body_sent: bool) -> None:
        assert not [call for call in self.calls if call[0] == "end"], "end was called twice"
        self._call("end", ending, body_sent)

    @property
    def ending(self) -> Any:
        """How it ended, and whether the request was all sent; None: not yet."""
        return self.calls[-1][1:] if self.calls and self.calls[-1][0] == "end" else None


class FakePolicy(Watched):
    """Requests for ``/gated`` take the lock, those for ``/peek`` are looked into."""

    engine = "fake"
    retry_after = 7
    keeps_client_host = False
    stall_timeout: float | None = 600.0

    def __init__(self) -> None:
        super().__init__()
        self.enter: Any = "now"
        #: What gates do to prepare the upstream: nothing (None), at once ("now"), or wait for the test ("later").
        self.prepare: str | None = None
        #: Whether the engine of ``/observe`` does not run.
        self.is_absent = False
        self.room = "now"
        self.capture = 0
        self.detached = False
        self.contended = False
        self.gates: list[FakeGate] = []
        self.asked: list[bytes] = []
        #: What the metrics are told.
        self.done: list[int] = []
        self.retries: list[str] = []

    def admission(self, method: bytes, target: bytes) -> Admission:
        if target.startswith((b"/gated", b"/v1/gated", b"/api/gated")):
            return Admission.LEASE
        if self.is_absent and target.startswith((b"/observe", b"/v1/observe")):
            return Admission.ABSENT
        return Admission.PEEK if target.startswith(b"/peek") else Admission.PASS

    def is_unload_only(self, target: bytes, body: bytes) -> bool:
        self.asked.append(body)
        return body == b"unload"

    def absent(self) -> tuple[str, dict[str, Any]]:
        return "fake is not loaded", {"state": "down"}

    def open_gate(self, head: RequestHead, client: str) -> FakeGate:
        self.gates.append(FakeGate(self))
        return self.gates[-1]

    def request_done(self, engine: str, status: int) -> None:
        self.done.append(status)
        self.look()

    def retried(self, engine: str, reason: str) -> None:
        self.retries.append(reason)
        self.look()

    @property
    def gate(self) -> FakeGate:
        """The only gate."""
        assert len(self.gates) == 1
        return self.gates[0]

    def waiting(self, count: int = 1) -> Deferred[Any]:
        """Wait for requests to wait at their gates."""
        return self.when(
            lambda: sum(1 for gate in self.gates if gate.entering) >= count, "a waiter"
        )

    def preparing(self) -> Deferred[Any]:
        """Wait for the only gate to prepare the upstream."""
        return self.when(lambda: self.gates and self.gate.preparing, "the upstream prepared")

    def clearing(self) -> Deferred[Any]:
        """Wait for room to be made at the only gate."""
        return self.when(lambda: self.gates and self.gate.clearing, "room being made")

    def ended(self, ending: Ending, body_sent: bool) -> Deferred[Any]:
        """Wait for the only gate to have ended thus."""
        return self.when(lambda: self.gates and self.gate.ending == (ending, body_sent), ending)


class Hello(Resource):
    """A page of our own."""

    def render(self, request: Any) -> bytes:
        request.setHeader(b"Content-Type", b"text/plain")
        return b"hello"
