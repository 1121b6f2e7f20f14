"""Handler of the compile setting: it compiles a new or existing model, and writes the lines of an exported
script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from snugfit.errors import RecipeError, UsageError
from snugfit.features.compile.compiling import (
    compile_evaluated,
    compile_lines,
    compile_parts,
    recompile_limit,
    run_as_written,
    whole_files,
    whole_layers,
)
from snugfit.features.compile.fields import COMPILE
from snugfit.step.wishes.handler import Context, Handler, LiveTraining, ScriptContext, all_of
from snugfit.step.wishes.model import unwrap_layers
from snugfit.techniques.feature import InstallStage
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.features.compile.fields import CompileWish
    from snugfit.job.job import Job


class CompileHandler(Handler):
    """Handler of the field `compile`: it compiles layers or the model with `torch.compile`."""

    wish, slot, stage = COMPILE.name, Slot.ENGINE, InstallStage.COMPILE

    def around_run(self, value: CompileWish) -> Context | None:
        """Return a context in which layers stay whole within DDP, and in which a killed compiler leaves no
        partial files for later runs. Layers with a cache have torch's recompile limit in it.
        """
        limited = partial(recompile_limit, value.limit)
        files = [whole_files] if value.backend == "inductor" else []
        return partial(all_of, [whole_layers, *files, *([limited] if value.cache else [])])

    def wrap(self, value: CompileWish, model: Any) -> None:
        """Compile the model's layers, or the whole model, in place."""
        compile_parts(model, value)

    def evaluated_model(self, value: CompileWish, loop: Any, build: Callable[[], Any]) -> Any:
        """Build the job's model with `build`, compile it for an evaluation, and return it."""
        model = build()
        compile_evaluated(model, value, generates=loop.job.added_phase is not None)
        return model

    def refuse_rehearsal(self, value: CompileWish, job: Job) -> None:
        """Raise `UsageError` for a job without training steps: compiled evaluation is not simulated."""
        if not job.trains:
            raise UsageError(
                "Compiled layers are simulated in training only. Leave 'compiled' out of the prediction, or "
                f"run snugfit measure {job.model.name} --phase {job.phase} with this recipe."
            )

    def undo(self, live: LiveTraining) -> None:
        """Restore the uncompiled parts of a model in training."""
        # The wrappers of recomputation enclose compiled layers, so they are removed first.
        unwrap_layers(live)
        run_as_written(live.model)

    def change(self, value: CompileWish, live: LiveTraining) -> Iterator[str]:
        """Compile an existing model like a new one, and yield a line that describes the change."""
        self.wrap(value, live.model)
        yield f"{value.what}: compiled, by {live.technique(self.slot)}"

    def script(self, value: CompileWish, context: ScriptContext) -> dict[str, Any]:
        """Return an exported script's `torch.nn.Module.compile` lines for the same layers or model. As in
        snugfit's loop, hooks and the switch for checkpointing are outside of the compiled part.
        """
        try:
            return {"compiling": compile_lines(context.job, value, trainer=context.trainer)}
        except RecipeError as refused:
            raise context.refusal(Slot.CHECKPOINTING, str(refused)) from None
