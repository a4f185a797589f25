#!/usr/bin/env python3
"""Writes tiny models of llama's architecture with random weights, so that a real llama-server can be tested anywhere.

They answer nonsense, but load, tokenize, stream and unload as any model does. Standard library only::

    python tests/tiny_gguf.py small.gguf            # 7 MB, thousands of tokens a second
    python tests/tiny_gguf.py heavy.gguf heavy      # 340 MB, about a hundred tokens a second on two cores

The format is GGUF version 3: a head with counts, the metadata, where each tensor is, then the tensors, aligned.
"""

from __future__ import annotations

import argparse
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

ALIGNMENT = 32
#: Values of a block of ggml's Q8_0: one half-precision scale and 32 signed bytes.
BLOCK, BLOCK_BYTES = 32, 34
#: Standard deviation of bytes that are drawn evenly, as signed numbers.
BYTE_DEVIATION = 73.9
F32, Q8_0 = 0, 8

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
_FORMATS = {UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?"}

#: Kinds of tokens in a SentencePiece vocabulary.
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

#: Width, width of the feed-forward part, layers, heads.
SIZES = {
    "micro": (64, 192, 2, 4),
    "small": (256, 768, 4, 4),
    "heavy": (1024, 2816, 24, 16),
}


def vocabulary() -> tuple[list[tuple[str, int]], int]:
    """Tokens and their kinds: special ones, bytes, letters, then made-up words; and where the words begin."""
    tokens = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    tokens += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    tokens += [(SPACE if code == 32 else chr(code), NORMAL) for code in range(32, 127)]
    words = len(tokens)
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    tokens += [(SPACE + first + second, NORMAL) for first in syllables for second in syllables]
    return tokens, words


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: object) -> bytes:
    return _string(str(value)) if kind == STRING else struct.pack(_FORMATS[kind], value)


def _field(key: str, kind: int, value: object) -> bytes:
    return _string(key) + struct.pack("<I", kind) + _value(kind, value)


def _list(key: str, kind: int, values: list[object]) -> bytes:
    body = b"".join(_value(kind, value) for value in values)
    return _string(key) + struct.pack("<IIQ", ARRAY, kind, len(values)) + body


class Tensor:
    """A name, its dimensions (the innermost first) and what makes its bytes."""

    def __init__(self, name: str, dimensions: tuple[int, ...], make: Callable[[], bytes]) -> None:
        self.name = name
        self.dimensions = dimensions
        self.make = make
        self.kind = Q8_0 if len(dimensions) == 2 else F32

    @property
    def size(self) -> int:
        if self.kind == F32:
            return 4 * self.dimensions[0]
        return self.dimensions[0] // BLOCK * BLOCK_BYTES * self.dimensions[1]


class Model:
    """The tensors and the metadata of one model."""

    def __init__(self, size: str, *, context: int = 2048, seed: int = 0) -> None:
        self.width, self.inner, self.layers, self.heads = SIZES[size]
        self.context = context
        self.name = f"tiny-{size}"
        self._random = random.Random(seed)
        self.tokens, self.words = vocabulary()

    def _matrix(self, width: int, rows: int, deviation: float) -> bytearray:
        count = width // BLOCK * rows
        data = bytearray(self._random.randbytes(BLOCK_BYTES * count))
        scale = struct.pack("<e", deviation / BYTE_DEVIATION)
        data[0::BLOCK_BYTES] = scale[:1] * count
        data[1::BLOCK_BYTES] = scale[1:] * count
        return data

    # The first number of the hidden state is a positive constant: every token sets it and no layer changes it. The last
    # norm makes it large, and the output rows of everything but words are strongly negative there. So only words are
    # ever sampled: valid UTF-8, and no end before max_tokens.

    def _embedding(self) -> bytes:
        data = self._matrix(self.width, len(self.tokens), 1.0)
        data[2 :: self.width // BLOCK * BLOCK_BYTES] = b"\x7f" * len(self.tokens)
        return data

    def _output(self) -> bytes:
        data = self._matrix(self.width, len(self.tokens), 3 * self.width**-0.5)
        rows = b"\x81" * self.words + bytes(len(self.tokens) - self.words)
        data[2 :: self.width // BLOCK * BLOCK_BYTES] = rows
        return data

    def _residual(self, width: int) -> bytes:
        data = self._matrix(width, self.width, 0.3 * width**-0.5)
        row = width // BLOCK * BLOCK_BYTES
        data[:row] = bytes(row)
        return data

    def _norm(self, first: float = 1.0) -> bytes:
        return struct.pack(f"<{self.width}f", first, *[1.0] * (self.width - 1))

    def tensors(self) -> Iterator[Tensor]:
        """All of them, in the order of the file."""
        width, inner = self.width, self.inner

        def plain(columns: int, rows: int) -> Callable[[], bytes]:
            return lambda: self._matrix(columns, rows, width**-0.5)

        yield Tensor("token_embd.weight", (width, len(self.tokens)), self._embedding)
        yield Tensor("output_norm.weight", (width,), lambda: self._norm(100.0))
        yield Tensor("output.weight", (width, len(self.tokens)), self._output)
        for layer in range(self.layers):
            name = f"blk.{layer}."
            yield Tensor(name + "attn_norm.weight", (width,), self._norm)
            for part in ("attn_q", "attn_k", "attn_v"):
                yield Tensor(f"{name}{part}.weight", (width, width), plain(width, width))
            yield Tensor(name + "attn_output.weight", (width, width), lambda: self._residual(width))
            yield Tensor(name + "ffn_norm.weight", (width,), self._norm)
            for part in ("ffn_gate", "ffn_up"):
                yield Tensor(f"{name}{part}.weight", (width, inner), plain(width, inner))
            yield Tensor(name + "ffn_down.weight", (inner, width), lambda: self._residual(inner))

    def metadata(self) -> list[bytes]:
        """What llama.cpp wants to know."""
        tokens = self.tokens
        return [
            _field("general.architecture", STRING, "llama"),
            _field("general.name", STRING, self.name),
            _field("general.file_type", UINT32, 7),
            _field("general.quantization_version", UINT32, 2),
            _field("llama.block_count", UINT32, self.layers),
            _field("llama.context_length", UINT32, self.context),
            _field("llama.embedding_length", UINT32, self.width),
            _field("llama.feed_forward_length", UINT32, self.inner),
            _field("llama.attention.head_count", UINT32, self.heads),
            _field("llama.attention.head_count_kv", UINT32, self.heads),
            _field("llama.attention.layer_norm_rms_epsilon", FLOAT32, 1e-5),
            _field("llama.rope.dimension_count", UINT32, self.width // self.heads),
            _field("llama.vocab_size", UINT32, len(tokens)),
            _field("tokenizer.ggml.model", STRING, "llama"),
            _field("tokenizer.ggml.pre", STRING, "default"),
            _list("tokenizer.ggml.tokens", STRING, [token for token, _ in tokens]),
            _list("tokenizer.ggml.scores", FLOAT32, [-float(i) for i in range(len(tokens))]),
            _list("tokenizer.ggml.token_type", INT32, [kind for _, kind in tokens]),
            _field("tokenizer.ggml.unknown_token_id", UINT32, 0),
            _field("tokenizer.ggml.bos_token_id", UINT32, 1),
            _field("tokenizer.ggml.eos_token_id", UINT32, 2),
            _field("tokenizer.ggml.add_bos_token", BOOL, True),
            _field("tokenizer.chat_template", STRING, TEMPLATE),
        ]

    def write(self, file: IO[bytes]) -> None:
        """Write the whole file."""
        tensors, metadata = list(self.tensors()), self.metadata()
        places, offset = b"", 0
        for tensor in tensors:
            dimensions = tensor.dimensions
            places += _string(tensor.name) + struct.pack("<I", len(dimensions))
            places += struct.pack(f"<{len(dimensions)}Q", *dimensions)
            places += struct.pack("<IQ", tensor.kind, offset)
            offset += -(-tensor.size // ALIGNMENT) * ALIGNMENT
        head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
        _write_aligned(file, head + b"".join(metadata) + places)
        for tensor in tensors:
            data = tensor.make()
            assert len(data) == tensor.size, tensor.name
            _write_aligned(file, data)


def _write_aligned(file: IO[bytes], data: bytes) -> None:
    file.write(data)
    file.write(bytes(-len(data) % ALIGNMENT))


def write_model(path: Path, size: str = "small", *, context: int = 2048, seed: int = 0) -> None:
    """Write a model of one of :data:`SIZES` to ``path``."""
    with open(path, "wb") as file:
        Model(size, context=context, seed=seed).write(file)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny model with random weights.")
    parser.add_argument("path", type=Path)
    parser.add_argument("size", nargs="?", choices=SIZES, default="small")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_model(args.path, args.size, context=args.context, seed=args.seed)


if __name__ == "__main__":
    main()
