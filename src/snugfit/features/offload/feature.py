"""Registration of the feature `offload`: activations are kept in the host's memory until the backward pass
uses them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.features.offload.fields import OFFLOAD
from snugfit.techniques.feature import Feature
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup


class Offload(Feature):
    """The feature that adds the technique `host` and its handler."""

    techniques: ClassVar[Mapping[Slot, tuple[str, ...]]] = {Slot.ACTIVATION_OFFLOAD: ("host",)}

    def handlers(self) -> Sequence[Any]:
        """Return the handler that offloads saved tensors."""
        from snugfit.features.offload.handler import OffloadHandler

        return (OffloadHandler(),)

    def simulation_overrides(
        self, setup: Setup, policy: Any, recorder: Any, notes: Any
    ) -> AbstractContextManager[None]:
        """Return a context that counts the calls of the hooks on saved tensors."""
        if OFFLOAD.of(setup) is None:
            return nullcontext()
        from snugfit.features.offload.activations import hooks_counted

        return hooks_counted(recorder.count_interception)

    def layer_period(self, setup: Setup, layers: int) -> int:
        """Return the number of layers in the smallest repeating group. If only the first layers are
        offloaded, that is all `layers`.
        """
        wish = OFFLOAD.of(setup)
        # The first layers differ from the others, so no pattern of layers repeats.
        return 1 if wish is None or wish.first is None else layers

    def treats_layers_alike(self, setup: Setup) -> bool:
        """Return True if all layers have equal memory and kernels: not if activations are offloaded, since
        the last layers keep theirs.
        """
        return OFFLOAD.of(setup) is None

    def has_timed_bytes(self, setup: Setup) -> bool:
        """Return True if memory depends on timing: with offloading, the end of a copy decides when memory is
        freed.
        """
        return OFFLOAD.of(setup) is not None

    def search_further(self, state: Any, pool: Any, job: Job, tell: Any, *, smallest: bool) -> str:
        """Evaluate recomputing recipes with the inputs of layers on the host, and add the better ones to the
        search's `state`. Return the technique's name if any recipe was evaluated, else an empty text.
        """
        from snugfit.features.offload.search import find_inputs_on_host

        return find_inputs_on_host(state, pool, job, tell, smallest=smallest)
