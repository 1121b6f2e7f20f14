"""The phase `example` (a training step of the user's own code), which the core finds by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from snugfit.errors import JobError, UsageError
from snugfit.job.phases import AddedPhase, PhaseWords


class Example(AddedPhase):
    """The phase of a job whose model, optimizers and loop are in a user's own Python function."""

    name: ClassVar[str] = "example"
    title: ClassVar[str] = "step of an example"
    words: ClassVar[PhaseWords] = PhaseWords("run", "step", "steps", measurement="snugfit.watch")
    unused: ClassVar[frozenset[str]] = frozenset({"batching", "precision", "attention", "engine", "adapters"})

    def settings(self, job: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings unchanged. Raises `JobError` for a job without a user's function."""
        if not hasattr(job.model.module, "example"):
            raise JobError(
                f"{job.model.name}: the phase example runs a function of your own file. Try snugfit predict "
                "--example FILE.py."
            )
        return given

    def tokens(self, job: Any) -> int:
        """Return 0: a user's own step may have any inputs."""
        return 0

    def step_class(self, loop: str) -> type[Any]:
        """Return the class that runs the user's own steps. Raises `UsageError` for another loop than the
        plain one.
        """
        if loop != "plain":
            raise UsageError(f"An example has its own loop, not {loop!r}. Leave --loop out.")
        from snugfit.features.examples.step import ExampleStep

        return ExampleStep


EXAMPLE = Example()
