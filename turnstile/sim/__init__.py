"""A simulated GPU host for the demo and the tests: one card, and faithful engines on it."""

from .card import GIB, MIB, Card, Interval, OutOfVram
from .comfyui import ComfySim
from .host import GpuHost
from .llama import LlamaSim
from .ollama import ModelSpec, OllamaSim

__all__ = [
    "GIB",
    "MIB",
    "Card",
    "ComfySim",
    "GpuHost",
    "Interval",
    "LlamaSim",
    "ModelSpec",
    "OllamaSim",
    "OutOfVram",
]
