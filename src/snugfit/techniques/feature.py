"""The contract between the core and its features, and the registry of features.

A feature is a folder of `features/` that can be deleted. Its `feature.py` has one subclass of `Feature`. The
subclass adds handlers of the feature's fields of `Setup` (`fields.py`) and techniques. It also overrides
methods that the command line, data, simulation and search call on every feature. The core imports no feature
and names none: it calls `wishes()`, `features()` and `hooks()`. A feature's tasks and inputs of models are in
`inputs.py` (`job/inputs.py`).

Listing features imports no torch. A feature imports its own modules within the methods that need them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from snugfit.feature_folders import FOLDER, FeatureError, feature_names
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from pathlib import Path

    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup


class InstallStage(IntEnum):
    """The moments of preparing a training run, in their order. Handlers of one stage run core first, then by
    the feature's name."""

    BUILD = 0
    """The model is created: its dtype and attention are arguments of its constructor."""
    ADAPT = 1
    """Another model replaces the first, or weights freeze, before any code reads the trainable parameters."""
    CAST = 2
    """Weights that train change their dtype."""
    REPLACE = 3
    """Modules compute with other kernels."""
    HEAD = 4
    """The head and the loss are replaced."""
    COMPILE = 5
    """Modules are compiled; a recomputed layer is compiled inside."""
    RECOMPUTE = 6
    """Layers are wrapped for checkpointing, once the modules they wrap are final."""
    SAVE = 7
    """Tensors that layers save for the backward pass are kept elsewhere."""
    DISTRIBUTE = 8
    """The model is distributed over processes; each makes an optimizer of its own part."""
    OPTIMIZE = 9
    """The optimizer is made of the parameters that train."""
    LOOP = 10
    """Autocast, gradient scaling and micro-batches surround the passes."""
    STEP = 11
    """The whole optimizer step is run in another way."""
    LOAD = 12
    """Batches reach the device."""
    PROCESS = 13
    """The process is configured."""


class Configuration(Protocol):
    """A user's own configuration that a feature read."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Return the job and the recipe that it describes, by the keys of a job file."""

    def show(self) -> None:
        """Print on stderr how each key was used."""


class Feature:
    """A deletable folder. Subclasses override the methods that they need."""

    name: ClassVar[str]
    """The folder's name; the registry sets it."""

    techniques: ClassVar[Mapping[Slot, tuple[str, ...]]] = {}
    """Module names by slot; each module has one technique, and the module's name is the technique's."""

    needs: ClassVar[Mapping[str, str]] = {}
    """Other features that a technique's module imports, by module; without them the technique is left out."""

    # ---- the command line ----

    removed_options: ClassVar[Mapping[tuple[str, str], str]] = {}
    """Replacement text by command and removed option of earlier versions."""

    def commands(self) -> Sequence[Callable[..., Any]]:
        """Return functions that become subcommands of their names."""
        return ()

    def documents(self) -> Mapping[str, type]:
        """Return, by command, the class whose `to_json` it prints, for `docs/json.md`."""
        return {}

    def options(self, command: str) -> Sequence[inspect.Parameter]:
        """Return further options of this command about a job."""
        return ()

    def rewrite_words(self, words: Sequence[str], declared: Collection[str]) -> Sequence[str]:
        """Return the words of a command line in the options that its command declares."""
        return words

    def further_options(self, declared: Collection[str]) -> Collection[str]:
        """Return names that `rewrite_words` replaces for such a command; an error suggests them."""
        return ()

    def advice_on_file(self, document: Mapping[Any, Any]) -> str:
        """Return advice for a job file with these foreign keys; empty where they are of no known tool."""
        return ""

    def read_configuration(self, flags: Mapping[str, Any], settings: dict[str, Any]) -> Configuration | None:
        """Return the configuration that the options of a command give. The `settings` of its job file and
        flags go before it, and gain those of its flags. Raises `UsageError`."""
        return None

    def check_options(self, command: str, flags: Mapping[str, Any], job: Job, gpus: int) -> None:
        """Raise `UsageError`, before long work begins, for options that this command cannot fulfil."""

    def take_answer(self, flags: Mapping[str, Any], job: Job, recipe: str | None, gpus: int) -> None:
        """Use the recipe that a command found for `gpus` GPUs; None where none fits."""

    def next_steps(self, plan: Any, configuration: Configuration | None) -> Mapping[str, str]:
        """Return, by title, lines that put the recipe of a plan to use."""
        return {}

    # ---- reading data ----

    column_roles: ClassVar[tuple[str, ...]] = ()
    """Roles of columns in a task of this feature (`data/rows.py` has the roles of texts)."""

    def class_reader(self, folders: Sequence[Path]) -> Callable[[Path], Any] | None:
        """Return a function from the folder around these to `Rows`; None where they hold no samples."""
        return None

    def read_samples(self, rows: Any, job: Job, processor: Any, tokenizer: Any, **how: Any) -> Any | None:
        """Return `IndexedSamples` of these `Rows`; None for a task of others. `how` has `pack` and
        `label_names`. Raises `UsageError`."""
        return None

    # ---- running a step ----

    def handlers(self) -> Sequence[Any]:
        """Return a `Handler` (`step/wishes/handler.py`) for each wish."""
        return ()

    def managed_bytes(self) -> int:
        """Return bytes of managed memory, which no allocator counts, that this process has made."""
        return 0

    def place_state(self, optimizer: Any, weight: Any) -> None:
        """Move the state of a weight, which was read from a checkpoint, to the memory that it needs."""

    # ---- simulating a step ----

    def layer_period(self, setup: Setup, layers: int) -> int:
        """Return after how many of `layers` layers the treatment of layers repeats."""
        return 1

    def optimizer_doubts(self, optimizer: Any) -> Sequence[str]:
        """Return sentences on open questions of a rehearsal with this optimizer, or None."""
        return ()

    def rate_names(self, kernel: Any) -> Sequence[str]:
        """Return names of rates (`Rates.patterns`) that come before those of the kernel's operator."""
        return ()

    def simulation_overrides(self, policy: Any, recorder: Any) -> AbstractContextManager[None]:
        """Return a context in which operators of the feature run on shapes as on the policy's device. Kernels
        that torch does not launch are given to `recorder.launch`."""
        return nullcontext()

    def tensors_beside(self, weight: Any) -> Sequence[tuple[Any, str]]:
        """Return owner and attribute of each tensor that belongs to a weight, in the order in which they
        move."""
        return ()

    def treats_layers_alike(self, setup: Setup) -> bool:
        """Return whether a step of few layers shows what each further layer adds."""
        return True

    # ---- predicting a step ----

    def context_bytes(self, operators: Collection[str]) -> int:
        """Return bytes outside of the allocator that NVML counts for these operators of a step."""
        return 0

    # ---- searching a plan ----

    def has_timed_bytes(self, setup: Setup) -> bool:
        """Return whether saved bytes depend on the time of copies, so that no other step bounds them."""
        return False

    def search_further(self, state: Any, pool: Any, job: Job, tell: Any, *, smallest: bool) -> str:
        """Add better recipes from outside the space, or smaller ones, to the state of a search. Return the
        name of a tried technique that no space contains."""
        return ""


@functools.cache
def features() -> tuple[Feature, ...]:
    """Return every feature, by name. Raises `FeatureError` for a folder that breaks the contract."""
    return tuple(map(_read, feature_names()))


def _read(name: str) -> Feature:
    module = importlib.import_module(f"{FOLDER}.{name}.feature")
    classes = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Feature) and value.__module__ == module.__name__
    ]
    if len(classes) != 1:
        raise FeatureError(f"{module.__name__}: one subclass of Feature is expected, found {len(classes)}.")
    classes[0].name = name
    return classes[0]()


@functools.cache
def hooks(method: str) -> tuple[Callable[..., Any], ...]:
    """Return this method of each feature that overrides it."""
    plain = getattr(Feature, method)
    return tuple(
        getattr(feature, method) for feature in features() if getattr(type(feature), method) is not plain
    )


def tensors_beside(weight: Any) -> list[tuple[Any, str]]:
    """Return owner and attribute of each tensor that features hold next to a weight."""
    return [entry for beside in hooks("tensors_beside") for entry in beside(weight)]


def technique_modules() -> tuple[tuple[Slot, str], ...]:
    """Return slot and module of each technique of a feature."""
    return tuple(
        (slot, f"{FOLDER}.{feature.name}.{module}")
        for feature in features()
        for slot, modules in feature.techniques.items()
        for module in modules
        if feature.needs.get(module, feature.name) in feature_names()
    )
