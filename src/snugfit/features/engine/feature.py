"""Registration of the feature `engine`: CUDA graphs of steps, master weights in two halves, and released
gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.features.engine.fields import RELEASE
from snugfit.techniques.feature import Feature
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup


class Engine(Feature):
    """The feature that adds the techniques `bf16_master`, `adamw_compact`, `captured`, `released` and
    `released_late`.
    """

    techniques: ClassVar[Mapping[Slot, tuple[str, ...]]] = {
        Slot.PRECISION: ("bf16_master",),
        Slot.ENGINE: ("captured",),
        Slot.OPTIMIZER: ("adamw_compact",),
        Slot.GRADIENTS: ("released", "released_late"),
    }

    def handlers(self) -> Sequence[Any]:
        """Return the handlers that apply the feature's fields of `Setup` to a training run."""
        from snugfit.features.engine import handlers

        return (
            handlers.MastersHandler(),
            handlers.FilledHandler(),
            handlers.CaptureHandler(),
            handlers.ReleaseHandler(),
        )

    def simulation_overrides(
        self, setup: Setup, policy: Any, recorder: Any, notes: Any
    ) -> AbstractContextManager[None]:
        """Return a context in which steps on a simulated GPU are recorded as simulated CUDA graphs."""
        from snugfit.features.engine.simulated_graphs import simulated_graphs

        return simulated_graphs(policy, recorder)

    def treats_layers_alike(self, setup: Setup) -> bool:
        """Return True if all layers have equal memory and kernels, so that a model of few layers can be
        simulated. Updates in the backward pass exclude this.
        """
        return not RELEASE.of(setup)

    def search_further(self, state: Any, pool: Any, job: Job, tell: Any, *, smallest: bool) -> str:
        """Evaluate recipes with updates within the backward pass, and add the better ones to the search's
        `state`. Return the technique's name if any recipe was evaluated, else an empty text.
        """
        from snugfit.features.engine.search import find_released

        return find_released(state, pool, job, tell, smallest=smallest)
