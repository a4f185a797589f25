"""What random schedules need to know of each simulated engine: how it is set up, fails, recovers, and when it rests."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from signal import SIGKILL
from typing import TYPE_CHECKING, Any

from memory_child import MemorySpawner
from virtual_net import LOCALHOST

from turnstile.config import Upstream
from turnstile.sim import SdSim
from turnstile.sim.graphs import image_graph
from turnstile.sim.sd_worker import Orders
from turnstile.sim.server import EngineSim

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
        self.sim = ordered(sim) if isinstance(sim, EngineSim) else sim
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

    def own_loads(self) -> list[float]:
        """When it loaded a model that nobody asked for."""
        return []

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

    def own_loads(self) -> list[float]:
        return self.sim.boots if self.sim.single is not None else []

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


class Sd(Part):
    """sd-server, whose processes turnstile starts and ends."""

    name = "sd"
    matches = (
        "/sdcpp/v1/jobs/*",
        "/sdcpp/v1/jobs/*",
        "POST /sdcpp/*",
        "POST /sdapi/*",
        "POST /v1/images/*",
        "GET *",
        "*",
    )
    IDLE = 20.0

    def __init__(self, system: System, sim: Any) -> None:
        super().__init__(system, sim)
        self.port = system.world.new_port()
        sim.on_start = self._started
        self.spawner = MemorySpawner(sim, system.world)
        self.spawner.on_terminate = self._terminated

    def settings(self) -> dict[str, Any]:
        return {
            "sd_url": Upstream.parse(f"http://{LOCALHOST}:{self.port}"),
            "sd_args": ("--listen-port", str(self.port)),
            "sd_log_dir": "/nonexistent",
            "sd_idle": self.IDLE,
            "sd_stop_grace": 3.0,
            "load_wait": 30.0,
            "listen_sd": LISTEN,
        }

    def _started(self, process: SdSim) -> None:
        ordered(process)
        system = self.system
        system.note("sd-server starts")
        tenant = system.service.arbiter.tenant
        if tenant is None or tenant.name != self.name:
            holder = "nobody" if tenant is None else tenant.name
            system.failures.append(f"sd-server was started while {holder} had the card")
        if len(self.sim.alive) > 1:
            system.failures.append("two processes of sd-server at once")

    def _terminated(self, process: SdSim) -> None:
        """Nobody's work is ended by turnstile but where that is told, or all of it ends."""
        system = self.system
        system.note(f"sd-server is told to end ({process.state})")
        service = system.service
        if service.card.degraded or not service.running:
            return
        leases = [lease for lease in service.arbiter.leases if lease.tenant.name == self.name]
        if leases and process.state == "up":
            system.failures.append(f"sd-server was stopped under a lease: {leases[0].label}")
        if any(job.status == "generating" for job in process.jobs.values()):
            system.failures.append("sd-server was stopped in mid-job")

    def well(self) -> None:
        self.sim.faults.clear()
        self.sim.drop_connections()
        for process in self.sim.alive:
            orders = process.orders
            if orders.hang_loading or orders.hang_render:
                process.signal(SIGKILL)
            else:
                process.orders = Orders()
                if process.state == "up" and not process.listening:
                    process.start_listening()

    def unrest(self) -> list[str]:
        return ["sd-server is at work"] if self.sim.busy else []

    async def die(self, away: float) -> None:
        for process in self.sim.alive:
            self.trouble("sd-server is killed")
            process.signal(SIGKILL)

    async def refuse(self, away: float) -> None:
        for process in self.sim.alive:
            if process.listening:
                self.trouble(f"sd-server refuses connections for {away:g} s")
                await process.stop_listening()
                await self.system.sleep(away)
                if process.state == "up" and not process.listening:
                    process.start_listening()

    def lie(self, rng: Random) -> Callable[[], None] | None:
        switch = rng.choice(
            (
                "crash_loading",
                "crash_loading",
                "hang_loading",
                "exit_in_render",
                "hang_render",
                "fail_render",
                "ignore_sigterm",
                "grandchild",
                "port_delay",
                "lose_job",
            )
        )
        alive = self.sim.alive
        if switch == "lose_job":
            jobs = [(p, name) for p in alive for name, job in p.jobs.items() if not job.completed]
            if jobs:
                process, name = rng.choice(jobs)
                self.trouble("a job of sd-server is lost")
                process.lose_job(name)
            return None
        if switch == "port_delay":
            return self._switch("the port of sd-server comes late", "port_delay", 3.0)
        if switch != "grandchild":
            for process in alive:
                setattr(process.orders, switch, True)
        return self._switch(f"sd-server: {switch}", switch, rng.choice((1, 2)))

    def use(self) -> list[str]:
        system = self.system
        problems = self._ask("drawing", "/sdapi/v1/txt2img", {"prompt": "a lock", "steps": 2})
        system.world.until(lambda: not system.unrest(), 60.0)
        system.world.pass_time(self.IDLE + 10.0)
        if self.sim.alive or system.host.card.used_by(self.name):
            problems.append("sd-server was not stopped when it was idle")
        return problems
