"""Uses of a model besides training and evaluation (phases), which features add.

A feature's module `phases.py` has an `AddedPhase` for each, which is read before there are jobs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

from snugfit.feature_folders import feature_objects


class PhaseWords(NamedTuple):
    """Words for a phase (use of a model), with which reports on its jobs are written."""

    verb: str
    """Verb for the phase, before the model's name, as in `can train this`."""
    turn: str
    """Noun for one repetition with predicted seconds, such as `step`."""
    turns: str
    """Plural of that noun, such as `steps`."""
    item: str = "samples"
    """Plural noun for the elements of a batch."""
    rate: str = "samples"
    """Plural noun of the throughput in a table with one throughput."""
    savings: str = "weights of fewer bits"
    """Noun for further ways to save memory, in an error message."""
    measurement: str = "snugfit measure"
    """Command or function that measures a real run, in an error message."""


class AddedPhase:
    """A use of a model (phase) that a feature adds, such as text generation. Subclasses override the methods
    that they need.
    """

    name: ClassVar[str]
    """Name of the phase: its value in `Phase`."""

    kind: ClassVar[str] = "phase"
    """Noun for the object in messages; that of a task is `task`."""

    title: ClassVar[str]
    """Noun for the phase in the heading of a report, such as `evaluation`."""

    words: ClassVar[PhaseWords] = PhaseWords("run", "step", "steps")
    """Words of reports on jobs of this phase."""

    note: ClassVar[str] = ""
    """Sentence that reports on such jobs add; empty for none."""

    setting_types: ClassVar[Mapping[str, type]] = {}
    """Types of the phase's settings by name. The names are keys of a job file."""

    slots: ClassVar[frozenset[str]] = frozenset()
    """Names of the recipe's slots (choices) that no other phase uses."""

    unused: ClassVar[frozenset[str]] = frozenset()
    """Names of the recipe's slots (choices) that this phase does not use, in addition to those that only
    training uses.
    """

    sizes: ClassVar[Mapping[str, tuple[str, int]]] = {}
    """Sizes that `--largest` may search in addition to the core's. Each is a field of `Job` or a setting,
    with its upper limit.
    """

    def settings(self, job: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the complete settings of a job in this phase. Raises `JobError` for unusable ones."""
        return given

    def default_length(self, model: Any, task: str, given: Mapping[str, Any]) -> int | None:
        """Return the number of tokens of an input sequence for a command that names none; None for that of
        `Job`.
        """
        return None

    def arguments(self, job: Any) -> list[str]:
        """Return arguments of a command for the job's settings that are not the default."""
        return []

    def tokens(self, job: Any) -> int:
        """Return the number of tokens that a step processes, for a throughput in tokens per second."""
        return int(job.batch_size * job.sequence_length)

    def step_class(self, loop: str) -> type[Any]:
        """Return the subclass of `Step` that runs this phase in a training loop (`step/step.py`). Raises
        `UsageError` for an unsupported loop.
        """
        raise NotImplementedError

    def rehearse(
        self, job: Any, open_step: Callable[[Any], Any], record: Callable[[Any, int], Any], steps: int
    ) -> Any:
        """Return the `Trace` (recorded allocations and kernels) of a simulated run of `steps` steps.

        `open_step` returns the step of a job. `record` runs a number of its steps and returns their
        `Recording`.
        """
        return record(open_step(job), steps).trace

    def summary(self, prediction: Any) -> Any:
        """Return the results of this phase in a `Prediction`, as a dataclass; None without any."""

    def lines(self, summary: Any) -> Mapping[str, str]:
        """Return lines of a prediction's report with the results of this phase, by label."""
        return {}


@functools.cache
def added_phases() -> Mapping[str, AddedPhase]:
    """Return the phases that all features add, by name."""
    return {phase.name: phase for phase in feature_objects("phases", AddedPhase)}


@functools.cache
def words_by_phase() -> Mapping[str, PhaseWords]:
    """Return the words of reports by phase."""
    core = {
        "train": PhaseWords("train", "step", "steps", savings="checkpointing, a smaller optimizer state"),
        "evaluate": PhaseWords("evaluate", "pass", "passes"),
    }
    return core | dict(map(attrgetter("name", "words"), added_phases().values()))
