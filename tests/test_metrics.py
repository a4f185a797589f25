"""Metrics: names and labels that dashboards rely on, and figures that agree with what happened."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families
from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock

from turnstile.arbiter import Arbiter, Kind, Lease, Tenant
from turnstile.card import DID_NOT_LEAVE, Card, Eviction
from turnstile.metrics import BUCKETS, Metrics
from turnstile.vram.back import Back

OLLAMA = Tenant("ollama", Kind.SHARED)
COMFY = Tenant("comfyui", Kind.EXCLUSIVE)


class FakeEngine:
    def __init__(self, tenant: Tenant, clock: Clock, outcome: Eviction, takes: float = 0) -> None:
        self.tenant = tenant
        self.outcome = outcome
        self.takes = takes
        self.clock = clock

    def evict(self) -> Deferred[Eviction]:
        self.clock.advance(self.takes)
        return succeed(self.outcome)


class World:
    def __init__(self) -> None:
        self.clock = Clock()
        self.arbiter = Arbiter(self.clock)
        self.card = Card(self.clock)
        self.metrics = Metrics(version="1.2.3")
        self.metrics.connect(self.arbiter, self.card)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value("gpu_turnstile_" + name, labels)

    def states(self) -> dict[str, float | None]:
        return {name: self.value("state", state=name) for name in ("idle", "llm", "image")}

    def take(self, tenant: Tenant) -> Lease:
        lease = self.arbiter.try_acquire(tenant)
        assert lease is not None
        return lease


@pytest.fixture
def world() -> World:
    return World()


def test_the_seeds_names_are_there_from_the_start(world: World) -> None:
    text = generate_latest(world.metrics.registry).decode()
    types = [line for line in text.splitlines() if line.startswith("# TYPE gpu_turnstile")]
    for line in (
        "# TYPE gpu_turnstile_state gauge",
        "# TYPE gpu_turnstile_llm_inflight gauge",
        "# TYPE gpu_turnstile_image_jobs_total counter",
        "# TYPE gpu_turnstile_lock_wait_seconds histogram",
        "# TYPE gpu_turnstile_unload_seconds histogram",
    ):
        assert line in types
    assert "gpu_turnstile_image_jobs_total 0.0\n" in text
    assert "gpu_turnstile_llm_inflight 0.0\n" in text
    assert 'gpu_turnstile_lock_wait_seconds_bucket{kind="image",le="+Inf"} 0.0\n' in text
    assert 'gpu_turnstile_lock_wait_seconds_bucket{kind="llm",le="900.0"} 0.0\n' in text
    assert 'gpu_turnstile_build_info{version="1.2.3"} 1.0\n' in text


def test_state_shows_all_three_and_one_of_them_is_on(world: World) -> None:
    assert world.states() == {"idle": 1, "llm": 0, "image": 0}
    leases = [world.take(OLLAMA), world.take(OLLAMA)]
    assert world.states() == {"idle": 0, "llm": 1, "image": 0}
    assert world.value("llm_inflight") == 2
    world.arbiter.acquire(COMFY)
    assert world.value("waiting", kind="image") == 1 and world.value("waiting", kind="llm") == 0
    for lease in leases:
        lease.release()
    assert world.states() == {"idle": 0, "llm": 0, "image": 1}
    assert world.value("llm_inflight") == 0 and world.value("waiting", kind="image") == 0


def test_waits_are_measured_by_kind(world: World) -> None:
    lease = world.take(OLLAMA)
    world.arbiter.acquire(COMFY)
    world.clock.advance(2.5)
    lease.release()
    assert world.value("lock_wait_seconds_count", kind="llm") == 1
    assert world.value("lock_wait_seconds_sum", kind="llm") == 0
    assert world.value("lock_wait_seconds_bucket", kind="llm", le="0.001") == 1
    assert world.value("lock_wait_seconds_sum", kind="image") == 2.5
    assert world.value("lock_wait_seconds_bucket", kind="image", le="1.0") == 0
    assert world.value("lock_wait_seconds_bucket", kind="image", le="2.5") == 1
    assert world.value("lock_wait_seconds_bucket", kind="image", le="+Inf") == 1


@pytest.mark.parametrize("waited", [BUCKETS[-1], BUCKETS[-1] + 0.1])
def test_the_ends_of_the_buckets(world: World, waited: float) -> None:
    lease = world.take(OLLAMA)
    world.arbiter.acquire(COMFY)
    world.clock.advance(waited)
    lease.release()
    inside = world.value("lock_wait_seconds_bucket", kind="image", le="900.0")
    assert inside == (1 if waited == BUCKETS[-1] else 0)
    assert world.value("lock_wait_seconds_count", kind="image") == 1


def test_waiters_that_give_up_are_counted_by_reason(world: World) -> None:
    world.take(OLLAMA)
    world.arbiter.acquire(COMFY).addErrback(lambda _: None).cancel()
    world.arbiter.acquire(COMFY, timeout=1).addErrback(lambda _: None)
    world.clock.advance(1)
    assert world.value("abandoned_total", kind="image", why="cancelled") == 1
    assert world.value("abandoned_total", kind="image", why="timeout") == 1
    assert world.value("lock_wait_seconds_count", kind="image") == 0


def test_requests_and_retries(world: World) -> None:
    for status in (200, 200, 503, 0):
        world.metrics.request_done("ollama", status)
    world.metrics.retried("comfyui", "refused")
    assert world.value("requests_total", engine="ollama", status="200") == 2
    assert world.value("requests_total", engine="ollama", status="503") == 1
    assert world.value("requests_total", engine="ollama", status="none") == 1
    assert world.value("retries_total", engine="comfyui", reason="refused") == 1


def test_image_jobs(world: World) -> None:
    world.metrics.job_done("success", 12.0, "p1", True)
    world.metrics.job_done("error", 1.0, "p2", False)
    world.metrics.job_done("foreign", 1.0, None, False)
    assert world.value("image_jobs_total") == 2
    assert world.value("job_outcomes_total", outcome="success") == 1
    assert world.value("job_outcomes_total", outcome="foreign") == 1
    assert world.value("handovers_total") == 1
    assert world.value("job_seconds_sum") == 13


def test_evictions_and_residency(world: World) -> None:
    ollama = FakeEngine(OLLAMA, world.clock, Eviction.CONFIRMED, 1.5)
    comfy = FakeEngine(COMFY, world.clock, Eviction.TIMED_OUT, 30)
    world.card.register(ollama)
    world.card.register(comfy, resident=False)
    assert world.value("resident", engine="ollama") == 1
    assert world.value("resident", engine="comfyui") == 0
    world.card.make_room(COMFY)
    assert world.value("resident", engine="ollama") == 0
    assert world.value("evictions_total", engine="ollama", outcome="confirmed") == 1
    assert world.value("unload_seconds_sum") == 1.5
    world.card.mark_resident("comfyui")
    world.card.make_room(OLLAMA)
    assert world.value("evictions_total", engine="comfyui", outcome="timed_out") == 1
    # Freeing ComfyUI is no unload of an LLM engine.
    assert world.value("unload_seconds_count") == 1
    assert world.value("degraded_open") == 1
    assert world.value("degraded_total", engine="comfyui", reason=DID_NOT_LEAVE) == 1
    world.card.mark_evicted("comfyui")
    assert world.value("degraded_open") == 0
    assert world.value("degraded_total", engine="comfyui", reason=DID_NOT_LEAVE) == 1


def test_websockets_nested_calls_and_memory(world: World) -> None:
    for change in (1, 1, -1):
        world.metrics.relays_changed(change)
    assert (world.value("websocket_relays"), world.value("websockets_total")) == (1, 2)
    world.metrics.nested_call()
    assert world.value("nested_calls_total") == 1
    assert world.value("vram_used_bytes") is None
    world.metrics.set_vram(used=5e9, total=16e9)
    assert (world.value("vram_used_bytes"), world.value("vram_total_bytes")) == (5e9, 16e9)
    world.metrics.set_vram(total=16e9)
    assert world.value("vram_used_bytes") is None


def test_both_formats_are_read_back(world: World) -> None:
    world.metrics.request_done('od"d\n', 200)
    world.metrics.retried("ollama", "dns")
    world.card.register(FakeEngine(OLLAMA, world.clock, Eviction.UNREACHABLE))
    world.card.make_room(COMFY)
    registry = world.metrics.registry
    plain = generate_latest(registry).decode()
    families = list(text_string_to_metric_families(plain))
    assert any(s.labels.get("engine") == 'od"d\n' for f in families for s in f.samples)
    names = [f.name for f in parse_openmetrics(generate_openmetrics(registry).decode())]
    assert len(names) == len(set(names))
    assert "gpu_turnstile_degraded" in names and "gpu_turnstile_degraded_open" in names


def test_the_process_is_shown_too(world: World) -> None:
    assert world.metrics.registry.get_sample_value("process_resident_memory_bytes")


def test_a_given_registry_gets_ours_only() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    assert metrics.registry is registry
    text = generate_latest(registry).decode()
    assert "process_" not in text and 'gpu_turnstile_state{state="idle"} 1.0' in text


def test_counters_for_the_state_page(world: World) -> None:
    world.metrics.request_done("ollama", 200)
    world.metrics.request_done("ollama", 503)
    world.metrics.job_done("success", 1, "p", True)
    counters = world.metrics.counters()
    assert counters["requests"] == {"ollama": 2}
    assert counters["job_outcomes"] == {"success": 1}
    assert counters["handovers"] == counters["image_jobs"] == 1


class Shown:
    """An engine that only shows something."""

    def __init__(self, tenant: Tenant, shows: dict[str, object] | None) -> None:
        self.tenant = tenant
        self.shows = shows

    def snapshot(self) -> dict[str, object]:
        if self.shows is None:
            raise ValueError("broken")
        return self.shows


def test_what_only_the_engines_know(world: World) -> None:
    sd = Shown(Tenant("sd", Kind.EXCLUSIVE), {"pid": None, "starts": 3, "crashes": 1})
    llama = Shown(
        Tenant("llamacpp", Kind.SHARED),
        {"models": {"a": "loaded", "b": "unloaded", "c": "unloaded"}},
    )
    world.metrics.watch([Shown(OLLAMA, None), sd, llama])  # type: ignore[list-item]
    assert world.value("sd_child_up") == 0
    assert (world.value("sd_starts_total"), world.value("sd_crashes_total")) == (3, 1)
    assert world.value("llama_models", status="unloaded") == 2
    assert world.value("llama_models", status="loaded") == 1
    sd.shows = {"pid": 7, "starts": 4, "crashes": 1}
    llama.shows = {"models": None}
    assert world.value("sd_child_up") == 1
    assert world.value("llama_models", status="loaded") is None


def test_an_engine_that_cannot_tell_hides_nothing_else(world: World) -> None:
    world.metrics.watch([Shown(Tenant("sd", Kind.EXCLUSIVE), None)])  # type: ignore[list-item]
    assert world.value("state", state="idle") == 1
    assert world.value("sd_child_up") is None


def test_waits_for_memory(world: World) -> None:
    world.metrics.memory_waited(Back.FLOOR, 0.02)
    world.metrics.memory_waited(Back.TIMED_OUT, 45.0)
    assert world.value("vram_wait_seconds_count", outcome="floor") == 1
    assert world.value("vram_wait_seconds_sum", outcome="timed_out") == 45.0
