"""A simulated sd-server (stable-diffusion.cpp): its routes, on top of the process in `sd_worker`.

``python -m turnstile.sim.sdserver`` is the same as a program of its own: see `sd_program`.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from twisted.internet.defer import CancelledError, DeferredSemaphore

from .exchange import Exchange, HttpError
from .httplib import JSON, Route, compact
from .sd_jobs import SdJobs
from .sd_worker import Render, sd_error

PAGE = b"<!doctype html><title>sd.cpp</title><p>simulated sd-server</p>\n"
JOB = re.compile(r"/sdcpp/v1/jobs/([A-Za-z0-9_-]+)(/cancel)?")
EXTRA = re.compile(r"<sd_cpp_extra_args>(.*?)</sd_cpp_extra_args>", re.DOTALL)
MODEL = "qwen-image-Q4_0"


class SdSim(SdJobs):
    """One process of sd-server on the simulated card.

    ``threads``: how many requests it works on at a time; renderings that nobody waits for any more
    count.  Everything else: see `SdWorker` and `SdJobs`.
    """

    def __init__(self, *args: Any, threads: int = 8, **options: Any) -> None:
        super().__init__(*args, **options)
        self._threads = DeferredSemaphore(threads)
        #: What is rendered for requests whose clients have left.
        self._abandoned: dict[Exchange, Render] = {}
        self.routes = {
            ("GET", "/"): self._page,
            ("GET", "/v1/models"): self._say({"data": [_MODEL_ENTRY]}),
            ("POST", "/v1/images/generations"): self._generations,
            ("POST", "/v1/images/edits"): self._edits,
            ("POST", "/sdapi/v1/txt2img"): partial(self._any2img, "txt2img"),
            ("POST", "/sdapi/v1/img2img"): partial(self._any2img, "img2img"),
            ("GET", "/sdapi/v1/progress"): self._progress,
            ("GET", "/sdcpp/v1/capabilities"): self._say(_CAPABILITIES),
            ("POST", "/sdcpp/v1/img_gen"): partial(self._submit, "img_gen"),
            ("POST", "/sdcpp/v1/vid_gen"): partial(self._submit, "vid_gen"),
            ("POST", "/sdcpp/v1/upscale"): self._upscale,
        }
        self.routes |= {
            ("GET", f"/sdapi/v1/{name}"): self._say(answer) for name, answer in _LISTS.items()
        }

    # -- before the routes

    async def handle(self, exchange: Exchange) -> None:
        await self._threads.acquire()
        try:
            await super().handle(exchange)
        finally:
            render = self._abandoned.pop(exchange, None)
            if render is None or self.exit_status is not None:
                self._threads.release()
            else:
                self.spawn(self._see_through(render))

    async def _see_through(self, render: Render) -> None:
        """A thread goes on with its rendering although the client has gone."""
        try:
            await render.over()
        except HttpError:
            pass
        finally:
            self._threads.release()

    def cors(self, exchange: Exchange) -> list[tuple[bytes, bytes]]:
        return [
            (b"Access-Control-Allow-Origin", exchange.header(b"origin") or b"*"),
            (b"Access-Control-Allow-Credentials", b"true"),
            (b"Access-Control-Allow-Methods", b"*"),
            (b"Access-Control-Allow-Headers", b"*"),
        ]

    def find(self, method: str, path: str) -> Route | None:
        found = JOB.fullmatch(path)
        if found is None:
            return None
        if found[2]:
            return partial(self._cancel, found[1]) if method == "POST" else None
        return partial(self._job, found[1]) if method == "GET" else None

    def not_found(self) -> HttpError:
        return HttpError(404, b"", b"text/plain")

    # -- generation

    async def _rendered(self, exchange: Exchange, render: Render) -> list[str]:
        """Its images in base64; a client that leaves does not end it."""
        try:
            images = await render.over()
        except CancelledError:
            self._abandoned[exchange] = render
            raise
        return [base64.b64encode(image).decode() for image in images]

    async def _generations(self, exchange: Exchange) -> None:
        asked = _parse(await exchange.body(), 500)
        prompt = asked.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise sd_error(400, "prompt required")
        images = await self._rendered(
            exchange, self.render("txt2img", _steps(asked), _count(asked, "n"))
        )
        self._answer_openai(exchange, images)

    async def _edits(self, exchange: Exchange) -> None:
        body = await exchange.body()
        if b"multipart/form-data" not in (exchange.header(b"content-type") or b""):
            raise sd_error(400, "Content-Type must be multipart/form-data")
        if not re.search(rb'name="prompt"\r\n(?:[^\r\n]+\r\n)*\r\n[^\r\n]', body):
            raise sd_error(400, "prompt required")
        if not re.search(rb'name="image(\[\])?"', body):
            raise sd_error(400, "at least one image[] required")
        self._answer_openai(exchange, await self._rendered(exchange, self.render("img2img")))

    def _answer_openai(self, exchange: Exchange, images: list[str]) -> None:
        _json(
            exchange,
            {
                "created": int(self.clock.seconds()),
                "data": [{"b64_json": image} for image in images],
                "output_format": "png",
            },
        )

    async def _any2img(self, kind: str, exchange: Exchange) -> None:
        asked = _parse(await exchange.body(), 500)
        if not asked.get("prompt"):
            raise sd_error(400, "prompt required")
        images = await self._rendered(
            exchange, self.render(kind, _steps(asked), _count(asked, "batch_size"))
        )
        info = json.dumps({"prompt": asked["prompt"], "version": "stable-diffusion.cpp"})
        _json(exchange, {"images": images, "parameters": asked, "info": info})

    async def _upscale(self, exchange: Exchange) -> None:
        asked = _parse(await exchange.body(), 400)
        if not asked.get("image"):
            raise sd_error(400, "image is required")
        images = await self._rendered(exchange, self.render("upscale", 1))
        shape = {"upscaler": "RealESRGAN_x4plus", "scale": 4, "repeats": 1, "output_format": "png"}
        _json(exchange, {**shape, "images": [{"index": 0, "b64_json": images[0]}]})

    async def _submit(self, kind: str, exchange: Exchange) -> None:
        asked = _parse(await exchange.body(), 400)
        sampling = asked.get("sample_params")
        steps = sampling.get("sample_steps") if isinstance(sampling, dict) else None
        job = self.submit(kind, _steps({**asked, "steps": steps}), _count(asked, "batch_count"))
        answer = {"id": job.id, "kind": kind, "status": "queued", "created": int(job.created)}
        _json(exchange, {**answer, "poll_url": f"/sdcpp/v1/jobs/{job.id}"}, 202)

    # -- observation

    async def _page(self, exchange: Exchange) -> None:
        exchange.reply(200, PAGE, b"text/html")

    def _say(self, answer: Any) -> Callable[[Exchange], Awaitable[None]]:
        async def say(exchange: Exchange) -> None:
            _json(exchange, answer)

        return say

    async def _progress(self, exchange: Exchange) -> None:
        render = self.rendering
        step, steps = (render.step, render.steps * render.images) if render else (0, 0)
        left = (steps - step) * self.step_time
        state = {"job": render.kind if render else "", "sampling_step": step}
        _json(
            exchange,
            {
                "progress": round(step / steps, 3) if steps else 0.0,
                "eta_relative": round(left, 3),
                "state": {**state, "sampling_steps": steps, "job_count": 1 if render else 0},
                "current_image": None,
                "textinfo": None,
            },
        )

    async def _job(self, job_id: str, exchange: Exchange) -> None:
        _json(exchange, self.describe(self.find_job(job_id)))

    async def _cancel(self, job_id: str, exchange: Exchange) -> None:
        await exchange.body()
        job = self.find_job(job_id)
        self.cancel_job(job)
        _json(exchange, self.describe(job))


def _json(exchange: Exchange, value: Any, status: int = 200) -> None:
    exchange.reply(status, compact(value), JSON)


def _parse(body: bytes, bad: int) -> dict[str, Any]:
    """A request's JSON object; ``bad`` is the status for what is none."""
    if not body:
        raise sd_error(400, "empty body")
    try:
        value = json.loads(body)
    except ValueError as error:
        text = "invalid json" if bad == 400 else "server_error"
        raise sd_error(bad, text, message=str(error)) from None
    if not isinstance(value, dict):
        raise sd_error(bad, "server_error", message="[json.exception.type_error.306]")
    return value


def _count(asked: dict[str, Any], key: str) -> int:
    """How many images are wanted."""
    value = asked.get(key, 1)
    return max(1, value) if isinstance(value, int) else 1


def _steps(asked: dict[str, Any]) -> int | None:
    """How many steps are wanted: in the body, or in what its prompt carries."""
    wanted = asked.get("steps")
    found = EXTRA.search(str(asked.get("prompt", "")))
    if found is not None:
        try:
            extra = json.loads(found[1])
            wanted = extra.get("sample_params", extra).get("sample_steps", wanted)
        except (ValueError, AttributeError):
            raise sd_error(400, "invalid sd_cpp_extra_args") from None
    return wanted if isinstance(wanted, int) and wanted > 0 else None


def _named(*names: str) -> list[dict[str, str]]:
    return [{"name": name} for name in names]


_MODEL_ENTRY = {"id": "sd-cpp-local", "object": "model", "owned_by": "local"}
_CHECKPOINT = {"title": MODEL, "model_name": MODEL, "filename": MODEL + ".gguf", "config": None}
_LISTS: dict[str, Any] = {
    "loras": [],
    "upscalers": _named("None", "Lanczos", "Nearest"),
    "latent-upscale-modes": _named("Latent"),
    "samplers": [{"name": "euler", "aliases": ["euler"], "options": {}}],
    "schedulers": [{"name": "discrete", "label": "discrete"}],
    "sd-models": [_CHECKPOINT],
    "options": {"samples_format": "png", "sd_model_checkpoint": MODEL},
}
_CAPABILITIES = {
    "model": {"name": MODEL + ".gguf", "stem": MODEL},
    "current_mode": "img_gen",
    "supported_modes": ["img_gen", "vid_gen"],
    "features": {"cancel_queued": True, "cancel_generating": False},
    "limits": {"max_batch_count": 8, "max_queue_size": 64},
}

if __name__ == "__main__":
    from .sd_program import main

    main()
