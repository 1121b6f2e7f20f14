"""Technique `compiled`: with torch.compile, pointwise operators run as few fused kernels, and fewer results
are kept.

The operators between a layer's products (norms, activation functions, casts, dropout, residuals) become a few
kernels that Triton compiles. So less is written to memory, and fewer kernels are launched. The backward pass
recomputes cheap results where a kept one would cost more.

`layers` compiles each of the model's repeated layers by itself, and equal layers share one program. That
takes seconds where a whole model takes a minute, and gains nearly as much. `model` compiles the forward pass
and its loss at once, as the Trainer's `torch_compile=True` does. The embeddings, the head and the loss fuse
too. transformers may then make an explicit mask where it would make none. Version 5.17 does; 5.23 does not if
no mask is given. Attention with such a mask uses a kernel that stores every score. BERT-large with 4 x 512
tokens took 8.3 GB on an H200, and 6.6 GB uncompiled.

Inductor's `mode` is a set of its options. `max-autotune-no-cudagraphs` times several kernels for each product
of matrices when it compiles, and takes the fastest. `reduce-overhead` records each program as a CUDA graph in
its second step. From the third on it replays the graph, which costs the host one launch. The graph's results
stay in memory that belongs to graphs alone. `max-autotune` does both. The other backends are for finding
faults. `eager` runs Dynamo's traced graph without compiling it. `aot_eager` cuts it into a forward and a
backward graph as Inductor does, and `cudagraphs` records these. A replayed program returns its results in the
same memory each time, gradients too. So gradients of several micro-batches do not add up with it.

The modes `default` and `reduce-overhead` are simulated. A recipe with another mode is predicted as the nearer
of them, with another backend as the uncompiled step. Its prediction is marked as uncertain.

With 16-bit autocast the position of autocast matters. snugfit's loops enter it `around` the compiled model,
and torch then traces the backward pass under it too (`torch._functorch.config.backward_pass_autocast`). The
Trainer's `torch_compile=True` and accelerate's dynamo enter it `within`. Their backward pass computes in 32
bits where autocast would cast, and keeps more for it. BERT-large with 4 x 512 tokens takes 1.8 GiB more so.

The first step compiles, so it pays where a run has many steps. Plans search `layers`; with `--keep
'compiled(what=model)'` they search the model. Such recipes are simulated from models of few layers where that
is exact (`rehearsal/few_layers.py`). Otherwise the whole model is simulated, which takes up to a minute.
Plans use the default mode and backend only, unless another is kept (`--keep 'compiled(backend=aot_eager)'`).
They do not search steps that record CUDA graphs; `snugfit predict` predicts them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from snugfit.errors import RecipeError
from snugfit.features.compile.fields import COMPILE, RECOMPILE_LIMIT, CompileWish
from snugfit.techniques.counterpart import Counterpart, Setting
from snugfit.techniques.setting import between
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job


Backend = Literal["inductor", "cudagraphs", "aot_eager", "eager"]
Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
OTHERS = tuple(
    (name, value) for name, kind in (("mode", Mode), ("backend", Backend)) for value in get_args(kind)[1:]
)
"""Names and values of all settings of compilation that are not the default."""

WAYS: tuple[tuple[str, dict[str, bool], dict[str, str]], ...] = (
    ("layers.compile", {"torch_compile": False, "layers.compile": True}, {}),
    ("forward.compile", {"torch_compile": False, "forward.compile": True}, {"what": "model"}),
    ("torch_compile", {"torch_compile": True}, {"what": "model", "autocast": "within"}),
)
"""Calls with which other libraries compile: prefix of their options, their arguments, and the same settings
in this class."""


CACHED_LAYERS = Counterpart(
    arguments={
        "torch_compile": False,
        "layers.compile": True,
        "layers.cache": True,
        "layers.limit": Setting("limit"),
    },
    settings={"cache": True},
)
"""`compile()` of layers in a script that leaves `use_cache` on."""

COMPILES = ("sdpa", "eager")
"""Names of attention implementations that were tested in compiled code."""

GRAPHS_MEASURED = (
    "three models that play CUDA graphs back were measured on an H100 with torch 2.11. Reserved bytes "
    "were exact for gpt2, compiled layer by layer. They were within 0.7 % for a Llama and a BERT of 4 "
    "layers, compiled whole. snugfit measure shows yours."
)


MOST_PROGRAMS = 256
"""Largest recompile limit that has an effect (`accumulated_recompile_limit` in `torch/_dynamo/config.py`)."""


@dataclass(frozen=True, kw_only=True)
class Compiled(Technique):
    """Compiles the model's repeated layers, each by itself, or the whole model."""

    fidelity: ClassVar = Fidelity.ROUNDS
    lowered: ClassVar = True
    needs: ClassVar = ("triton>=3.5",)
    extra: ClassVar = "compile"
    source: ClassVar = "torch.nn.Module.compile; Ansel et al., ASPLOS 2024 (PyTorch 2)"
    elsewhere: ClassVar = ("compile", "torch_compile", "regional_compilation")
    counterparts: ClassVar = (
        CACHED_LAYERS,
        *(
            Counterpart(
                arguments={**arguments, **({f"{prefix}_{name}": value} if name else {})},
                settings={**settings, **({name: value} if name else {})},
            )
            for name, value in (("", ""), *OTHERS)
            # Mode and backend are not combined, because only Inductor has modes.
            for prefix, arguments, settings in WAYS
        ),
    )

    what: Literal["layers", "model"] = "layers"
    """Compiled part: the model's repeated `layers` alone, or all of the `model`."""

    mode: Mode = "default"
    """Inductor's mode: `max-autotune-no-cudagraphs` tries kernels for each product, `reduce-overhead` replays
    CUDA graphs, `max-autotune` does both.
    """

    backend: Backend = "inductor"
    """Compiler of traced code: `inductor`, or one of three to find a fault. `eager` compiles nothing,
    `aot_eager` makes a forward and a backward graph, and `cudagraphs` records these.
    """

    autocast: Literal["around", "within"] = "around"
    """Position of 16-bit autocast: `around` the compiled model, or `within` it, as with the Trainer's
    `torch_compile=True`, which takes more memory.
    """

    cache: bool = False
    """Layers fill a key-value cache, so torch compiles each separately, up to `limit`."""

    limit: int = between(1, MOST_PROGRAMS, RECOMPILE_LIMIT)
    """The `recompile_limit` of torch. Another than 8 sets `cache`."""

    def __post_init__(self) -> None:
        """Check the settings. Raises `RecipeError` for invalid values, a mode of a backend without modes,
        layers with autocast `within`, and a cache that is not simulated.
        """
        super().__post_init__()
        # Layers without a cache are one program, so the limit is for those with a cache.
        if self.limit != RECOMPILE_LIMIT:
            object.__setattr__(self, "cache", True)
        if self.cache and (self.what == "model" or self._wish.records_graphs or self.backend != "inductor"):
            raise RecipeError(
                "compiled: layers fill a cache, and only layers compiled by inductor without CUDA graphs are "
                "simulated with a cache. Set model.config.use_cache = False in the script, and leave "
                "cache and limit out."
            )
        # Layers are compiled inside of the model's autocast in any case.
        if self.autocast == "within" and self.what == "layers":
            raise RecipeError(
                "compiled: autocast is within, and layers are compiled within the model's autocast always; "
                "leave it out, or try 'compiled(what=model, autocast=within)'."
            )
        if self.mode != "default" and self.backend != "inductor":
            raise RecipeError(
                f"compiled: mode is {self.mode}, and the backend {self.backend} has no modes; leave one of "
                "them out."
            )

    @property
    def within_modules(self) -> bool:
        """Return True for layers in Inductor's default mode. Processes exchange tensors outside of them."""
        return self._wish.compiles_layers_alike and not self._wish.is_one_program

    @property
    def _wish(self) -> CompileWish:
        return CompileWish(**vars(self))

    def install(self, setup: Setup) -> Setup:
        """Return the training settings with the options of `torch.compile` of this technique."""
        return setup.with_fields(compile=self._wish)

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield reasons to refuse a recipe: kernels of other libraries, dispatch modes or joined layers,
        which torch.compile does not support.
        """
        wish = recipe[Slot.CHECKPOINTING].value
        # Selective checkpointing inspects each operator, but a compiled layer runs no single operators.
        if wish is not None and (wish.keep or wish.layers_per_span != 1):
            yield (
                f"{recipe[Slot.CHECKPOINTING]} looks into layers that are compiled, or joins several. Try "
                "'every_layer' or 'every_nth_layer'."
            )
        attention, gradients = recipe[Slot.ATTENTION], recipe[Slot.GRADIENTS]
        if attention.value not in COMPILES:
            yield f"{attention} was not tested with it. Take 'sdpa'."
        if not gradients.plain:
            yield f"{gradients} was not tested with it. Leave one of them out."
        if job.added_phase is not None and (self.what, job.phase_settings.get("cache")) != (
            "model",
            "static",
        ):
            yield (
                "a cache that grows is compiled again for each token. Try 'compiled(what=model)' with "
                "--cache static."
            )
        # A budget is a setting of Inductor's partitioner.
        if self.backend != "inductor" and COMPILE.of(recipe[Slot.CHECKPOINTING].alone) is not None:
            yield (
                f"{recipe[Slot.CHECKPOINTING]} cuts the programs of Inductor. Try "
                f"'compiled + {recipe[Slot.CHECKPOINTING]}'."
            )
        if self._wish.records_graphs:
            yield from self._objections_to_graphs(recipe)
        if self.what == "model" and not recipe[Slot.HEAD].plain:
            head = recipe[Slot.HEAD]
            yield f"{head} was not tested in a model that is compiled whole. Try 'compiled + {head}'."

    def _objections_to_graphs(self, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield reasons to refuse techniques whose results a replayed CUDA graph would overwrite, or that are
        untested in one.
        """
        instead = "'compiled'" if self.what == "layers" else "'compiled(what=model)'"
        if recipe[Slot.BATCHING].value > 1:
            yield (
                f"a CUDA graph gives each micro-batch's gradients in the same memory, so those of "
                f"{recipe[Slot.BATCHING]} would not add up: torch stops with an error. Try {instead}."
            )
        if recipe[Slot.CHECKPOINTING].value is not None:
            yield (
                f"{recipe[Slot.CHECKPOINTING]} runs programs again in the backward pass. It was not tested "
                f"with CUDA graphs. Try {instead}."
            )
        if recipe[Slot.HEAD].value is not None:
            yield (
                f"{recipe[Slot.HEAD]} runs a backward pass within the forward pass. It was not tested with "
                f"CUDA graphs. Try {instead}."
            )

    def warnings(self, job: Job, compute_capability: tuple[int, int] | None) -> Iterator[str]:
        """Yield warnings: compiling a whole model takes a minute, and may change its attention kernel."""
        if self.what == "model":
            yield (
                # With transformers 5.17, BERT-large (4 x 512 tokens) took 8.3 GB with an explicit mask, 6.6
                # GB uncompiled.
                "a whole model takes a minute to compile, and attention in it may store every score, "
                "where transformers makes a mask in it. Try 'compiled', which takes seconds and keeps "
                "attention fused. A Llama-3.2-1B on an H200 took the bytes that were predicted, and 11 "
                "% more time."
            )

        if self.backend in ("aot_eager", "eager"):
            yield (
                f"the backend {self.backend} is for finding faults: it traces, and compiles nothing. Leave "
                "it out where none is looked for."
            )
        if self.mode == "reduce-overhead":
            yield GRAPHS_MEASURED
        if self._wish.records_graphs:
            yield (
                "batches of other lengths record CUDA graphs of their own, whose memory adds up. Pad "
                "all batches to one length."
            )

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """Return why plans for an evaluation job exclude compilation (only training steps are simulated);
        empty for training.
        """
        return "" if job.trains else "a compiled evaluation is measured, and not simulated"

    def is_searched(self) -> bool:
        """Return True if plans search this technique: not if steps record CUDA graphs, since their second
        step differs from later ones. A cache only slows training, so it is not searched either.
        """
        # The first steps differ: kernel by kernel, then recorded as a CUDA graph, then replayed.
        return not self._wish.records_graphs and not self.cache

    def planned_without(self, job: Job, recipe: TechniqueBySlot) -> str:
        """Return why plans skip compilation with the recipe's attention (no such step was measured); empty if
        they do not.
        """
        attention = recipe[Slot.ATTENTION]
        if attention.plain:
            return ""
        return f"never measured with {attention} (--keep '{attention} + {self}' plans with both)"
