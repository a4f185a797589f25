"""Tells systemd how the service is: ready, reloading, stopping, a status line, signs of life (sd_notify(3)).

A datagram to the socket that NOTIFY_SOCKET names, and nothing at all without it. Python's packages for this block when
systemd is slow to read, which the reactor must not, and are no longer than what is left of this module without them.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, MutableMapping
from typing import Any

import attrs
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IDelayedCall, IReactorTime, IReadDescriptor
from twisted.python.failure import Failure
from zope.interface import implementer

from turnstile.arbiter import Arbiter, Event, Kind
from turnstile.card import Card, Degraded
from turnstile.log import Logger

_log = Logger()

#: Seconds between two attempts to send what systemd could not take.
RETRY_AFTER = 0.1
#: The most messages that wait to be sent.
MOST_PENDING = 16
#: The fewest seconds between two status lines.
STATUS_INTERVAL = 1.0
#: Signs of life in the time that systemd waits for one.
BEATS = 3
#: Seconds beyond its own limits that a stop may take, before systemd ends it.
STOP_SLACK = 15.0


@attrs.frozen
class Manager:
    """What systemd wants to hear.

    :ivar address: where to send it, as `socket.socket.sendto` takes it; ``None``: nobody listens.
    :ivar watchdog: seconds without a sign of life after which the process is ended; ``None``: never.
    """

    address: str | None = None
    watchdog: float | None = None


def take_environment(environ: MutableMapping[str, str], pid: int) -> Manager:
    """Read what systemd left in the environment and take it out, so that no child speaks in our name."""
    address = environ.pop("NOTIFY_SOCKET", "")
    microseconds = environ.pop("WATCHDOG_USEC", "")
    for_pid = environ.pop("WATCHDOG_PID", "")
    if address[:1] not in ("/", "@"):
        if address:
            _log.warn(
                "NOTIFY_SOCKET is no unix socket, systemd is told nothing: {address}",
                address=address,
            )
        return Manager()
    watchdog = None
    if microseconds.isdecimal() and int(microseconds) and for_pid in ("", str(pid)):
        watchdog = int(microseconds) / 1e6
    # An abstract socket's name begins with a zero byte.
    return Manager("\0" + address[1:] if address.startswith("@") else address, watchdog)


class Notifier:
    """Sends messages to systemd without ever waiting for it.

    :param address: see :class:`Manager`; ``None``: every method does nothing.
    :param monotonic: microseconds of CLOCK_MONOTONIC.
    """

    def __init__(
        self,
        clock: IReactorTime,
        address: str | None,
        *,
        monotonic: Callable[[], int] = lambda: time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000,
    ) -> None:
        self._clock = clock
        self._address = address
        self._monotonic = monotonic
        self._socket: socket.socket | None = None
        self._pending: deque[str] = deque(maxlen=MOST_PENDING)
        self._retry: IDelayedCall | None = None
        self._failed = False
        if address is not None:
            self._socket = socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            )

    @property
    def enabled(self) -> bool:
        """Whether somebody listens."""
        return self._socket is not None

    def ready(self, status: str) -> None:
        """The service is up, or has read its configuration anew."""
        self._send(f"READY=1\nSTATUS={_line(status)}")

    def status(self, status: str) -> None:
        """What ``systemctl status`` shows."""
        self._send(f"STATUS={_line(status)}")

    def reloading(self) -> None:
        """The configuration is being read anew; :meth:`ready` follows."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={self._monotonic()}")

    def stopping(self, status: str, seconds: float) -> None:
        """The service stops, which may take ``seconds``."""
        extend = round((seconds + STOP_SLACK) * 1e6)
        self._send(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={extend}\nSTATUS={_line(status)}")

    def beat(self) -> None:
        """A sign of life; one that can't be sent now is not sent later."""
        self._send("WATCHDOG=1", keep=False)

    def close(self) -> None:
        """Say no more."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self._flush()
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()

    def _send(self, message: str, keep: bool = True) -> None:
        if self._socket is None:
            return
        if keep:
            self._pending.append(message)
            self._flush()
        else:
            self._try(message)

    def _flush(self) -> None:
        while self._pending and self._try(self._pending[0]):
            self._pending.popleft()
        if self._pending and self._retry is None and self._socket is not None:
            self._retry = self._clock.callLater(RETRY_AFTER, self._again)

    def _again(self) -> None:
        self._retry = None
        self._flush()

    def _try(self, message: str) -> bool:
        """Send; false if it is worth another try."""
        assert self._socket is not None and self._address is not None
        try:
            self._socket.sendto(message.encode(), self._address)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            if not self._failed:
                self._failed = True
                _log.warn("systemd can't be told: {problem}", problem=error.strerror or error)
        return True


def _line(text: str) -> str:
    return " ".join(text.split())


# -- the status line -------------------------------------------------------------------------------------------------


def describe(arbiter: Arbiter, card: Card) -> str:
    """The state of the card in one line."""
    tenant = arbiter.tenant
    if tenant is None:
        text = "idle"
        if card.resident:
            text += f" ({', '.join(sorted(card.resident))} may hold memory)"
        if arbiter.held:
            text = "looking at the engines"
    elif tenant.kind is Kind.SHARED:
        text = f"llm: {_count(len(arbiter.leases), 'request')} of {tenant.name}"
    else:
        text = f"image: a job of {tenant.name}"
    waiting = [
        f"{number} {kind.value}"
        for kind in (Kind.EXCLUSIVE, Kind.SHARED)
        for number in (sum(1 for _ in arbiter.waiting(kind)),)
        if number
    ]
    if waiting:
        text += f"; waiting: {', '.join(waiting)}"
    for interval in card.degraded:
        text += f"; degraded: {interval.culprit}: {interval.reason}"
    return text


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


class StatusLine:
    """Keeps systemd's status line true: told of changes, sends at most one line in ``STATUS_INTERVAL``."""

    def __init__(
        self, clock: IReactorTime, notifier: Notifier, arbiter: Arbiter, card: Card
    ) -> None:
        self._clock = clock
        self._notifier = notifier
        self._arbiter = arbiter
        self._card = card
        self._sent = ""
        self._sent_at: float | None = None
        self._call: IDelayedCall | None = None
        self._stopped = False
        arbiter.add_listener(self._arbiter_event)
        card.add_listener(self._degraded)

    def text(self) -> str:
        """The line as it should be now; taken for sent."""
        self._sent = describe(self._arbiter, self._card)
        self._sent_at = self._clock.seconds()
        return self._sent

    def stop(self) -> None:
        """Send no more."""
        self._stopped = True
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def changed(self) -> None:
        """Something changed that the line may show."""
        if self._call is not None or self._stopped:
            return
        wait = 0.0
        if self._sent_at is not None:
            wait = max(0.0, self._sent_at + STATUS_INTERVAL - self._clock.seconds())
        self._call = self._clock.callLater(wait, self._tell)

    def _arbiter_event(self, event: Event) -> None:
        self.changed()

    def _degraded(self, interval: Degraded) -> None:
        self.changed()

    def _tell(self) -> None:
        self._call = None
        before = self._sent
        if self.text() != before:
            self._notifier.status(self._sent)


# -- the watchdog ----------------------------------------------------------------------------------------------------


@implementer(IReadDescriptor)
class Pulse:
    """Gives signs of life while the reactor lives: each is a byte that the reactor has to carry through a socket.

    So both its timers and its input work, and nothing holds it up, when systemd hears of it.

    :param timeout: seconds after which a process that is not heard of is ended.
    :param beat: gives the sign.
    :param ailment: what is wrong with the service; empty: nothing. No sign is given while there is something.
    """

    def __init__(
        self, reactor: Any, timeout: float, beat: Callable[[], None], ailment: Callable[[], str]
    ) -> None:
        self._reactor = reactor
        self._interval = timeout / BEATS
        self._beat = beat
        self._ailment = ailment
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._call: IDelayedCall | None = None
        self._due = 0.0
        self._told = ""

    def start(self) -> None:
        """Begin, with a sign at once."""
        self._ends = reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        self._reactor.addReader(self)
        self._due = self._reactor.seconds()
        self._send()

    def stop(self) -> None:
        """Give no more signs."""
        if self._call is not None:
            self._call.cancel()
            self._call = None
        ends, self._ends = self._ends, None
        if ends is not None:
            self._reactor.removeReader(self)
            for end in ends:
                end.close()

    def _send(self) -> None:
        now = self._reactor.seconds()
        late = now - self._due
        if late >= self._interval:
            _log.warn(
                "the reactor stood still for {seconds:.1f} s (the watchdog ends it after {limit:g} s)",
                seconds=late,
                limit=self._interval * BEATS,
            )
        self._due = now + self._interval
        self._call = self._reactor.callLater(self._interval, self._send)
        assert self._ends is not None
        with contextlib.suppress(BlockingIOError):
            self._ends[1].send(b".")

    def fileno(self) -> int:
        return self._ends[0].fileno() if self._ends is not None else -1

    def logPrefix(self) -> str:
        return "watchdog"

    def doRead(self) -> None:
        assert self._ends is not None
        with contextlib.suppress(BlockingIOError):
            self._ends[0].recv(4096)
        ailment = self._ailment()
        if ailment != self._told:
            self._told = ailment
            if ailment:
                _log.error("no signs of life to systemd any more: {ailment}", ailment=ailment)
        if not ailment:
            self._beat()

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:  # noqa: B008
        self.stop()


__all__ = [
    "Manager",
    "Notifier",
    "Pulse",
    "StatusLine",
    "describe",
    "take_environment",
]
