"""The larger things that the simulated ComfyUI serves: images, and its catalogue of nodes."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

SIDE = 64


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(seed: int, padding: int = 0) -> bytes:
    """A small valid PNG of one colour, made larger by ``padding`` bytes of a private chunk."""
    colour = bytes((seed * 37 % 256, seed * 91 % 256, seed * 17 % 256))
    rows = (b"\0" + colour * SIDE) * SIDE
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    extra = _chunk(b"siMp", bytes(padding)) if padding else b""
    body = _chunk(b"IHDR", header) + extra + _chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + body + _chunk(b"IEND", b"")


def node_info(name: str, output: bool = False) -> dict[str, Any]:
    """One node's entry in ``/object_info``."""
    return {
        "input": {"required": {"value": ["INT", {"default": 0, "min": 0, "max": 1 << 30}]}},
        "input_order": {"required": ["value"]},
        "output": ["IMAGE"],
        "output_is_list": [False],
        "output_name": ["IMAGE"],
        "name": name,
        "display_name": name,
        "description": "A node of the simulator. " * 4,
        "python_module": "nodes",
        "category": "sim",
        "output_node": output,
    }


def object_info(nbytes: int, names: list[str]) -> dict[str, Any]:
    """A catalogue of about ``nbytes`` as JSON."""
    catalogue = {name: node_info(name, name.startswith("S")) for name in names}
    size = len(json.dumps(node_info("SimNode0000")))
    for index in range(max(0, nbytes // size - len(names))):
        name = f"SimNode{index:04}"
        catalogue[name] = node_info(name)
    return catalogue
