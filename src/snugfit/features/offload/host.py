"""Activation offloading to the host's memory: activations return shortly before the backward pass uses them.

The GPU's copy engines copy them beside the computation, through page-locked memory. A step takes no longer if
the link keeps up: a layer's activations must be copied while the next layer is computed. Inputs of
checkpointed layers meet this with a PCIe 5 link from a few hundred tokens on. All activations of layers are
ten times as much, for less arithmetic, so the link mostly bounds such a step.

With `layers` only the first few of a stack are offloaded; neither TRL nor transformers supports that. The
other layers need no copies, and each copy has more time. It may last until as many further layers have run as
are not offloaded, and as long in the backward pass (`features/offload/activations.py`). A few layers are
offloaded for free. A layer that is recomputed as well saves only its input, so only that is offloaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from snugfit.features.offload.fields import OffloadWish
from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setting import between
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job

What = Literal["checkpoints", "all"]


@dataclass(frozen=True, kw_only=True)
class Host(Technique):
    """Keeps activations of layers in the host's page-locked memory until the backward pass uses them."""

    fidelity: ClassVar = Fidelity.SAME
    on_cpu: ClassVar = "moves nothing: activations are in the host's memory already"
    source: ClassVar = (
        "torch.autograd.graph.saved_tensors_hooks with a stream of its own; the synchronous form is "
        "torch.autograd.graph.save_on_cpu, TRL's is SFTConfig(activation_offloading=True)"
    )
    elsewhere: ClassVar = ("activation_offloading", "save_on_cpu")
    last_resort: ClassVar = "host(all)"
    counterparts: ClassVar = (
        Counterpart(
            arguments={"activation_offloading": True},
            settings={"what": "all"},
            note="TRL moves those of all layers, what embeddings save, and tensors from 1 KiB on",
        ),
        Counterpart(
            arguments={"activation_checkpointing": True, "activation_checkpointing_kwargs.offload": True},
            settings={"what": "checkpoints"},
            note="transformers moves those of all layers, by the stream that computes, which waits for each",
        ),
    )

    what: What
    """Offloaded tensors: `checkpoints` (inputs of recomputed layers) or `all` (all that layers save).

    Tensors of less than 1 MiB stay on the device.
    """

    layers: int | None = between(1, 10_000, default=None)
    """Number of layers whose activations are on the host, from the first; an encoder and a decoder have as
    many each. None offloads all layers.
    """

    def install(self, setup: Setup) -> Setup:
        """Set the Setup's field for offloaded activations."""
        return setup.with_fields(activation_offload=OffloadWish(what=self.what, first=self.layers))

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield errors for unsupported recipes: compiled layers, and `checkpoints` without recomputed layers.

        The compiler decides which tensors its layers save. A layer that is not recomputed has no saved input.
        """
        if recipe[Slot.ENGINE].alone.lowering is not None:
            yield f"activations of layers under {recipe[Slot.ENGINE]} are not moved. Try 'uncompiled'."
        if self.what == "checkpoints" and recipe[Slot.CHECKPOINTING].value is None:
            yield (
                "no layer is recomputed, so there are no inputs of recomputed layers to move. Try "
                "'host(all)', or 'every_layer'."
            )

    def warnings(self, job: Job, compute_capability: tuple[int, int] | None) -> Iterator[str]:
        """Yield a warning if `layers` is at least the model's number of layers."""
        most = job.model.layers
        if self.layers and most and self.layers >= most:
            yield (
                f"{job.model.name} has {most} layers, so the activations of all move to the host. Give "
                "a smaller number to move fewer."
            )

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """Return the reason why a plan cannot choose the number of offloaded layers; empty if it can."""
        if job.model.layers > 1:
            return ""
        return f"its config has no number of layers (--keep '{cls.last_resort}' plans with all of them)"

    @classmethod
    def grades(cls, job: Job) -> Sequence[Self]:
        """Return this technique for the first 1 to L - 1 of L layers, each with more activations on the host
        than the one before.
        """
        return cls(what="all").lesser(job)

    def lesser(self, job: Job) -> Sequence[Self]:
        """Return this technique for fewer layers, from 1 to L - 1 of L, as alternatives for a plan."""
        return [replace(self, layers=k) for k in range(1, job.model.layers)] if self.layers is None else ()

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield the technique for all activations; if every layer is recomputed, these are the layers'
        inputs."""
        yield cls(what="all")
