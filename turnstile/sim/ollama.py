"""A simulated Ollama: its routes, on top of the scheduler in `ollama_runner`."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable
from typing import Any

from twisted.internet.defer import CancelledError, Deferred

from .card import Card
from .exchange import Exchange, HttpError
from .faults import take
from .ollama_formats import (
    JSON,
    Format,
    Messages,
    Native,
    NativeChat,
    OpenAiChat,
    OpenAiText,
    Responses,
    failure,
    fields,
    openai_failure,
    parse_keep_alive,
    usage,
    word,
)
from .ollama_library import Library, Route, is_remote
from .ollama_runner import ModelSpec, Runner, full_name

VERSION = "0.31.0"
PIECE = 64 << 10
EMBEDDING = [0.01, -0.02, 0.03, 0.04]
LOCAL_ORIGIN = re.compile(
    r"(https?://(localhost|127\.0\.0\.1|0\.0\.0\.0)(:\d+)?"
    r"|(app|file|tauri|vscode-webview|vscode-file)://.*)\Z"
)
ALLOW_METHODS = b"GET,POST,PUT,PATCH,DELETE,HEAD,OPTIONS"
ALLOW_HEADERS = b"Authorization,Content-Type,User-Agent,Accept,X-Requested-With"


class OllamaSim(Library):
    """Ollama on the simulated card.

    ``token_rate`` is tokens a second, ``prompt_time`` what comes before the first of them.
    ``ignores_disconnect_for``: how long the runner goes on for a client that has left [CASES C08].
    Everything else: see `Library` and `Scheduler`.
    """

    def __init__(
        self,
        card: Card,
        clock: Any,
        models: tuple[ModelSpec, ...] | list[ModelSpec] | None = None,
        *,
        token_rate: float = 50.0,
        prompt_time: float = 0.05,
        ignores_disconnect_for: float = 0.0,
        allowed_origins: tuple[str, ...] = (),
        **scheduling: Any,
    ) -> None:
        super().__init__(card, clock, models, **scheduling)
        self.token_rate = token_rate
        self.prompt_time = prompt_time
        self.ignores_disconnect_for = ignores_disconnect_for
        self.allowed_origins = allowed_origins
        self.active_generations = 0
        self.generations = 0
        self._routes: dict[tuple[str, str], Route] = {
            **self.library_routes(),
            ("POST", "/api/generate"): self._generate,
            ("POST", "/api/chat"): self._chat,
            ("POST", "/api/embed"): self._embed,
            ("POST", "/api/embeddings"): self._embeddings,
            ("POST", "/v1/chat/completions"): lambda ex: self._openai(ex, OpenAiChat),
            ("POST", "/v1/completions"): lambda ex: self._openai(ex, OpenAiText),
            ("POST", "/v1/responses"): lambda ex: self._openai(ex, Responses),
            ("POST", "/v1/messages"): lambda ex: self._openai(ex, Messages),
            ("POST", "/v1/embeddings"): self._v1_embeddings,
            ("POST", "/v1/audio/transcriptions"): self._transcribe,
        }

    def reset(self) -> None:
        super().reset()
        self.active_generations = 0

    # -- dispatch

    async def handle(self, exchange: Exchange) -> None:
        if not self._host_allowed(exchange.header(b"host") or b""):
            exchange.reply(403, b"", None)
            return
        if not self._cors(exchange):
            return
        path = exchange.path
        method = "GET" if exchange.method == "HEAD" else exchange.method
        route = self._routes.get((method, path))
        if route is None and path.startswith("/api/blobs/"):
            route = self._blob
        if route is None:
            await exchange.body()
            bare = path.rstrip("/")
            if path.endswith("/") and (method, bare) in self._routes:
                code = 301 if method == "GET" else 307
                exchange.reply(code, b"", None, [(b"Location", bare.encode())])
            elif any(known == path for _, known in self._routes):
                exchange.reply(405, b"405 method not allowed", b"text/plain")
            else:
                exchange.reply(404, b"404 page not found", b"text/plain")
            return
        try:
            await route(exchange)
        except HttpError as error:
            raise openai_failure(error) if path.startswith("/v1/") else error from None

    @staticmethod
    def _host_allowed(host: bytes) -> bool:
        """The check that Ollama makes when it listens on loopback [src]."""
        name = host.decode("latin-1")
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        else:
            name = name.partition(":")[0]
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            name = name.lower()
            return name in ("", "localhost") or name.endswith((".localhost", ".local", ".internal"))
        return address.is_loopback or address.is_private

    def _cors(self, exchange: Exchange) -> bool:
        """Judge the Origin; false if the request is answered already."""
        origin = (exchange.header(b"origin") or b"").decode("latin-1")
        host = (exchange.header(b"host") or b"").decode("latin-1")
        if not origin or origin in (f"http://{host}", f"https://{host}"):
            return True
        if not LOCAL_ORIGIN.match(origin) and origin not in self.allowed_origins:
            exchange.reply(403, b"", None)
            return False
        allow = [(b"Access-Control-Allow-Origin", origin.encode("latin-1")), (b"Vary", b"Origin")]
        if exchange.method == "OPTIONS":
            more = [
                (b"Access-Control-Allow-Methods", ALLOW_METHODS),
                (b"Access-Control-Allow-Headers", ALLOW_HEADERS),
                (b"Access-Control-Max-Age", b"43200"),
            ]
            exchange.reply(204, b"", None, [*allow, *more])
            return False
        exchange.extra_headers.extend(allow)
        return True

    # -- routes that use the card

    async def _generate(self, exchange: Exchange) -> None:
        asked = fields(await exchange.body())
        empty = not asked.get("prompt") and not asked.get("images")
        await self._native(exchange, asked, Native, empty)

    async def _chat(self, exchange: Exchange) -> None:
        asked = fields(await exchange.body())
        await self._native(exchange, asked, NativeChat, not asked.get("messages"))

    async def _native(
        self, exchange: Exchange, asked: dict[str, Any], kind: type[Native], empty: bool
    ) -> None:
        spec = self._find(asked)
        keep_alive = parse_keep_alive(asked.get("keep_alive"))
        if spec.embedding_only:
            raise failure(400, f'"{spec.name}" does not support generate')
        shape = kind(str(asked.get("model")), self.clock.seconds(), self.requests_seen)
        if empty and keep_alive == 0:
            await self._unload(spec.name)
            exchange.json(shape.done("unload"))
        elif empty:
            self.release(await self.acquire(full_name(spec.name), keep_alive))
            exchange.json(shape.done("load"))
        else:
            await self._answer(exchange, asked, spec, keep_alive, shape)

    async def _unload(self, name: str) -> None:
        faults = self.faults
        ignored, faults.ignore_unload = take(faults.ignore_unload)
        if not ignored:
            self.expire(name)
        hangs, faults.unload_hangs = take(faults.unload_hangs)
        if hangs:
            await Deferred()
        fails, faults.unload_500 = take(faults.unload_500)
        if fails:
            raise failure(500, "simulated failure of the unload")

    async def _openai(self, exchange: Exchange, kind: type[Format]) -> None:
        asked = fields(await exchange.body())
        spec = self._find(asked)
        if spec.embedding_only:
            raise failure(400, f'"{spec.name}" does not support chat')
        needed = {Responses: "input", OpenAiText: "prompt"}.get(kind, "messages")
        if not asked.get(needed):
            raise failure(400, f"[] is too short - '{needed}'")
        shape = kind(str(asked["model"]), self.clock.seconds(), self.requests_seen)
        await self._answer(exchange, asked, spec, None, shape)

    async def _answer(
        self,
        exchange: Exchange,
        asked: dict[str, Any],
        spec: ModelSpec,
        keep_alive: float | None,
        shape: Format,
    ) -> None:
        tokens = count_tokens(asked, spec)
        stream = asked.get("stream", shape.streams_by_default)

        async def work() -> None:
            if not stream:
                await self.sleep(self.prompt_time + tokens / self.token_rate)
                exchange.json(shape.whole(tokens))
                return
            await self.sleep(self.prompt_time)
            exchange.start(200, content_type=shape.stream_type)
            exchange.write(shape.opening())
            for index in range(tokens):
                exchange.write(shape.piece(index, word(index)))
                await exchange.drain()
                await self.sleep(1 / self.token_rate)
            exchange.write(shape.closing(tokens))
            exchange.finish()

        await self._on_card(spec, keep_alive, work)

    async def _on_card(
        self, spec: ModelSpec, keep_alive: float | None, work: Callable[[], Awaitable[None]]
    ) -> None:
        """Do the work on the model's runner; a client that leaves cancels it."""
        self.generations += 1
        if is_remote(spec.name):
            await work()
            return
        runner = await self.acquire(full_name(spec.name), keep_alive)
        lingers = False
        if runner.slots is not None:
            try:
                await runner.slots.acquire()
            except CancelledError:
                self.release(runner)
                raise
        self.active_generations += 1
        try:
            await work()
        except CancelledError:
            lingers = self.ignores_disconnect_for > 0
            raise
        finally:
            if lingers:
                self.spawn(self._linger(runner))
            else:
                self._generated(runner)

    async def _linger(self, runner: Runner) -> None:
        await self.sleep(self.ignores_disconnect_for)
        self._generated(runner)

    def _generated(self, runner: Runner) -> None:
        if runner.slots is not None:
            runner.slots.release()
        self.active_generations -= 1
        self.release(runner)

    async def _embed(self, exchange: Exchange) -> None:
        asked = fields(await exchange.body())
        spec = self._find(asked)
        given = asked.get("input")
        if given is None:
            raise failure(400, "invalid input type")
        count = len(given) if isinstance(given, list) else 1

        async def work() -> None:
            await self.sleep(self.prompt_time)
            body = {"model": asked.get("model"), "embeddings": [EMBEDDING] * count}
            exchange.json({**body, "total_duration": 1, "prompt_eval_count": count})

        await self._on_card(spec, parse_keep_alive(asked.get("keep_alive")), work)

    async def _embeddings(self, exchange: Exchange) -> None:
        asked = fields(await exchange.body())
        spec = self._find(asked)

        async def work() -> None:
            await self.sleep(self.prompt_time)
            exchange.json({"embedding": EMBEDDING})

        await self._on_card(spec, parse_keep_alive(asked.get("keep_alive")), work)

    async def _v1_embeddings(self, exchange: Exchange) -> None:
        asked = fields(await exchange.body())
        spec = self._find(asked)
        given = asked.get("input")
        if given in (None, "", []):
            raise failure(400, "invalid input")
        count = len(given) if isinstance(given, list) else 1

        async def work() -> None:
            await self.sleep(self.prompt_time)
            data = [
                {"object": "embedding", "embedding": EMBEDDING, "index": index}
                for index in range(count)
            ]
            shape = {"object": "list", "data": data, "model": asked["model"], "usage": usage(0)}
            exchange.json(shape)

        await self._on_card(spec, None, work)

    async def _transcribe(self, exchange: Exchange) -> None:
        body = await exchange.body()
        found = re.search(rb'name="?model"?\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)', body)
        spec = self._find({"model": found[1].decode("utf-8", "replace") if found else None})

        async def work() -> None:
            await self.sleep(self.prompt_time)
            exchange.json({"text": "one tenant at a time"})

        await self._on_card(spec, None, work)


def count_tokens(asked: dict[str, Any], spec: ModelSpec) -> int:
    """How long the answer is to be."""
    options = asked.get("options")
    wanted = options.get("num_predict") if isinstance(options, dict) else None
    for key in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        wanted = asked.get(key) if wanted is None else wanted
    return wanted if isinstance(wanted, int) and wanted >= 0 else spec.tokens


__all__ = ["JSON", "ModelSpec", "OllamaSim"]
