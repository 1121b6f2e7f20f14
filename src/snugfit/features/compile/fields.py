"""The setting that the feature `compile` adds to `Setup`, the training settings of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit.techniques.wish import Wish

WITH_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of Inductor that record CUDA graphs (`torch._inductor.list_mode_options`)."""


RECOMPILE_LIMIT = 8
"""Programs that torch 2.11 to 2.15 compile for one function (`recompile_limit` in `torch/_dynamo/config.py`).
"""


@dataclass(frozen=True, kw_only=True)
class CompileWish:
    """Settings of compilation: the compiled parts of the model, and the options of `torch.compile` (field
    `compile`).
    """

    what: str = "layers"
    """Compiled part: `layers` compiles each repeated layer by itself, `model` the model's forward pass as a
    whole."""

    backend: str = "inductor"
    """Compiler of a traced graph, by torch's name (`torch.compile(backend=...)`)."""

    mode: str = "default"
    """Set of Inductor's options, by torch's name (`torch.compile(mode=...)`)."""

    autocast: str = "around"
    """Position of autocast. `around` the compiled code: its backward pass is traced under autocast too.
    `within` it: its backward pass is traced without autocast.
    """

    budget: float = 1.0
    """Share of the bytes beyond its inputs that a compiled program may keep for its backward pass. It
    computes the rest again.
    """

    cache: bool = False
    """Compiled layers receive the model's cache of keys and values, as in a script that leaves
    `model.config.use_cache` on. torch then compiles each layer separately.
    """

    limit: int = RECOMPILE_LIMIT
    """Number of programs that torch compiles for one function (`torch._dynamo.config.recompile_limit`)."""

    @property
    def is_one_program(self) -> bool:
        """Return True if the whole model is compiled as one program, rather than layer by layer."""
        return self.what == "model"

    @property
    def records_graphs(self) -> bool:
        """Return True if `torch.compile` records the compiled programs as CUDA graphs and replays them."""
        return self.backend == "cudagraphs" or self.mode in WITH_GRAPHS

    @property
    def compiles_layers_alike(self) -> bool:
        """Return True if all layers compile to equal code: `torch.compile` has its defaults, and no memory
        budget spans all layers. With a cache, layers beyond the limit run uncompiled.
        """
        has_defaults = (self.backend, self.mode) == ("inductor", "default")
        return has_defaults and not self.cache and not (self.is_one_program and self.has_budget)

    @property
    def has_budget(self) -> bool:
        """Return True if compiled programs keep fewer activations than by default, under a memory budget."""
        return self.budget < 1


COMPILE = Wish[CompileWish | None]("compile", CompileWish | None, None, touches=("passes",), lowers=True)
"""The field `compile` of a `Setup`: the parts to compile, inside of recomputed layers. None compiles nothing.
"""
