"""Random schedules of clients and faults: one tenant at a time, no lease leaked, every line drained.

A failing seed plays again with ``TURNSTILE_SCHEDULE_SEED=<seed> pytest tests/test_random_schedule.py``;
``TURNSTILE_SCHEDULE_RUNS`` multiplies how much is played.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from schedule_kit import System, run_schedule
from twisted.internet.defer import Deferred, succeed

from turnstile.arbiter import Lease, Tenant
from turnstile.card import Card, Eviction

RUNS = int(os.environ.get("TURNSTILE_SCHEDULE_RUNS", "1"))


def seeds(first: int, count: int) -> list[int]:
    """The seeds to play: the given one, or always the same ones and one that is new each time."""
    given = os.environ.get("TURNSTILE_SCHEDULE_SEED")
    if given is not None:
        return [int(given)]
    return [*range(first, first + count * RUNS - 1), random.SystemRandom().randrange(10**6, 10**9)]


#: One run each: 5 x 1000 operations of clients alone.
@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(1, 5))
def test_clients_alone_never_make_two_tenants_meet(seed: int) -> None:
    report = run_schedule(seed, 1000, strict=True)
    assert report.problems == [], str(report)
    assert report.overlaps == report.degraded == 0
    assert report.operations == 1000


VARIATIONS: list[dict[str, Any]] = [
    {},
    {"config": {"free_between_jobs": True, "image_burst": 2, "job_timeout_action": "interrupt"}},
    {"config": {"llm_busy_mode": "reject", "warm_model": "llama3.2", "llm_max_inflight": 2}},
    {
        "config": {"listen_ollama_nested": "tcp:0:interface=127.0.0.1", "job_timeout": 5.0},
        "ollama": {"ignores_disconnect_for": 1.0, "cancels_load": False},
    },
    {
        "config": {"unload_timeout": 2.0, "free_timeout": 2.0, "llm_wait_timeout": 5.0},
        "users": 25,
        "harshness": 3,
    },
]


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(101, 10))
def test_with_faults_tenants_meet_in_degraded_intervals_only(seed: int) -> None:
    """10 x 500 operations; engines die, hang, lie and cut connections."""
    report = run_schedule(seed, 500, faults=True, **VARIATIONS[seed % len(VARIATIONS)])
    assert report.problems == [], str(report)
    # Else the intervals would excuse anything.
    assert report.degraded_seconds < 0.5 * report.virtual_seconds


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(201, 2))
def test_what_comes_behind_turnstiles_back_is_seen(seed: int) -> None:
    """Jobs are queued in ComfyUI and models loaded in Ollama directly."""
    report = run_schedule(seed, 300, intruders=True)
    assert report.problems == [], str(report)


# -- planted bugs: what the tests above would say ------------------------------------------------------------------


def every(count: int) -> Callable[[], bool]:
    """True each ``count``-th time."""
    calls = 0

    def due() -> bool:
        nonlocal calls
        calls += 1
        return calls % count == 0

    return due


def test_an_eviction_that_is_skipped_is_found() -> None:
    def sabotage(system: System) -> None:
        card: Card = system.service.card
        make_room, due = card.make_room, every(3)

        def forgetful(tenant: Tenant) -> Deferred[None] | None:
            skipped = card.resident - {tenant.name} and due()
            return None if skipped else make_room(tenant)

        card.make_room = forgetful  # type: ignore[method-assign]

    report = run_schedule(1, 300, sabotage=sabotage)
    assert any("overlap of comfyui and ollama outside a degraded" in p for p in report.problems), (
        report
    )


def test_an_eviction_that_is_believed_too_early_is_found() -> None:
    def sabotage(system: System) -> None:
        engine, due = system.service.ollama, every(3)
        assert engine is not None
        evict = engine.evict

        def hasty() -> Deferred[Eviction]:
            return succeed(Eviction.CONFIRMED) if due() else evict()

        engine.evict = hasty  # type: ignore[method-assign]

    report = run_schedule(1, 300, sabotage=sabotage)
    assert any("overlap of comfyui and ollama outside a degraded" in p for p in report.problems), (
        report
    )


def test_a_lease_that_is_not_released_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release, due = Lease.release, every(50)

    def forgetful(lease: Lease) -> None:
        if not (lease.active and due()):
            release(lease)

    monkeypatch.setattr(Lease, "release", forgetful)
    report = run_schedule(1, 300)
    assert any("not idle at the end: lease" in p for p in report.problems), report


def test_the_same_seed_plays_the_same_again() -> None:
    first, second = (run_schedule(7, 100, faults=True) for _ in range(2))
    assert first.virtual_seconds == second.virtual_seconds
    assert first.tally == second.tally
