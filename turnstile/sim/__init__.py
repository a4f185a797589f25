"""A simulated GPU host for the demo and the tests: one card, and faithful engines on it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .card import GIB, MIB, Card, Interval, OutOfVram
    from .card_server import CardServer
    from .comfyui import ComfySim
    from .host import GpuHost
    from .llama import LlamaSim
    from .ollama import ModelSpec, OllamaSim
    from .sd_fleet import SdFleet
    from .sdserver import SdSim

__all__ = [
    "GIB",
    "MIB",
    "Card",
    "CardServer",
    "ComfySim",
    "GpuHost",
    "Interval",
    "LlamaSim",
    "ModelSpec",
    "OllamaSim",
    "OutOfVram",
    "SdFleet",
    "SdSim",
]

#: Where each name is. They are looked up on use: a simulated sd-server is a process that starts
#: often and needs few of them.
_HOMES = {
    "CardServer": "card_server",
    "ComfySim": "comfyui",
    "GpuHost": "host",
    "LlamaSim": "llama",
    "ModelSpec": "ollama_runner",
    "OllamaSim": "ollama",
    "SdFleet": "sd_fleet",
    "SdSim": "sdserver",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'card')}"), name)
    globals()[name] = value
    return value
