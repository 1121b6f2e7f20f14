"""Comparison of micro-batches with the whole batch, by the gradients of a few of the user's samples.

A few samples that differ from each other are split into two micro-batches. Their gradients are compared with
those of all these samples together. Each micro-batch is weighted as in the training. Losses alone show
little: a new model gives all samples the same loss under any weights of classes. Gradients of the same
samples in another order show the effect of rounding and of random draws.

The comparison has three results:

- Same gradients: the batch may be split.
- Different gradients: samples depend on each other (in-batch negatives, statistics of a batch). Or the loss
  is a mean over uncounted items: weights of classes, tokens under a custom name, omitted answers, two means,
  the balance of experts.
- Undecided: an error, no gradient at all, noise, or out of memory.

After the last two results, plans and recoveries do not split the batch, and the user's own split gets a
warning. The comparison runs before the first split, and again after some steps (`compares_again`). The first
batch may contain only one class, and the outputs of a new model may be zeros. Batch norms are detected
earlier, by their class.

Samples are compared by the content of their tensors. A single number (a class, a weight, a position) counts
by itself. A row of labels or of a mask counts by its number of valid values. Samples of the same class and
length would hide weights of classes and counts of tokens.

**Gradients.** Gradients of a few samples, computed as one batch, in another order and in micro-batches. The
model is unchanged.

The model is in training mode, because a batch norm, a router or a custom term behaves differently in
evaluation. Only dropout is off. A dropout mask is drawn for all samples of a call at once. Micro-batches
could not reproduce the mask of the whole batch. Each sample has its own mask, so dropout never changes
whether a loss is a mean over samples. All other random draws start from the same state in each run.

If memory is too small, or parameters are sharded, losses are compared instead, after noise was added to the
weights. Gradients come from `torch.autograd.grad`, which does not change `.grad` and runs no hooks of
parameters. Such hooks may update weights within a backward pass, or belong to DDP. Compiled layers run
eagerly.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import accumulate, combinations
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from snugfit.errors import one_line
from snugfit.job.batch import IGNORED
from snugfit.job.batch_layout import BatchLayout, leaves, map_leaves
from snugfit.job.sample_mixing import mixing_of
from snugfit.step.clipping import tensor_parts
from snugfit.step.memory_errors import memory_cause
from snugfit.training.ranks import are_joined
from snugfit.training.rng import all_rng_states, preserve_rng, restore_all_rng_states
from snugfit.training.run.items import items_in, shifts_labels

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job


SAMPLES, ON_THE_HOST, FEWEST = 6, 4, 2
"""Numbers of samples whose gradients are compared: the usual number, the least on the CPU, and the least on a
GPU. A GPU's memory may have room for no more."""


class Tolerance(NamedTuple):
    """Relative differences up to which two gradients count as equal."""

    relative: float
    """Largest accepted difference of one parameter's gradients, relative to their norm."""
    floor: float
    """Largest accepted difference relative to the norm of all gradients. It is for gradients that are
    mathematically 0."""
    loss: float
    """Largest accepted relative difference of two losses."""


OF_32_BIT, OF_16_BIT = Tolerance(0.01, 1e-4, 1e-3), Tolerance(0.15, 1e-2, 0.02)
"""Tolerances of gradients computed in 32 and in 16 bits.

In 16 bits, kernels for other sizes round differently: gradients of BERT-large in bfloat16 differed by 7 % on
an H200. Tensor cores round fp32 in this way if tf32 is allowed.
"""

LossOf = Callable[[Any, dict[str, Any]], Any]
"""The type of a function that returns the loss, a scalar tensor, of a model and a batch on its device."""

ItemsOf = Callable[[Mapping[str, Any]], float]
"""The type of a function that returns a batch's number of items (samples or labels), over which its loss is a
mean."""


class Verdict(NamedTuple):
    """Result of a comparison of gradients: the reason why the batch may not be split, or why that is unknown.
    Both texts are empty if it may be split.
    """

    differs: str = ""
    unclear: str = ""


def weighed_by_items(loss_of: LossOf, items_of: ItemsOf) -> PieceLoss:
    """Return a loss function for a part of a batch, weighted by its fraction of the labels (or samples) that
    count.
    """

    def piece_loss(model: Any, piece: dict[str, Any], whole: dict[str, Any]) -> Any:
        items = items_of(piece)
        return loss_of(model, piece) * (items / items_of(whole)) if items else None

    return piece_loss


def counted_by(job: Job, model: Any) -> ItemsOf:
    """Return the default function that counts the terms of a batch's loss: labels that are not ignored, or
    samples.
    """
    shifts = shifts_labels(model)
    return lambda piece: items_in(piece, shifts=shifts, dims=job.model.batch_dims)


def job_with_mixing(
    job: Job,
    model: Any,
    loss_of: PieceLoss,
    example: Mapping[str, Any] | None = None,
    *,
    max_pieces: int = SAMPLES,
    context: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
    again: bool = False,
) -> Job:
    """Test if micro-batches give the same gradients as the whole batch, and return the job with the result.

    `mixes_samples` gets a reason if gradients of pieces do not add up to those of the whole. `unclear_cut`
    gets a reason if the comparison is undecided. On a GPU at most `max_pieces` samples are used, of `example`
    or of the job's example. `context` is entered for a model that fails without it. With `again`, the run has
    already started. Losses are then compared on a GPU, because computing a loss saves nothing for a backward
    pass. The run thus needs no more memory than predicted.
    """
    # If the model is known to mix samples, such as by batch norm, no comparison is needed.
    if mixing_of(job).reason:
        return job
    batch = example or job.model.example or {}
    verdict = None
    give_back_unused(model)  # cached memory of the steps does not fit this batch
    try:
        verdict = _verdict(job, model, loss_of, batch, max_pieces, again)
    except Exception as fault:  # a user's loss may raise any error
        error = f"{type(fault).__name__}: {one_line(fault)}"
    if verdict is None and context is not None:
        with contextlib.suppress(Exception), context():
            verdict = _verdict(job, model, loss_of, batch, max_pieces, again)
    if verdict is None:
        verdict = Verdict(unclear=error)
    give_back_unused(model)
    return replace(job, mixes_samples=verdict.differs, unclear_cut=verdict.unclear)


def _verdict(
    job: Job,
    model: Any,
    loss_of: PieceLoss,
    batch: Mapping[str, Any],
    most: int,
    again: bool,
) -> Verdict:
    layout = BatchLayout.of(batch, job.model.batch_dims, samples=job.batch_size)
    if layout.unclear:  # splitting this batch raises an error elsewhere
        return Verdict()
    if layout.samples < FEWEST:
        return Verdict(unclear="the first batch has one sample only")
    runs = CutRuns(model, batch, layout, loss_of)
    fewest = ON_THE_HOST if runs.device.type == "cpu" else FEWEST
    parts = chosen_samples(batch, layout, max(fewest, min(most, SAMPLES)))
    if not runs.can_take_gradients or (again and runs.device.type == "cuda"):
        return _of_losses(runs, parts)
    # If memory runs out, gradients of fewer samples are tried, and then losses alone.
    for attempt in (parts, chosen_samples(batch, layout, FEWEST)):
        with contextlib.suppress(MemoryError):
            return _of_either_parts(runs, attempt)
    return _of_losses(runs, parts)


def _of_either_parts(runs: CutRuns, parts: Parts) -> Verdict:
    """Compare gradients of two parts of a batch with those of the whole; use halves if the loss fails for one
    sample. Raises `MemoryError` when memory ran out.
    """
    for attempt in (parts, evenly(parts)):
        try:
            return _of_gradients(runs, attempt)
        except Exception as fault:
            if memory_cause(fault):
                raise MemoryError from None
            if attempt is not parts or len(parts[0]) > 1 or len(parts[1]) < FEWEST:
                raise
    raise AssertionError("one of two attempts returns or raises")


def _of_gradients(runs: CutRuns, parts: Parts) -> Verdict:
    samples = [*parts[0], *parts[1]]
    whole, reverse, cut = runs.take([samples], [samples[::-1]], parts)
    tolerance = OF_16_BIT if runs.has_few_digits else OF_32_BIT
    total = sum(size * size for _, size in distances(whole, whole)) ** 0.5
    if not is_number(whole):
        return Verdict(unclear=f"the loss of {len(samples)} samples, or a gradient of it, is not a number")
    if not total:
        return Verdict(unclear=f"all gradients of {len(samples)} samples are 0")
    # The whole batch has finite gradients, so NaN or infinity comes from splitting it.
    if not is_number(cut):
        return Verdict(differs=f"{_what(parts)}, where they are no numbers")

    def beyond(other: Taken) -> list[tuple[float, str]]:
        """Return the relative differences above the tolerance with their parameters, the largest first."""
        by_name = zip(distances(whole, other), runs.names, strict=True)
        return sorted(
            (
                (apart / size, name)
                for (apart, size), name in by_name
                if apart > tolerance.relative * size + tolerance.floor * total
            ),
            reverse=True,
        )

    # If the order of samples changes gradients more than the tolerance, an effect of the split cannot be
    # detected.
    if beyond(reverse):
        return Verdict(
            unclear=f"the gradients of {len(samples)} samples depend on their order or on random draws"
        )
    if not (different := beyond(cut)):
        return Verdict()
    share, name = different[0]
    return Verdict(differs=f"{_what(parts)}, by {share:.0%} ({name})")


def _what(parts: Parts) -> str:
    few, many = map(len, parts)
    return f"the gradients of {few + many} samples are others in pieces of {few} and {many}"


def _of_losses(runs: CutRuns, parts: Parts) -> Verdict:
    """Compare the sum of the micro-batches' losses with the loss of the whole batch, if gradients are not
    available.
    """
    samples = [*parts[0], *parts[1]]
    orders = runs.take([samples], [samples[::-1]], parts, gradients=False)
    whole, reverse, cut = (taken.loss for taken in orders)
    bound = (OF_16_BIT if runs.has_few_digits else OF_32_BIT).loss * abs(whole)
    # Written with `not`, because every comparison with NaN is False.
    if not abs(whole - reverse) <= bound:
        return Verdict(unclear=f"the loss of {len(samples)} samples depends on their order or random draws")
    if not abs(whole - cut) <= bound:
        few, many = map(len, parts)
        return Verdict(
            differs=f"the loss of {few + many} samples is {whole:.4g} together and {cut:.4g} in pieces of "
            f"{few} and {many}"
        )
    return Verdict()


# ---- the choice of samples --------------------------------------------------------------------------------


LONGEST_ROW = 1 << 16
"""Largest number of values per sample in a tensor whose distinct values describe the sample. Pixels and sound
have more, and their counts mean nothing."""

Traits = Sequence[Sequence[float]]
"""The type of the samples' properties, each scaled to 0 to 1. Samples that differ most in them are chosen."""

Parts = tuple[tuple[int, ...], tuple[int, ...]]
"""The type of a split into two micro-batches: the sample indices of each, the smaller micro-batch first."""


def chosen_samples(batch: Mapping[str, Any], layout: BatchLayout, most: int) -> Parts:
    """Choose at most `most` samples of a batch, as different as possible, and divide them into one third and
    two thirds.
    """
    traits = _traits(batch, layout)
    chosen = _unlike(traits, min(most, layout.samples))
    return divide(traits, chosen, max(1, len(chosen) // 3))


def evenly(parts: Parts) -> Parts:
    """Divide the same samples into two halves."""
    samples = [*parts[0], *parts[1]]
    half = len(samples) // 2
    return tuple(samples[:half]), tuple(samples[half:])


def divide(traits: Traits, chosen: Sequence[int], size: int) -> Parts:
    """Divide these samples into `size` samples and the rest, so that the average features of the two differ
    most.
    """

    def distance(piece: tuple[int, ...]) -> float:
        rest = [index for index in chosen if index not in piece]
        means = [[sum(traits[i][at] for i in part) / len(part) for part in (piece, rest)] for at in columns]
        return sum(abs(one - other) for one, other in means)

    columns = range(len(traits[0]))
    piece = max(combinations(chosen, size), key=distance)
    return piece, tuple(index for index in chosen if index not in piece)


def _unlike(traits: Traits, count: int) -> list[int]:
    """Return the indices of `count` samples that differ most from each other in their labels, lengths and
    other traits.
    """
    chosen = [0]
    nearest = [_distance(traits[0], other) for other in traits]
    while len(chosen) < count:
        rest = [index for index in range(len(traits)) if index not in chosen]
        chosen.append(max(rest, key=nearest.__getitem__))
        nearest = [
            min(known, _distance(traits[chosen[-1]], other))
            for known, other in zip(nearest, traits, strict=True)
        ]
    return chosen


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


def _traits(batch: Mapping[str, Any], layout: BatchLayout) -> Traits:
    import torch

    columns = []
    for name, value in leaves(batch):
        if name not in layout.rows or not torch.is_tensor(value):
            continue
        dimension, rows = layout.rows[name]
        values = value.detach().movedim(dimension, 0)
        values = values[: layout.samples * rows].reshape(layout.samples, -1)
        if not 0 < values.shape[1] <= LONGEST_ROW:
            continue
        if values.shape[1] > 1:
            values = (values.ne(0) & values.ne(IGNORED)).sum(1, keepdim=True)
        column = values[:, 0].double().nan_to_num().cpu()
        # A property that is equal in all samples cannot distinguish them.
        if (width := float(column.max() - column.min())) > 0:
            columns.append(((column - column.min()) / width).tolist())
    return [[column[sample] for column in columns] for sample in range(layout.samples)]


# ---- gradients ---------------------------------------------------------------------------------------------


MOST_VALUES = 1 << 22
"""Largest number of gradient values to compare, unless the smallest parameter alone has more.

Three copies take 16 MiB each in fp32. The smallest parameters are taken first: norms, biases, routers and
heads, of all layers.
"""

DRAWS = ("Dropout", "DropPath", "StochasticDepth")
"""Substrings of class names of layers that drop values at random in training."""

RATES = ("drop", "zoneout")
"""Substrings of attribute names of drop rates: `attention_dropout`, `drop_path_rate`, `layerdrop`."""

NOISE = 0.3
"""Standard deviation of the noise that is added to weights before losses are compared."""

LOSS_SCALE = 1024.0
"""Factor of the loss that keeps fp16 gradients from underflowing to zero."""

PieceLoss = Callable[[Any, dict[str, Any], dict[str, Any]], "torch.Tensor | None"]
"""The type of a function of a model, a micro-batch and the whole batch on the device. It returns the
micro-batch's term of the loss, a scalar tensor; None if no item counts."""


class Taken(NamedTuple):
    """Loss and gradients, each summed over several micro-batches of a batch."""

    loss: float
    gradients: Sequence[torch.Tensor]
    """Gradients of the compared parameters; empty when only losses are compared."""


class CutRuns:
    """Computes losses and gradients of a few samples of one batch, in several orders and with several
    splits.
    """

    def __init__(
        self, model: torch.nn.Module, batch: Mapping[str, Any], layout: BatchLayout, loss_of: PieceLoss
    ) -> None:
        self._model, self._batch, self._layout, self._loss_of = model, batch, layout, loss_of
        self.device = next(model.parameters()).device
        self.names, self._parameters = _compared_weights(model)
        self.in_16_bit = False
        """True once a run has returned a 16-bit loss or gradient."""

    @property
    def has_few_digits(self) -> bool:
        """True if a run computed in 16 bits, or multiplied fp32 matrices with tf32."""
        import torch

        tf32 = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
        return self.in_16_bit or (self.device.type == "cuda" and tf32)

    @property
    def can_take_gradients(self) -> bool:
        """Return True for parameters without sharding; the hooks of shards expect the forward and backward
        passes of a full step.
        """
        # Without a process group no weight is sharded.
        is_sharded = are_joined() and any(map(tensor_parts().is_part, self._model.parameters()))
        return bool(self._parameters) and not is_sharded

    def take(self, *orders: Sequence[Sequence[int]], gradients: bool = True) -> list[Taken]:
        """Return loss and gradients of the samples for each split into micro-batches. Without `gradients`,
        only losses are computed, under other weights. Model, gradients and random generators are restored
        afterwards.
        """
        import torch

        with (
            preserve_rng(self.device),
            torch.set_grad_enabled(gradients),
            torch.compiler.set_stance("force_eager"),
            _as_it_was(self._model),
            contextlib.nullcontext() if gradients else _shaken(self._parameters),
            _without_dropout(self._note_dtype),
        ):
            begin = all_rng_states(self.device)
            taken: list[Taken] = []
            for pieces in orders:
                restore_all_rng_states(begin, self.device)
                taken.append(self._take(pieces, gradients))
            return taken

    def _take(self, pieces: Sequence[Sequence[int]], gradients: bool) -> Taken:
        import torch

        # The weights of micro-batches were computed for these samples alone, not for the whole batch.
        whole = self._samples([index for piece in pieces for index in piece])
        loss, total = 0.0, [torch.zeros_like(weight) for weight in self._parameters if gradients]
        for piece in pieces:
            value = self._loss_of(self._model, self._samples(piece), whole)
            if value is None:
                continue
            loss += float(value.detach())
            if not gradients:
                continue
            # Some parameters, such as those of an expert, may not be used for these samples.
            gradients_of_piece = torch.autograd.grad(value * LOSS_SCALE, self._parameters, allow_unused=True)
            for held, gradient in zip(total, gradients_of_piece, strict=True):
                if gradient is not None:
                    held.add_(gradient)
        return Taken(loss, total)

    def _note_dtype(self, result: Any) -> None:
        import torch

        if isinstance(result, torch.Tensor) and result.dtype in (torch.float16, torch.bfloat16):
            self.in_16_bit = True

    def _samples(self, indices: Sequence[int]) -> dict[str, Any]:
        import torch

        parts = [self._layout.part(self._batch, index, index + 1) for index in indices]
        return map_leaves(
            self._layout.join(parts),
            lambda _, value: value.to(self.device) if torch.is_tensor(value) else value,
        )


def give_back_unused(model: torch.nn.Module) -> None:
    """Free the allocator's unused cached memory on this model's GPU, because a step may need it."""
    import torch

    if next(model.parameters()).device.type == "cuda":
        torch.cuda.empty_cache()


def distances(one: Taken, other: Taken) -> list[tuple[float, float]]:
    """For each parameter, return the norm of the difference of two gradients, and the norm of the larger
    one."""
    import torch

    rows = [
        torch.stack([(a.float() - b.float()).norm(), torch.maximum(a.float().norm(), b.float().norm())])
        for a, b in zip(one.gradients, other.gradients, strict=True)
    ]
    # All parameters are transferred at once, since each transfer waits for the device.
    return [(distance, size) for distance, size in torch.stack(rows).tolist()]


def is_number(taken: Taken) -> bool:
    """Return True if the loss and all gradients are finite numbers."""
    return math.isfinite(taken.loss) and all(bool(value.isfinite().all()) for value in taken.gradients)


def _compared_weights(model: torch.nn.Module) -> tuple[list[str], list[torch.nn.Parameter]]:
    """Return the parameters whose gradients are compared: their names and the parameters themselves."""
    named = sorted(
        ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad),
        key=lambda pair: pair[1].numel(),
    )
    sizes = accumulate(weight.numel() for _, weight in named)
    count = max(1, sum(values <= MOST_VALUES for values in sizes))
    return [name for name, _ in named[:count]], [weight for _, weight in named[:count]]


# ---- restoring the model ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _as_it_was(model: torch.nn.Module) -> Iterator[None]:
    """Context in which the model is in training mode without dropout, and is restored at the end.

    Its buffers and the plain attributes of its modules, including their modes, are restored.
    """
    import torch

    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with contextlib.ExitStack() as unchanged:
        for module in model.modules():
            unchanged.enter_context(unchanged_attributes(module))
        if not model.training:  # otherwise frozen modules stay in evaluation
            model.train()
        for module in model.modules():
            _drop_nothing(module)
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def _drop_nothing(module: torch.nn.Module) -> None:
    """Set the dropout rates of a module to 0, through the attributes that recomputed layers and snugfit's
    kernels also read.
    """
    is_layer = any(name in type(module).__name__ for name in DRAWS)
    if is_layer:
        module.training = False
    for name, value in vars(module).items():
        is_rate = any(word in name for word in RATES) or (is_layer and name in ("p", "drop_prob"))
        if is_rate and isinstance(value, float):
            vars(module)[name] = 0.0


@contextlib.contextmanager
def _shaken(weights: Sequence[Any]) -> Iterator[None]:
    """Context in which noise is added to the weights, including shards; their bits are restored at the end.

    The noise makes the losses of samples differ in a new model, too.
    """
    import torch

    parts = [tensor_parts().own(weight) for weight in weights]
    with torch.no_grad():
        before = [part.detach().clone() for part in parts]
        for number, part in enumerate(parts):  # one generator each: shards differ in size
            noise = torch.randn(part.shape, generator=torch.Generator().manual_seed(number))
            part.add_(noise.to(part), alpha=NOISE)
        try:
            yield
        finally:
            for part, value in zip(parts, before, strict=True):
                part.copy_(value)


@contextlib.contextmanager
def _without_dropout(note: Callable[[Any], None]) -> Iterator[None]:
    """Context that disables dropout in torch's functions, which models also call with rates of a config and
    no layer.

    `note` is called with each result.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class Undropped(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
        ) -> Any:
            keywords = dict(keywords or {})
            name = getattr(function, "__name__", "")
            # The operator `native_dropout` also returns its mask.
            if "dropout" in name and "native" not in name:
                return arguments[0] if arguments else keywords["input"]
            # The fifth positional argument of this function is `dropout_p`.
            if function is torch.nn.functional.scaled_dot_product_attention and len(arguments) > 4:
                arguments = (*arguments[:4], 0.0, *arguments[5:])
            elif keywords.get("dropout_p"):
                keywords["dropout_p"] = 0.0
            result = function(*arguments, **keywords)
            note(result)
            return result

    with Undropped():
        yield


@contextlib.contextmanager
def unchanged_attributes(holder: Any) -> Iterator[None]:
    """Context that restores the attributes of an object at the end, with the content of its dicts and lists.

    A Trainer's own loss may collect figures for its log, for example.
    """
    containers = [
        (value, _copy_containers(value))
        for name, value in vars(holder).items()
        # A list in a dataset may be long, and computing a loss does not change it.
        if isinstance(value, dict | list) and not name.endswith("dataset")
    ]
    with patch.dict(vars(holder)):
        try:
            yield
        finally:
            for value, content in containers:  # other objects may share the list
                value.clear()
                (value.update if isinstance(value, dict) else value.extend)(content)


def _copy_containers(value: Any) -> Any:
    """Copy dicts and lists recursively, in the same classes; their other values are shared."""
    if isinstance(value, dict | list):
        pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
        value = copy(value)
        for key, item in pairs:
            value[key] = _copy_containers(item)
    return value
