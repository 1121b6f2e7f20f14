"""Search for the tensor of a failed allocation: by size in a predicted step, or guessed from the size
alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from snugfit.features.diagnosis.result import RequestedTensor
from snugfit.units import MIB, show_bytes

if TYPE_CHECKING:
    from snugfit.rehearsal.trace.trace import Trace

SMALL, SMALL_SEGMENT = 1 * MIB, 2 * MIB
LARGE_FROM, LARGE_SEGMENT, LARGE_ROUND = 10 * MIB, 20 * MIB, 2 * MIB
"""Sizes of segments in bytes, from CUDACachingAllocator.cpp. An error message has the segment's size instead
of the tensor's."""

SHOWN = 3
"""Largest number of tensors in a report that the failed request may have been for."""

VOCABULARIES = {
    30_522: "BERT", 32_000: "Llama 2, Mistral", 50_257: "GPT-2", 50_265: "RoBERTa",
    128_256: "Llama 3", 129_280: "DeepSeek-V3", 151_936: "Qwen", 152_064: "Qwen", 201_088: "gpt-oss",
    202_048: "Llama 4", 248_320: "Qwen 3.5", 250_002: "XLM-R", 256_000: "Gemma", 262_208: "Gemma 3",
}  # fmt: skip
"""Common vocabulary sizes with their models, for guesses that the failed request was for logits."""

TOKENS = 512
"""Multiple of which a guessed number of tokens must be."""

GUESS_FROM = 64 * MIB
"""Smallest failed request in bytes for which a shape is guessed. Smaller requests have too many explanations.
"""


def tensor_sizes(least: int, most: int) -> tuple[int, int]:
    """Return bounds in bytes of the tensors for which the allocator requests a segment of `least` to `most`
    bytes. A segment is a block from cudaMalloc.
    """
    if least <= SMALL_SEGMENT <= most:
        return 1, SMALL
    if least <= LARGE_SEGMENT <= most:
        # A segment of 20 MiB may also be for one large tensor, so 10 MiB is no upper bound.
        return SMALL + 1, most
    # The error's figure is rounded. Segments are multiples of 2 MiB, so only those in its range are possible.
    first, last = -(-least // LARGE_ROUND) * LARGE_ROUND, most // LARGE_ROUND * LARGE_ROUND
    return (first - LARGE_ROUND + 1, last) if 0 < first <= last else (max(1, least), most)


def match_trace(trace: Trace, sizes: tuple[int, int], live_bytes: int | None) -> list[RequestedTensor]:
    """Return the tensors of a predicted step that match the failed allocation's size, the most likely first.
    The most likely one was allocated with nearly `live_bytes` alive, or else with the most.
    """
    matches: dict[tuple[str, str, str, str, int], list[int]] = {}
    counts: Counter[tuple[str, str, str, str, int]] = Counter()
    last = max((block.step for block in trace.blocks), default=-1)
    before = 0
    for event, after in zip(trace.events, trace.live(), strict=True):
        if event > 0 and sizes[0] <= trace.blocks[event - 1].nbytes <= sizes[1]:
            block = trace.blocks[event - 1]
            key = (_fold(block.module), block.operator, block.phase, str(block.kind), block.nbytes)
            matches.setdefault(key, []).append(before)
            counts[key] += block.step in (-1, last)
        before = after

    def distance(live: list[int]) -> int:
        return -max(live) if live_bytes is None else min(abs(nbytes - live_bytes) for nbytes in live)

    ordered = sorted(matches.items(), key=lambda entry: (distance(entry[1]), -entry[0][4]))
    shapes = _shapes(trace)
    return [
        RequestedTensor(
            module=key[0],
            operator=key[1].removeprefix("aten::"),
            phase=key[2],
            kind=key[3],
            bytes=key[4],
            count=counts[key],
            shapes=shapes.get(key[:3], ""),
            live_bytes=max(live)
            if live_bytes is None
            else min(live, key=lambda entry: abs(entry - live_bytes)),
            guess=False,
        )
        for key, live in ordered[:SHOWN]
    ]


def _shapes(trace: Trace) -> dict[tuple[str, str, str], str]:
    """Return the input shapes of the operators in a simulated step, by module, operator and phase (such as
    backward).
    """
    shapes: dict[tuple[str, str, str], str] = {}
    for kernel in trace.kernels:
        key = (_fold(kernel.module), kernel.operator, kernel.phase)
        if key not in shapes and kernel.shapes:
            shapes[key] = ", ".join("×".join(map(str, shape)) or "1" for shape in kernel.shapes)
    return shapes


def _fold(module: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)


def guess(sizes: tuple[int, int]) -> list[RequestedTensor]:
    """Return likely shapes for a failed allocation of an unknown job. They are logits and attention scores,
    shapes with round numbers first.
    """
    if sizes[1] < GUESS_FROM:
        return []
    guesses = [*_logits(*sizes), *_scores(*sizes)]
    return [entry for _, entry in sorted(guesses, key=lambda entry: -entry[0])[:SHOWN]]


def _logits(least: int, most: int) -> Iterator[tuple[int, RequestedTensor]]:
    """Yield logits with this size in bytes for known vocabularies. The first value is the roundness of the
    number of tokens.
    """
    for width, dtype in ((4, "fp32"), (2, "16 bits")):
        for entries, models in VOCABULARIES.items():
            tokens = -(-least // (entries * width * TOKENS)) * TOKENS
            if 0 < tokens * entries * width <= most:
                shape = f"{tokens:,} tokens × {entries:,} of {models}, {dtype}"
                name = "logits, a copy of them, or their gradient"
                # The largest power of two that divides a number of tokens measures how round it is.
                yield tokens & -tokens, _as_guess(name, tokens * entries * width, shape)


def _scores(least: int, most: int) -> Iterator[tuple[int, RequestedTensor]]:
    """Yield attention scores with this size in bytes, for the longest sequence that gives it. The first value
    is the roundness of the shape.
    """
    for length in (16_384, 8192, 4096, 2048, 1024):
        for width, dtype in ((4, "fp32"), (2, "16 bits")):
            heads = most // (length * length * width)
            nbytes = heads * length * length * width
            if heads >= 8 and heads % 8 == 0 and nbytes >= least:
                shape = f"{heads} heads of all samples × {length:,} × {length:,}, {dtype}"
                yield TOKENS, _as_guess("attention scores of eager attention", nbytes, shape)
                return


def _as_guess(name: str, nbytes: int, shape: str) -> RequestedTensor:
    return RequestedTensor(
        module=name, operator="", phase="", kind="", bytes=nbytes, count=0, shapes=shape, live_bytes=None,
        guess=True,
    )  # fmt: skip


def show_request(requested: int, *, from_text: bool) -> str:
    """Return a sentence on the size of the failed allocation, and on the tensor sizes that lead to it."""
    if not from_text:
        return f"The request was for {show_bytes(requested)}."
    if requested == LARGE_SEGMENT:
        return "20 MiB is the allocator's segment for any tensor of 1 to 10 MiB, so the tensor was small."
    if requested == SMALL_SEGMENT:
        return "2 MiB is the allocator's segment for tensors of at most 1 MiB, so the tensor was tiny."
    return f"The request was for {show_bytes(requested)}: one tensor, rounded up to 2 MiB."
