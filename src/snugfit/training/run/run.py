"""The description of a run that checkpoints store, so that only the same run resumes from them.

A run consists of its job, recipe, options and data, and of the software and machine on which it began. Its
checkpoints store all of that, so that only the same run can be resumed. If a difference would change results,
resuming raises an error that names it. Settings of logs and checkpoints may differ. For other package
versions or another GPU there is a warning: the run continues correctly, but not bit for bit. A run that ran
out of memory continues under another recipe than the requested one; its checkpoints store both.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError
from snugfit.job.job import Job
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import on_gpus
from snugfit.techniques.technique import Slot
from snugfit.techniques.wish import SeveralProcesses, processes_of
from snugfit.training.checkpoint.code_facts import code_facts
from snugfit.training.checkpoint.facts import FACTS, Facts, compare_facts, forward_facts, model_facts
from snugfit.training.checkpoint.manager import differences
from snugfit.training.options import TrainOptions
from snugfit.training.ranks import ALONE, Ranks
from snugfit.training.run.order import SampleOrder
from snugfit.versions import versions

if TYPE_CHECKING:
    import torch

    from snugfit.techniques.setup import Setup

FREE_OPTIONS = frozenset({
    "save_strategy", "save_steps", "save_total_limit", "eval_strategy", "eval_steps",
    "per_device_eval_batch_size", "load_best_model_at_end", "early_stopping_patience",
    "early_stopping_threshold", "logging_steps", "stop_seconds", "on_nonfinite", "most_skipped_in_a_row",
    "report_to", "run_name", "on_loss_spike", "loss_spike_rtol",
})  # fmt: skip
"""Options that may change when a run is resumed, since they do not change the computation of a step."""

LENGTH_OPTIONS = frozenset({"num_train_epochs", "max_steps"})
"""Options that may change when a run is resumed, if the learning rate does not depend on the number of steps.
"""

LENGTH_FREE_SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt")

FINGERPRINT_SAMPLES = 64
"""Number of samples in the dataset's checksum, evenly spaced."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """A dataset for training: its samples, with their collate function."""

    samples: Sequence[Mapping[str, Any]]
    """The dataset: `len`, and a sample for each index.

    If it has a `checksum(index)` of bytes, the fingerprint uses that instead of the sample.
    """

    collate: Callable[[list[Any]], dict[str, Any]]
    """Collate function: it turns samples into one host batch of tensors (B, ...)."""

    lengths: Sequence[int] | None = None
    """Number of tokens of each sample, which `group_by_length` needs; else None."""

    notes: tuple[str, ...] = ()
    """Sentences for the user about the dataset."""

    def fingerprint(self) -> str:
        """Return a checksum of the dataset: of its number of samples and of some samples."""
        count = len(self.samples)
        read = min(FINGERPRINT_SAMPLES, count)
        digest = hashlib.sha256(f"{count}".encode())
        for index in (number * count // read for number in range(read)):
            digest.update(_sample_bytes(self.samples, index))
        return digest.hexdigest()


def _sample_bytes(samples: Any, index: int) -> bytes:
    """Return bytes that identify a sample; a picture is identified by its file, to avoid decoding."""
    if hasattr(samples, "checksum"):
        checksum: bytes = samples.checksum(index)
        return checksum
    return json.dumps({name: _as_json(value) for name, value in samples[index].items()}).encode()


def _as_json(value: Any) -> Any:
    if hasattr(value, "tolist") and getattr(value, "ndim", 0) > 1:  # pixel values as text would take seconds
        return [str(value.dtype), list(value.shape), hashlib.sha256(_raw_bytes(value)).hexdigest()]
    return value.tolist() if hasattr(value, "tolist") else value if isinstance(value, list) else repr(value)


def _raw_bytes(value: Any) -> bytes:
    """Return the bytes of an array or tensor of any dtype and shape."""
    import torch

    # A scalar has no dimension, so it is reshaped before its bytes are viewed.
    flat = torch.as_tensor(value).detach().cpu().contiguous().reshape(-1)
    raw: bytes = flat.view(torch.uint8).numpy().tobytes()
    return raw


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run before it starts: its job, recipe, options, data and folder."""

    job: Job
    recipe: Recipe
    options: TrainOptions
    data: Data
    evaluation: Data | None
    folder: Path
    """Folder of the run's checkpoints and its journal."""

    weights: Path | None
    """Folder of the initial weights; None for random weights."""

    device: torch.device

    compare_code: bool = True
    """True if a run can be resumed only with the same source code of the user's functions."""

    ranks: Ranks = ALONE
    """Rank of this process within the recipe's device mesh, and the exchanges with the other ranks."""

    def setup(self, recipe: Recipe) -> Setup:
        """Return the training settings (`Setup`) of the recipe for this number of processes."""
        return on_gpus(recipe.setup(), self.ranks.size)

    def recipe_after(self, about: Mapping[str, Any]) -> Recipe:
        """Return the recipe to resume with, from the description in a checkpoint.

        It is the last recipe of the saved run, with this run's distribution over GPUs.
        """
        return _shared_as(Recipe.parse(about["recipe"]), self.recipe)

    def order(self, micro_batches: int) -> SampleOrder:
        """Return the object that computes the order of samples, for this number of micro-batches."""
        sampling = self.options.train_sampling_strategy
        return SampleOrder(
            len(self.data.samples),
            self.job.batch_size,
            micro_batches,
            seed=self.options.order_seed,
            shuffle=sampling != "sequential",
            drop_last=self.options.dataloader_drop_last,
            lengths=self.data.lengths,
            rank=self.ranks.data_rank,
            ranks=self.ranks.data_ranks,
            bucket=sampling == "group_by_length",
        )

    def steps(self, order: SampleOrder) -> int:
        """Return the number of optimizer steps of the whole run."""
        options = self.options
        # As in the Trainer, `max_steps` overrides the number of epochs.
        return options.max_steps or math.ceil(options.num_train_epochs * order.steps_per_epoch)

    def about(self, recipe: Recipe) -> dict[str, Any]:
        """Return the description of the run that its checkpoints store; the run continues under `recipe`."""
        return {
            "job": self.job.to_json(),
            "asked": str(self.recipe),
            "recipe": str(recipe),
            "options": self.options.to_json(),
            FACTS: self._facts(),
            "weights": self._weights(),
            "samples": len(self.data.samples),
            "data": self.data.fingerprint(),
            "device": _device_name(self.device),
            "gpus": self.ranks.size,
            "versions": versions(),
        }

    def _facts(self) -> Facts:
        module = self.job.model.module
        facts = {} if module is None else model_facts(module)
        if self.compare_code:
            facts |= code_facts({"collate": self.data.collate})
            facts |= {} if module is None else forward_facts(module)
        return facts

    def _weights(self) -> list[list[Any]] | None:
        """Return names and sizes of the files with the run's initial weights.

        Adapters are saved without the weights that they adapt. A resumed run must therefore begin with the
        same ones, in any folder.
        """
        if self.weights is None:
            return None
        return sorted([file.name, file.stat().st_size] for file in self.weights.glob("*.safetensors"))


def depends_on_length(schedule: str, warmup_steps: float) -> bool:
    """Return True if the learning rate of a step depends on the run's total number of steps.

    `schedule` is transformers' name. A warm-up below 1 is a share of the steps.
    """
    return schedule not in LENGTH_FREE_SCHEDULES or 0 < warmup_steps < 1


def lengthens(run: Run, before: Mapping[str, Any], step: int) -> str:
    """Return a sentence on the learning rate if `run` lengthens a finished run, else an empty text.

    The finished run ends with a checkpoint after `step`. The text is empty too if the rate does not depend on
    the length.
    """
    saved = before.get("options", {})
    length = {name: saved[name] for name in LENGTH_OPTIONS if name in saved}
    options = run.options
    if not length or not depends_on_length(options.lr_scheduler_type, options.warmup_steps):
        return ""
    # The number of steps does not depend on the number of micro-batches.
    order = run.order(1)
    finished_at = replace(run, options=replace(options, **length)).steps(order)
    if not finished_at <= step < (steps := run.steps(order)):
        return ""
    return (
        f"The run had finished after {finished_at:,} steps and now continues to {steps:,}. From here its "
        f"learning rate follows a schedule of {steps:,} steps, so it differs from a run of that length "
        "from the start."
    )


def compare_runs(before: Mapping[str, Any], run: Run, step: int = -1) -> tuple[list[str], list[str]]:
    """Compare `run` with the description in a checkpoint after `step`; return errors and warnings.

    Errors would change a number, so the run cannot be resumed. Warnings only prevent numbers that are
    identical bit for bit. A finished run may be lengthened.
    """
    # Conversion to JSON and back turns tuples into lists, as in the stored description.
    now = {"gpus": 1, **json.loads(json.dumps(run.about(run.recipe)))}
    options = before.get("options", {})
    depends = depends_on_length(run.options.lr_scheduler_type, run.options.warmup_steps)
    free = FREE_OPTIONS | (LENGTH_OPTIONS if not depends or lengthens(run, before, step) else frozenset())
    another_mesh = _on_another_mesh(before, run)
    # In a description without a number of GPUs, the number is 1.
    as_asked = {"gpus": 1, **before}
    before, errors_of_mesh = _on_these_gpus(as_asked, run)
    if before.get("asked") != now.get("asked"):  # another recipe: report it as the user wrote it
        before, errors_of_mesh = as_asked, []
    wrong = differences(before, now, ("asked", "weights", "samples")) + another_mesh
    job = before.get("job", {})
    if _folder_change(job.get("model", {}), now["job"]["model"]):
        job = {**job, "model": now["job"]["model"]}
    wrong += differences(job, now["job"], prefix="job.")
    wrong += compare_facts(before, now)
    wrong += differences(
        options, now["options"], [name for name in {**now["options"], **options} if name not in free]
    )
    # A different number of samples has its own error.
    if before.get("data") != now["data"] and before.get("samples") == now["samples"]:
        wrong.append("data has the same number of samples, but other samples")
    changed = differences(before.get("versions", {}), now["versions"])
    return wrong, changed + errors_of_mesh + differences(before, now, ("device", "gpus"))


def _on_these_gpus(before: Mapping[str, Any], run: Run) -> tuple[Mapping[str, Any], list[str]]:
    """Return a checkpoint's description of its run, changed to this run's distribution over GPUs, and the
    changes.

    Another distribution computes the same numbers, up to rounding.
    """
    try:
        recipe = Recipe.parse(before["asked"])
    except (KeyError, SnugfitError):
        return before, []
    shared = _shared_as(recipe, run.recipe)
    if shared == recipe:
        return before, []
    changed = [
        f"{slot} was {recipe[slot]} and is now {shared[slot]}"
        for slot in Slot
        if recipe[slot] != shared[slot]
    ]
    return {**before, "asked": str(shared)}, changed


def _on_another_mesh(before: Mapping[str, Any], run: Run) -> list[str]:
    """Return an error if the checkpoint's matrices are split over another number of ranks.

    Its optimizer's groups depend on that number (`optimizer_groups`).
    """
    try:
        own, other = (
            (processes_of(recipe.setup()) or SeveralProcesses()).matrix_parts
            for recipe in (run.recipe, Recipe.parse(before["asked"]))
        )
    except (KeyError, SnugfitError):
        return []
    return [f"matrices were split over {other} GPUs and are now split over {own}"] if own != other else []


def _shared_as(recipe: Recipe, other: Recipe) -> Recipe:
    """Return the recipe with the techniques for several GPUs of another recipe."""
    for slot in roster.slots_of_several_gpus():
        recipe = recipe.with_(other[slot])
    return recipe


def moved_model(before: Mapping[str, Any], run: Run) -> str:
    """Return a sentence if the model's folder has another path than in the checkpoint and the same content,
    else an empty text.

    The content is compared by the files of the initial weights.
    """
    return _folder_change(
        before.get("job", {}).get("model", {}), json.loads(json.dumps(run.job.to_json()["model"]))
    )


def _folder_change(model: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if model.get("origin") != "path" or model == now or {**model, "name": now["name"]} != now:
        return ""
    return f"The model's folder was {model['name']} and is now {now['name']}; its content is the same."


def _device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
