"""A technique: one way to make a job fit or run faster, for one slot (a choice of the recipe, such as the
optimizer).

A technique is defined by its effect: its method `install` takes the `Setup` of a training loop and returns a
changed one. No technique declares its memory or time; both result from simulating that Setup. Here are the
slots in the order of a recipe, the three degrees of fidelity, and the base class of all techniques.
"""

from __future__ import annotations

import functools
import re
from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from snugfit.errors import RecipeError
from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setting import check_setting, setting_types, show_setting
from snugfit.versions import version_of

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup


class Slot(StrEnum):
    """Choice of a recipe, such as the optimizer: a group of techniques of which a recipe has exactly one. The
    members are in the order in which a recipe is written.
    """

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
    CACHE = "cache"


FIELDS = {
    Slot.ATTENTION: "attention",
    Slot.MATMUL: "matmul",
    Slot.HEAD: "logits",
    Slot.CHECKPOINTING: "checkpoint",
    Slot.BATCHING: "micro_batches",
    Slot.OPTIMIZER: "optimizer",
    Slot.ALLOCATOR: "expandable_segments",
    Slot.LOADING: "loader",
}
"""Field of `Setup` that the techniques of a slot set, by slot. Slots with no such field or several are
omitted.
"""

ALL_LINEAR = "all-linear"
"""Word of peft for every linear layer except the head."""


class Fidelity(StrEnum):
    """Difference between a technique's results and the plain recipe's: none, rounding, or another
    algorithm.
    """

    SAME = "same"
    """The sums equal the plain recipe's, up to the order of floating-point additions."""

    ROUNDS = "rounds"
    """The formulas are the plain recipe's, but some results are rounded differently."""

    LEARNS = "learns"
    """The training algorithm differs from the plain recipe's, but also trains the model."""


# A technique is frozen, so its Setup is created once. A search reads it for every candidate.
@functools.cache
def _alone(technique: Technique) -> Setup:
    return setup_of(technique)


@dataclass(frozen=True, kw_only=True)
class Technique(ABC):
    """One way to make a job fit or run faster. Its dataclass fields are its settings. Each technique has its
    own file.
    """

    name: ClassVar[str]
    """Word for the technique in a recipe; by default the file's name. The roster sets it and the slot."""

    slot: ClassVar[Slot]
    """Slot (choice of a recipe, such as the optimizer) that the technique fills. Its value is the folder's
    name.
    """

    fidelity: ClassVar[Fidelity]
    """Largest numerical difference between the technique and the plain recipe."""

    title: ClassVar[str] = ""
    """Common name of the technique, such as LoRA; empty if it is `name`."""

    family: ClassVar[str] = ""
    """Name of the common algorithm of techniques of one slot that differ only in their kernels; empty without
    such techniques. A plan that keeps the user's technique may choose another one of its family.
    """

    plain: ClassVar[bool] = False
    """True for the default technique of its slot: the behaviour of plain PyTorch code."""

    needs: ClassVar[tuple[str, ...]] = ()
    """Required packages in addition to the core's, as requirement strings: `bitsandbytes>=0.50`."""

    extra: ClassVar[str] = ""
    """Name of snugfit's extra (optional requirements) that installs `needs`."""

    source: ClassVar[str]
    """Source of the technique, such as a paper or a library's class."""

    elsewhere: ClassVar[tuple[str, ...]] = ()
    """Names of the technique in other libraries. A recipe may contain them in place of `name`."""

    advice: ClassVar[Mapping[str, str]] = {}
    """Names of similar techniques in other libraries, each with a sentence that recommends this technique."""

    counterparts: ClassVar[tuple[Counterpart, ...]] = ()
    """Arguments of transformers that switch the technique on. An export writes the first that has no note."""

    keeps_small_updates: ClassVar[bool] = False
    """True if 16-bit weights also change by small updates, which rounding to the nearest number would
    discard.
    """

    single_weight_updates: ClassVar[bool] = False
    """True for an optimizer whose update of a weight reads no other weight or gradient."""

    drops_padding: ClassVar[bool] = False
    """True if a step skips the padding of its batches, so that other ways of padding do not help."""

    unplanned: ClassVar[str] = ""
    """Reason why no plan and no recovery chooses the technique for any job; empty if they may choose it."""

    caveat: ClassVar[str] = ""
    """Warning that applies to every job with the technique; empty without one."""

    last_resort: ClassVar[str] = ""
    """Recipe word of a technique for steps that do not fit otherwise; empty for other techniques. A plan
    searches it only if the user names it.
    """

    lowered: ClassVar[bool] = False
    """True if each kind of GPU needs its own compilation of the model's code, or its own full simulation.
    Each takes long, so plans for many GPUs try the technique only if the user fixes it.
    """

    searched: ClassVar[bool] = True
    """True if a plan can search recipes with the technique. Otherwise only `predict` accepts it."""

    grade_cost: ClassVar[float] = 1.0
    """Factor on the seconds of a grade (the technique in fewer layers, `grades`) for a lower bound. The
    seconds are interpolated linearly to the recomputation of each layer.
    """

    needs_several_gpus: ClassVar[bool] = False
    """True for training on several GPUs, which one GPU cannot use."""

    single_process: ClassVar[bool] = False
    """True if neither several processes nor DeepSpeed's engine can be simulated with the technique."""

    preloaded: ClassVar[str] = ""
    """Module that a plan's worker processes import in advance if every recipe has the technique."""

    on_cpu: ClassVar[str] = ""
    """End of a sentence about a run on a CPU, which begins with the technique's name. Empty if CPUs support
    it.
    """

    least_capability: ClassVar[tuple[int, int] | None] = None
    """Smallest compute capability of a GPU that can run the technique; None for every GPU."""

    def __post_init__(self) -> None:
        """Raise `RecipeError` for a setting of the wrong type or outside its range."""
        kinds = setting_types(type(self))
        for declared in fields(self):
            value = getattr(self, declared.name)
            if wrong := check_setting(declared, kinds[declared.name], value):
                raise RecipeError(f"{self.name}: {declared.name} is {show_setting(value)}; {wrong}.")

    @property
    def within_modules(self) -> bool:
        """Return True if the technique only changes the code of modules, and each module still uses only its
        own weights. It then also runs where processes share the batch or the weights.
        """
        return False

    @property
    def value(self) -> Any:
        """Return the value that this technique sets in its field (`FIELDS`); a subclass overrides this or
        `install`.
        """
        return getattr(self.alone, FIELDS[self.slot])

    def install(self, setup: Setup) -> Setup:
        """Return a copy of the training settings (`Setup`) with this technique's fields changed."""
        return setup.with_fields(**{FIELDS[self.slot]: self.value})

    @property
    def alone(self) -> Setup:
        """Return the training settings of a recipe with this technique and default techniques otherwise."""
        return _alone(self)

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield the reasons why the technique is incompatible with this job or recipe, as sentences with a
        next action.
        """
        return iter(())

    def planned_without(self, job: Job, recipe: TechniqueBySlot) -> str:
        """Return a sentence with another technique of this recipe and the reason why no plan combines the
        two.

        A plan combines them only if the user fixes both. Empty if all techniques may be combined.
        """
        return ""

    def adapted_modules(self, job: Job) -> str | Sequence[str]:
        """Return the name suffixes of the modules that get adapters. A text is the word `ALL_LINEAR` or a
        pattern.
        """
        return ()

    @property
    def trained_rank(self) -> int | None:
        """Return the rank of the trained low-rank matrices; None if whole weights train."""
        return None

    def is_searched(self) -> bool:
        """Return True if a plan can search recipes with these settings of the technique."""
        return self.searched

    def code(self, job: Job) -> tuple[str, ...]:
        """Return Python lines that change `model` as snugfit does for this technique, for scripts without
        snugfit. Empty if `install` names other libraries' functions only.
        """
        return ()

    def warnings(self, job: Job, compute_capability: tuple[int, int] | None) -> Iterator[str]:
        """Yield warnings about this technique for a job on a GPU of this compute capability; the job runs all
        the same.
        """
        return iter((self.caveat,) if self.caveat else ())

    def warnings_beside(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield warnings for the technique's combination with this recipe's other techniques; the job runs
        all the same.
        """
        return iter(())

    @classmethod
    def fidelity_for(cls, job: Job) -> Fidelity:
        """Return the technique's fidelity (numerical closeness to the plain step) in this job; by default
        `fidelity`.
        """
        return cls.fidelity

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """Return the reason why no plan or recovery chooses this technique for this job, though users may."""
        return cls.unplanned

    @classmethod
    def uncertain(cls, job: Job) -> str:
        """Return a warning that this technique may change this job's results; empty without one."""
        return ""

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield this technique with each setting that a plan may try: by default the technique without
        settings.
        """
        yield cls()

    @classmethod
    def grades(cls, job: Job) -> Sequence[Self]:
        """Return this technique with several settings, such as numbers of recomputed layers, in the order of
        decreasing memory and increasing seconds. They are too many to simulate all, so a plan searches for
        the first that fits. Empty for a technique that is searched by its `settings`.
        """
        return ()

    def lesser(self, job: Job) -> Sequence[Self]:
        """Return this technique with settings for fewer layers. Each saves more memory than the one before,
        and less than this technique. A plan that must keep the technique uses the first that fits. Empty for
        one without such settings.
        """
        return ()

    def smaller(self, job: Job) -> Sequence[Self]:
        """Return this technique with other settings, each with less memory and more seconds than the one
        before. If this one does not fit, a plan takes the first that does.
        """
        return ()

    def is_never_better_than(self, other: Technique, compute_capability: tuple[int, int] | None) -> bool:
        """Return True if a step with this technique is never faster or smaller than with `other`, on GPUs of
        this compute capability. A plan that may choose `other` then skips this technique.
        """
        return False

    @classmethod
    def missing_package(cls) -> str | None:
        """Return a message that a package of `needs` is missing or too old; None if all are installed.

        No package is imported for that.
        """
        from packaging.requirements import Requirement

        for text in cls.needs:
            requirement = Requirement(text)
            cure = f'Try: pip install "snugfit[{cls.extra}]"'
            installed = cls.installed_version(requirement.name)
            if installed is None:
                return f"{cls.name} needs {text}, which is not installed. {cure}"
            # Nightly builds of a library are accepted too.
            if not requirement.specifier.contains(installed, prereleases=True):
                return f"{cls.name} needs {text}, but {installed} is installed. {cure}"
        return None

    @classmethod
    def installed_version(cls, package: str) -> str | None:
        """Return the installed version of a package of `needs`, or None. A technique with another package of
        the same code overrides it.
        """
        return version_of(package)

    @classmethod
    def summary(cls) -> str:
        """Return the first sentence of the technique's docstring."""
        return first_sentence(cls.__doc__ or "")

    def __str__(self) -> str:
        """Return the technique as written in a recipe: its name, and the settings that differ from their
        defaults.

        A setting without a default is the main one, and is written by position: `micro_batches(4)`; the
        others by name: `sgd(momentum=0.5)`.
        """
        shown = [
            # A setting without a default is the main one, and is written without its name.
            show_setting(value) if declared.default is MISSING else f"{declared.name}={show_setting(value)}"
            for declared in fields(self)
            if (value := getattr(self, declared.name)) != declared.default
        ]
        return f"{self.name}({', '.join(shown)})" if shown else self.name


@dataclass(frozen=True, kw_only=True)
class PlainTechnique(Technique):
    """Base class of the default technique of a slot (a choice of the recipe), which leaves the training
    settings unchanged.
    """

    fidelity: ClassVar = Fidelity.SAME
    plain: ClassVar = True
    source: ClassVar = "torch's eager mode"
    counterparts: ClassVar[tuple[Counterpart, ...]] = (Counterpart(arguments={}),)

    def install(self, setup: Setup) -> Setup:
        """Return the Setup unchanged, because a default technique has no effect."""
        return setup


class TechniqueBySlot(Protocol):
    """Protocol for the techniques of a recipe by slot (such as precision). The class `Recipe` in a higher
    layer implements it.
    """

    def __getitem__(self, slot: Slot | str) -> Technique:
        """Return the recipe's technique in this slot (a choice such as precision)."""
        ...


def setup_of(*techniques: Technique) -> Setup:
    """Return the settings of the plain training loop after these techniques change them, in order."""
    from snugfit.techniques.setup import Setup

    setup = Setup()
    for technique in techniques:
        setup = technique.install(setup)
    return setup


def first_sentence(text: str) -> str:
    """Return the text up to the first full stop that ends a sentence, on one line; empty if there is none."""
    paragraph = " ".join(text.split("\n\n", maxsplit=1)[0].split())
    # A full stop inside a name (`torch.optim`) ends no sentence.
    end = re.search(r"\.(\s|$)", paragraph)
    return paragraph[: end.start() + 1] if end else ""
