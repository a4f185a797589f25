"""What a node of the simulated ComfyUI needs to call a language model."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IConsumer
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure
from twisted.web.client import ResponseDone
from twisted.web.http import PotentialDataLoss
from twisted.web.iweb import IBodyProducer, IResponse
from zope.interface import implementer


@implementer(IBodyProducer)
class BytesProducer:
    """A request body that is at hand."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.length = len(data)

    def startProducing(self, consumer: IConsumer) -> Deferred[None]:
        consumer.write(self.data)
        return succeed(None)

    def pauseProducing(self) -> None:
        """All has been written already."""

    def resumeProducing(self) -> None:
        """All has been written already."""

    def stopProducing(self) -> None:
        """All has been written already."""


class _Collector(Protocol):
    """Gathers an answer's body; cancelling drops the connection."""

    transport: Any

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.done: Deferred[bytes] = Deferred(lambda _: self.transport.stopProducing())

    def dataReceived(self, data: bytes) -> None:
        self.parts.append(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self.done.called:
            return
        if isinstance(reason.value, (ResponseDone, PotentialDataLoss)):
            self.done.callback(b"".join(self.parts))
        else:
            self.done.errback(reason)


def collect(response: IResponse) -> Deferred[bytes]:
    """The whole body of an answer; fails if it is cut off."""
    collector = _Collector()
    response.deliverBody(collector)
    return collector.done
