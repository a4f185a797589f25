"""Prometheus metrics.

What happens is counted in plain Python numbers and put into prometheus_client's shape only when somebody asks, since
the counting is in the path of every request; gauges are read from the arbiter and the card at that moment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from turnstile import __version__
from turnstile.arbiter import Abandoned, Arbiter, Event, Granted, Kind
from turnstile.card import Card, Degraded, Eviction
from turnstile.engines.base import Engine
from turnstile.vram.back import Back

PREFIX = "gpu_turnstile_"
#: From a grant that hardly waited to JOB_TIMEOUT.
BUCKETS = (
    0.001,
    0.005,
    0.025,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
    900.0,
)
STATES = ("idle", *(kind.value for kind in Kind))


class _Histogram:
    """The counts of one histogram."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(BUCKETS, value)] += 1
        self.total += value

    def buckets(self) -> Sequence[tuple[str, float]]:
        found, so_far = [], 0
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), self.counts, strict=True):
            so_far += count
            found.append((bound, float(so_far)))
        return found


class Metrics(Collector):
    """Everything that is counted, and the registry that shows it.

    :param registry: where to register; ``None`` makes one of our own, with the process's own figures beside ours.
    :param version: turnstile's, for ``build_info``.
    """

    def __init__(
        self, registry: CollectorRegistry | None = None, *, version: str = __version__
    ) -> None:
        self._version = version
        self._arbiter: Arbiter | None = None
        self._card: Card | None = None
        self._requests: defaultdict[tuple[str, int], int] = defaultdict(int)
        self._retries: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._abandoned: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._outcomes: defaultdict[str, int] = defaultdict(int)
        self._degraded: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._evictions: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._image_jobs = 0
        self._handovers = 0
        self._nested_calls = 0
        self._relays = 0
        self._relays_total = 0
        self._lock_wait = {kind: _Histogram() for kind in Kind}
        self._wait_llm = self._lock_wait[Kind.SHARED]
        self._wait_image = self._lock_wait[Kind.EXCLUSIVE]
        self._unload = _Histogram()
        self._job_seconds = _Histogram()
        self._engines: Sequence[Engine] = ()
        self._vram: dict[str, float] = {}
        self._memory_wait: defaultdict[str, _Histogram] = defaultdict(_Histogram)
        if registry is None:
            registry = CollectorRegistry()
            ProcessCollector(registry=registry)
            PlatformCollector(registry=registry)
        self.registry = registry
        registry.register(self)

    # -- what others tell -------------------------------------------------------------------------------------

    def connect(self, arbiter: Arbiter, card: Card) -> None:
        """Count what happens at ``arbiter`` and ``card``, and show their state."""
        self._arbiter = arbiter
        self._card = card
        arbiter.add_listener(self._arbiter_event)
        card.add_listener(self._degraded_interval)
        card.add_eviction_listener(self._evicted)

    def watch(self, engines: Sequence[Engine]) -> None:
        """Show what only the engines themselves know."""
        self._engines = engines

    def request_done(self, engine: str, status: int) -> None:
        """A request is over; ``status`` 0 means that it was never answered."""
        self._requests[engine, status] += 1

    def retried(self, engine: str, reason: str) -> None:
        """A request is tried again."""
        self._retries[engine, reason] += 1

    def job_done(
        self,
        outcome: str,
        seconds: float = 0.0,
        prompt_id: str | None = None,
        handed_over: bool = False,
    ) -> None:
        """An image job is over; ``foreign`` ones were seen, but not forwarded by us."""
        self._outcomes[outcome] += 1
        if outcome != "foreign":
            self._image_jobs += 1
            self._job_seconds.observe(seconds)
        if handed_over:
            self._handovers += 1

    def nested_call(self) -> None:
        """An image job called a chat engine inside its own lease."""
        self._nested_calls += 1

    def relays_changed(self, change: int) -> None:
        """A WebSocket relay was opened (1) or closed (-1)."""
        self._relays += change
        if change > 0:
            self._relays_total += change

    def set_vram(self, *, used: float | None = None, total: float | None = None) -> None:
        """What the probe saw last, in bytes; ``None``: not known."""
        for name, value in (("used", used), ("total", total)):
            if value is None:
                self._vram.pop(name, None)
            else:
                self._vram[name] = value

    def memory_waited(self, outcome: Back, seconds: float) -> None:
        """An engine left, and its memory was waited for."""
        self._memory_wait[outcome.name.lower()].observe(seconds)

    def counters(self) -> dict[str, Any]:
        """The most telling sums, for the state page."""
        requests: defaultdict[str, int] = defaultdict(int)
        for (engine, _), count in self._requests.items():
            requests[engine] += count
        return {
            "requests": dict(requests),
            "retries": sum(self._retries.values()),
            "image_jobs": self._image_jobs,
            "job_outcomes": dict(self._outcomes),
            "handovers": self._handovers,
            "degraded": sum(self._degraded.values()),
            "evictions": sum(self._evictions.values()),
            "nested_calls": self._nested_calls,
            "websocket_relays": self._relays,
        }

    # -- events -----------------------------------------------------------------------------------------------

    def _arbiter_event(self, event: Event) -> None:
        kind = type(event)
        if kind is Granted:
            assert isinstance(event, Granted)
            shared = event.lease.tenant.kind is Kind.SHARED
            wait = self._wait_llm if shared else self._wait_image
            if event.waited > 0.0:
                wait.observe(event.waited)
            else:
                wait.counts[0] += 1
        elif kind is Abandoned:
            assert isinstance(event, Abandoned)
            self._abandoned[event.waiter.tenant.kind.value, event.why] += 1

    def _degraded_interval(self, interval: Degraded) -> None:
        if interval.ended is None:
            self._degraded[interval.reason, interval.culprit] += 1

    def _evicted(self, engine: str, outcome: Eviction, seconds: float) -> None:
        self._evictions[engine, outcome.value.replace(" ", "_")] += 1
        card = self._card
        if card is not None and any(
            tenant.name == engine and tenant.kind is Kind.SHARED for tenant in card.tenants
        ):
            self._unload.observe(seconds)

    # -- what Prometheus sees ---------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """All metrics as they are now."""
        yield from self._collect_arbiter()
        yield _counter(
            "image_jobs",
            "Image jobs that were forwarded under the lease and are over.",
            [],
            {(): self._image_jobs},
        )
        yield _histogram(
            "lock_wait_seconds",
            "Time from asking for the card to getting it.",
            ["kind"],
            {(kind.value,): histogram for kind, histogram in self._lock_wait.items()},
        )
        yield _histogram(
            "unload_seconds",
            "Time that LLM engines took to leave the card.",
            [],
            {(): self._unload},
        )
        yield _histogram("job_seconds", "Duration of image jobs.", [], {(): self._job_seconds})
        requests = {
            (engine, str(status) if status else "none"): count
            for (engine, status), count in self._requests.items()
        }
        yield _counter(
            "requests",
            'Requests by engine and answer ("none": the client left or the answer never came).',
            ["engine", "status"],
            requests,
        )
        yield _counter(
            "retries", "Attempts that were made again.", ["engine", "reason"], self._retries
        )
        yield _counter(
            "abandoned", "Requests that left a waiting line.", ["kind", "why"], self._abandoned
        )
        yield _counter(
            "job_outcomes",
            "Image jobs by how they ended, those that did not come through turnstile included.",
            ["outcome"],
            {(outcome,): count for outcome, count in self._outcomes.items()},
        )
        yield _counter(
            "handovers",
            "Image jobs that passed the card to the next one without freeing it.",
            [],
            {(): self._handovers},
        )
        yield _counter(
            "nested_calls",
            "Chat requests that ran inside an image job.",
            [],
            {(): self._nested_calls},
        )
        yield _gauge("websocket_relays", "Relayed WebSockets now.", [], {(): self._relays})
        yield _counter("websockets", "WebSockets that were relayed.", [], {(): self._relays_total})
        yield from self._collect_card()
        yield from self._collect_engines()
        for name, value in self._vram.items():
            yield _gauge(f"vram_{name}_bytes", f"Memory of the card, {name}.", [], {(): value})
        yield _histogram(
            "vram_wait_seconds",
            "Time from the end of an eviction until the card's memory was seen to be back, or not.",
            ["outcome"],
            {(outcome,): histogram for outcome, histogram in sorted(self._memory_wait.items())},
        )
        info = InfoMetricFamily(PREFIX + "build", "The turnstile that runs here.")
        info.add_metric([], {"version": self._version})
        yield info

    def _collect_arbiter(self) -> Iterator[Metric]:
        arbiter = self._arbiter
        state = arbiter.state if arbiter is not None else "idle"
        yield _gauge(
            "state",
            "1 for the state that the card is in, 0 for the others.",
            ["state"],
            {(name,): int(name == state) for name in STATES},
        )
        yield _gauge(
            "llm_inflight",
            "LLM requests that hold the card.",
            [],
            {(): arbiter.llm_inflight if arbiter is not None else 0},
        )
        waiting: dict[tuple[str, ...], float] = {}
        for kind in Kind:
            waiters = arbiter.waiting(kind) if arbiter is not None else iter(())
            waiting[(kind.value,)] = sum(1 for _ in waiters)
        yield _gauge("waiting", "Requests that wait for the card.", ["kind"], waiting)

    def _collect_card(self) -> Iterator[Metric]:
        card = self._card
        # Not plain "degraded": OpenMetrics takes that for the family of the counter below.
        yield _gauge(
            "degraded_open",
            "Open intervals in which two engines may hold memory.",
            [],
            {(): len(card.degraded) if card is not None else 0},
        )
        yield _counter(
            "degraded",
            "Intervals in which two engines may have held memory.",
            ["reason", "engine"],
            self._degraded,
        )
        yield _counter(
            "evictions",
            "Evictions by engine and outcome.",
            ["engine", "outcome"],
            self._evictions,
        )
        resident: dict[tuple[str, ...], float] = {}
        if card is not None:
            resident = {(t.name,): int(t.name in card.resident) for t in card.tenants}
        yield _gauge(
            "resident", "Whether the engine may hold memory of the card.", ["engine"], resident
        )
        switching = card is not None and card.switching()
        yield _gauge("switching", "Whether an engine is being evicted.", [], {(): int(switching)})

    def _collect_engines(self) -> Iterator[Metric]:
        known = {engine.tenant.name: engine.snapshot() for engine in self._engines}
        sd, llama = known.get("sd"), known.get("llamacpp")
        if sd is not None:
            up = int(sd.get("pid") is not None)
            yield _gauge("sd_child_up", "Whether there is an sd-server process.", [], {(): up})
            yield _counter("sd_starts", "Starts of sd-server.", [], {(): sd.get("starts", 0)})
            yield _counter(
                "sd_crashes", "Ends of sd-server by itself.", [], {(): sd.get("crashes", 0)}
            )
        models = llama.get("models") if llama is not None else None
        if models is not None:
            counts = Counter(models.values())
            yield _gauge(
                "llama_models",
                "Models of llama.cpp's router by status, when it was last looked at.",
                ["status"],
                {(status,): count for status, count in sorted(counts.items())},
            )


def _counter(name: str, text: str, labels: list[str], values: Any) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key, value)
    return family


def _gauge(name: str, text: str, labels: list[str], values: Any) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _histogram(name: str, text: str, labels: list[str], values: Any) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value.buckets(), value.total)
    return family


__all__ = ["BUCKETS", "Metrics"]
