"""What random schedules need to know of each simulated engine: how it is set up, fails, recovers, and when it rests."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from virtual_net import LOCALHOST

from turnstile.config import Upstream
from turnstile.sim.graphs import image_graph

if TYPE_CHECKING:
    from schedule_kit import System

LISTEN = f"tcp:0:interface={LOCALHOST}"


class _Ordered(dict[Any, None]):
    """A set that is iterated in the order of its making, so that nothing depends on where objects lie."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)

    def pop(self, *args: Any) -> Any:
        return super().pop(*args) if args else self.popitem()[0]


def ordered(sim: Any) -> Any:
    """The simulated server, with sets that play again alike."""
    sim.connections, sim._tasks = _Ordered(), _Ordered()
    return sim


class Part:
    """One engine of a system.

    :cvar matches: which requests HTTP faults strike.
    """

    name: str
    matches: tuple[str, ...]

    def __init__(self, system: System, sim: Any) -> None:
        self.system = system
        self.sim = sim
        #: How much of the card it had, by time.
        self.held: list[tuple[float, int]] = []

    @property
    def faults(self) -> Any:
        return self.sim.faults

    def settings(self) -> dict[str, Any]:
        """What turnstile's configuration says of it."""
        raise NotImplementedError

    def well(self) -> None:
        """Take all faults away and have it up."""
        sim = self.sim
        sim.faults.clear()
        # What hangs does so for ever, and so would a node of ComfyUI that waits for it.
        sim.drop_connections()
        if not sim.listening:
            self.system.world.wait(sim.restart(0.1))

    def unrest(self) -> list[str]:
        """What it is still at."""
        raise NotImplementedError

    async def die(self, away: float) -> None:
        """It is killed, and back after a while."""
        self.trouble(f"{self.name} is killed, back after {away:g} s")
        await self.sim.restart(away)

    async def refuse(self, away: float) -> None:
        """It refuses connections for a while."""
        sim = self.sim
        if sim.listening:
            self.trouble(f"{self.name} refuses connections for {away:g} s")
            await sim.stop_listening()
            await self.system.sleep(away)
            if not sim.listening:
                sim.start_listening()

    def lie(self, rng: Random) -> Callable[[], None] | None:
        """It does not do what it says, until the function that is returned is called, if one is."""
        raise NotImplementedError

    def load(self) -> None:
        """Somebody else loads a model of a chat engine."""
        raise NotImplementedError

    def _switch(self, what: str, switch: str, value: Any) -> Callable[[], None]:
        self.trouble(what)
        setattr(self.faults, switch, value)
        return lambda: setattr(self.faults, switch, False)

    def trouble(self, what: str) -> None:
        self.system.note(f"FAULT: {what}")

    def use(self) -> list[str]:
        """Use it once as if nothing had been; returns what was wrong."""
        raise NotImplementedError

    def _ask(self, what: str, target: str, body: dict[str, Any], *good: int) -> list[str]:
        answer = self.system.world.wait(self.system.ask(self.name, "POST", target, body))
        right = answer.status in (good or (200,)) and answer.complete
        return [] if right else [f"the last {what}: {answer}"]


class Ollama(Part):
    name = "ollama"
    matches = ("/api/ps", "/api/ps", "POST /api/generate", "POST /api/*", "/v1/*", "*")

    def settings(self) -> dict[str, Any]:
        return {"ollama_url": Upstream.parse(self.sim.url), "listen_ollama": LISTEN}

    def unrest(self) -> list[str]:
        if self.sim.active_generations or self.sim.waiting:
            return ["Ollama is at work"]
        return []

    def lie(self, rng: Random) -> Callable[[], None] | None:
        kind = rng.randrange(4)
        if kind == 0:
            return self._switch("Ollama ignores unloads", "ignore_unload", rng.choice((1, 2, True)))
        if kind == 1:
            what = "an unloaded model of Ollama loads itself again"
            return self._switch(what, "reappear", rng.choice((1, 2, 4)))
        if kind == 2:
            return self._switch("unloads of Ollama hang", "unload_hangs", rng.choice((1, True)))
        return self._switch("unloads of Ollama fail", "unload_500", rng.choice((1, True)))

    def load(self) -> None:
        self.sim.load("llama3.2", 5.0)

    def use(self) -> list[str]:
        body = {"model": "llama3.2", "prompt": "why", "options": {"num_predict": 3}}
        return self._ask("chat", "/api/generate", body)


class Llama(Part):
    name = "llamacpp"
    matches = (
        "/models",
        "/models",
        "POST /models/unload",
        "POST /v1/*",
        "POST /models/*",
        "/models/sse",
        "*",
    )

    def settings(self) -> dict[str, Any]:
        return {"llama_url": Upstream.parse(self.sim.url), "listen_llama": LISTEN}

    def unrest(self) -> list[str]:
        if self.sim.active_generations or self.sim.waiting:
            return ["llama.cpp is at work"]
        return []

    def lie(self, rng: Random) -> Callable[[], None] | None:
        kind = rng.randrange(7)
        if kind == 0:
            what = "llama.cpp ignores unloads"
            return self._switch(what, "ignore_unload", rng.choice((1, 2, True)))
        if kind == 1:
            what = "an unloaded model of llama.cpp loads itself again"
            return self._switch(what, "reappear", rng.choice((1, 2, 4)))
        if kind == 2:
            return self._switch("unloads of llama.cpp hang", "unload_hangs", rng.choice((1, True)))
        if kind == 3:
            return self._switch("unloads of llama.cpp fail", "unload_500", rng.choice((1, True)))
        if kind == 4:
            return self._switch("models of llama.cpp crash in mid-load", "crash_load", 2)
        if kind == 5:
            what = "models of llama.cpp leave only when they are killed"
            return self._switch(what, "hang_stop", rng.choice((1, True)))
        names = sorted(self.sim.resident)
        if names:
            name = rng.choice(names)
            self.trouble(f"the process of {name} dies")
            self.sim.crash(name)
        return None

    def load(self) -> None:
        self.sim.load("llama-3.2-3b")

    def use(self) -> list[str]:
        body = {"model": "llama-3.2-3b", "prompt": "why", "max_tokens": 3}
        return self._ask("completion", "/v1/completions", body)


class Comfy(Part):
    name = "comfyui"
    matches = (
        "/queue",
        "/history/*",
        "/free",
        "/system_stats",
        "POST */prompt",
        "POST */prompt",
        "GET *",
        "*",
    )

    def settings(self) -> dict[str, Any]:
        return {"comfy_url": Upstream.parse(self.sim.url), "listen_comfy": LISTEN}

    def well(self) -> None:
        super().well()
        if self.sim.wedged:
            self.system.world.wait(self.sim.restart(0.1))

    def lie(self, rng: Random) -> Callable[[], None] | None:
        kind = rng.randrange(3)
        if kind == 0:
            return self._switch("ComfyUI ignores /free", "ignore_free", True)
        if kind == 1:
            return self._switch("jobs leave no history", "never_in_history", True)
        self.trouble("a job is lost")
        self.faults.lose_job()
        return None

    def unrest(self) -> list[str]:
        return [f"ComfyUI has {self.sim.remaining} jobs"] if self.sim.remaining else []

    def use(self) -> list[str]:
        system = self.system
        problems = self._ask("image job", "/prompt", {"prompt": image_graph(steps=2)})
        system.world.until(lambda: not system.unrest(), 60.0)
        system.world.pass_time(10.0)
        if system.host.card.used_by(self.name):
            problems.append("ComfyUI was not freed after the last job")
        return problems
