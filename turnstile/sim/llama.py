"""A simulated llama-server: its routes, on top of the router in `llama_router`."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from twisted.internet.defer import CancelledError, Deferred

from .card import Card
from .exchange import Exchange, HttpError
from .httplib import JSON_UTF8, KEEP_ALIVE, Route, compact
from .llama_formats import (
    METRICS,
    ROUTER_PROPS,
    Completion,
    LlamaChat,
    LlamaText,
    count_tokens,
    embeddings,
    llama_error,
    parse,
    props,
)
from .llama_router import Child, Instance, Router
from .llama_streams import ChildDied, Kept, Streams
from .ollama_formats import Format, Messages, Responses, text_of, word
from .ollama_runner import ModelSpec

NOT_BUFFERED = (b"X-Accel-Buffering", b"no")
LOST = b"proxy error: Failed to read connection"
NOT_THERE = b"proxy error: Could not establish connection"
PAGE = b"<!doctype html><title>llama.cpp</title><p>simulated llama-server</p>\n"

Action = Callable[[Exchange, Instance, Child, dict[str, Any]], Awaitable[None]]
"""What a child does for a request: the request, its model, the child, the body."""

Work = Callable[[], Awaitable[None]]


class LlamaSim(Router):
    """llama-server on the simulated card, as a router or (``single``) with one model.

    ``token_rate`` is tokens a second, ``prompt_time`` what comes before the first of them.
    ``unknown_routes_load``: a POST to a path that is not known here has its model loaded before it
    is not found.  The real one does not, but has new routes with every version, and these do.
    Everything else: see `Router`.
    """

    preflight_status = 200
    preflight_type = b"text/html"

    def __init__(
        self,
        card: Card,
        clock: Any,
        models: tuple[ModelSpec, ...] | list[ModelSpec] | None = None,
        *,
        token_rate: float = 50.0,
        prompt_time: float = 0.05,
        api_key: str | None = None,
        unknown_routes_load: bool = True,
        **routing: Any,
    ) -> None:
        super().__init__(card, clock, models, **routing)
        self.token_rate = token_rate
        self.prompt_time = prompt_time
        self.api_key = api_key
        self.unknown_routes_load = unknown_routes_load
        self.generations = 0
        self.streams = Streams()
        self.actions = self._actions()
        self.routes = {
            ("GET", "/"): self._page,
            ("GET", "/health"): self._health,
            ("GET", "/v1/health"): self._health,
            ("GET", "/models"): self._models,
            ("GET", "/v1/models"): self._models,
            ("GET", "/props"): self._props,
            ("GET", "/slots"): partial(self._look, self._slots, True),
            ("GET", "/metrics"): partial(self._look, self._metrics, False),
            ("GET", "/lora-adapters"): partial(self._look, self._lora, True),
            ("GET", "/v1/stream"): self._stream_get,
            ("DELETE", "/v1/stream"): self._stream_delete,
            ("POST", "/v1/streams/lookup"): self._stream_lookup,
        }
        self.routes |= {("POST", path): self._post for path in self.actions}
        if self.single is None:
            self.routes |= {
                ("POST", "/models"): self._download,
                ("DELETE", "/models"): self._remove,
                ("POST", "/models/load"): self._load_route,
                ("POST", "/models/unload"): self._unload_route,
                ("GET", "/models/sse"): self._sse,
            }

    def _actions(self) -> dict[str, Action]:
        chat, text = self._completion(LlamaChat), self._completion(LlamaText)
        own, anthropic = self._completion(Completion), self._completion(Messages)
        responses = self._completion(Responses)
        tokens: Action = partial(self._say, {"input_tokens": 1})
        return {
            "/completion": own,
            "/completions": own,
            "/v1/completions": text,
            "/chat/completions": chat,
            "/v1/chat/completions": chat,
            "/v1/responses": responses,
            "/responses": responses,
            "/v1/messages": anthropic,
            "/embedding": self._embed,
            "/embeddings": self._embed,
            "/v1/embeddings": self._embed,
            "/tokenize": partial(self._say, {"tokens": [1, 2, 3]}),
            "/detokenize": partial(self._say, {"content": text_of(3)}),
            "/apply-template": partial(self._say, {"prompt": "<s>"}),
            "/chat/completions/input_tokens": tokens,
            "/v1/chat/completions/input_tokens": tokens,
            "/responses/input_tokens": tokens,
            "/v1/responses/input_tokens": tokens,
            "/v1/messages/count_tokens": tokens,
            "/v1/chat/completions/control": partial(self._say, {"success": True}),
            "/lora-adapters": partial(self._say, {"success": True}),
            "/v1/audio/transcriptions": partial(self._say, {"text": "one tenant at a time"}),
            "/audio/transcriptions": partial(self._say, {"text": "one tenant at a time"}),
            "/props": partial(self._unsupported, "changing global properties", "--props"),
            "/infill": partial(self._unsupported, "infill", "--fim"),
            "/rerank": partial(self._unsupported, "reranking", "--reranking"),
            "/reranking": partial(self._unsupported, "reranking", "--reranking"),
            "/v1/rerank": partial(self._unsupported, "reranking", "--reranking"),
            "/v1/reranking": partial(self._unsupported, "reranking", "--reranking"),
        }

    def reset(self) -> None:
        self.streams.clear()
        super().reset()

    # -- before the routes

    def standard_headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"Server", b"llama.cpp")]

    def cors(self, exchange: Exchange) -> list[tuple[bytes, bytes]]:
        allow = [(b"Access-Control-Allow-Origin", exchange.header(b"origin") or b"")]
        if exchange.method == "OPTIONS":
            allow += [
                (b"Access-Control-Allow-Credentials", b"true"),
                (b"Access-Control-Allow-Methods", b"GET, POST"),
                (b"Access-Control-Allow-Headers", b"*"),
            ]
        return allow

    async def refused(self, exchange: Exchange) -> bool:
        if self.single is not None and exchange.path != "/":
            child = self.instances[self.single].child
            if child is None or not child.was_ready:
                await exchange.body()
                raise llama_error("Loading model", "unavailable_error")
        if self.api_key is None or exchange.path in ("/health", "/v1/health", "/"):
            return False
        given = exchange.header(b"authorization") or exchange.header(b"x-api-key") or b""
        if given.removeprefix(b"Bearer ") == self.api_key.encode():
            return False
        await exchange.body()
        raise llama_error("Invalid API Key", "authentication_error")

    def find(self, method: str, path: str) -> Route | None:
        if method != "POST":
            return None
        if re.fullmatch(r"/slots/[^/]+", path):
            return self._post
        return self._unknown_post if self.unknown_routes_load and self.single is None else None

    def not_found(self) -> HttpError:
        return llama_error("File Not Found", "not_found_error")

    # -- the router

    def _named(self, name: object) -> Instance:
        if not isinstance(name, str) or not name:
            raise llama_error("model name is missing from the request")
        instance = self.instances.get(name)
        if instance is None:
            raise llama_error(f"model '{name}' not found")
        return instance

    def _may_load(self, exchange: Exchange) -> bool:
        wanted = exchange.query.get("autoload", "")
        return wanted in ("true", "1") if wanted else self.autoload

    async def _child_for(self, exchange: Exchange, name: object) -> tuple[Instance, Child]:
        """The child that is to serve the request, once it can."""
        if self.single is not None:
            instance = self.instances[self.single]
        else:
            instance = self._named(name)
            if self._may_load(exchange):
                await self.ensure(instance)
            elif not instance.running:
                raise llama_error("model is not loaded")
        child = instance.child
        if child is None:
            raise llama_error(f"model name={instance.spec.name} is not running")
        if child.exiting:
            raise HttpError(500, NOT_THERE, JSON_UTF8)
        if instance.status == "loading" and not child.was_ready:
            raise llama_error("Loading model", "unavailable_error")
        return instance, child

    async def _post(self, exchange: Exchange) -> None:
        body = await exchange.body()
        asked = _multipart(exchange, body) or parse(body)
        instance, child = await self._child_for(exchange, asked.get("model"))
        action = self.actions.get(exchange.path) or partial(
            self._unsupported, "slots action", "--slot-save-path"
        )
        instance.last_used = self.clock.seconds()
        await self._through(exchange, instance, child, asked, action)

    async def _unknown_post(self, exchange: Exchange) -> None:
        body = await exchange.body()
        try:
            instance = self._named(parse(body).get("model"))
        except HttpError:
            raise self.not_found() from None
        if self._may_load(exchange):
            await self.ensure(instance)
        raise self.not_found()

    async def _look(self, show: Action, task: bool, exchange: Exchange) -> None:
        instance, child = await self._child_for(exchange, exchange.query.get("model"))
        await self._through(exchange, instance, child, {}, show, task=task)

    async def _through(
        self,
        exchange: Exchange,
        instance: Instance,
        child: Child,
        asked: dict[str, Any],
        action: Action,
        *,
        task: bool = True,
    ) -> None:
        """Have the child serve the request; what becomes of it if the child ends.

        ``task``: it keeps the child awake.
        """
        child.requests += 1
        if task:
            child.tasks += 1
            child.disarm()
        if self.single is None:
            # The router passes the child's answer on as a stream, and what that says of its own
            # connection with it [seen].
            exchange.always_chunked = True
            exchange.connection.keep_alive = False
            exchange.extra_headers += [NOT_BUFFERED, KEEP_ALIVE]
        try:
            await action(exchange, instance, child, asked)
        except HttpError:
            if KEEP_ALIVE in exchange.extra_headers:
                exchange.extra_headers.remove(KEEP_ALIVE)
            raise
        except ChildDied:
            if not exchange.started:
                exchange.reply(500, LOST, JSON_UTF8)
            else:
                # The router has sent the head and ends the body as if all were well.
                exchange.write(LOST)
                exchange.finish()
        finally:
            child.requests -= 1
            if task:
                child.tasks -= 1
                self.tasks_over(instance, child)

    async def _load_route(self, exchange: Exchange) -> None:
        name = parse(await exchange.body()).get("model")
        instance = self.instances.get(name) if isinstance(name, str) else None
        if instance is None:
            raise self.not_found()
        if instance.running:
            raise llama_error("model is already running")
        await self.make_place(instance.spec.name)
        self.begin_load(instance)
        exchange.json({"success": True})

    async def _unload_route(self, exchange: Exchange) -> None:
        name = parse(await exchange.body()).get("model")
        instance = self.instances.get(name) if isinstance(name, str) else None
        if instance is None:
            raise llama_error("model is not found")
        if not instance.running:
            raise llama_error("model is not running")
        faults = self.faults
        if not faults.spend("ignore_unload"):
            self.stop_instance(instance)
        if faults.spend("unload_hangs"):
            await Deferred()
        if faults.spend("unload_500"):
            raise llama_error("simulated failure of the unload", "server_error")
        exchange.json({"success": True})

    async def _download(self, exchange: Exchange) -> None:
        name = parse(await exchange.body()).get("model")
        if not isinstance(name, str) or not name:
            raise llama_error("model must be a non-empty string")
        if name in self.instances:
            raise llama_error(f"model '{name}' already exists")
        self.instances[name] = Instance(ModelSpec(name))
        exchange.json({"success": True})

    async def _remove(self, exchange: Exchange) -> None:
        name = exchange.query.get("model", "")
        if not name:
            raise llama_error("model must be a non-empty string")
        if name not in self.instances:
            raise llama_error(f"model name={name} is not found", "server_error")
        if self.instances[name].running:
            raise llama_error(f"model name={name} is running", "server_error")
        del self.instances[name]
        exchange.json({"success": True})

    async def _sse(self, exchange: Exchange) -> None:
        exchange.start(200, content_type=b"text/event-stream")
        if exchange.method == "HEAD":
            exchange.finish()
            return
        with self.subscribed(lambda event: exchange.write(b"data: " + compact(event) + b"\n\n")):
            await Deferred()

    # -- looks that load nothing

    async def _page(self, exchange: Exchange) -> None:
        exchange.reply(200, PAGE, b"text/html; charset=utf-8")

    async def _health(self, exchange: Exchange) -> None:
        exchange.json({"status": "ok"})

    async def _models(self, exchange: Exchange) -> None:
        for instance in self.instances.values() if self.single is not None else ():
            if instance.child is not None:
                await self.asleep_or_awake(instance, instance.child)
        data = [self._listed(instance) for instance in self.instances.values()]
        if self.single is None:
            exchange.json({"data": data, "object": "list"})
            return
        for entry in data:
            del entry["status"]
        models = [{"name": self.single, "model": self.single, "capabilities": ["completion"]}]
        exchange.json({"models": models, "object": "list", "data": data})

    def _listed(self, instance: Instance) -> dict[str, Any]:
        name = instance.spec.name
        status: dict[str, Any] = {"value": instance.status, "args": ["llama-server", "-m", name]}
        if instance.failed:
            status |= {"exit_code": instance.exit_code, "failed": True}
        entry = {
            "id": name,
            "aliases": [],
            "tags": [],
            "object": "model",
            "owned_by": "llamacpp",
            "created": int(self.clock.seconds()),
            "status": status,
            "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
            "source": "preset",
            "can_remove": False,
        }
        if instance.running and instance.status != "loading":
            entry["meta"] = {"vocab_type": 2, "n_vocab": 32000, "size": instance.spec.disk}
        return entry

    async def _props(self, exchange: Exchange) -> None:
        if self.single is None and not exchange.query.get("model"):
            exchange.json({**ROUTER_PROPS, "max_instances": self.models_max})
            return
        await self._look(self._own_props, False, exchange)

    async def _own_props(
        self, exchange: Exchange, instance: Instance, child: Child, asked: dict[str, Any]
    ) -> None:
        await self.asleep_or_awake(instance, child)
        sleeps = instance.status == "sleeping"
        exchange.json(props(instance.spec.name, self.parallel, sleeps))

    async def _metrics(
        self, exchange: Exchange, instance: Instance, child: Child, asked: dict[str, Any]
    ) -> None:
        await self.asleep_or_awake(instance, child)
        exchange.reply(200, METRICS, b"text/plain; version=0.0.4")

    async def _slots(
        self, exchange: Exchange, instance: Instance, child: Child, asked: dict[str, Any]
    ) -> None:
        await self.awake(instance, child)
        slots = [{"id": n, "is_processing": n < child.working} for n in range(self.parallel)]
        exchange.json(slots)

    async def _lora(
        self, exchange: Exchange, instance: Instance, child: Child, asked: dict[str, Any]
    ) -> None:
        await self.awake(instance, child)
        exchange.json([])

    # -- work

    async def _say(
        self,
        answer: dict[str, Any],
        exchange: Exchange,
        instance: Instance,
        child: Child,
        asked: dict[str, Any],
    ) -> None:
        """Something small that the model is needed for."""
        await self.awake(instance, child)
        exchange.json(answer)

    async def _unsupported(
        self,
        what: str,
        remedy: str,
        exchange: Exchange,
        instance: Instance,
        child: Child,
        asked: dict[str, Any],
    ) -> None:
        await self.awake(instance, child)
        message = f"This server does not support {what}. Start it with `{remedy}`"
        raise llama_error(message, "not_supported_error")

    async def _embed(
        self, exchange: Exchange, instance: Instance, child: Child, asked: dict[str, Any]
    ) -> None:
        await self.awake(instance, child)
        if not instance.spec.embedding_only:
            await self._unsupported("embeddings", "--embeddings", exchange, instance, child, asked)
        given = asked.get("input", asked.get("content"))
        if given in (None, "", []):
            raise llama_error('"input" or "content" must be provided')
        count = len(given) if isinstance(given, list) else 1

        async def work() -> None:
            await self.compute(child, self.prompt_time)
            exchange.json(embeddings(instance.spec.name, count))

        await self._on_slot(instance, child, work)

    def _completion(self, kind: type[Format]) -> Action:
        async def complete(
            exchange: Exchange, instance: Instance, child: Child, asked: dict[str, Any]
        ) -> None:
            await self.awake(instance, child)
            if instance.spec.embedding_only:
                raise llama_error(
                    "This server does not support completions. Start it without `--embeddings`",
                    "not_supported_error",
                )
            needed = {Messages: "messages", LlamaChat: "messages", Responses: "input"}
            key = needed.get(kind, "prompt")
            if key not in asked:
                raise llama_error(f"'{key}' is required")
            shape = kind(instance.spec.name, self.clock.seconds(), self.requests_seen)
            tokens = count_tokens(asked, instance.spec.tokens)
            stream = bool(asked.get("stream", False))
            conversation = exchange.header(b"x-conversation-id")
            if not conversation:
                work = partial(self._produce, exchange, child, shape, tokens, stream)
                await self._on_slot(instance, child, work)
                return
            # A named conversation belongs to its stream, not to the connection that began it.
            kept = self.streams.begin(conversation.decode("latin-1"))
            produce = partial(self._produce, kept, child, shape, tokens, stream)
            kept.task = self.spawn(self._keep(instance, child, kept, produce))
            await kept.follow(exchange)

        return complete

    async def _keep(self, instance: Instance, child: Child, kept: Kept, produce: Work) -> None:
        child.requests += 1
        child.tasks += 1
        try:
            await self._on_slot(instance, child, produce)
        except ChildDied:
            kept.broken = True
        finally:
            kept.end()
            child.requests -= 1
            child.tasks -= 1
            self.tasks_over(instance, child)

    async def _produce(
        self, sink: Any, child: Child, shape: Format, tokens: int, stream: bool
    ) -> None:
        """Compute an answer and write it to an exchange, or to a stream that is kept."""
        if not stream:
            await self.compute(child, self.prompt_time + tokens / self.token_rate)
            sink.json(shape.whole(tokens))
            return
        await self.compute(child, self.prompt_time)
        more = [] if self.single is None else [NOT_BUFFERED]
        sink.start(200, more, content_type=b"text/event-stream")
        sink.write(shape.opening())
        for index in range(tokens):
            sink.write(shape.piece(index, word(index)))
            await sink.drain()
            await self.compute(child, 1 / self.token_rate)
        sink.write(shape.closing(tokens))
        sink.finish()

    async def _on_slot(self, instance: Instance, child: Child, work: Work) -> None:
        """Do the work in one of the child's slots; a client that leaves cancels it, not at once."""
        await child.slots.acquire()
        self.generations += 1
        self.active_generations += 1
        child.working += 1
        lingers = False
        try:
            await work()
        except CancelledError:
            lingers = self.abort_time > 0 and child.alive
            raise
        finally:
            if lingers:
                self.spawn(self._linger(instance, child))
            else:
                self._worked(instance, child)

    async def _linger(self, instance: Instance, child: Child) -> None:
        try:
            await child.nap(self.clock, self.real(self.abort_time))
        finally:
            self._worked(instance, child)

    def _worked(self, instance: Instance, child: Child) -> None:
        child.slots.release()
        self.active_generations -= 1
        child.working -= 1
        self.tasks_over(instance, child)

    # -- streams that outlive their connection

    async def _stream_get(self, exchange: Exchange) -> None:
        name = exchange.query.get("conv_id", "")
        if not name:
            raise llama_error("Missing conversation id in path")
        kept = self.streams.kept.get(name)
        if kept is None:
            raise self.not_found()
        await kept.follow(exchange, int(exchange.query.get("from", "0") or 0))

    async def _stream_delete(self, exchange: Exchange) -> None:
        self.streams.cancel(exchange.query.get("conv_id", ""))
        exchange.reply(204, b"", b"application/json")

    async def _stream_lookup(self, exchange: Exchange) -> None:
        try:
            asked = parse(await exchange.body()).get("conversation_ids")
        except HttpError:
            asked = None
        names = asked if isinstance(asked, list) else []
        exchange.json(self.streams.listed([name for name in names if isinstance(name, str)]))


def _multipart(exchange: Exchange, body: bytes) -> dict[str, Any] | None:
    """The fields of a form, None for anything else."""
    if b"multipart/form-data" not in (exchange.header(b"content-type") or b"").lower():
        return None
    found = re.findall(rb'name="?(\w+)"?\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)', body)
    return {name.decode(): value.decode("utf-8", "replace") for name, value in found}


__all__ = ["LlamaSim", "ModelSpec"]
