"""Handlers of the feature's fields: bfloat16 weights with 32-bit masters, steps recorded as CUDA graphs, and
updates within the backward pass.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.errors import UsageError
from snugfit.features.engine.fields import ALL, CAPTURE, FILLED, MASTERS, PREVIOUS_NORM, RELEASE
from snugfit.features.engine.replay.graphs import REHEARSED, CudaGraphs
from snugfit.step.wishes.handler import Context, Handler
from snugfit.techniques.feature import InstallStage
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    import torch

    from snugfit.features.engine.fields import CaptureWish
    from snugfit.step.step_runner import StepRunner
    from snugfit.step.wishes.handler import LiveTraining


def _refusals(reason: str) -> Mapping[str, str]:
    """Return a reason to refuse each training loop except snugfit's own: a dict with the value `reason` for
    each.
    """
    own = "its loop is snugfit's own code"
    return {**dict.fromkeys(("accelerate", "trainer", "fit", "custom_loop"), reason), "script": own}


_MADE_BEFORE = (
    "the model and its optimizer were made before the recipe is known, and masters are the optimizer's own "
    "states. snugfit train takes this recipe, or use 'bf16'."
)


class MastersHandler(Handler):
    """Handler of the field `masters`: weights are bfloat16, and the optimizer stores the low bits of their
    32-bit values.
    """

    wish, slot, stage = MASTERS.name, Slot.PRECISION, InstallStage.CAST
    refused: ClassVar[Mapping[str, str]] = {
        "fit": _MADE_BEFORE,
        "custom_loop": _MADE_BEFORE,
        "script": "its optimizer is snugfit's own code",
    }

    def model_arguments(self, value: str) -> dict[str, Any]:
        """Return the argument that loads weights in 32 bits: a loader that rounds them would lose the low
        bits. Frozen weights have no use for these.
        """
        return {"dtype": "float32"} if value == ALL else {}

    def wrap(self, value: str, model: Any) -> None:
        """Convert trained weights to bfloat16, each with its low bits in a second tensor."""
        from snugfit.features.engine.masters.halves import split_weights

        split_weights(model)


class CaptureHandler(Handler):
    """Handler of the field `capture`: steps recorded as CUDA graphs."""

    wish, slot, stage = CAPTURE.name, Slot.ENGINE, InstallStage.STEP
    refused: ClassVar[Mapping[str, str]] = {
        front_end: reason
        for front_end, reason in _refusals(
            "its steps are those of another loop, and only snugfit's own are recorded. snugfit train takes it"
        ).items()
        if front_end != "fit"
    }

    def objections(self, value: CaptureWish, live: LiveTraining) -> Iterator[str]:
        """Yield an objection to Python code of the user that runs within each pass, as replays would skip
        it.
        """
        if live.code_in_passes:
            yield (
                f"{live.technique(self.slot)}: a replayed pass runs no Python code, so these would be "
                f"skipped: {', '.join(live.code_in_passes)}. Remove them, or leave captured out."
            )

    def fill_multiple(self, value: CaptureWish, loop: Any) -> int:
        """Return the multiple to which the lengths of recorded batches are padded."""
        # Without a GPU no graph is recorded, so the lengths of batches need not be rounded up.
        return value.multiple if _can_record(loop) else 0

    def step_runner(self, value: CaptureWish, loop: Any, runner: StepRunner | None) -> StepRunner | None:
        """Return the runner that records the loop's steps as CUDA graphs and replays them. On a CPU return
        the given runner.
        """
        if not _can_record(loop):
            return runner
        from snugfit.features.engine.replay.passes import CapturedPasses
        from snugfit.features.engine.replay.step import CapturedStep

        # In a simulation, `REHEARSED` creates simulated graphs.
        make_graphs = REHEARSED.get()
        graphs = CudaGraphs(loop.device) if make_graphs is None else make_graphs()
        kind = CapturedPasses if loop.updates_by_others else CapturedStep
        return kind(loop, graphs, value.multiple)

    def evaluated_model(self, value: CaptureWish, loop: Any, build: Callable[[], Any]) -> Any:
        """Return the job's model, whose decode steps are recorded as CUDA graphs. Raises `UsageError` on a
        CPU.
        """
        make_graphs = REHEARSED.get()
        if make_graphs is None and loop.device.type != "cuda":
            raise UsageError(
                "captured records decode steps as CUDA graphs, and a CPU has none. Leave it out, or run it "
                "on a GPU."
            )
        from snugfit.features.engine.replay.decode import record_decoding

        model = build()
        graphs = CudaGraphs(loop.device) if make_graphs is None else make_graphs()
        record_decoding(model, graphs, lambda note: loop.results.update(note=note))
        return model

    def around_rehearsal(self, value: CaptureWish, *, on_gpu: bool) -> Context | None:
        """Return a context in which torch's optimizers treat `meta` as a device that records, if a GPU is
        simulated."""
        from snugfit.features.engine.simulated_graphs import recorded_on_shapes

        return recorded_on_shapes if on_gpu else None

    def around_run(self, value: CaptureWish) -> Context:
        """Return a context in which all GPU work runs on one stream other than the default one. CUDA graphs
        cannot record the default stream, and one stream lets all work reuse freed memory.
        """
        return _on_own_stream


class FilledHandler(Handler):
    """Handler of the field `filled`: batches are padded as for CUDA graphs, but steps are not recorded."""

    wish, slot, stage = FILLED.name, Slot.ENGINE, InstallStage.STEP
    refused: ClassVar[Mapping[str, str]] = _refusals("only searches set it")

    def fill_multiple(self, value: int, loop: Any) -> int:
        """Return the multiple to which lengths are padded."""
        return value

    def prepare_pieces(
        self, value: int, loop: Any, model: Any, pieces: Sequence[Mapping[str, Any]]
    ) -> Sequence[Mapping[str, Any]]:
        """Return a step's micro-batches, padded to one length."""
        from snugfit.features.engine.replay.batch import fill_up, longest_sequence

        return fill_up(pieces, value, longest_sequence(loop.job))

    def around_pass(self, value: int, model: Any, batch: dict[str, Any], *, is_last: bool) -> Context:
        """Return a context in which transformers builds attention masks from shapes alone, without reading
        values of the batch.
        """
        from snugfit.features.engine.replay.batch import is_packed, masks_by_shape

        return functools.partial(masks_by_shape, packed=is_packed([batch]))


class ReleaseHandler(Handler):
    """Handler of the field `release`: each weight is updated as soon as its gradient exists
    (`updates/passes.py`).
    """

    wish, slot, stage = RELEASE.name, Slot.GRADIENTS, InstallStage.STEP
    refused: ClassVar[Mapping[str, str]] = _refusals(
        "its loop reads all gradients after the backward pass, and updates then. snugfit train takes this "
        "recipe"
    )

    def step_runner(self, value: str, loop: Any, runner: StepRunner | None) -> StepRunner:
        """Return the runner whose backward passes update the weights, replayed as CUDA graphs if `runner`
        records them.
        """
        from snugfit.features.engine.updates.passes import ReleasedPasses

        return ReleasedPasses(loop, runner, clips_late=value == PREVIOUS_NORM)


def _can_record(loop: Any) -> bool:
    return loop.job.trains and (REHEARSED.get() is not None or loop.device.type == "cuda")


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    """Return the CUDA stream on which a process records all its CUDA graphs on this GPU. There is only one,
    because cuBLAS keeps some 70 MB for each stream.
    """
    import torch

    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _on_own_stream() -> Iterator[None]:
    import torch

    # A simulation has no CUDA stream.
    if not torch.cuda.is_available() or REHEARSED.get() is not None:
        yield
        return
    before = torch.cuda.current_stream()
    stream = _stream(torch.cuda.current_device())
    # The current stream waits until the work of the other stream is finished.
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        before.wait_stream(stream)
