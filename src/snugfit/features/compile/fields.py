"""The setting that the feature `compile` adds to `Setup`, the training settings of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit.techniques.wish import Wish

WITH_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of Inductor that record CUDA graphs (`torch._inductor.list_mode_options`)."""


@dataclass(frozen=True, kw_only=True)
class CompileWish:
    """Settings of compilation: the compiled parts of the model, and the options of `torch.compile` (field
    `compile`).
    """

    what: str = "layers"
    """`layers`: each of the repeated layers, by itself; `model`: its forward pass, as one."""

    backend: str = "inductor"
    """Compiler of a traced graph, by torch's name."""

    mode: str = "default"
    """Set of `inductor`'s options, by torch's name."""

    autocast: str = "around"
    """Position of autocast. `around` the compiled code, whose backward pass is then traced under it too; or
    `within` it, whose backward pass is traced without.
    """

    budget: float = 1.0
    """Share of the bytes beyond its inputs that a compiled program may keep for its backward pass; the rest
    is computed again.
    """

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
        budget spans all layers.
        """
        has_defaults = (self.backend, self.mode) == ("inductor", "default")
        return has_defaults and not (self.is_one_program and self.has_budget)

    @property
    def has_budget(self) -> bool:
        """Return True if compiled programs keep fewer activations than by default, under a memory budget."""
        return self.budget < 1


COMPILE = Wish[CompileWish | None]("compile", CompileWish | None, None, touches=("passes",), lowers=True)
"""The field `compile`: compiled parts, inside of recomputed ones; None compiles nothing."""
