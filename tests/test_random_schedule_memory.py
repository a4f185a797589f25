"""Random schedules with a probe of the card's memory: what an engine left is back before the next one begins.

The simulated driver takes its time to give memory back, and a desktop uses some of it.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from schedule_kit import Report, System, run_schedule
from test_random_schedule import seeds
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from turnstile.vram import ProbeError, Reading, Vram
from turnstile.vram.reading import GIB, MIB

DESKTOP = 3 * GIB
#: Seconds that the driver takes.
LAG = 0.4


class Probe:
    """Tells the most that was used lately, after a moment."""

    name = "simulated"

    def __init__(self, system: System, *, flaky: bool = False) -> None:
        self._system = system
        self._flaky = flaky
        self._random = random.Random(system.seed + 7)

    def used(self) -> int:
        """Bytes that the driver shows as used."""
        card, now = self._system.host.card, self._system.world.seconds()
        recent = [card.used]
        for began, residents in reversed(card.history):
            recent.append(sum(residents.values()))
            if began <= now - LAG:
                break
        return max(recent) + DESKTOP + self._random.randrange(32 * MIB)

    def open(self) -> Deferred[str]:
        return deferLater(self._system.world, 0.01, lambda: "a card")

    def read(self) -> Deferred[Reading]:
        def answer() -> Reading:
            if self._flaky and self._random.random() < 0.2:
                raise ProbeError("not now")
            return Reading(self.used(), self._system.host.card.total_bytes + DESKTOP)

        return deferLater(self._system.world, self._random.choice((0.0, 0.02, 0.2)), answer)


class Plugged:
    """Plugs a probe into a running system and watches what it is good for."""

    def __init__(self, **how: Any) -> None:
        self._how = how
        self.vram: Vram
        self.waits: list[str] = []
        self.early: list[str] = []

    def __call__(self, system: System) -> None:
        probe = Probe(system, **self._how)
        service = system.service
        self.vram = service.vram = service.card.memory = Vram(
            system.world, [probe], wait=20.0, free=2 * GIB
        )
        self.vram.add_wait_listener(lambda how, _: self.waits.append(how.value))
        system.world.wait(self.vram.start())

        def evicted(name: str, outcome: object, _: float) -> None:
            others = service.card.resident - {name}
            used = probe.used()
            if not others and not service.card.degraded and used > DESKTOP + GIB:
                self.early.append(f"{name} {outcome}: {used / GIB:.1f} GiB still used")

        service.card.add_eviction_listener(evicted)


def found(report: Report) -> list[str]:
    """What the run found wrong, but for a look at sd-server in the very moment in which that was told to end."""
    return [problem for problem in report.problems if "answered 502" not in problem]


@pytest.mark.slow
@pytest.mark.parametrize(
    "engines", [("ollama", "comfyui"), ("llamacpp", "sd"), ("ollama", "llamacpp", "comfyui", "sd")]
)
@pytest.mark.parametrize("seed", seeds(301, 2))
def test_memory_is_back_before_the_next_one_begins(seed: int, engines: tuple[str, ...]) -> None:
    plugged = Plugged()
    report = run_schedule(seed, 300, strict=True, engines=engines, sabotage=plugged)
    assert found(report) == [], str(report)
    assert plugged.early == []
    assert plugged.waits and set(plugged.waits) <= {"floor", "free", "stable", "unknown"}
    least = plugged.vram.floor.least
    assert least is not None and abs(least - DESKTOP) <= 64 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(401, 3))
def test_faults_of_engines_and_probe_keep_the_promises(seed: int) -> None:
    plugged = Plugged(flaky=True)
    report = run_schedule(
        seed, 300, faults=True, engines=("ollama", "llamacpp", "comfyui", "sd"), sabotage=plugged
    )
    assert found(report) == [], str(report)
    assert plugged.waits


def test_a_wait_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plugged = Plugged()
    monkeypatch.setattr(Vram, "returned", lambda *_: None)
    run_schedule(301, 100, sabotage=plugged)
    assert plugged.early and "still used" in plugged.early[0]
