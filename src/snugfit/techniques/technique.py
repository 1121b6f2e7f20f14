"""What a technique is: one way to make a job fit or run faster, in one slot of the recipe.

A technique is written once, as what it really does: `install` takes the `Setup` of a training loop and gives
back a changed one. Nothing about its cost stands anywhere; the cost is what a rehearsal of that Setup shows.
This file holds the small vocabulary every technique shares: the slots in the order in which a recipe is
written, the three degrees of fidelity, and the base class.
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

from snugfit.errors import RecipeError
from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setting import check_setting, setting_types, show_setting
from snugfit.versions import version_of

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup


class Slot(StrEnum):
    """The kinds of technique, in the order in which a recipe is written. A recipe has one of each."""

    ADAPTERS = "adapters"
    ATTENTION = "attention"
    PRECISION = "precision"
    MATMUL = "matmul"
    KERNELS = "kernels"
    HEAD = "head"
    ENGINE = "engine"
    CHECKPOINTING = "checkpointing"
    ACTIVATION_OFFLOAD = "activation_offload"
    BATCHING = "batching"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    SHARDING = "sharding"
    TENSOR_PARALLEL = "tensor_parallel"
    CONTEXT_PARALLEL = "context_parallel"
    EXPERT_PARALLEL = "expert_parallel"
    PIPELINE_PARALLEL = "pipeline_parallel"
    ALLOCATOR = "allocator"
    LOADING = "loading"


ALL_LINEAR = "all-linear"
"""peft's word for every linear layer but the head."""


class Fidelity(StrEnum):
    """How close a technique stays to the plain recipe's mathematics."""

    SAME = "same"
    """The same sums: equal up to the order of floating-point additions."""

    ROUNDS = "rounds"
    """The same formula, rounded differently somewhere."""

    LEARNS = "learns"
    """Another algorithm, which also learns."""


@functools.cache
def _alone(technique: Technique) -> Setup:
    from snugfit.techniques.setup import Setup

    return technique.install(Setup())


@dataclass(frozen=True, kw_only=True)
class Technique(ABC):
    """One way to make a job fit or run faster. Settings are its fields; one file each."""

    name: ClassVar[str]
    """The word in a recipe; by default the file's name. The roster sets it and the slot."""

    slot: ClassVar[Slot]
    """What kind of technique it is; the name of its folder."""

    fidelity: ClassVar[Fidelity]
    """How close it stays to the plain recipe."""

    family: ClassVar[str] = ""
    """The algorithm that techniques of one slot share, which differ in their kernels alone and keep the same
    states: a plan that keeps the user's own may take another of its family. Empty where it has none."""

    plain: ClassVar[bool] = False
    """Whether this is the slot's default: what a plain PyTorch user gets."""

    needs: ClassVar[tuple[str, ...]] = ()
    """Packages beyond the core, as requirement strings: `bitsandbytes>=0.50`."""

    extra: ClassVar[str] = ""
    """snugfit's extra that installs `needs`."""

    source: ClassVar[str]
    """Where the technique comes from: a paper, a library's class."""

    elsewhere: ClassVar[tuple[str, ...]] = ()
    """What other libraries call it; such a word in a recipe means this technique."""

    advice: ClassVar[Mapping[str, str]] = {}
    """Words of other libraries for what is not the same, each with the sentence that advises this."""

    counterparts: ClassVar[tuple[Counterpart, ...]] = ()
    """transformers' arguments that mean this; the first without a note is what an export writes."""

    keeps_small_updates: ClassVar[bool] = False
    """Whether updates that rounding to the nearest would lose move weights of 16 bits all the same."""

    drops_padding: ClassVar[bool] = False
    """Whether a step computes nothing for the padding of its batches, so that no way of padding is better."""

    unplanned: ClassVar[str] = ""
    """The reason why no plan and no recovery chooses it, for every job; empty where they may."""

    caveat: ClassVar[str] = ""
    """A warning for every job; empty without one."""

    last_resort: ClassVar[str] = ""
    """As a recipe says it, where no plan looks for it unless it is named, and a step that does not fit
    otherwise may fit with it; empty elsewhere."""

    lowered: ClassVar[bool] = False
    """Whether a rehearsal lowers the model's code for each kind of GPU anew, or simulates its steps in full
    for each, which takes long: plans for many GPUs look at it only where it is kept."""

    searched: ClassVar[bool] = True
    """Whether a plan can look for recipes around it; otherwise one predicts a recipe that has it."""

    needs_several_gpus: ClassVar[bool] = False
    """Whether it is a way for several GPUs to train together, which one GPU has no use for."""

    reads_weights: ClassVar[bool] = False
    """True where its kernels read the weights of linear layers and do not call the layers."""

    single_process: ClassVar[bool] = False
    """Whether it is simulated neither in several processes nor by DeepSpeed's engine."""

    preloaded: ClassVar[str] = ""
    """The module that a plan's worker processes import ahead where every recipe has it."""

    on_cpu: ClassVar[str] = ""
    """How a run on the CPU goes without what the technique is for, a clause after its name; empty where it
    has the same there."""

    least_capability: ClassVar[tuple[int, int] | None] = None
    """The compute capability below which the GPU cannot do this at all."""

    def __post_init__(self) -> None:
        """Raises `RecipeError` for a setting of the wrong type or outside its range."""
        kinds = setting_types(type(self))
        for declared in fields(self):
            value = getattr(self, declared.name)
            if wrong := check_setting(declared, kinds[declared.name], value):
                raise RecipeError(f"{self.name}: {declared.name} is {show_setting(value)}; {wrong}.")

    @abstractmethod
    def install(self, setup: Setup) -> Setup:
        """The same Setup with this technique's wishes in it."""

    @property
    def alone(self) -> Setup:
        """The Setup that it makes with plain techniques."""
        return _alone(self)

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Why it cannot go with this job or recipe, in words a user can act on; nothing when it can."""
        return iter(())

    def planned_without(self, job: Job, recipe: TechniqueBySlot) -> str:
        """Which of this recipe's other techniques no plan of this job puts beside it, unless they are kept,
        and why; empty where any may stand there."""
        return ""

    def adapted_modules(self, job: Job) -> str | Sequence[str]:
        """Return ends of the names of modules that get adapters; as a text `ALL_LINEAR` or a pattern."""
        return ()

    @property
    def trained_rank(self) -> int | None:
        """Return the rank of the matrices that train; None where whole weights train."""
        return None

    def is_searched(self) -> bool:
        """Whether a plan can look for recipes around it with these settings."""
        return self.searched

    def code(self, job: Job) -> tuple[str, ...]:
        """Lines of Python that do to `model` what `install` has snugfit's own functions do to it, for scripts
        that run without snugfit; nothing when `install` names other libraries' functions only."""
        return ()

    def warnings(self, job: Job, compute_capability: tuple[int, int] | None) -> Iterator[str]:
        """What the user should know of this job on a GPU of this compute capability, though it runs."""
        return iter((self.caveat,) if self.caveat else ())

    def warnings_beside(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """What the user should know of it beside this recipe's other techniques, though it runs."""
        return iter(())

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """Why no plan and no recovery chooses it for this job, though a user may name it; empty where they
        may."""
        return cls.unplanned

    @classmethod
    def uncertain(cls, job: Job) -> str:
        """What could not be found out about it for this job; empty where nothing is open."""
        return ""

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """What a planner may try: by default the technique as it stands."""
        yield cls()

    @classmethod
    def grades(cls, job: Job) -> Sequence[Self]:
        """Settings of which each saves more memory and takes longer than the one before, between the slot's
        plain technique and another: too many to be searched one by one, so a plan looks for the least that
        fits. Empty for a technique that is searched by its `settings`."""
        return ()

    def lesser(self, job: Job) -> Sequence[Self]:
        """The same for fewer layers: settings of which each saves more memory than the one before, and less
        than this. A plan that keeps this takes the least that fits; none of one that is kept as it is."""
        return ()

    def smaller(self, job: Job) -> Sequence[Self]:
        """The same technique with other settings, each of which needs less memory and more seconds than the
        one before, and all less memory than this. Where this does not fit, a plan looks for the first that
        does."""
        return ()

    def is_never_better_than(self, other: Technique, compute_capability: tuple[int, int] | None) -> bool:
        """Whether no step with it is faster or smaller than the same step with `other` in its place, on GPUs
        of this compute capability, so that a plan that may choose `other` need not look at it."""
        return False

    @classmethod
    def missing_package(cls) -> str | None:
        """`adamw_8bit needs bitsandbytes>=0.50, which is not installed. Try: ...`; None when all of `needs`
        is installed. No package is imported to find out."""
        from packaging.requirements import Requirement

        for text in cls.needs:
            requirement = Requirement(text)
            cure = f'Try: pip install "snugfit[{cls.extra}]"'
            installed = version_of(requirement.name)
            if installed is None:
                return f"{cls.name} needs {text}, which is not installed. {cure}"
            if not requirement.specifier.contains(installed, prereleases=True):
                return f"{cls.name} needs {text}, but {installed} is installed. {cure}"
        return None

    @classmethod
    def summary(cls) -> str:
        """The first sentence of the docstring."""
        return first_sentence(cls.__doc__ or "")

    def __str__(self) -> str:
        """As it stands in a recipe: the name, and the settings that differ from their defaults.

        A setting that has no default is what the technique is about, and is written by position:
        `micro_batches(4)`; the others by name: `sgd(momentum=0.5)`.
        """
        shown = [
            show_setting(value) if declared.default is MISSING else f"{declared.name}={show_setting(value)}"
            for declared in fields(self)
            if (value := getattr(self, declared.name)) != declared.default
        ]
        return f"{self.name}({', '.join(shown)})" if shown else self.name


class TechniqueBySlot(Protocol):
    """A recipe as its own techniques see it: `Recipe`, which stands above them, is one."""

    def __getitem__(self, slot: Slot | str) -> Technique:
        """The technique in this slot."""
        ...


def first_sentence(text: str) -> str:
    """Up to the first full stop that ends a sentence, on one line; empty when there is none."""
    paragraph = " ".join(text.split("\n\n", maxsplit=1)[0].split())
    end = re.search(r"\.(\s|$)", paragraph)
    return paragraph[: end.start() + 1] if end else ""
