"""A simulated ComfyUI: its routes, on top of the worker in `comfy_worker`."""

from __future__ import annotations

import gzip
import hashlib
import ipaddress
import json
import re
import uuid
import zlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from .card import MIB, Card
from .comfy_assets import object_info
from .comfy_worker import ComfyWorker
from .comfy_ws import ComfySocket
from .exchange import Exchange, HttpError
from .graphs import NO_PROMPT, OUTPUT_CLASSES, validate

VERSION = "0.3.64"
TROUBLE = b"500 Internal Server Error\n\nServer got itself in trouble"
PAGE = b"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>ComfyUI</title></head>
<body><div id="vue-app">simulated ComfyUI</div></body></html>
"""
KNOWN_NODES = sorted(OUTPUT_CLASSES | {"CheckpointLoaderSimple", "KSampler"})
UPLOADS_KEPT = 50

Route = Callable[[Exchange], Awaitable[None]]


def trouble() -> HttpError:
    """What aiohttp answers when a handler raised."""
    return HttpError(500, TROUBLE, close=True)


class ComfySim(ComfyWorker):
    """ComfyUI on the simulated card.

    ``max_upload_size`` bounds every request body (413), ``enable_cors`` is
    ``--enable-cors-header``: no Origin check.  Everything else: see `ComfyWorker`.
    """

    eager_continue = True

    def __init__(
        self,
        card: Card,
        clock: Any,
        *,
        max_upload_size: int = 100 * MIB,
        enable_cors: bool = False,
        object_info_bytes: int = 500_000,
        **working: Any,
    ) -> None:
        self.max_upload_size = max_upload_size
        super().__init__(card, clock, **working)
        self.enable_cors = enable_cors
        self.object_info_bytes = object_info_bytes
        self.uploads: dict[str, bytes] = {}
        self.userdata: dict[str, bytes] = {}
        self._object_info: dict[str, Any] | None = None
        self._object_info_json = b""
        self._routes: dict[tuple[str, str], Route] = {
            ("GET", "/"): self._page,
            ("GET", "/ws"): self._websocket,
            ("GET", "/prompt"): self._get_prompt,
            ("POST", "/prompt"): self._post_prompt,
            ("GET", "/queue"): self._get_queue,
            ("POST", "/queue"): self._post_queue,
            ("POST", "/interrupt"): self._interrupt_route,
            ("GET", "/history"): self._get_history,
            ("POST", "/history"): self._post_history,
            ("POST", "/free"): self._free_route,
            ("GET", "/system_stats"): self._system_stats,
            ("GET", "/object_info"): self._get_object_info,
            ("GET", "/view"): self._view,
            ("POST", "/upload/image"): self._upload,
            ("GET", "/features"): self._features_route,
            ("GET", "/embeddings"): self._list,
            ("GET", "/extensions"): self._list,
            ("GET", "/models"): self._list,
            ("GET", "/settings"): self._settings,
            ("GET", "/userdata"): self._list_userdata,
        }

    # -- control hooks

    @property
    def sockets(self) -> dict[str, ComfySocket]:
        """The sockets that hear events, by clientId."""
        return self.hub.sockets

    @property
    def pongs(self) -> deque[bytes]:
        return self.hub.pongs

    @property
    def ws_messages(self) -> deque[tuple[str, bytes | str]]:
        return self.hub.messages

    def push_text(
        self, text: str, client_id: str | None = None, fragment: int | None = None
    ) -> None:
        """Send any text message, in frames of ``fragment`` bytes if given."""
        self.hub.push(text.encode(), False, client_id, fragment)

    def push_binary(
        self, data: bytes, client_id: str | None = None, fragment: int | None = None
    ) -> None:
        """Send any binary message, in frames of ``fragment`` bytes if given."""
        self.hub.push(data, True, client_id, fragment)

    def ping(self, client_id: str | None = None, payload: bytes = b"") -> None:
        """Ping; the answer shows in ``pongs``."""
        for socket in self.hub.targets(client_id):
            socket.sendPing(payload)

    def close_sockets(
        self, code: int = 1001, reason: str = "", client_id: str | None = None
    ) -> None:
        """Begin the closing handshake."""
        for socket in self.hub.targets(client_id):
            socket.sendCloseFrame(code=code, reasonUtf8=reason.encode() or None)

    def features(self) -> dict[str, Any]:
        return {"supports_preview_metadata": False, "max_upload_size": self.max_upload_size}

    def standard_headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().standard_headers(), (b"Server", b"Python/3.12 aiohttp/3.11.18")]

    # -- dispatch

    async def handle(self, exchange: Exchange) -> None:
        if not self.enable_cors and not _origin_allowed(exchange):
            exchange.reply(403, b"", b"application/octet-stream")
            return
        if exchange.method == "OPTIONS":
            exchange.reply(200, b"", b"application/octet-stream")
            return
        # %2F stays encoded: it does not part segments.  Nothing else is normalised.
        segments = [unquote(part) for part in exchange.record.path.decode("latin-1").split("/")]
        if len(segments) > 2 and segments[1] == "api":
            del segments[1]
        method = "GET" if exchange.method == "HEAD" else exchange.method
        route = self._route(method, segments)
        if route is None:
            # A catch-all serves the page's files by GET: other methods are not allowed anywhere.
            if method == "GET":
                exchange.reply(404, b"404: Not Found")
            else:
                exchange.reply(405, b"405: Method Not Allowed", headers=[(b"Allow", b"GET,HEAD")])
            return
        await route(exchange)

    def _route(self, method: str, segments: list[str]) -> Route | None:
        if not any("/" in part for part in segments):
            route = self._routes.get((method, "/".join(segments)))
            if route is not None:
                return route
        if len(segments) != 3 or not segments[2]:
            return None
        kind, name = segments[1:]
        if method == "GET" and kind == "history":
            return lambda exchange: self._get_history_of(exchange, name)
        if method == "GET" and kind == "object_info":
            return lambda exchange: self._get_node_info(exchange, name)
        if kind == "userdata" and method in ("GET", "POST", "DELETE"):
            return lambda exchange: self._userdata(exchange, name)
        return None

    async def _json_body(self, exchange: Exchange) -> Any:
        """The body as JSON, whatever it calls itself; a 500 if it is none."""
        body = await exchange.body(self.max_upload_size)
        coding = (exchange.header(b"content-encoding") or b"").lower()
        try:
            if coding == b"gzip":
                body = gzip.decompress(body)
            elif coding == b"deflate":
                body = zlib.decompress(body)
        except (OSError, EOFError, zlib.error):
            raise HttpError(400, b"400: Bad Request", close=True) from None
        if len(body) > self.max_upload_size:
            raise HttpError(413, b"Maximum request body size exceeded")
        try:
            return json.loads(body.decode("utf-8"))
        except ValueError:
            raise trouble() from None

    # -- jobs

    async def _post_prompt(self, exchange: Exchange) -> None:
        asked = await self._json_body(exchange)
        try:
            self._submit(exchange, asked)
        except (TypeError, ValueError, AttributeError, KeyError):
            raise trouble() from None

    def _submit(self, exchange: Exchange, asked: Any) -> None:
        given = _Asked(asked)
        if "number" in given:
            number = float(given["number"])
        else:
            number = self.next_number(bool(given.get("front")))
        if "prompt" not in given:
            exchange.json({"error": NO_PROMPT, "node_errors": {}}, 400)
            return
        prompt_id = str(given.get("prompt_id", uuid.uuid4()))
        verdict = validate(given["prompt"])
        extra = given.get("extra_data", {})
        if "client_id" in given:
            extra["client_id"] = given["client_id"]
        if verdict.error is not None:
            exchange.json({"error": verdict.error, "node_errors": verdict.node_errors}, 400)
            return
        self.put(number, prompt_id, given["prompt"], extra, verdict.outputs)
        exchange.json(
            {"prompt_id": prompt_id, "number": number, "node_errors": verdict.node_errors}
        )

    async def _get_prompt(self, exchange: Exchange) -> None:
        exchange.json(self.status()["status"])

    async def _get_queue(self, exchange: Exchange) -> None:
        running = [self.running.item()] if self.running is not None else []
        pending = [job.item() for job in self.pending]
        exchange.json({"queue_running": running, "queue_pending": pending})

    async def _post_queue(self, exchange: Exchange) -> None:
        asked = _Asked(await self._json_body(exchange))
        if asked.get("clear"):
            self.clear_queue()
        for prompt_id in asked.names("delete"):
            self.delete(prompt_id)
        exchange.reply(200, b"", b"application/octet-stream")

    async def _interrupt_route(self, exchange: Exchange) -> None:
        body = await exchange.body(self.max_upload_size)
        try:
            asked = json.loads(body)
        except ValueError:
            asked = {}
        if not isinstance(asked, dict):
            raise trouble()
        self.interrupt(asked.get("prompt_id") or None)
        exchange.reply(200, b"", b"application/octet-stream")

    async def _get_history(self, exchange: Exchange) -> None:
        top = exchange.query.get("max_items", "")
        entries = list(self.history.items())
        if top.isdigit():
            entries = entries[-int(top) :] if int(top) else []
        exchange.json(dict(entries))

    async def _get_history_of(self, exchange: Exchange, prompt_id: str) -> None:
        entry = self.history.get(prompt_id)
        exchange.json({} if entry is None else {prompt_id: entry})

    async def _post_history(self, exchange: Exchange) -> None:
        asked = _Asked(await self._json_body(exchange))
        if asked.get("clear"):
            self.history.clear()
        for prompt_id in asked.names("delete"):
            if isinstance(prompt_id, str):
                self.history.pop(prompt_id, None)
        exchange.reply(200, b"", b"application/octet-stream")

    async def _free_route(self, exchange: Exchange) -> None:
        asked = await self._json_body(exchange)
        if not isinstance(asked, dict):
            raise trouble()
        self.free(bool(asked.get("unload_models")), bool(asked.get("free_memory")))
        exchange.reply(200, b"", b"application/octet-stream")

    async def _websocket(self, exchange: Exchange) -> None:
        if (exchange.header(b"upgrade") or b"").lower() != b"websocket":
            exchange.reply(
                400, b'No WebSocket UPGRADE hdr: None\n Can "Upgrade" only to "WebSocket".'
            )
            return
        protocol = self.hub.protocol(exchange.query.get("clientId"))
        exchange.record.status = 101
        exchange.record.answered_at = self.clock.seconds()
        exchange.connection.upgrade(protocol, exchange.raw_head)

    # -- observation

    async def _system_stats(self, exchange: Exchange) -> None:
        held = self.card.used_by(self.owner)
        cached = 0 if self.running else self.card.labels(self.owner).get("activations", 0)
        device = {
            "name": "cuda:0 NVIDIA Simulated : cudaMallocAsync",
            "type": "cuda",
            "index": 0,
            "vram_total": self.card.total_bytes,
            "vram_free": self.card.free + cached,
            "torch_vram_total": held,
            "torch_vram_free": cached,
        }
        system = {
            "os": "posix",
            "ram_total": 64 << 30,
            "ram_free": 48 << 30,
            "comfyui_version": VERSION,
            "python_version": "3.12.3",
            "pytorch_version": "2.8.0+cu128",
            "embedded_python": False,
            "argv": ["main.py"],
        }
        exchange.json({"system": system, "devices": [device]})

    def _catalogue(self) -> dict[str, Any]:
        if self._object_info is None:
            self._object_info = object_info(self.object_info_bytes, KNOWN_NODES)
            self._object_info_json = json.dumps(self._object_info).encode()
        return self._object_info

    async def _get_object_info(self, exchange: Exchange) -> None:
        self._catalogue()
        exchange.reply(200, self._object_info_json, b"application/json; charset=utf-8")

    async def _get_node_info(self, exchange: Exchange, name: str) -> None:
        info = self._catalogue().get(name)
        exchange.json({} if info is None else {name: info})

    async def _page(self, exchange: Exchange) -> None:
        headers = [(b"Cache-Control", b"no-cache")]
        exchange.reply(200, PAGE, b"text/html; charset=utf-8", headers)

    async def _features_route(self, exchange: Exchange) -> None:
        exchange.json(self.features())

    async def _list(self, exchange: Exchange) -> None:
        exchange.json([])

    async def _settings(self, exchange: Exchange) -> None:
        exchange.json({})

    # -- files

    async def _view(self, exchange: Exchange) -> None:
        filename = exchange.query.get("filename", "")
        data = self.files.get(filename, self.uploads.get(filename))
        if data is None:
            exchange.reply(404, b"404: Not Found")
            return
        etag = b'"%s"' % hashlib.md5(data).hexdigest()[:20].encode()
        headers = [
            (b"ETag", etag),
            (b"Accept-Ranges", b"bytes"),
            (b"Content-Disposition", f'filename="{quote(filename)}"'.encode()),
        ]
        if etag in (exchange.header(b"if-none-match") or b""):
            exchange.reply(304, b"", None, headers)
            return
        found = re.fullmatch(rb"bytes=(\d*)-(\d*)", exchange.header(b"range") or b"")
        if found is None or found[0] == b"bytes=-":
            exchange.reply(200, data, b"image/png", headers)
            return
        size = len(data)
        if found[1]:
            first, last = int(found[1]), min(int(found[2] or size - 1), size - 1)
        else:
            first, last = max(0, size - int(found[2])), size - 1
        if first > last:
            headers.append((b"Content-Range", b"bytes */%d" % size))
            exchange.reply(416, b"", None, headers)
            return
        headers.append((b"Content-Range", b"bytes %d-%d/%d" % (first, last, size)))
        exchange.reply(206, data[first : last + 1], b"image/png", headers)

    async def _upload(self, exchange: Exchange) -> None:
        body = await exchange.body(self.max_upload_size)
        content_type = exchange.header(b"content-type") or b""
        found = re.search(rb'boundary="?([^";]+)"?', content_type)
        if found is None:
            raise trouble()
        for part in body.split(b"--" + found[1])[1:-1]:
            head, _, data = part.partition(b"\r\n\r\n")
            name = re.search(rb'filename="([^"]*)"', head)
            if name is not None and b'name="image"' in head:
                filename = name[1].decode("utf-8", "replace")
                while len(self.uploads) >= UPLOADS_KEPT:
                    del self.uploads[next(iter(self.uploads))]
                self.uploads[filename] = data.removesuffix(b"\r\n")
                exchange.json({"name": filename, "subfolder": "", "type": "input"})
                return
        exchange.reply(400, b"", b"application/octet-stream")

    async def _list_userdata(self, exchange: Exchange) -> None:
        folder = exchange.query.get("dir", "").rstrip("/") + "/"
        exchange.json(
            [name.removeprefix(folder) for name in self.userdata if name.startswith(folder)]
        )

    async def _userdata(self, exchange: Exchange, name: str) -> None:
        if exchange.method == "POST":
            body = await exchange.body(self.max_upload_size)
            if exchange.query.get("overwrite") == "false" and name in self.userdata:
                exchange.reply(409, b"File already exists")
                return
            self.userdata[name] = body
            exchange.json(name)
        elif name not in self.userdata:
            exchange.reply(404, b"", b"application/octet-stream")
        elif exchange.method == "DELETE":
            del self.userdata[name]
            exchange.reply(204, b"", None)
        else:
            exchange.reply(200, self.userdata[name], b"application/octet-stream")


class _Asked(dict[str, Any]):
    """A JSON body as ComfyUI looks into it: a list or text has no keys, a number is a 500."""

    def __init__(self, value: Any) -> None:
        if value is None or isinstance(value, (int, float)):
            raise trouble()
        super().__init__(value if isinstance(value, dict) else {})

    def names(self, key: str) -> list[Any]:
        """The list under a key that may be absent; anything else there is a 500."""
        value = self.get(key, [])
        if not isinstance(value, (list, dict, str)):
            raise trouble()
        return list(value)


def _origin_allowed(exchange: Exchange) -> bool:
    """Whether ComfyUI's check of Origin against a loopback Host lets the request in [seen]."""
    host = (exchange.header(b"host") or b"").decode("latin-1").lower()
    origin = (exchange.header(b"origin") or b"").decode("latin-1").lower()
    if not origin or origin == "null":
        return True
    try:
        ours, theirs = urlsplit(f"//{host}"), urlsplit(origin)
        our_port, their_port = ours.port, theirs.port
    except ValueError:
        return False
    if not ours.hostname or not theirs.hostname or not _is_loopback(ours.hostname):
        return True
    if our_port is None or their_port is None:
        return ours.hostname == theirs.hostname
    return host == theirs.netloc


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"
