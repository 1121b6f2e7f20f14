"""The Setup: a recipe's settings of a training loop, as plain data.

`CoreSetup` has the fields of the core, and `Setup` those of the installed features too (`feature.py`). Every
loop implements each field or refuses it by name. No field holds code: a callable is an import path
(`package.module:name`) with arguments. So a Setup can be printed, compared, and written to JSON and back
unchanged. Each field has a handler, and handlers run in the order of `feature.InstallStage`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, make_dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

from snugfit.documents import JsonFields
from snugfit.job.dtype import LOST_BELOW, dtype_name
from snugfit.techniques.wish import Call as Call  # noqa: PLC0414 - exported: optimizers are Calls
from snugfit.techniques.wish import Lowering, lowering_wishes, used_wishes, wishes

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class OptimizerWish:
    """The optimizer setting of a `Setup`: its constructor, and its name in the HF Trainer."""

    factory: Call
    """Constructor of the optimizer: `factory(parameters, lr=..., weight_decay=..., **arguments)` returns a
    `torch.optim.Optimizer`.
    """

    prepare: Call | None = None
    """Function `prepare(model, **arguments)` that runs once before the factory, for example to keep some
    modules' states in fp32.
    """

    trainer_name: str | None = None
    """Value of `TrainingArguments.optim` for the same optimizer; None if the HF Trainer has none."""

    weight_decay: bool = True
    """True if the factory takes `weight_decay`."""

    shapes: Call | None = None
    """Function `shapes(on_gpu=...)` that returns a context manager, for optimizers that call compiled code
    directly. A simulation enters it. In the context, steps allocate for tensors without data as for real
    tensors on that device.
    """


@dataclass(frozen=True, kw_only=True)
class CheckpointWish:
    """The checkpointing setting of a `Setup`: groups of consecutive layers that keep only their input, each
    recomputed as a whole.

    A group (span) is given by its length, or by the number of groups. `cut` forms the groups for every
    training loop.
    """

    layers_per_span: int = 1
    """Number of consecutive layers (a span) that are recomputed together. With 0, `spans` determines their
    number.
    """

    spans: int | None = None
    """Number of spans into which a stack of layers is cut if `layers_per_span` is 0. None is
    round(sqrt(layers)), the optimum of Chen et al. (arXiv 1604.06174, section 4.1) for equal layers.
    """

    every: int = 1
    """Interval between recomputed spans, which start with the first. Other spans keep their activations."""

    first: int | None = None
    """Largest number of recomputed spans, from the first of those chosen by `every`; None for no limit."""

    keep: str = ""
    """Names of the operators whose results a recomputed span keeps, as in `step/selective.py`; empty for
    none.
    """

    keep_drawn: bool = False
    """True if the results of attention with dropout are kept too. Other operators in a span may then draw no
    random numbers from torch's generators.
    """

    def cut(self, layers: int) -> tuple[range, ...]:
        """Return the groups of consecutive layers that are recomputed together, for this many layers, in
        order.

        Groups given by their number differ in length by one layer at most, the longer ones first.
        """
        if layers < 1:
            return ()
        if self.layers_per_span:
            starts = [*range(0, layers, self.layers_per_span), layers]
        else:
            count = min(layers, self.spans or max(1, round(math.sqrt(layers))))
            # The first `longer` spans have one layer more.
            short, longer = divmod(layers, count)
            starts = [index * short + min(index, longer) for index in range(count + 1)]
        spans = [range(start, end) for start, end in pairwise(starts)]
        # `first` counts only the spans that `every` has chosen.
        return tuple(spans[:: self.every][: self.first])


EVERY_LAYER = CheckpointWish()
"""The checkpointing setting that recomputes each layer by itself."""


LOGITS_BYTES = 256 << 20
"""Default bytes of the fp32 logits of one chunk (chosen). Products of fewer tokens take longer on a GPU of
today, and such logits take about a GiB with their temporaries."""


@dataclass(frozen=True, kw_only=True)
class LogitsWish:
    """The setting for chunked logits: head, loss and gradient are computed for some tokens at a time."""

    tokens: int | None = None
    """Number of tokens in a chunk of logits; None computes it from `LOGITS_BYTES`."""

    def tokens_at_once(self, vocabulary: int, itemsize: int = 4) -> int:
        """Return the number of tokens in a chunk. Without a set number, it is the largest power of two whose
        logits, of `itemsize` bytes each, take at most `LOGITS_BYTES`.
        """
        # One shifted by the bit length minus one is the largest power of two up to the number.
        return self.tokens or 1 << max(0, (LOGITS_BYTES // (itemsize * vocabulary)).bit_length() - 1)


@dataclass(frozen=True, kw_only=True)
class LoaderWish:
    """Settings of torch's DataLoader: workers and pinned memory."""

    workers: int = 0
    """Number of worker processes that prepare batches; 0 prepares them in the training process."""

    pinned: bool = False
    """True for batches in page-locked host memory, whose copies to the device are asynchronous."""


@dataclass(frozen=True, kw_only=True)
class CoreSetup(JsonFields):
    """The core's fields of the training loop's settings (`Setup`), each with the default of the
    plain loop.
    """

    weights_dtype: str | None = None
    """Dtype of the model's floating-point weights, by torch's name; None leaves them as they are loaded
    (`Job.dtype`).
    """

    attention: str = "sdpa"
    """Attention, by the values of transformers' `attn_implementation`, or by the name of a feature's own
    attention (`step/wishes/own_attention.py`).
    """

    matmul: str = "ieee"
    """torch's `fp32_precision` of matrix products and convolutions: `ieee` or `tf32`."""

    logits: LogitsWish | None = None
    """Setting of chunked logits: the number of tokens whose logits exist at a time. None computes all logits
    together.
    """

    checkpoint: CheckpointWish | None = None
    """Layers that keep only their inputs and are recomputed in backward (non-reentrant); None recomputes
    none.
    """

    optimizer: OptimizerWish = field(
        default_factory=lambda: OptimizerWish(
            factory=Call(path="torch.optim:AdamW", arguments={"foreach": True}), trainer_name="adamw_torch"
        )
    )
    """Constructor of the optimizer, with its settings."""

    autocast: str | None = None
    """Dtype of autocast regions, by torch's name; None runs them in the weights' dtype."""

    scale_gradients: bool = False
    """True to scale the loss against underflow and to skip steps with non-finite gradients (GradScaler)."""

    micro_batches: int = 1
    """Number of micro-batches into which the global batch is split. They run one after the other."""

    loader: LoaderWish = field(default_factory=LoaderWish)
    """Worker processes and pinned memory of the DataLoader."""

    expandable_segments: bool = False
    """True if the CUDA allocator uses expandable segments."""

    @property
    def lowering(self) -> Lowering | None:
        """Return the setting of a compiler whose programs replace the model's code; None if the code runs
        uncompiled.
        """
        for wish in lowering_wishes():
            if (value := wish.of(self)) is not None:
                return value
        return None

    @property
    def records_graphs(self) -> bool:
        """Return True if steps are recorded as CUDA graphs, so that the first steps differ from
        later ones.
        """
        recorded = any(wish.records_graphs for wish in used_wishes(self))
        lowering = self.lowering
        return recorded or (lowering is not None and lowering.records_graphs)

    @property
    def has_budget(self) -> bool:
        """Return True if compiled programs save fewer activations for their backward pass than by default."""
        lowering = self.lowering
        return lowering is not None and lowering.has_budget

    def trained_dtype(self, job: Job) -> str:
        """Return the dtype of the trained weights, by torch's name. If a module has several, a 16-bit dtype
        goes first. Weights that a feature adds to frozen ones are fp32 (peft's `autocast_adapter_dtype`).
        """
        module = job.model.module
        # peft casts adapters to fp32 (`autocast_adapter_dtype`).
        if any(wish.freezes for wish in used_wishes(self)):
            return "float32"
        if module is None or self.weights_dtype:
            return self.weights_dtype or job.dtype
        dtypes = {dtype_name(weight.dtype) for weight in module.parameters() if weight.requires_grad}
        # The narrowest dtype determines if small updates are lost.
        return next((name for name in dtypes if name in LOST_BELOW), job.dtype)

    @property
    def optimizer_path(self) -> str:
        """Return the import path of the optimizer's constructor."""
        return self.optimizer.factory.path

    def for_update(self) -> Self:
        """Return the settings (`Setup`) that determine an optimizer update alone, without micro-batches and
        checkpointing.
        """
        return self.in_one_piece().with_fields(checkpoint=None)

    def in_one_piece(self) -> Self:
        """Return a copy of the settings without micro-batches."""
        return self.with_fields(micro_batches=1)

    def created_dtype(self, job: Job) -> str:
        """Return the dtype in which the model's weights are created, by torch's name."""
        return self.weights_dtype or job.dtype

    def product_dtype(self, job: Job) -> str:
        """Return the dtype of matrix products and attention, by torch's name."""
        return self.autocast or self.created_dtype(job)

    @property
    def recomputes(self) -> bool:
        """Return True if the backward pass recomputes results of the forward pass."""
        return self.checkpoint is not None or self.has_budget

    @property
    def keeps_only_inputs(self) -> bool:
        """Return True if each layer is recomputed, and the forward pass keeps its inputs only."""
        # autocast keeps casts of the layers' weights until the forward pass ends.
        return self.checkpoint == EVERY_LAYER and self.autocast is None

    def recomputes_as(self, other: CoreSetup) -> bool:
        """Return True if the same layers are recomputed as under the other settings."""
        return self.checkpoint == other.checkpoint

    def with_equal_layers(self) -> Self:
        """Return a copy that recomputes each layer, if this one recomputes any."""
        return self.with_fields(checkpoint=self.checkpoint and EVERY_LAYER)

    @property
    def saves_memory(self) -> bool:
        """True if the forward and backward passes save memory at a cost of time, as by recomputation."""
        return self.recomputes or self.logits is not None

    def without_savings(self) -> Self:
        """Return a copy that recomputes nothing and computes all logits together."""
        return self.with_fields(checkpoint=None, logits=None)

    def can_follow(self, before: Self) -> bool:
        """Return True if a run with the settings `before` can continue with these. Only checkpointing may
        differ, and the number of micro-batches may rise.
        """
        with_same_pieces = self.with_fields(checkpoint=before.checkpoint, micro_batches=before.micro_batches)
        return with_same_pieces == before and self.micro_batches >= before.micro_batches

    def per_piece(self, count: int) -> int:
        """Return the number of samples or kernels of one micro-batch, from the `count` of the whole batch."""
        return count // self.micro_batches

    def in_pieces(self, count: int, job: Job) -> tuple[Job, Self]:
        """Return the job and settings for a batch of `count` micro-batches, each as large as now."""
        small = replace(job, batch_size=self.per_piece(job.batch_size) * count)
        return small, self.with_fields(micro_batches=count)

    def with_precision(
        self, *, weights: str | None = None, products: str | None = None, is_scaled: bool = False
    ) -> Self:
        """Return a copy of the settings with weights and autocast of these dtypes, and a gradient scaler if
        `is_scaled`.
        """
        return self.with_fields(weights_dtype=weights, autocast=products, scale_gradients=is_scaled)

    def without_autocast(self) -> tuple[str | None, Self]:
        """Return the autocast dtype, and a copy of the settings without autocast. The caller casts the copy's
        weights in another way.
        """
        return self.autocast, self.with_fields(autocast=None)

    def with_adamw(self, wish: OptimizerWish) -> Self:
        """Return a copy of the Setup with this AdamW as its optimizer, or with the variant that a feature's
        field requires.
        """
        # A feature with another form of weights needs its own AdamW for them.
        named = (
            candidate.adamw
            for candidate in wishes()
            if candidate.adamw is not None and candidate.of(self) != candidate.default
        )
        own = next(named, None)
        return self.with_fields(optimizer=wish if own is None else own.run())

    def with_fields(self, **changed: Any) -> Self:
        """Return a copy of the training settings with these fields changed. A search makes several hundred
        thousand copies, and `dataclasses.replace` takes ten times as long. Raises `TypeError` for an unknown
        field.
        """
        if unknown := changed.keys() - self.__dict__.keys():
            raise TypeError(f"a Setup has no {', '.join(sorted(unknown))}")
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, **changed)
        return copy


# mypy cannot follow `make_dataclass`.
if TYPE_CHECKING:

    class Setup(CoreSetup):
        """The settings of a training loop from a recipe: fields of the core and of the features."""

else:
    Setup = make_dataclass(
        "Setup",
        [(wish.name, wish.kind, field(default=wish.default)) for wish in wishes()],
        bases=(CoreSetup,),
        namespace={
            "__doc__": "Settings of a training loop: the fields of the core and of the features.",
            "__module__": __name__,  # for pickle
        },
        frozen=True,
        kw_only=True,
    )
