"""Header of a GGUF file: metadata and the sizes of its tensors, read strictly and without any data.

Source of the format: ggml, MIT, `docs/gguf.md`, versions 2 and 3. A file is untrusted. So counts, lengths and
types are checked before they are used, and each fault raises a `ModelError`.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from snugfit.errors import ModelError

MAGIC, VERSIONS = b"GGUF", (2, 3)
MOST_ENTRIES, MOST_DIMENSIONS, LONGEST_TEXT = 1 << 17, 4, 1 << 24
MOST_ITEMS = 1 << 22
LONGEST_HEADER = 256 << 20
"""Largest accepted numbers of entries, dimensions, bytes of a string, items of a list, and bytes of a header.
A vocabulary of 262,144 words with its merges has some 10 MB.
"""

SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
"""Formats of numbers for `struct`, by the type of a metadata value; 7 is a boolean."""

TEXT, LIST = 8, 9

TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
"""Name, elements per block and bytes per block, by the type of a tensor (`ggml.h`, `ggml-common.h`;
`GGML_QUANT_SIZES` of gguf 0.19, MIT).
"""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file: its name, type and shape."""

    name: str
    shape: tuple[int, ...]
    """Dimensions in ggml's order: the length of a row comes first."""
    kind: str
    """Name of the tensor's type, such as `Q4_K`."""
    size: int
    """Bytes of the tensor's data."""


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file: its metadata and tensors."""

    name: str
    """Path of the GGUF file."""

    metadata: Mapping[str, Any]
    """Metadata values by key. A list of strings is represented by its length."""

    tensors: tuple[GgufTensor, ...]

    missing_bytes: int = 0
    """Bytes of the tensors that the file does not have, as after a download that was cut."""

    @property
    def architecture(self) -> str:
        """The model architecture in the metadata, such as `llama`. Raises `ModelError` if it is missing."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise _fault(self.name, 'it has no "general.architecture"')
        return value

    def number(self, key: str, default: int | None = None) -> int:
        """Return an integer of the architecture's metadata, or the largest of a list. Raises `ModelError` if
        it is missing and there is no default.
        """
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        value = max(value, default=None) if isinstance(value, list) else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 32:
            raise _fault(self.name, f'"{self.architecture}.{key}" is {value!r}, not a whole number')
        return value


def read_gguf(path: Path) -> GgufHeader:
    """Read and return the header of a GGUF file. Raises `ModelError` for a file that cannot be read or is
    damaged.
    """
    try:
        with path.open("rb") as file:
            return _HeaderReader(file, str(path)).read()
    except OSError as error:
        raise ModelError(
            f"{path}: cannot be read ({error.strerror}). Name a .gguf file that can be read."
        ) from None


def _fault(name: str, fault: str) -> ModelError:
    return ModelError(f"{name}: not a usable GGUF file: {fault}. Download the file again, or name another.")


class _HeaderReader:
    """Reads the parts of a GGUF header in order, and counts their bytes."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self._name, self._position = file, name, 0

    def read(self) -> GgufHeader:
        if self._bytes(4) != MAGIC:
            raise _fault(self._name, "it does not begin with GGUF")
        version = self._number("<I")
        if version not in VERSIONS:
            raise _fault(self._name, f"its version is {version}, and known are 2 and 3")
        tensors, entries = self._count("tensors"), self._count("entries")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._text()
            if key in metadata:
                raise _fault(self._name, f"the key {key[:80]!r} occurs twice")
            metadata[key] = self._value(self._number("<I"))
        table = self._tensors(tensors)
        needed = self._position + sum(tensor.size for tensor in table)
        missing = needed - os.fstat(self._file.fileno()).st_size
        return GgufHeader(self._name, metadata, table, max(0, missing))

    def _tensors(self, count: int) -> tuple[GgufTensor, ...]:
        tensors: dict[str, GgufTensor] = {}
        for _ in range(count):
            tensor = self._tensor()
            if tensor.name in tensors:
                raise _fault(self._name, f"the tensor {tensor.name[:80]!r} occurs twice")
            tensors[tensor.name] = tensor
        return tuple(tensors.values())

    def _tensor(self) -> GgufTensor:
        name, dimensions = self._text(), self._number("<I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise _fault(self._name, f"the tensor {name[:80]!r} has {dimensions} dimensions")
        shape = tuple(self._number("<Q") for _ in range(dimensions))
        kind = self._number("<I")
        self._number("<Q")  # offset of the tensor's data, which is not read
        numbers = math.prod(shape)
        if not 0 < numbers < 1 << 50:
            raise _fault(self._name, f"the tensor {name[:80]!r} has the shape {list(shape)}")
        if kind not in TENSOR_TYPES:
            raise _fault(self._name, f"the tensor {name[:80]!r} has the unknown type {kind}")
        title, block, size = TENSOR_TYPES[kind]
        if shape[0] % block:
            raise _fault(self._name, f"rows of {shape[0]} numbers in {name[:80]!r} are no blocks of {block}")
        return GgufTensor(name, shape, title, numbers // block * size)

    def _value(self, kind: int, *, nested: bool = False) -> Any:
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == TEXT:
            return self._text()
        if kind != LIST or nested:
            raise _fault(self._name, f"a value has the unknown type {kind}")
        inner, count = self._number("<I"), self._number("<Q")
        if count > MOST_ITEMS:
            raise _fault(self._name, f"a list has {count:,} items")
        if inner == TEXT:
            for _ in range(count):
                self._text()
            return count
        return [self._value(inner, nested=True) for _ in range(count)]

    def _count(self, name: str) -> int:
        count = int(self._number("<Q"))
        if count > MOST_ENTRIES:
            raise _fault(self._name, f"it has {count:,} {name}")
        return count

    def _number(self, form: str) -> Any:
        (number,) = struct.unpack(form, self._bytes(struct.calcsize(form)))
        return number

    def _text(self) -> str:
        length = self._number("<Q")
        if length > LONGEST_TEXT:
            raise _fault(self._name, f"a text has {length:,} bytes")
        return self._bytes(length).decode("utf-8", errors="replace")

    def _bytes(self, count: int) -> bytes:
        self._position += count
        if self._position > LONGEST_HEADER:
            raise _fault(self._name, "its header is longer than 256 MiB")
        content = self._file.read(count)
        if len(content) != count:
            raise _fault(self._name, "its header ends too early")
        return content
