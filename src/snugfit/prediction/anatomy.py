"""Break down a predicted step: bytes at the peak by category (weights, activations, ...) and module, bytes
over time, and operators.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from snugfit.job.job import Job
from snugfit.prediction.exchanges import exchanges
from snugfit.rehearsal.trace.trace import Block, Trace
from snugfit.results.footprint import Kind
from snugfit.results.prediction import Anatomy, CurvePoint, KindLine, ModuleLine, OperatorLine, TensorLine
from snugfit.step.step import PHASES
from snugfit.techniques.setup import Setup
from snugfit.units import show_bytes

LEAST_SHARE = 0.002
"""Smallest share of a category's bytes (weights, activations, ...) at which a report names a dtype."""

POINTS = 240
"""Number of points of the curve that shows allocated bytes during a step."""


def anatomy(trace: Trace, peak: int, reserved: Sequence[int], job: Job, setup: Setup) -> Anatomy:
    """Return the bytes at the peak (the event with index `peak`) by category and module, the bytes over time,
    and the operators of a trace. `reserved` are the allocator's bytes after each event.
    """
    # Without a setting for weights, they have the dtype of the job.
    setup = replace(setup, weights_dtype=setup.weights_dtype or job.dtype)
    alive = [trace.blocks[index] for index in trace.alive_at(peak)]
    return Anatomy(
        kinds=tuple(_kinds(alive, setup)),
        largest=tuple(_largest(alive)),
        curve=tuple(_curve(trace, reserved)),
        operators=tuple(_operators(trace)),
        syncs=trace.syncs,
        modules=tuple(_modules(alive)),
    )


def by_kind(trace: Trace, peak: int) -> dict[str, int]:
    """Return the bytes by category (weights, activations, ...) at event `peak`, largest first; they add up to
    the requested bytes there.
    """
    total: Counter[str] = Counter()
    for index in trace.alive_at(peak):
        total[trace.blocks[index].kind] += trace.blocks[index].nbytes
    return dict(total.most_common())


def _kinds(alive: Iterable[Block], setup: Setup) -> Iterable[KindLine]:
    blocks = defaultdict(list)
    for block in alive:
        blocks[block.kind].append(block)
    for kind, members in sorted(blocks.items(), key=lambda item: -sum(b.nbytes for b in item[1])):
        yield KindLine(
            kind=kind,
            bytes=sum(block.nbytes for block in members),
            reason=_reason(kind, members, setup, _dtypes(members)),
        )


def _dtypes(blocks: Sequence[Block]) -> str:
    """Return the dtypes of these blocks as text, with their bytes if there are several; empty if unknown."""
    sizes: Counter[str] = Counter()
    for block in blocks:
        sizes[block.dtype] += block.nbytes
    del sizes[""]
    most = sizes.total() * LEAST_SHARE
    large = [(dtype, nbytes) for dtype, nbytes in sizes.most_common() if nbytes >= most]
    if len(large) == 1:
        return large[0][0]
    return ", ".join(f"{dtype} ({show_bytes(nbytes)})" for dtype, nbytes in large)


def _reason(kind: str, blocks: Sequence[Block], setup: Setup, dtypes: str) -> str:
    optimizer = setup.optimizer_path.split(":")[-1]
    in_dtypes = f"in {dtypes}, " if dtypes else ""
    fixed = {
        Kind.WEIGHTS: f"parameters and buffers, in {dtypes or exchanges().weights_dtype(setup)}",
        Kind.GRADIENTS: f"{in_dtypes}from the first backward pass until the optimizer has used them",
        Kind.OPTIMIZER_STATES: f"{in_dtypes}kept by {optimizer} from step to step",
        Kind.ACTIVATIONS: _of_activations(blocks, setup),
        Kind.CACHES: f"copies of weights that autocast cast to {setup.autocast} once",
        Kind.KEY_VALUES: f"{in_dtypes}keys and values, or states, of the tokens so far",
        Kind.LOGITS: f"{in_dtypes}scores of the vocabulary for the next token",
        Kind.INPUTS: "the batch",
        Kind.GATHERED: "of the layer that computes, and of the next",
        Kind.COMMUNICATION: "what other GPUs are sent, or send",
    }
    if kind in fixed:
        return fixed[Kind(kind)]
    if kind == Kind.WORKSPACES:
        names = Counter(block.operator.split(": ")[-1] for block in blocks)
        return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in names.most_common(3))
    sizes: Counter[str] = Counter()
    for block in blocks:
        sizes[f"{_short(block.operator)} in {block.phase}"] += block.nbytes
    return "mostly " + ", ".join(name for name, _ in sizes.most_common(2))


def _of_activations(blocks: Iterable[Block], setup: Setup) -> str:
    # A step of a feature's phase (such as evaluation) has no backward pass.
    if all(block.phase not in PHASES for block in blocks):
        return "results and temporaries of the layers"
    recomputed = ", or recomputed from checkpoints" if setup.checkpoint else ""
    return f"saved in the forward pass for the backward pass{recomputed}"


def _largest(alive: Iterable[Block]) -> Iterable[TensorLine]:
    sizes: Counter[tuple[str, str, str, str, str]] = Counter()
    counts: Counter[tuple[str, str, str, str, str]] = Counter()
    for block in alive:
        key = (_fold_layers(block.module), _short(block.operator), block.phase, block.kind, block.dtype)
        sizes[key] += block.nbytes
        counts[key] += 1
    for key, nbytes in sizes.most_common():
        module, operator, phase, kind, dtype = key
        yield TensorLine(
            module=module,
            operator=operator,
            phase=phase,
            kind=kind,
            bytes=nbytes,
            count=counts[key],
            dtype=dtype,
        )


def _modules(alive: Iterable[Block]) -> Iterable[ModuleLine]:
    sizes: Counter[tuple[str, str]] = Counter()
    for block in alive:
        sizes[_fold_layers(block.module), block.kind] += block.nbytes
    for (module, kind), nbytes in sizes.most_common():
        yield ModuleLine(module=module, kind=kind, bytes=nbytes)


def _fold_layers(module: str) -> str:
    """Return the common name for layers of a stack: `encoder.layer.*.output` for `encoder.layer.3.output`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)


def _short(operator: str) -> str:
    return operator.removeprefix("aten::").strip("_")


def _curve(trace: Trace, reserved: Sequence[int]) -> Iterable[CurvePoint]:
    """Yield the curve of allocated bytes over the last step. Each of about `POINTS` points is the maximum
    over an equal number of events.
    """
    last = max((mark.step for mark in trace.marks), default=-1)
    marks = [mark for mark in trace.marks if mark.step == last]
    if not marks:
        return
    import numpy as np

    changes = trace.changes()
    start, live = marks[0].event, changes.cumsum()
    # A stretch (events of one point) has at least one event, for steps with fewer events than points.
    stretch = max(1, (len(live) - start) // POINTS)
    tops = [low + int(live[low : low + stretch].argmax()) for low in range(start, len(live), stretch)]
    kinds = list(dict.fromkeys(block.kind for block in trace.blocks))
    numbers = dict(zip(kinds, range(len(kinds)), strict=True))
    kind_of_block = np.array([numbers[block.kind] for block in trace.blocks], np.int8)
    kind_of = kind_of_block[abs(np.array(trace.events, np.int64)) - 1]
    by_kind = [np.where(kind_of == number, changes, 0).cumsum()[tops].tolist() for number in numbers.values()]
    current = 0
    for top, *sizes in zip(tops, *by_kind, strict=True):
        # The phase at a point is that of the last mark before it.
        while current + 1 < len(marks) and marks[current + 1].event <= top:
            current += 1
        yield CurvePoint(
            position=(top - start) / max(1, len(live) - start),
            phase=marks[current].phase,
            live_bytes=int(live[top]),
            reserved_bytes=reserved[top],
            kinds={str(kind): nbytes for kind, nbytes in zip(kinds, sizes, strict=True) if nbytes},
        )


def _operators(trace: Trace) -> Iterable[OperatorLine]:
    # The module imports torch, which `snugfit --help` must not load.
    from snugfit.rehearsal.record.kernels import GROUPS, group_of

    totals: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    # Repeated micro-batches refer to the same kernel objects.
    counts = Counter(map(id, trace.kernels))
    for kernel in {id(kernel): kernel for kernel in trace.kernels}.values():
        line, count = totals[(group_of(kernel.operator), kernel.phase)], counts[id(kernel)]
        line[0] += count
        line[1] += count * kernel.flops
        line[2] += count * kernel.nbytes
    order = list(dict.fromkeys((*PHASES, *(phase for _, phase in totals))))
    for (group, phase), (kernels, flops, nbytes) in sorted(
        totals.items(), key=lambda item: (GROUPS.index(item[0][0]), order.index(item[0][1]))
    ):
        yield OperatorLine(group=group, phase=phase, kernels=kernels, flops=flops, bytes=nbytes)
