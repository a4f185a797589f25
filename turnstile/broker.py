"""One port for llama.cpp and sd-server, as stadi has it: which requests are whose, and the page ``/status``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import unquote_to_bytes

from turnstile.proxy.http1 import RequestHead
from turnstile.proxy.resource import EngineResource
from turnstile.status import Page

SD = "sd"
LLAMA = "llamacpp"

#: What stable-diffusion.cpp's server answers and llama.cpp's does not.
_SD_PREFIXES = (b"/v1/images/", b"/sdapi/", b"/sdcpp/")


def broker_route(target: bytes) -> str:
    """Which of the two engines a request is for: ``sd`` or ``llamacpp``.

    By the path, its percent signs decoded as both servers do before they route. All that is not sd-server's goes to
    llama.cpp, ``/v1/models`` and the pages at ``/`` too.
    """
    path = target.partition(b"?")[0]
    if b"%" in path:
        path = unquote_to_bytes(path)
    return SD if path.startswith(_SD_PREFIXES) else LLAMA


def make_route(
    llama: EngineResource, sd: EngineResource
) -> Callable[[RequestHead], EngineResource]:
    """What a :class:`~turnstile.proxy.site.ProxySite` that fronts both asks."""

    def route(head: RequestHead) -> EngineResource:
        return sd if broker_route(head.target) == SD else llama

    return route


class BrokerStatus(Page):
    """``GET /status``: whether sd-server is up, which is whether its process lives; and what else stadi's users ask.

    :param state: the content of the state page.
    """

    def __init__(self, state: Callable[[], dict[str, Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._state = state

    def render_GET(self, request: Any) -> bytes:
        """Answer with a short JSON object."""
        return self.answer_json(request, self.status(), indent=2)

    def status(self) -> dict[str, Any]:
        """The page's content."""
        state = self._state()
        engines = state["engines"]
        sd = engines.get(SD, {})
        return {
            "sd_child_up": sd.get("pid") is not None,
            "sd": sd,
            "llama": engines.get(LLAMA, {}),
            "vram": state.get("vram"),
            "state": state["state"],
            "tenant": state["tenant"],
            "leases": len(state["leases"]),
            "waiting": {kind: len(line) for kind, line in state["waiting"].items()},
            "resident": state["resident"],
            "switching": state["switching"],
            "degraded": len(state["degraded"]),
            "version": state["version"],
        }
