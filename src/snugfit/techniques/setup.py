"""The Setup: what a recipe asks of a training loop, as plain data.

`CoreSetup` has the fields of the core, and `Setup` those of the installed features too (`feature.py`). Every
loop implements each field or refuses it by name. No field holds code: a callable is an import path
(`package.module:name`) with arguments, so a Setup prints, compares, and goes through JSON unchanged. Each
field has a handler, and handlers run in the order of `feature.InstallStage`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, make_dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

from snugfit.documents import decode_fields
from snugfit.job.dtype import LOST_BELOW, dtype_name
from snugfit.techniques.wish import Call as Call  # noqa: PLC0414 - exported: optimizers are Calls
from snugfit.techniques.wish import used_wishes, wishes

if TYPE_CHECKING:
    from snugfit.job.job import Job


PADDING_FREE = "padding_free"
"""An attention of our own (`step/wishes/padding_free/`) that drops the padding of what a model is given."""

RING = "ring"
"""torch's `scaled_dot_product_attention` without masks, whose sequences are cut over ranks
(`step/wishes/mesh/ring_attention.py`)."""


@dataclass(frozen=True, kw_only=True)
class OptimizerWish:
    """Which optimizer, and what the HF Trainer calls the same one."""

    factory: Call
    """`factory(parameters, lr=..., weight_decay=..., **arguments)` gives a `torch.optim.Optimizer`."""

    prepare: Call | None = None
    """`prepare(model, **arguments)` runs once before the factory, e.g. to keep some modules' states wide."""

    trainer_name: str | None = None
    """`TrainingArguments.optim` for the same optimizer, or None when the HF Trainer has no name for it."""

    weight_decay: bool = True
    """Whether the factory takes `weight_decay`."""

    shapes: Call | None = None
    """For optimizers that call compiled code directly: `shapes(on_gpu=...)` is a context manager, entered for
    a rehearsal, in which a step does on shapes what the compiled code does on data of that device."""


@dataclass(frozen=True, kw_only=True)
class CheckpointWish:
    """Which layers keep only their input: spans of consecutive layers, each recomputed as one.

    The stack is cut in one of two ways, by the length of a span or by the number of spans; `cut` does it,
    so that every loop cuts alike.
    """

    layers_per_span: int = 1
    """Consecutive layers that are recomputed together; 0 cuts the stack by `spans` instead."""

    spans: int | None = None
    """With `layers_per_span` 0: how many spans the stack is cut into; None takes round(sqrt(layers)), the
    optimum of Chen et al. (arXiv 1604.06174, section 4.1) for layers that are alike."""

    every: int = 1
    """Of the spans, each `every`-th is recomputed, from the first; the others keep their activations."""

    first: int | None = None
    """Of the spans that are left, only so many are recomputed, from the first; None takes them all."""

    keep: str = ""
    """What is kept inside a recomputed span, by the names of `step/selective.py`; empty keeps nothing."""

    keep_drawn: bool = False
    """Whether that holds for attention with dropout too. Then nothing else in a span may draw random numbers
    from torch's generators."""

    def cut(self, layers: int) -> tuple[range, ...]:
        """The spans of a stack of this many layers that are recomputed, in order.

        Spans cut by number differ in length by one layer at most, the longer ones first.
        """
        if layers < 1:
            return ()
        if self.layers_per_span:
            starts = [*range(0, layers, self.layers_per_span), layers]
        else:
            count = min(layers, self.spans or max(1, round(math.sqrt(layers))))
            short, longer = divmod(layers, count)
            starts = [index * short + min(index, longer) for index in range(count + 1)]
        spans = [range(start, end) for start, end in pairwise(starts)]
        return tuple(spans[:: self.every][: self.first])


EVERY_LAYER = CheckpointWish()
"""Each layer, by itself."""


LOGITS_BYTES = 256 << 20
"""Of a chunk's logits in 32 bits (chosen): products of fewer tokens take longer on a GPU of today, and with
what is needed beside them such logits take about a GiB."""


@dataclass(frozen=True, kw_only=True)
class LogitsWish:
    """Logits that exist for some tokens at a time, with their loss and its gradient."""

    tokens: int | None = None
    """So many at a time; None cuts by `LOGITS_BYTES`."""

    def tokens_at_once(self, vocabulary: int, itemsize: int = 4) -> int:
        """Tokens of a chunk: by default the largest power of two whose logits, of so many bytes each, stay
        within `LOGITS_BYTES`."""
        return self.tokens or 1 << max(0, (LOGITS_BYTES // (itemsize * vocabulary)).bit_length() - 1)


WITH_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of Inductor that record CUDA graphs (`torch._inductor.list_mode_options`)."""


@dataclass(frozen=True, kw_only=True)
class CompileWish:
    """Which parts of the model `torch.compile` compiles, and how."""

    what: str = "layers"
    """`layers`: each of the repeated layers, by itself; `model`: its forward pass, as one."""

    backend: str = "inductor"
    """What makes a program of a traced graph, by torch's name."""

    mode: str = "default"
    """Of `inductor`: a set of its options, by torch's name."""

    autocast: str = "around"
    """Where autocast begins: `around` what is compiled, whose backward pass is then traced under it too, or
    `within` it, and the backward pass is traced without."""

    budget: float = 1.0
    """Of what a compiled program would keep for its backward pass beyond its inputs, the share that it may
    keep; the rest is computed again."""

    @property
    def records_graphs(self) -> bool:
        """Whether its programs are recorded as CUDA graphs, and played back."""
        return self.backend == "cudagraphs" or self.mode in WITH_GRAPHS


@dataclass(frozen=True, kw_only=True)
class CaptureWish:
    """An optimizer step that is recorded as CUDA graphs, and played back."""

    multiple: int = 64
    """Of padded batches: lengths are filled up to a multiple of this, and each has graphs of its own."""

    recorded: bool = True
    """False in what a search rehearses: the passes that would be recorded, as they are written. Batches are
    filled up, and masks decided by shapes."""


@dataclass(frozen=True, kw_only=True)
class ShardingWish:
    """DeepSpeed's engine around model and optimizer, on one GPU or on one of several."""

    stage: int = 2
    """Of ZeRO: 2 keeps gradients and optimizer states in flat partitions, 3 weights too."""

    states: str = "none"
    """Where optimizer states, the weights that are updated and the update itself are: `none` leaves them on
    the GPU, `cpu` is the host, `nvme` a disk (stage 3)."""

    weights: str = "none"
    """Where weights wait until a module uses them (stage 3): `none`, `cpu` or `nvme`."""

    dtype: str = "float32"
    """What modules hold and compute in, by torch's name. What is updated is always fp32."""

    ranks: int = 1
    """How many processes train together, one for each GPU, each on its part of the global batch."""


@dataclass(frozen=True, kw_only=True)
class ParallelWish:
    """Processes that train one model together by torch.distributed, one for each GPU (a rank).

    They stand in a mesh. Along its data axis each has a part of the global batch; along the others ranks work
    on the same samples, and each does a part of what these take."""

    weights: str = "copied"
    """What each of them holds, along the data axis, of weights, gradients and optimizer states: `copied`, all
    of it, and gradients are averaged (DDP); `sharded`, a part, and weights are gathered where a layer
    computes (FSDP2); `alone` has no data axis."""

    states: str = "copied"
    """What each of them holds of optimizer states where weights are copied: all of them, or, `sharded`, those
    of a part of the weights, which it updates and sends to the others (`ZeroRedundancyOptimizer`)."""

    ranks: int = 0
    """How many they are; 0 while that is open."""

    shards: int = 0
    """Over how many of the data axis one copy of the weights is spread; 0 spreads one over all. Fewer make
    several copies, whose gradients are averaged."""

    reshard: str = "layers"
    """Which gathered weights are dropped after the forward pass and gathered again for the backward one:
    those of the `layers`, `all`, or `none`. What is not in a layer is needed again at once."""

    on_host: bool = False
    """Whether the host keeps the parts, and updates them."""

    dtype: str | None = None
    """What gathered weights are cast to, and computed in, by torch's name; None leaves them as they are."""

    bucket_views: bool = False
    """Whether copied weights' gradients lie in the buckets that are averaged, and nowhere else."""

    tensor: int = 1
    """Over how many ranks the matrices of each layer are cut."""

    context: int = 1
    """Over how many ranks each sequence is cut."""

    stages: int = 1
    """Over how many ranks the layers are put, one stage after the other."""

    schedule: str = ""
    """Where there are stages: in which order each runs its micro-batches, by torch's name."""

    chunks: int = 1
    """How many stages each of these ranks has: with n ranks the first has the stages 0, n, 2n, ..."""

    experts: int = 1
    """Over how many ranks the experts of each layer are spread: those that share its matrices, or 1."""

    @property
    def copies(self) -> bool:
        """Whether ranks hold all of the weights and average their gradients: those of the data axis, or,
        where there is none, those that share each sequence."""
        return self.weights == "copied" or (self.weights == "alone" and self.context > 1)

    @property
    def all_stages(self) -> int:
        """Into how many stages the layers are cut."""
        return self.stages * self.chunks

    @property
    def ranks_of_one_part(self) -> int:
        """How many ranks work on the same part of the global batch."""
        return self.tensor * self.context * self.stages

    @property
    def data_ranks(self) -> int:
        """Into how many parts the global batch is cut."""
        return self.ranks // self.ranks_of_one_part

    def data_rank(self, rank: int) -> int:
        """Which part of the global batch a rank works on, from 0. Of the mesh's axes (`mesh_of`) those that
        are left of the data axis change slower, and those right of it faster."""
        return rank // (self.context * self.tensor) % self.data_ranks

    def counts(self, rank: int) -> float:
        """How much of what this rank says that its part came to counts: ranks that have pieces of the same
        sequences say a part of it each, as if it were the whole, and of others that work on one part, one of
        the last stage, where the loss is, says all."""
        is_last_stage = rank // (self.ranks // self.stages) == self.stages - 1
        return 1 / self.context if is_last_stage and rank % self.tensor == 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class LoaderWish:
    """How batches reach the device."""

    workers: int = 0
    """Processes that prepare batches; 0 prepares them in the training process."""

    pinned: bool = False
    """Batches in page-locked host memory, so that copies run beside the computation."""


@dataclass(frozen=True, kw_only=True)
class CoreSetup:
    """The fields of the core. The defaults are the plain loop's."""

    weights_dtype: str | None = None
    """build: dtype of the model's floating-point weights, by torch's name; None leaves them as they are
    loaded (`Job.dtype`)."""

    attention: str = "sdpa"
    """build: the attention, by the values of transformers' `attn_implementation`, or `PADDING_FREE`."""

    matmul: str = "ieee"
    """build: torch's `fp32_precision` of matrix products and convolutions: `ieee` or `tf32`."""

    masters: bool = False
    """adapt: weights that train, in whichever dtype they are loaded, become bfloat16, and the optimizer keeps
    what that leaves of them in 16 bits, so that it updates them in 32."""

    logits: LogitsWish | None = None
    """checkpoint: of how many tokens a language model's logits exist at a time; None computes them whole."""

    checkpoint: CheckpointWish | None = None
    """checkpoint: which layers keep only their inputs (non-reentrant); None keeps everything."""

    compile: CompileWish | None = None
    """checkpoint: what is compiled, inside of what is recomputed; None runs the code as it is written."""

    optimizer: OptimizerWish = field(
        default_factory=lambda: OptimizerWish(
            factory=Call(path="torch.optim:AdamW", arguments={"foreach": True}), trainer_name="adamw_torch"
        )
    )
    """optimizer: which optimizer makes the updates."""

    autocast: str | None = None
    """loop: dtype of autocast regions, by torch's name; None runs in the weights' dtype."""

    scale_gradients: bool = False
    """loop: scale the loss against underflow and skip steps with non-finite gradients (GradScaler)."""

    micro_batches: int = 1
    """loop: pieces the global batch is cut into, one after the other."""

    release: bool = False
    """loop: each weight is updated within the backward pass, and its gradient dropped; otherwise all
    gradients are kept until it has ended."""

    capture: CaptureWish | None = None
    """loop: the step is recorded as CUDA graphs; None launches kernel by kernel."""

    sharding: ShardingWish | None = None
    """loop: DeepSpeed's engine runs the steps; None leaves them to the loop."""

    parallel: ParallelWish | None = None
    """optimizer: processes that train together, each of which wraps the model before it makes an optimizer of
    what it then holds; None trains in one."""

    loader: LoaderWish = field(default_factory=LoaderWish)
    """loader: how batches reach the device."""

    expandable_segments: bool = False
    """process: the CUDA allocator grows segments in place instead of taking new ones."""

    @property
    def records_graphs(self) -> bool:
        """Whether anything is recorded as CUDA graphs, so that the first steps differ from those after."""
        recorded = self.capture is not None and self.capture.recorded
        return recorded or (self.compile is not None and self.compile.records_graphs)

    @property
    def has_budget(self) -> bool:
        """Whether compiled layers keep less than they would."""
        return self.compile is not None and self.compile.budget < 1

    def trained_dtype(self, job: Job) -> str:
        """The dtype of the weights that train, by torch's name: a module's narrowest, where it has several.
        Those that a feature adds beside frozen ones are fp32 (peft's `autocast_adapter_dtype`)."""
        module = job.model.module
        if any(wish.freezes for wish in used_wishes(self)):
            return "float32"
        if module is None or self.weights_dtype:
            return self.weights_dtype or job.dtype
        dtypes = {dtype_name(weight.dtype) for weight in module.parameters() if weight.requires_grad}
        return next((name for name in dtypes if name in LOST_BELOW), job.dtype)

    def with_fields(self, **changed: Any) -> Self:
        """Return a copy with these fields changed. A space of recipes makes several hundred thousand copies,
        and `dataclasses.replace` takes ten times as long. Raises `TypeError` for an unknown field."""
        if unknown := changed.keys() - self.__dict__.keys():
            raise TypeError(f"a Setup has no {', '.join(sorted(unknown))}")
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, **changed)
        return copy

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `Setup.from_json` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The Setup that `to_json` wrote."""
        return decode_fields(cls, document)


if TYPE_CHECKING:

    class Setup(CoreSetup):
        """What a recipe asks of a training loop: the fields of the core and of the features."""

else:
    Setup = make_dataclass(
        "Setup",
        [(wish.name, wish.kind, field(default=wish.default)) for wish in wishes()],
        bases=(CoreSetup,),
        namespace={
            "__doc__": "What a recipe asks of a training loop: the fields of the core and of the features.",
            "__module__": __name__,  # for pickle
        },
        frozen=True,
        kw_only=True,
    )
