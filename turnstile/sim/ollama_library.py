"""What Ollama keeps on disk: its models and blobs, and the routes that need no card."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

from .card import Card
from .exchange import Exchange, HttpError
from .ollama_formats import failure, fields, ndjson, stamp
from .ollama_runner import ModelSpec, Scheduler, full_name

VERSION = "0.31.0"
PIECE = 64 << 10

Route = Callable[[Exchange], Awaitable[None]]


class Library(Scheduler):
    """The part of `OllamaSim` that answers without the card.

    ``hash_blobs``: check that an uploaded blob has the digest that it is named by.
    """

    def __init__(
        self,
        card: Card,
        clock: Any,
        models: tuple[ModelSpec, ...] | list[ModelSpec] | None = None,
        *,
        hash_blobs: bool = False,
        **scheduling: Any,
    ) -> None:
        super().__init__(card, clock, models, **scheduling)
        self.hash_blobs = hash_blobs
        self.blobs: dict[str, int] = {}

    def library_routes(self) -> dict[tuple[str, str], Route]:
        """Handlers by method and path; blobs apart."""
        return {
            ("GET", "/"): self._root,
            ("GET", "/api/version"): self._version,
            ("GET", "/api/tags"): self._tags,
            ("GET", "/api/ps"): self._ps,
            ("GET", "/v1/models"): self._v1_models,
            ("POST", "/api/show"): self._show,
            ("POST", "/api/pull"): self._pull,
            ("POST", "/api/push"): self._push,
            ("POST", "/api/create"): self._create,
            ("POST", "/api/copy"): self._copy,
            ("DELETE", "/api/delete"): self._delete,
            ("GET", "/sim/download"): self._download,
        }

    def _find(self, asked: dict[str, Any]) -> ModelSpec:
        name = asked.get("model") or asked.get("name")
        if not isinstance(name, str) or not name:
            raise failure(400, "model is required")
        spec = self.models.get(full_name(name))
        if spec is None and is_remote(name):
            spec = ModelSpec(name, 0)
        if spec is None:
            raise failure(404, f"model '{name}' not found")
        return spec

    async def _root(self, exchange: Exchange) -> None:
        exchange.reply(200, b"Ollama is running")

    async def _version(self, exchange: Exchange) -> None:
        exchange.json({"version": VERSION})

    def _entry(self, name: str) -> dict[str, Any]:
        spec = self.models[name]
        family = "nomic-bert" if spec.embedding_only else "llama"
        return {
            "name": name,
            "model": name,
            "size": spec.disk,
            "digest": hashlib.sha256(name.encode()).hexdigest(),
            "details": {
                "parent_model": "",
                "format": "gguf",
                "family": family,
                "families": [family],
                "parameter_size": "3.2B",
                "quantization_level": "Q4_K_M",
            },
        }

    async def _tags(self, exchange: Exchange) -> None:
        now = stamp(self.clock.seconds())
        exchange.json({"models": [{**self._entry(n), "modified_at": now} for n in self.models]})

    async def _ps(self, exchange: Exchange) -> None:
        models = []
        for name, runner in self.listed():
            expires = runner.expires_at
            if expires is None:
                expires = self.clock.seconds() + max(0.0, self.real(runner.keep_alive))
            models.append(
                {
                    **self._entry(name),
                    "expires_at": stamp(expires),
                    "size_vram": runner.spec.vram,
                    "context_length": 4096,
                }
            )
        exchange.json({"models": models})

    async def _v1_models(self, exchange: Exchange) -> None:
        now = int(self.clock.seconds())
        data = [
            {"id": name, "object": "model", "created": now, "owned_by": "library"}
            for name in self.models
        ]
        exchange.json({"object": "list", "data": data})

    async def _show(self, exchange: Exchange) -> None:
        spec = self._find(fields(await exchange.body()))
        capabilities = ["embedding"] if spec.embedding_only else ["completion"]
        name = full_name(spec.name)
        exchange.json(
            {
                "license": "",
                "modelfile": f"FROM {name}",
                "parameters": "",
                "template": "{{ .Prompt }}",
                "details": self._entry(name)["details"],
                "model_info": {"general.architecture": "llama"},
                "capabilities": capabilities,
            }
        )

    async def _pull(self, exchange: Exchange) -> None:
        asked = fields(await exchange.body())
        name = full_name(str(asked.get("model") or asked.get("name") or ""))
        if asked.get("stream") is not False:
            exchange.start(200, content_type=b"application/x-ndjson")
            exchange.write(ndjson({"status": "pulling manifest"}))
            layer = {"status": "pulling 0123456789ab", "digest": "sha256:01", "total": 4 << 30}
            for done in range(5):
                await self.sleep(0.1)
                exchange.write(ndjson({**layer, "completed": done << 30}))
                await exchange.drain()
        self.models.setdefault(name, ModelSpec(name))
        await self._report_success(exchange)

    async def _push(self, exchange: Exchange) -> None:
        self._find(fields(await exchange.body()))
        await self._report_success(exchange)

    async def _create(self, exchange: Exchange) -> None:
        asked = fields(await exchange.body())
        name = full_name(str(asked.get("model") or asked.get("name") or ""))
        self.models.setdefault(name, ModelSpec(name))
        await self._report_success(exchange)

    async def _report_success(self, exchange: Exchange) -> None:
        if not exchange.started:
            exchange.start(200, content_type=b"application/x-ndjson")
        exchange.write(ndjson({"status": "success"}))
        exchange.finish()

    async def _copy(self, exchange: Exchange) -> None:
        asked = fields(await exchange.body())
        spec = self._find({"model": asked.get("source")})
        name = full_name(str(asked.get("destination") or ""))
        self.models[name] = ModelSpec(name, spec.vram, spec.embedding_only, spec.tokens, spec.size)
        exchange.reply(200, b"", None)

    async def _delete(self, exchange: Exchange) -> None:
        asked = fields(await exchange.body())
        name = full_name(self._find(asked).name)
        self.expire(name)
        del self.models[name]
        exchange.reply(200, b"", None)

    async def _blob(self, exchange: Exchange) -> None:
        digest = exchange.path.removeprefix("/api/blobs/")
        if exchange.method == "HEAD":
            exchange.reply(200 if digest in self.blobs else 404, b"", None)
            return
        if exchange.method != "POST":
            raise HttpError(405, b"405 method not allowed", b"text/plain")
        hasher = hashlib.sha256() if self.hash_blobs else None
        length = await exchange.stream(hasher.update if hasher else lambda data: None)
        if hasher and digest != f"sha256:{hasher.hexdigest()}":
            raise failure(400, "digest mismatch, file must be downloaded again")
        self.blobs[digest] = length
        exchange.reply(201, b"", None)

    async def _download(self, exchange: Exchange) -> None:
        """Not Ollama's: ``?bytes=N`` of zeros with their length, chunked with ``&chunked=1``."""
        left = int(exchange.query.get("bytes", "0"))
        exchange.start(
            200,
            content_type=b"application/octet-stream",
            length=None if "chunked" in exchange.query else left,
        )
        piece = bytes(PIECE)
        while left > 0 and exchange.method != "HEAD":
            exchange.write(piece[:left])
            left -= PIECE
            await exchange.drain()
            if not left % (64 * PIECE):
                await self.sleep(0)  # Others live here too.
        exchange.finish()


def is_remote(name: str) -> bool:
    """Models that Ollama runs elsewhere."""
    return name.endswith(("-cloud", ":cloud"))
