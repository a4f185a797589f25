"""Policies and gates: how requests of each engine claim the card. The seam between the data path and the engines."""

from turnstile.gates.base import Claim, EnginePolicy, LeaseGate
from turnstile.gates.comfyui import ComfyPolicy, ImageGate
from turnstile.gates.ollama import LlmGate, NestedGate, NestedHint, NestedOllamaPolicy, OllamaPolicy

__all__ = [
    "Claim",
    "ComfyPolicy",
    "EnginePolicy",
    "ImageGate",
    "LeaseGate",
    "LlmGate",
    "NestedGate",
    "NestedHint",
    "NestedOllamaPolicy",
    "OllamaPolicy",
]
