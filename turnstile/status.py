"""The pages about turnstile itself: health, metrics, state."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from twisted.internet.interfaces import IReactorTime
from twisted.web.resource import Resource

from turnstile.arbiter import Arbiter, Event, Kind, Tenant, Transition, Waiter
from turnstile.card import Card
from turnstile.engines.base import Engine, snapshot_of
from turnstile.metrics import Metrics

#: How many transitions, and how many past degraded intervals, the state page shows.
REMEMBERED = 50
_OPENMETRICS = "application/openmetrics-text"


class StateRecorder:
    """Remembers the latest transitions of the card."""

    def __init__(self, arbiter: Arbiter) -> None:
        self.transitions: deque[Transition] = deque(maxlen=REMEMBERED)
        arbiter.add_listener(self._heard, Transition)

    def _heard(self, event: Event) -> None:
        if type(event) is Transition:
            self.transitions.append(event)


class Page(Resource):
    """A leaf that is the same for everybody and not to be cached."""

    isLeaf = True

    def answer(self, request: Any, content_type: str, body: bytes) -> bytes:
        request.setHeader(b"content-type", content_type.encode("ascii"))
        request.setHeader(b"cache-control", b"no-store")
        return body

    def answer_json(self, request: Any, what: Any, indent: int | None = None) -> bytes:
        body = json.dumps(what, indent=indent, default=str).encode() + b"\n"
        return self.answer(request, "application/json", body)


class HealthResource(Page):
    """What a health check wants to know: three keys and no more."""

    def __init__(self, arbiter: Arbiter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arbiter = arbiter

    def render_GET(self, request: Any) -> bytes:
        """Answer 200 with the state of the card."""
        arbiter = self._arbiter
        health = {
            "state": arbiter.state,
            "llm_inflight": arbiter.llm_inflight,
            "image_pending": arbiter.image_pending,
        }
        return self.answer_json(request, health)


class MetricsResource(Page):
    """The metrics in Prometheus's text format 0.0.4, or OpenMetrics for those who ask for it.

    prometheus_client has a resource for Twisted, but it is a WSGI application that runs in a thread, while the
    reactor's thread changes what it reads.
    """

    def __init__(self, metrics: Metrics) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._metrics = metrics

    def render_GET(self, request: Any) -> bytes:
        """Answer with all metrics."""
        from prometheus_client.exposition import choose_encoder

        accept = (request.getHeader(b"accept") or b"").decode("latin-1")
        encode, content_type = choose_encoder(_OPENMETRICS if _OPENMETRICS in accept else "")
        return self.answer(request, content_type, encode(self._metrics.registry))


class StateResource(Page):
    """Everything that goes on, for people.

    :param vram: what is known of the card's memory; ``None``: nobody can tell.
    :param gpu_share: who divides the card's time by GPU-share.
    :param wall: seconds since the epoch; the clock's own zero is nobody's business.
    """

    def __init__(
        self,
        arbiter: Arbiter,
        card: Card,
        engines: Sequence[Engine],
        clock: IReactorTime,
        version: str,
        recorder: StateRecorder,
        metrics: Metrics | None = None,
        *,
        vram: Callable[[], dict[str, Any] | None] | None = None,
        gpu_share: Callable[[], dict[str, Any]] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._vram = vram
        self._gpu_share = gpu_share
        self._arbiter = arbiter
        self._card = card
        self._engines = engines
        self._clock = clock
        self._version = version
        self._recorder = recorder
        self._metrics = metrics
        self._wall = wall
        self._began = clock.seconds()

    def render_GET(self, request: Any) -> bytes:
        """Answer with the state as JSON."""
        return self.answer_json(request, self.state(), indent=2)

    def state(self) -> dict[str, Any]:
        """The page's content."""
        arbiter, card = self._arbiter, self._card
        now = self._clock.seconds()
        moment = _Moment(now, self._wall())
        engines = {engine.tenant.name: snapshot_of(engine) for engine in self._engines}
        tenant = arbiter.tenant
        here = engines.get(tenant.name, {}) if tenant is not None else {}
        return {
            "version": self._version,
            "now": moment.iso(now),
            "uptime": _round(now - self._began),
            "state": arbiter.state,
            "tenant": _name(tenant),
            "held": arbiter.held,
            "leases": [
                {
                    "label": lease.label,
                    "client": lease.client,
                    "tenant": lease.tenant.name,
                    "age": _round(now - lease.granted_at),
                    "waited": _round(lease.granted_at - lease.asked_at),
                }
                for lease in sorted(arbiter.leases, key=lambda lease: lease.granted_at)
            ],
            "waiting": {kind.value: _line(arbiter.waiting(kind), now) for kind in Kind},
            "resident": sorted(card.resident),
            "switching": card.switching(),
            "job": here.get("job"),
            "engines": engines,
            "vram": self._vram() if self._vram is not None else None,
            "gpu_share": self._gpu_share() if self._gpu_share is not None else None,
            "degraded": [
                {
                    "engine": interval.culprit,
                    "reason": interval.reason,
                    "since": moment.iso(interval.began),
                    "age": _round(now - interval.began),
                }
                for interval in card.degraded
            ],
            "degraded_before": [
                {
                    "engine": interval.culprit,
                    "reason": interval.reason,
                    "since": moment.iso(interval.began),
                    "until": moment.iso(interval.ended),
                    "seconds": _round(interval.ended - interval.began),
                }
                for interval in islice(reversed(card.history), REMEMBERED)
                if interval.ended is not None
            ],
            "transitions": [
                {
                    "from": _name(transition.before) or "idle",
                    "to": _name(transition.after) or "idle",
                    "at": moment.iso(transition.at),
                    "age": _round(now - transition.at),
                }
                for transition in reversed(self._recorder.transitions)
            ],
            "counters": self._metrics.counters() if self._metrics is not None else {},
        }


class PeersResource(Page):
    """``GET /gpu/peers``: who divides the card's time by GPU-share.

    :param peers: the page's content.
    """

    def __init__(self, peers: Callable[[], dict[str, Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._peers = peers

    def render_GET(self, request: Any) -> bytes:
        """Answer with peers, weights and shares as JSON."""
        return self.answer_json(request, self._peers(), indent=2)


class _Moment:
    """Turns the clock's times into dates."""

    def __init__(self, now: float, wall: float) -> None:
        self._offset = wall - now

    def iso(self, at: float) -> str:
        date = datetime.fromtimestamp(at + self._offset, UTC)
        return date.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _line(waiters: Iterable[Waiter], now: float) -> list[dict[str, Any]]:
    return [
        {
            "position": position,
            "label": waiter.label,
            "client": waiter.client,
            "tenant": waiter.tenant.name,
            "age": _round(now - waiter.asked_at),
        }
        for position, waiter in enumerate(waiters, 1)
    ]


def _name(tenant: Tenant | None) -> str | None:
    return tenant.name if tenant is not None else None


def _round(seconds: float) -> float:
    return round(seconds, 3)


def make_status_tree(
    arbiter: Arbiter,
    card: Card,
    engines: Sequence[Engine],
    clock: IReactorTime,
    version: str,
    metrics: Metrics,
    *,
    short_forms: bool,
    vram: Callable[[], dict[str, Any] | None] | None = None,
    gpu_share: Callable[[], dict[str, Any]] | None = None,
    wall: Callable[[], float] = time.time,
) -> dict[bytes, Resource]:
    """The pages by their exact paths.

    :param short_forms: also ``/healthz``, ``/metrics`` and ``/gpu/peers``, for listeners whose engine does not own
        these paths.
    :param vram: as for :class:`StateResource`, ``gpu_share`` too; that has a page of its own as well.
    """
    health = HealthResource(arbiter)
    numbers = MetricsResource(metrics)
    recorder = StateRecorder(arbiter)
    state = StateResource(
        arbiter,
        card,
        engines,
        clock,
        version,
        recorder,
        metrics,
        vram=vram,
        gpu_share=gpu_share,
        wall=wall,
    )
    tree: dict[bytes, Resource] = {
        b"/turnstile/healthz": health,
        b"/turnstile/metrics": numbers,
        b"/turnstile/state": state,
    }
    if gpu_share is not None:
        tree[b"/turnstile/gpu/peers"] = PeersResource(gpu_share)
    if short_forms:
        ours = len(b"/turnstile")
        tree |= {path[ours:]: page for path, page in tree.items() if page is not state}
    return tree


__all__ = [
    "HealthResource",
    "MetricsResource",
    "Page",
    "PeersResource",
    "StateRecorder",
    "StateResource",
    "make_status_tree",
]
