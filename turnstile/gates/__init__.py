"""Policies and gates: how requests of each engine claim the card. The seam between the data path and the engines."""

from turnstile.gates.base import Claim, EnginePolicy, LeaseGate
from turnstile.gates.comfyui import ComfyPolicy, ImageGate
from turnstile.gates.llamacpp import LlamaGate, LlamaPolicy
from turnstile.gates.ollama import LlmGate, NestedGate, NestedHint, NestedOllamaPolicy, OllamaPolicy
from turnstile.gates.sdserver import SdGate, SdJobGate, SdPolicy, SdResource

__all__ = [
    "Claim",
    "ComfyPolicy",
    "EnginePolicy",
    "ImageGate",
    "LeaseGate",
    "LlamaGate",
    "LlamaPolicy",
    "LlmGate",
    "NestedGate",
    "NestedHint",
    "NestedOllamaPolicy",
    "OllamaPolicy",
    "SdGate",
    "SdJobGate",
    "SdPolicy",
    "SdResource",
]
