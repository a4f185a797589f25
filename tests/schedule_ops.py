"""What happens in a random schedule: the operations of clients, and of fate."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autobahn.twisted.websocket import WebSocketClientFactory
from schedule_clients import Answer, Events, Leave, unchunk
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure
from virtual_net import LOCALHOST

from turnstile.sim.graphs import (
    error_graph,
    image_graph,
    nested_graph,
    oom_graph,
    sleep_graph,
    stubborn_graph,
    system_exit_graph,
)

if TYPE_CHECKING:
    from schedule_kit import System

#: How often an operation is drawn, relative to others.
Operations = list[tuple[float, Callable[[], Any]]]

WHY = [{"role": "user", "content": "why"}]


class Clients:
    """The clients of one engine.

    :ivar faults: whether engines fail in this run.
    """

    name: str

    def __init__(self, system: System, faults: bool) -> None:
        self.system = system
        self.rng = system.rng
        self.world = system.world
        self.faults = faults

    def operations(self) -> Operations:
        raise NotImplementedError

    def leave(self) -> Leave | None:
        """Whether and how the client goes away before its answer."""
        rng = self.rng
        if rng.random() >= 0.25:
            return None
        at = rng.choice(("connect", "head", "body", "sent", "sent", "sent", "answer", "answer"))
        after = rng.choice(
            (0.0, rng.uniform(0, 0.005), rng.uniform(0, 0.3), rng.uniform(0, 3.0), 10.0)
        )
        return Leave(at, after, rng.random() < 0.5)

    def pause(self) -> float:
        return self.rng.choice((0.0, 0.0, 0.0, 0.001, 0.2, 1.5))

    async def ask(
        self,
        method: str,
        target: str,
        body: Any = None,
        *fields: str,
        to: str | None = None,
        leave: Leave | None = None,
    ) -> Answer:
        """One request, to the engine's own listener unless ``to`` names another, or to the port for several."""
        if to is None and self.name in ("llamacpp", "sd") and "broker" in self.system.service.ports:
            to = self.rng.choice((self.name, "broker"))
        self.system.note(f"client: {method} {target} of {to or self.name}")
        return await self.system.call(
            to or self.name,
            method,
            target,
            body,
            leave or self.leave(),
            None,
            self.pause() if body is not None else 0.0,
            fields,
        )


class OllamaClients(Clients):
    name = "ollama"
    models = (
        "llama3.2",
        "llama3.2",
        "llama3.2:latest",
        "qwen3:8b",
        "big:70b",
        "nomic-embed-text",
        "absent",
    )

    def operations(self) -> Operations:
        own: Operations = [
            (30, self.chat),
            (4, self.chat_openai),
            (4, self.embed),
            (3, self.unload_only),
            (3, self.load_only),
            (1, self.unknown_post),
            (6, self.look),
            (0.5, self.odd_request),
        ]
        if "ollama-nested" in self.system.service.ports:
            own += [(3, self.nested_job), (2, self.nested_call)]
        return own

    def keep_alive(self) -> dict[str, Any]:
        choice = self.rng.choice((None, None, None, None, 0, -1, "5s"))
        return {} if choice is None else {"keep_alive": choice}

    async def chat(self) -> None:
        rng = self.rng
        options = {"num_predict": rng.choice((0, 1, 3, 8, 40))}
        body: dict[str, Any] = {
            "model": rng.choice(self.models),
            "options": options,
            **self.keep_alive(),
        }
        if rng.random() < 0.3:
            body["stream"] = False
        if rng.random() < 0.5:
            await self.ask("POST", "/api/generate", {**body, "prompt": "why"})
        else:
            body["messages"] = [{"role": "user", "content": "why" * rng.choice((1, 1, 1, 5000))}]
            await self.ask("POST", "/api/chat", body)

    async def chat_openai(self) -> None:
        path, more = self.rng.choice(
            (
                ("/v1/chat/completions", {"messages": WHY}),
                ("/v1/completions", {"prompt": "why"}),
                ("/v1/responses", {"input": "why"}),
                ("/v1/messages", {"messages": WHY}),
            )
        )
        body = {"model": self.rng.choice(self.models), "max_tokens": 5, **more}
        if self.rng.random() < 0.5:
            body["stream"] = True
        await self.ask("POST", path, body)

    async def embed(self) -> None:
        path, more = self.rng.choice(
            (
                ("/api/embed", {"input": ["a", "b"]}),
                ("/api/embeddings", {"prompt": "a"}),
                ("/v1/embeddings", {"input": "a"}),
            )
        )
        model = self.rng.choice(("nomic-embed-text", "nomic-embed-text", "llama3.2"))
        await self.ask("POST", path, {"model": model, **more})

    async def unload_only(self) -> None:
        model = self.rng.choice(self.models)
        path = self.rng.choice(("/api/generate", "/api/chat"))
        zero = self.rng.choice((0, "0", "0s"))
        await self.ask("POST", path, {"model": model, "keep_alive": zero})

    async def load_only(self) -> None:
        body = {"model": self.rng.choice(self.models), **self.keep_alive()}
        await self.ask("POST", "/api/generate", body)

    async def unknown_post(self) -> None:
        path = self.rng.choice(("/api/new", "/api/chat/", "/api/%63hat", "/v2/chat"))
        await self.ask("POST", path, {"model": "llama3.2", "messages": WHY})

    async def odd_request(self) -> None:
        await self.ask("POST", self.rng.choice(("/api/create", "/x/../prompt")), b"{}")

    async def look(self) -> None:
        method, path = self.rng.choice(
            (
                ("GET", "/api/tags"),
                ("GET", "/api/ps"),
                ("GET", "/api/version"),
                ("HEAD", "/"),
                ("GET", "/v1/models"),
                ("GET", "/nothing"),
                ("GET", "/sim/download?bytes=3000000"),
                ("GET", "/sim/download?bytes=300000&chunked=1"),
            )
        )
        await self.ask(method, path)

    async def nested_job(self) -> None:
        rng = self.rng
        url = f"http://{LOCALHOST}:{self.system.port('ollama-nested')}/api/generate"
        call = {"model": rng.choice(self.models), "prompt": "why", "options": {"num_predict": 5}}
        graph = nested_graph(
            url,
            call,
            count=rng.choice((1, 2, 4)),
            pause=rng.choice((0.0, 0.5, 3.0)),
            ignore_errors=True,
        )
        await self.ask("POST", "/prompt", {"prompt": graph}, to="comfyui")

    async def nested_call(self) -> None:
        body = {"model": self.rng.choice(self.models), "prompt": "why"}
        await self.ask("POST", "/api/generate", body, to="ollama-nested")


class LlamaClients(Clients):
    name = "llamacpp"
    models = (
        "llama-3.2-3b",
        "llama-3.2-3b",
        "llama-3.2-3b",
        "qwen3-8b",
        "big-70b",
        "nomic-embed",
        "absent",
    )

    def operations(self) -> Operations:
        return [
            (30, self.chat),
            (4, self.embed),
            (4, self.small),
            (3, self.load),
            (3, self.unload),
            (1, self.unknown_post),
            (3, self.look_that_loads),
            (8, self.look),
            (1, self.events),
            (1, self.end_stream),
        ]

    async def chat(self) -> None:
        rng = self.rng
        path, more = rng.choice(
            (
                ("/v1/chat/completions", {"messages": WHY}),
                ("/v1/chat/completions", {"messages": WHY}),
                ("/chat/completions", {"messages": WHY}),
                ("/v1/messages", {"messages": WHY}),
                ("/v1/completions", {"prompt": "why"}),
                ("/completion", {"prompt": "why" * rng.choice((1, 1, 5000))}),
                ("/v1/responses", {"input": "why"}),
            )
        )
        body: dict[str, Any] = {
            "model": rng.choice(self.models),
            "max_tokens": rng.choice((0, 1, 3, 8, 40)),
            **more,
        }
        if rng.random() < 0.6:
            body["stream"] = True
        fields = [f"X-Conversation-Id: c{rng.randint(0, 3)}"] if rng.random() < 0.1 else []
        if rng.random() < 0.05:
            path += "?autoload=" + rng.choice(("false", "true", "0"))
        await self.ask("POST", path, body, *fields)

    async def embed(self) -> None:
        model = self.rng.choice(("nomic-embed", "nomic-embed", "llama-3.2-3b"))
        await self.ask("POST", "/v1/embeddings", {"model": model, "input": ["a", "b"]})

    async def small(self) -> None:
        path = self.rng.choice(
            ("/tokenize", "/apply-template", "/v1/messages/count_tokens", "/slots/0", "/props")
        )
        await self.ask("POST", path, {"model": self.rng.choice(self.models), "content": "why"})

    async def load(self) -> None:
        await self.ask("POST", "/models/load", {"model": self.rng.choice(self.models)})

    async def unload(self) -> None:
        await self.ask("POST", "/models/unload", {"model": self.rng.choice(self.models)})

    async def unknown_post(self) -> None:
        path = self.rng.choice(("/v9/chat", "/completion/", "/%63ompletion", "/models/lead"))
        await self.ask("POST", path, {"model": "llama-3.2-3b", "prompt": "why"})

    async def look_that_loads(self) -> None:
        rng = self.rng
        path = rng.choice(("/props", "/slots", "/metrics", "/lora-adapters", "/%6detrics"))
        query = f"?model={rng.choice(self.models)}" + rng.choice(("", "", "&autoload=false"))
        await self.ask(rng.choice(("GET", "GET", "HEAD")), path + query)

    async def look(self) -> None:
        path = self.rng.choice(
            ("/models", "/v1/models", "/health", "/props", "/", "/slots", "/nothing")
        )
        await self.ask("GET", path)

    async def events(self) -> None:
        stay = self.rng.choice((0.1, 3.0, 20.0))
        await self.ask("GET", "/models/sse", leave=Leave("sent", stay, self.rng.random() < 0.5))

    async def end_stream(self) -> None:
        await self.ask("DELETE", f"/v1/stream?conv_id=c{self.rng.randint(0, 3)}")


class ComfyClients(Clients):
    name = "comfyui"

    def __init__(self, system: System, faults: bool) -> None:
        super().__init__(system, faults)
        self.prompt_ids: deque[str] = deque(maxlen=6)
        self._wedges = False

    def operations(self) -> Operations:
        return [
            (22, self.image),
            (8, self.look),
            (3, self.delete_from_queue),
            (1, self.clear_queue),
            (3, self.interrupt),
            (1, self.clear_history),
            (4, self.websocket),
            (0.5, self.odd_request),
        ]

    async def image(self) -> None:
        rng = self.rng
        graph: Any = rng.choice(
            (
                lambda: image_graph(steps=rng.randint(1, 12)),
                lambda: image_graph(steps=rng.randint(1, 12)),
                lambda: image_graph(steps=2, step_time=rng.uniform(0.0, 4.0)),
                lambda: image_graph(
                    steps=1, checkpoint=rng.choice(("sd.safetensors", "xl.safetensors"))
                ),
                lambda: sleep_graph(rng.uniform(0.0, 5.0)),
                lambda: stubborn_graph(rng.uniform(0.0, 5.0)),
                error_graph,
                oom_graph,
                lambda: {"1": {"class_type": "Missing"}},
                lambda: {"1": {"class_type": "KSampler", "inputs": {}}},
                lambda: None,
            )
        )()
        if self.faults and not self._wedges and rng.random() < 0.01:
            graph = system_exit_graph()
            self._wedges = True
            self.world.callLater(20.0, self._unwedge)
        body: Any = {"prompt": graph}
        if rng.random() < 0.5:
            body["client_id"] = f"page-{rng.randint(0, 3)}"
        if rng.random() < 0.15:
            body["prompt_id"] = f"mine-{rng.randint(0, 5)}-{rng.randint(0, 9)}"
        if rng.random() < 0.05:
            body = rng.choice((b"{", b"", b"[]", b'{"prompt": {}}'))
        path = rng.choice(("/prompt", "/api/prompt", "/%70rompt"))
        answer = await self.ask("POST", path, body)
        if answer.status == 200 and answer.complete:
            try:
                prompt_id = json.loads(unchunk(answer.body))["prompt_id"]
            except ValueError:
                return  # a fault's
            self.prompt_ids.append(prompt_id)
            if rng.random() < 0.5:
                await self.system.sleep(rng.uniform(0.0, 3.0))
                await self.ask("GET", f"/history/{prompt_id}")

    def _unwedge(self) -> None:
        self._wedges = False
        if self.system.host.comfy.wedged:
            self.system.note("FAULT: ComfyUI is restarted by its owner")
            self.system.host.comfy.restart(0.5)

    async def look(self) -> None:
        path = self.rng.choice(
            ("/", "/queue", "/history", "/prompt", "/system_stats", "/object_info", "/api/queue")
        )
        await self.ask("GET", path)

    async def odd_request(self) -> None:
        await self.ask("POST", self.rng.choice(("/x/../prompt", "/upload/image")), b"{}")

    def some_prompt(self) -> str:
        pending = [job.id for job in self.system.host.comfy.pending]
        known = [*self.prompt_ids, *pending]
        return self.rng.choice(known) if known else "none"

    async def delete_from_queue(self) -> None:
        await self.ask("POST", "/queue", {"delete": [self.some_prompt()]})

    async def clear_queue(self) -> None:
        await self.ask("POST", "/api/queue", {"clear": True})

    async def interrupt(self) -> None:
        body = {"prompt_id": self.some_prompt()} if self.rng.random() < 0.6 else {}
        await self.ask("POST", "/interrupt", body)

    async def clear_history(self) -> None:
        body = {"clear": True} if self.rng.random() < 0.5 else {"delete": [self.some_prompt()]}
        await self.ask("POST", "/history", body)

    async def websocket(self) -> None:
        rng = self.rng
        sid = f"page-{rng.randint(0, 3)}"
        port = self.system.port("comfyui")
        factory = WebSocketClientFactory(
            f"ws://{LOCALHOST}:{port}/ws?clientId={sid}", reactor=self.world
        )
        factory.protocol = Events
        factory.noisy = False
        factory.setProtocolOptions(openHandshakeTimeout=0, closeHandshakeTimeout=1)
        factory.ended = Deferred()
        factory.clientConnectionFailed = lambda *_: factory.ended.callback(None)
        connector = self.world.connectTCP(LOCALHOST, port, factory)
        self.system.note(f"client: WebSocket of {sid}")
        how = rng.randrange(3)
        stay = rng.choice((0.0, 0.01, 2.0, 20.0))

        def go(how: int) -> None:
            transport = getattr(connector, "transport", None)
            if connector.state == "disconnected" or transport is None:
                return
            if how == 0 or not transport.connected:
                connector.disconnect() if connector.state == "connecting" else transport.abortConnection()
            elif how == 1 and transport.protocol.state == Events.STATE_OPEN:
                transport.protocol.sendClose(1000)
            else:
                transport.loseConnection()

        self.world.callLater(rng.uniform(0.0, stay), go, how)
        self.world.callLater(stay + 30.0, go, 0)
        await factory.ended


class SdClients(Clients):
    name = "sd"

    def operations(self) -> Operations:
        return [
            (16, self.draw),
            (8, self.job),
            (8, self.look),
            (1, self.upscale),
            (1, self.odd_request),
        ]

    async def draw(self) -> None:
        rng = self.rng
        steps = rng.choice((1, 1, 3, 8, 30))
        extra = f'<sd_cpp_extra_args>{{"sample_params": {{"sample_steps": {steps}}}}}</sd_cpp_extra_args>'
        path, body = rng.choice(
            (
                ("/sdapi/v1/txt2img", {"prompt": "a lock", "steps": steps}),
                ("/sdapi/v1/txt2img", {"prompt": "a lock", "steps": steps, "batch_size": 2}),
                ("/sdapi/v1/img2img", {"prompt": "a lock", "steps": steps}),
                ("/v1/images/generations", {"prompt": "a lock" + extra}),
                ("/v1/images/generations", {"prompt": "a lock" + extra}),
                ("/sdapi/v1/%74xt2img", {"prompt": "a lock", "steps": steps}),
                ("/sdapi/v1/txt2img", {"prompt": ""}),
                ("/v1/images/edits", {"prompt": "a lock"}),
            )
        )
        await self.ask("POST", path, body)

    async def job(self) -> None:
        rng = self.rng
        kind = rng.choice(("img_gen", "img_gen", "vid_gen"))
        steps = rng.choice((1, 3, 8, 30))
        body: Any = {"prompt": "a lock", "sample_params": {"sample_steps": steps}}
        if rng.random() < 0.1:
            body = rng.choice((b"{", b"", b"[]"))
        answer = await self.ask("POST", f"/sdcpp/v1/{kind}", body)
        if answer.status != 202 or not answer.complete:
            return
        try:
            url = json.loads(unchunk(answer.body))["poll_url"]
        except ValueError:
            return  # a fault's
        for _ in range(rng.choice((0, 0, 1, 3))):
            await self.system.sleep(rng.uniform(0.0, 2.0))
            await self.ask("GET", url)
        if rng.random() < 0.3:
            await self.ask("POST", url + "/cancel")

    async def look(self) -> None:
        path = self.rng.choice(
            (
                "/sdapi/v1/progress",
                "/sdapi/v1/progress",
                "/sdapi/v1/options",
                "/sdapi/v1/sd-models",
                "/sdcpp/v1/capabilities",
                "/sdcpp/v1/jobs/none",
                "/v1/models",
                "/",
            )
        )
        answer = await self.ask(self.rng.choice(("GET", "GET", "HEAD")), path)
        if not (answer.left or self.faults or answer.status in (200, 404, 503)):
            self.system.failures.append(f"{path} answered {answer.status}")

    async def upscale(self) -> None:
        await self.ask("POST", "/sdcpp/v1/upscale", {"image": "aaaa"})

    async def odd_request(self) -> None:
        method, path = self.rng.choice(
            (
                ("POST", "/sdapi/v1/interrupt"),
                ("DELETE", "/sdapi/v1/txt2img"),
                ("OPTIONS", "/sdapi/v1/txt2img"),
                ("GET", "/sdapi/v1/txt2img"),
            )
        )
        await self.ask(method, path, b"" if method == "POST" else None)


CLIENTS: dict[str, type[Clients]] = {
    kind.name: kind for kind in (OllamaClients, LlamaClients, ComfyClients, SdClients)
}


class Schedule:
    """Operations of clients, and in some runs of fate.

    :param faults: engines fail now and then.
    :param intruders: models are loaded and jobs queued behind turnstile's back.
    :param harshness: how many times as often that happens.
    """

    def __init__(
        self,
        system: System,
        operations: int,
        *,
        users: int = 10,
        faults: bool = False,
        intruders: bool = False,
        harshness: int = 1,
    ) -> None:
        self.system = system
        self.rng = system.rng
        self.world = system.world
        self.left = operations
        self.done_operations = 0
        self.users = users
        #: When jobs and models (of which engine) came behind turnstile's back.
        self.foreign_jobs: list[float] = []
        self.foreign_models: list[tuple[float, str]] = []
        self.running: dict[object, tuple[float, str]] = {}
        self.operations: Operations = [(4, self.look_at_turnstile)]
        for name in system.parts:
            self.operations += CLIENTS[name](system, faults).operations()
        if faults:
            self.operations += [
                (3 * harshness, self.fault_http),
                (harshness, self.fault_process),
                (2 * harshness, self.fault_engine),
                (harshness, self.fault_sockets),
            ]
        if intruders and "comfyui" in system.parts:
            self.operations.append((2 * harshness, self.foreign_job))
        if intruders and system.parts.keys() & {"ollama", "llamacpp"}:
            self.operations.append((2 * harshness, self.foreign_model))
        self._weights = [weight for weight, _ in self.operations]
        self._choices = [operation for _, operation in self.operations]

    # -- the driver

    def start(self) -> None:
        for number in range(self.users):
            Deferred.fromCoroutine(self._user(number)).addErrback(self._user_failed)

    def _user_failed(self, failure: Failure) -> None:
        self.system.failures.append("a client of the test failed: " + failure.getTraceback())

    async def _user(self, number: int) -> None:
        rng = self.rng
        tally = self.system.tally
        while self.left > 0:
            self.left -= 1
            operation = rng.choices(self._choices, self._weights)[0]
            name = operation.__qualname__
            key = object()
            self.running[key] = (self.world.seconds(), name)
            tally[name] = tally.get(name, 0) + 1
            try:
                await operation()
            finally:
                del self.running[key]
                self.done_operations += 1
            # Bursts and silences: most think for a moment, some for long enough that the card falls idle.
            think = rng.choice((0.0, 0.01, 0.3, 1.0, 4.0 if number % 3 else 12.0))
            await self.system.sleep(rng.uniform(0.0, think))

    def finished(self) -> bool:
        return self.left <= 0 and not self.running

    async def look_at_turnstile(self) -> None:
        path = self.rng.choice(("/healthz", "/metrics", "/turnstile/state", "/turnstile/healthz"))
        name = self.rng.choice(list(self.system.parts))
        if name in ("llamacpp", "sd") and not path.startswith("/turnstile"):
            path = "/turnstile" + path
        self.system.note(f"client: GET {path} of {name}")
        leave = Clients(self.system, False).leave()
        answer = await self.system.call(name, "GET", path, None, leave)
        if not answer.left and answer.status != 200:
            self.system.failures.append(f"{path} answered {answer.status}")

    # -- fate

    def _part(self) -> Any:
        return self.rng.choice(list(self.system.parts.values()))

    async def fault_http(self) -> None:
        """Some requests to an engine go wrong."""
        rng = self.rng
        part = self._part()
        match = rng.choice(part.matches)
        times = rng.choice((1, 1, 2, 5, None))
        faults = part.faults
        kind = rng.choice(
            (
                "hang",
                "status",
                "status",
                "garbage",
                "drop",
                "drop",
                "cut",
                "upload",
                "delay",
                "trickle",
            )
        )
        if kind == "hang":
            rule = faults.hang(match, times)
        elif kind == "status":
            rule = faults.status(rng.choice((500, 503, 404, 502)), match, times)
        elif kind == "garbage":
            rule = faults.garbage(match, times)
        elif kind == "drop":
            rule = faults.drop(match, times, rst=rng.random() < 0.5)
        elif kind == "cut":
            rule = faults.drop(match, times, after=rng.choice((0, 1, 20)), rst=rng.random() < 0.5)
        elif kind == "upload":
            rule = faults.drop_upload(match, times, after=rng.choice((0, 10, 60)))
        elif kind == "delay":
            rule = faults.delay(rng.choice((0.05, 0.5, 7.0)), match, times)
        else:
            rule = faults.trickle(match, times, interval=0.005)
        part.trouble(f"{part.name}: {kind} on {match}, times {times}")
        self.world.callLater(rng.choice((0.5, 3.0, 20.0)), rule.cancel)

    async def fault_process(self) -> None:
        """An engine dies, or refuses connections for a while."""
        rng = self.rng
        part = self._part()
        away = rng.choice((0.0, 0.3, 2.0, 8.0))
        if rng.random() < 0.7:
            await part.die(away)
        else:
            await part.refuse(away)

    async def fault_engine(self) -> None:
        """An engine does not do what it says."""
        part = self._part()
        well = part.lie(self.rng)
        if well is not None:
            self.world.callLater(self.rng.choice((1.0, 5.0, 20.0)), well)

    async def fault_sockets(self) -> None:
        """Open connections to an engine are cut."""
        rng = self.rng
        if "comfyui" in self.system.parts and rng.random() < 0.5:
            self.system.note("FAULT: ComfyUI's WebSockets are cut")
            for sid, socket in list(self.system.host.comfy.sockets.items()):
                if sid.startswith("turnstile-") or rng.random() < 0.3:
                    socket.transport.abortConnection()
        else:
            part = self._part()
            part.trouble(f"all connections to {part.name} are cut")
            part.sim.drop_connections(rst=rng.random() < 0.5)

    async def foreign_job(self) -> None:
        comfy = self.system.host.comfy
        if comfy.listening:
            self.system.note("FAULT: a job is queued in ComfyUI directly")
            self.foreign_jobs.append(self.world.seconds())
            comfy.submit(image_graph(steps=self.rng.randint(1, 8)))

    async def foreign_model(self) -> None:
        names = [name for name in self.system.parts if name in ("ollama", "llamacpp")]
        part = self.system.parts[self.rng.choice(names)]
        if part.sim.listening:
            part.trouble(f"a model is loaded in {part.name} directly")
            self.foreign_models.append((self.world.seconds(), part.name))
            part.load()
