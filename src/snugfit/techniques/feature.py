"""The interface between the core and its features.

A feature is a folder of `features/` that can be deleted, or a plugin. Its `feature.py` has one subclass of
`Feature`, whose methods the core calls. Fields of `Setup` are in `fields.py`, tasks in `tasks.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager as Context
from contextlib import nullcontext
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup


class InstallStage(IntEnum):
    """Stages of preparing a run, in order. In each, core handlers run before those of features."""

    BUILD = 0
    """The model is constructed: its dtype and attention are arguments of its constructor."""
    ADAPT = 1
    """Another model replaces the first, or weights are frozen, before code reads trainable parameters."""
    CAST = 2
    """Trainable weights are cast to another dtype."""
    REPLACE = 3
    """Modules are changed to run other kernels."""
    HEAD = 4
    """The head and the loss are replaced."""
    COMPILE = 5
    """Modules are compiled. A recomputed layer is compiled inside its checkpoint."""
    RECOMPUTE = 6
    """Layers are wrapped for activation checkpointing, after the modules inside are final."""
    SAVE = 7
    """Hooks move the tensors that layers save for the backward pass to other memory."""
    DISTRIBUTE = 8
    """The model is distributed over processes. Each process then creates an optimizer of its own part."""
    OPTIMIZE = 9
    """The optimizer is created from the trainable parameters."""
    LOOP = 10
    """Autocast, gradient scaling and micro-batches are added around the forward and backward passes."""
    STEP = 11
    """The whole optimizer step is wrapped, for example in a CUDA graph."""
    LOAD = 12
    """The data loader is configured, by which batches reach the device."""
    PROCESS = 13
    """Settings of the whole process, such as its allocator, are applied."""


class Configuration(Protocol):
    """A user's configuration file that a feature has read, such as a DeepSpeed config."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Return the settings of this configuration file as a dictionary with snugfit's own keys."""

    @property
    def doubts(self) -> Sequence[str]:
        """Return warnings about keys of the file that were not read and may change memory or time."""

    def show(self) -> None:
        """Print on stderr how each key of the file was used."""


class Feature:
    """Base class of a feature: a folder that can be deleted. Subclasses override some methods."""

    name: ClassVar[str]  # the registry sets the folder's name
    techniques: ClassVar[Mapping[Slot, tuple[str, ...]]] = {}
    """Module names by slot (choice of a recipe). Each module has one technique of the same name."""
    needs: ClassVar[Mapping[str, str]] = {}
    """Other features that a module imports. Without them its technique and its public names are left out."""
    public_names: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Names that the package `snugfit` exports, by the module that defines them."""
    removed_options: ClassVar[Mapping[tuple[str, str], str]] = {}
    """Advice for options of earlier versions or of other commands, by command and option."""

    def commands(self) -> Sequence[Callable[..., Any]]:
        """Return functions that become subcommands of the command line."""
        return ()

    def documents(self) -> Mapping[str, type]:
        """Return the class of each command's `--json` document by command, for `snugfit schema`."""
        return {}

    def reports(self) -> Mapping[type, Callable[[Any], Any]]:
        """Return functions that render a command's result as text, by the result's class."""
        return {}

    def options(self, command: str) -> Sequence[inspect.Parameter]:
        """Return the options that this feature adds to a command, as parameters of a function."""
        return ()

    def rewrite_words(self, words: Sequence[str], declared: Collection[str]) -> Sequence[str]:
        """Return a command line's words after changes. `declared` are the known commands or options."""
        return words

    def further_options(self, declared: Collection[str]) -> Collection[str]:
        """Return the words that `rewrite_words` accepts as options of a command; an error suggests them."""
        return ()

    def advice_on_file(self, document: Mapping[Any, Any]) -> str:
        """Return advice on a job file whose keys belong to another tool; empty if no known tool has them."""
        return ""

    def read_configuration(self, flags: Mapping[str, Any], settings: dict[str, Any]) -> Configuration | None:
        """Return the configuration that options name, or None. It may change the job's `settings`."""
        return None

    def prepare(self, command: str, request: Any) -> Any:
        """Return a command's `Request` (job, recipe, GPU) as options change it. Raises `UsageError`."""
        return request

    def read_mesh(self, recipe: Any, text: str) -> Any:
        """Return the recipe with the parallel techniques of the option `--mesh`, and the number of GPUs."""

    def predict_by_formula(self, request: Any) -> Any | None:
        """Return the answer of `snugfit predict` for a recipe that is not simulated; None for others."""

    def take_answer(self, flags: Mapping[str, Any], answer: Any) -> None:
        """Write a command's result, such as a plan, into the files that the command's options name."""

    def picture(self, answer: Any, form: str) -> bytes | None:
        """Return charts of a command's result as a `png`, `svg` or (for a notebook) `html` file; or None."""

    def add_to_plan(self, request: Any, plan: Any, *, fresh: bool) -> Mapping[str, Any]:
        """Return further entries of a plan's JSON output by key, computed for the plan's recipe."""
        return {}

    def next_steps(self, plan: Any, configuration: Configuration | None) -> Mapping[str, str]:
        """Return lines for the end of a plan's report that put its recipe to use, by title."""
        return {}

    def changes_that_fit(self) -> Any:
        """Return the module that finds changes of a recipe with which a step fits."""

    column_roles: ClassVar[tuple[str, ...]] = ()
    """Roles of a data set's columns in tasks of this feature; `data/rows.py` has the roles of texts."""

    def class_reader(self, folders: Sequence[Path]) -> Callable[[Path], Any] | None:
        """Return a function that reads samples from folders of classes as `Rows`; None without samples."""
        return None

    def read_samples(self, rows: Any, job: Job, processor: Any, tokenizer: Any, **options: Any) -> Any | None:
        """Return `Rows` as `IndexedSamples`, or None for other tasks. `options` are `pack`, `label_names`."""
        return None

    def handlers(self) -> Sequence[Any]:
        """Return a `Handler` (`step/wishes/handler.py`) for each field that the feature adds to `Setup`."""
        return ()

    def managed_bytes(self) -> int:
        """Return bytes of CUDA managed memory, which no allocator counts, that this process has allocated."""
        return 0

    def place_state(self, optimizer: Any, weight: Any) -> None:
        """Move a weight's optimizer state, read from a checkpoint, to its memory, such as the host's."""

    refused_optimizers: ClassVar[Mapping[str, str]] = {}
    """Reasons why a Trainer's optimizers are not supported, by a part of their name in transformers."""

    def tensor_parts(self) -> Any:
        """Return the operations on sharded tensors, such as their common norm (`step/clipping.py`)."""

    def state_parts(self) -> Any:
        """Return the object that saves and loads sharded run states (`training/checkpoint/parts.py`)."""

    def processes(self) -> Any:
        """Return the module that starts, restarts, compares, measures and plans runs of several processes."""

    def trackers(self) -> Any:
        """Return the module that passes a run's metrics to trackers (`report_to`)."""

    def layer_period(self, setup: Setup, layers: int) -> int:
        """Return the period, in layers, of these settings: 2 if every second layer is recomputed."""
        return 1

    def optimizer_doubts(self, optimizer: Any) -> Sequence[str]:
        """Return warnings that a simulation with this optimizer (or None) may be inexact."""
        return ()

    def rate_names(self, kernel: Any) -> Sequence[str]:
        """Return names of a kernel's speed rates (`Rates.patterns`), before those of its operator."""
        return ()

    def recorder_class(self, setup: Setup) -> type[Any] | None:
        """Return the subclass of `Recorder` that records a simulated step of this Setup, or None."""
        return None

    surrounds_policy: ClassVar[bool] = False
    """True if the contexts of `simulation_overrides` enclose those of the device policy."""

    def simulation_overrides(self, setup: Setup, policy: Any, recorder: Any, notes: Any) -> Context[None]:
        """Return a context in which the feature's operators run without data as on the simulated device."""
        return nullcontext()

    def tensors_beside(self, weight: Any) -> Sequence[tuple[Any, str]]:
        """Return pairs (object, attribute) of tensors, such as scales, that belong to a weight."""
        return ()

    def packed_dtype(self, tensor: Any) -> str:
        """Return the number format of values packed in a tensor, such as `nf4`; empty for another tensor."""
        return ""

    def doubts_on_bytes(self, setup: Setup, blocks: Sequence[Any], missing: int) -> Sequence[str]:
        """Return warnings about memory blocks live at the peak; `missing` is the bytes that do not fit."""
        return ()

    def treats_layers_alike(self, setup: Setup) -> bool:
        """Return True if simulations of few layers predict the bytes and kernels of each further one."""
        return True

    def program_decisions(self) -> Context[list[Any]]:
        """Return a context that yields the list of a compiler's decisions on layers (`few_layers`)."""
        return nullcontext([])

    def context_bytes(self, operators: Collection[str]) -> int:
        """Return bytes that a step's operators add to the CUDA context in NVML, outside of the allocator."""
        return 0

    def exchanges(self) -> Any:
        """Return the object that predicts collectives between processes (`prediction/exchanges.py`)."""

    def first_step_seconds(self, setup: Setup, kernels: Collection[Any], in_programs: int) -> float:
        """Return the seconds that these distinct kernels add to a first step (`prediction/startup.py`)."""
        return 0.0

    def timing_doubts(self, setup: Setup) -> Sequence[str]:
        """Return warnings about the accuracy of predicted seconds."""
        return ()

    def lowered_kinds(self) -> Sequence[type[Any]]:
        """Return subclasses of `LoweredKinds`: lower bounds of bytes and seconds with compiled layers."""
        return ()

    def has_timed_bytes(self, setup: Setup) -> bool:
        """Return True if the bytes at the peak depend on the time of copies and so have no lower bound."""
        return False

    def search_further(self, state: Any, pool: Any, job: Job, tell: Any, *, smallest: bool) -> str:
        """Evaluate further recipes in a plan's search, add better ones, and return their technique's name."""
        return ""
