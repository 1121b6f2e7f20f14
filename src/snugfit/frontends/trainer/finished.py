"""Return the result of a finished run when it is started again.

A scheduler that restarts a job runs the same script in the same folder. This would train again, or take one
step too many. At the end of training `finished.json` is written into the run's folder. It contains the run's
facts, the result of `train()`, the Trainer's state, and the checkpoint with the final weights. It is valid
only for the same run. A run that continues or starts again removes it first.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from snugfit.documents import BadDocument, read_document, write_document
from snugfit.errors import SnugfitError
from snugfit.frontends.trainer.facts import with_global_batch
from snugfit.frontends.trainer.parts import trainer_parts
from snugfit.step.transformers_internals import restore_callbacks
from snugfit.training.checkpoint.facts import compare_facts
from snugfit.training.checkpoint.manager import differences
from snugfit.training.checkpoint.manifest import verify
from snugfit.training.checkpoint.packed_state import pack, unpack
from snugfit.training.ranks import Ranks

FINISHED_RUN = "finished.json"

SAME = ("trainer", "asked", "batch_size", "samples", "length")
"""Entries that are compared besides the facts, with the run's length.

The number of processes is not compared: the run is finished for any.
"""

FOLDERS_OF_THIS_PROCESS: set[Path] = set()
"""Folders of earlier runs in this process; a second `train()` there is intended to train again."""


def forget_finished(root: Path) -> None:
    """Remove the result of a finished run before a run continues or starts in this folder."""
    FOLDERS_OF_THIS_PROCESS.add(root.resolve())
    with suppress(OSError):
        (root / FINISHED_RUN).unlink()


def note_finished(trainer: Any, root: Path, about: Mapping[str, Any], output: Any) -> None:
    """Write the result of `train()`, if a checkpoint contains its final weights."""
    best = trainer.state.best_global_step if trainer.args.load_best_model_at_end else None
    step = best or trainer.state.global_step
    if not (root / f"checkpoint-{step}").is_dir():
        return
    state, _ = pack({"state": asdict(trainer.state), "loss": output.training_loss, "metrics": output.metrics})
    document = {"about": {**about, "length": _length(trainer)}, "checkpoint": step, "result": state}
    with suppress(OSError):  # a full disk: the next start resumes the last checkpoint
        write_document(root / FINISHED_RUN, document)


def finished_output(
    trainer: Any, root: Path, about: Mapping[str, Any], resume_from: str | bool | None, ranks: Ranks
) -> Any:
    """Return the result of this very run's `train()`, if it finished in this folder.

    The trainer gets its model and its state. None for an unfinished run, or one to be trained again. The
    first of several processes decides.
    """
    from transformers import TrainerState
    from transformers.trainer_utils import TrainOutput

    now = {**about, "length": _length(trainer)}
    finished = ranks.first_answers(lambda: _finished_run(root, now, resume_from))
    if finished is None:
        return None
    result, weights = finished
    parts = trainer_parts(trainer)
    parts.spread_model()
    parts.load_weights(trainer.model, weights, ranks)
    trainer.state = TrainerState(**result["state"])
    restore_callbacks(trainer)
    return TrainOutput(trainer.state.global_step, result["loss"], result["metrics"])


def _finished_run(
    root: Path, now: Mapping[str, Any], resume_from: str | bool | None
) -> tuple[dict[str, Any], Path] | None:
    """Return the stored result of the run `now` and the checkpoint with its weights.

    None for an unfinished or different run, or if it was not requested.
    """
    import torch
    from transformers import TrainerState

    try:
        document = read_document(root / FINISHED_RUN)
        before, step = document["about"], document["checkpoint"]
        if (
            not _asks_for_it(root, resume_from)
            or differences(with_global_batch(before), with_global_batch(now), SAME)
            or compare_facts(before, now)
        ):
            return None
        result: dict[str, Any] = unpack(document["result"], {}, torch.device("cpu"))
        TrainerState(**result["state"])
        return result, verify(root / f"checkpoint-{step}", step).folder
    except (BadDocument, OSError, LookupError, TypeError, ValueError, AttributeError, SnugfitError):
        return None


def _asks_for_it(root: Path, resume_from: str | bool | None) -> bool:
    """Return True if the folder's newest state is requested; the default requests it only in a new
    process."""
    from transformers.trainer_utils import get_last_checkpoint

    if resume_from is None:
        return root.resolve() not in FOLDERS_OF_THIS_PROCESS
    if isinstance(resume_from, bool):
        return resume_from
    newest = get_last_checkpoint(root)
    return newest is not None and Path(resume_from).resolve() == Path(newest).resolve()


def _length(trainer: Any) -> list[float]:
    return [trainer.args.max_steps, trainer.args.num_train_epochs]
