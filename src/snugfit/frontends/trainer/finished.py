"""A run that has finished says so when it is started again, and gives its result.

A scheduler that starts a job once more runs the same script in the same folder, which would train anew, or
take a step more than was asked for. When training is done `finished.json` is written into the run's folder:
which run it was, what `train()` gave, the Trainer's state, and the checkpoint whose weights are the result.
It counts while the run that is started is that very one; what goes on or begins anew removes it first.
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
from snugfit.frontends.trainer.sharded import is_spread, load_kept_weights
from snugfit.step.transformers_internals import restore_callbacks
from snugfit.training.checkpoint.facts import compare_facts
from snugfit.training.checkpoint.manager import differences
from snugfit.training.checkpoint.manifest import verify
from snugfit.training.checkpoint.packed_state import pack, unpack
from snugfit.training.ranks import Ranks

FINISHED_RUN = "finished.json"

SAME = ("trainer", "asked", "batch_size", "samples", "length")
"""What a checkpoint says of its run that is compared beside its facts, and how long the run is. However many
processes have trained it, it is done."""

FOLDERS_OF_THIS_PROCESS: set[Path] = set()
"""Where this process has trained: whoever calls `train()` there twice wants to train twice."""


def forget_finished(root: Path) -> None:
    """A run goes on or begins in this folder."""
    FOLDERS_OF_THIS_PROCESS.add(root.resolve())
    with suppress(OSError):
        (root / FINISHED_RUN).unlink()


def note_finished(trainer: Any, root: Path, about: Mapping[str, Any], output: Any) -> None:
    """Writes what `train()` has given, where a checkpoint holds the weights that it has left."""
    best = trainer.state.best_global_step if trainer.args.load_best_model_at_end else None
    step = best or trainer.state.global_step
    if not (root / f"checkpoint-{step}").is_dir():
        return
    state, _ = pack({"state": asdict(trainer.state), "loss": output.training_loss, "metrics": output.metrics})
    document = {"about": {**about, "length": _length(trainer)}, "checkpoint": step, "result": state}
    with suppress(OSError):  # a full disk: the next start takes up the last checkpoint
        write_document(root / FINISHED_RUN, document)


def finished_output(
    trainer: Any, root: Path, about: Mapping[str, Any], resume_from: str | bool | None, ranks: Ranks
) -> Any:
    """What this very run's `train()` gave when it finished in this folder, with its model and its state put
    into the trainer; None where it has not, or is to be trained anew. Of several processes the first knows
    it."""
    from transformers import TrainerState
    from transformers.trainer_utils import TrainOutput

    now = {**about, "length": _length(trainer)}
    finished = ranks.first_answers(lambda: _finished_run(root, now, resume_from))
    if finished is None:
        return None
    result, weights = finished
    if is_spread(trainer):
        trainer.spread_model()
    load_kept_weights(trainer.model, weights, ranks)
    trainer.state = TrainerState(**result["state"])
    restore_callbacks(trainer)
    return TrainOutput(trainer.state.global_step, result["loss"], result["metrics"])


def _finished_run(
    root: Path, now: Mapping[str, Any], resume_from: str | bool | None
) -> tuple[dict[str, Any], Path] | None:
    """What this folder says of the run that is started `now`, and the checkpoint that has its weights; None
    where it has not finished, or is not asked for."""
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
    """Whether the newest state of the folder is asked for; without a word only by another process."""
    from transformers.trainer_utils import get_last_checkpoint

    if resume_from is None:
        return root.resolve() not in FOLDERS_OF_THIS_PROCESS
    if isinstance(resume_from, bool):
        return resume_from
    newest = get_last_checkpoint(root)
    return newest is not None and Path(resume_from).resolve() == Path(newest).resolve()


def _length(trainer: Any) -> list[float]:
    return [trainer.args.max_steps, trainer.args.num_train_epochs]
