"""Registration of the feature `compile`: layers or a whole model compiled by torch.compile, and attention
that torch compiles.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.features.compile.fields import COMPILE
from snugfit.techniques.feature import Feature
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.techniques.setup import Setup


class Compile(Feature):
    """The feature that adds the techniques `compiled`, `budget` and `flex`, and the handler of their
    field."""

    techniques: ClassVar[Mapping[Slot, tuple[str, ...]]] = {
        Slot.ATTENTION: ("flex",),
        Slot.CHECKPOINTING: ("budget",),
        Slot.ENGINE: ("compiled",),
    }

    surrounds_policy: ClassVar[bool] = True

    def handlers(self) -> Sequence[Any]:
        """Return the handler that compiles a model's layers or the model (field `compile`)."""
        from snugfit.features.compile.handler import CompileHandler

        return (CompileHandler(),)

    def simulation_overrides(
        self, setup: Setup, policy: Any, recorder: Any, notes: Any
    ) -> AbstractContextManager[None]:
        """Return a context in which Inductor's programs for the simulated device run on tensors
        without data.
        """
        wish = COMPILE.of(setup)
        if wish is None:
            return nullcontext()
        from snugfit.features.compile.simulation.layers import compiled_layers

        return compiled_layers(policy, recorder, notes, wish)

    def treats_layers_alike(self, setup: Setup) -> bool:
        """Return True if all compiled layers have equal memory and kernels: with torch.compile's defaults,
        unless a memory budget spans all layers.
        """
        wish = COMPILE.of(setup)
        return wish is None or wish.compiles_layers_alike

    def program_decisions(self) -> AbstractContextManager[list[Any]]:
        """Return a context that yields a list of Inductor's decisions on kernel order and buffers for each
        compiled program that runs.
        """
        from snugfit.features.compile.simulation.layers import decisions_of_programs

        return decisions_of_programs()

    def lowered_kinds(self) -> Sequence[type[Any]]:
        """Return the class that computes lower bounds of bytes and seconds for candidate recipes with
        compiled layers.
        """
        from snugfit.features.compile.compiled_kinds import CompiledKinds

        return (CompiledKinds,)

    def first_step_seconds(self, setup: Setup, kernels: Collection[Any], in_programs: int) -> float:
        """Return the seconds that compiling adds to the first step. Equal layers share compiled code and are
        counted once.
        """
        wish = COMPILE.of(setup)
        if wish is None:
            return 0.0
        from snugfit.features.compile.prices import compile_seconds

        return compile_seconds(kernels, in_programs if wish.is_one_program else 0)

    def timing_doubts(self, setup: Setup) -> Sequence[str]:
        """Return a warning about the accuracy of the predicted seconds of Inductor's kernels; empty without
        compilation.
        """
        from snugfit.features.compile.prices import COMPILED_SECONDS, WHOLE_SECONDS

        wish = COMPILE.of(setup)
        if wish is None or wish.backend != "inductor":
            return ()
        return (WHOLE_SECONDS if wish.is_one_program else COMPILED_SECONDS,)
