"""What a run is asked to do, and what its checkpoints say of it so that it is only ever resumed as itself.

A run is its job, its recipe, its options and its data; and the software and the machine that it began on. Its
checkpoints carry all of that. A resumed run must be the same run: what would change a number in it is refused
by name, what only changes how it is watched or kept may be changed, and other software or another GPU is a
warning, for then it goes on correctly and no longer bit for bit. A run that ran out of memory goes on under
another recipe than the one that was asked for; its checkpoints name both.
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
from snugfit.techniques.setup import ParallelWish
from snugfit.techniques.several_gpus import on_gpus
from snugfit.techniques.technique import Slot
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
"""Options that change no number of a step: they may differ when a run is resumed."""

LENGTH_OPTIONS = frozenset({"num_train_epochs", "max_steps"})
"""Options that may differ too where the learning rate does not depend on how long the run is."""

LENGTH_FREE_SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt")

FINGERPRINT_SAMPLES = 64
"""Of a dataset's samples, how many its fingerprint reads, spread evenly."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Samples, and how they become batches."""

    samples: Sequence[Mapping[str, Any]]
    """A map-style dataset: `len`, and a sample for each index. Where it has a `checksum(index)` of bytes, the
    fingerprint takes that for the sample."""

    collate: Callable[[list[Any]], dict[str, Any]]
    """Samples to one host batch of tensors (B, ...)."""

    lengths: Sequence[int] | None = None
    """Tokens of each sample, for `group_by_length`."""

    notes: tuple[str, ...] = ()
    """What somebody who trains on this should know."""

    def fingerprint(self) -> str:
        """A checksum of how many samples there are and of some of them."""
        count = len(self.samples)
        read = min(FINGERPRINT_SAMPLES, count)
        digest = hashlib.sha256(f"{count}".encode())
        for index in (number * count // read for number in range(read)):
            digest.update(_sample_bytes(self.samples, index))
        return digest.hexdigest()


def _sample_bytes(samples: Any, index: int) -> bytes:
    """What tells a sample from others: a picture's own file, where it need not be decoded for that."""
    if hasattr(samples, "checksum"):
        checksum: bytes = samples.checksum(index)
        return checksum
    return json.dumps({name: _as_json(value) for name, value in samples[index].items()}).encode()


def _as_json(value: Any) -> Any:
    if hasattr(value, "tolist") and getattr(value, "ndim", 0) > 1:  # pixels: as text they would take seconds
        return [str(value.dtype), list(value.shape), hashlib.sha256(_raw_bytes(value)).hexdigest()]
    return value.tolist() if hasattr(value, "tolist") else value if isinstance(value, list) else repr(value)


def _raw_bytes(value: Any) -> bytes:
    """The bytes of an array, or of a tensor, of any dtype and shape."""
    import torch

    flat = torch.as_tensor(value).detach().cpu().contiguous().reshape(-1)
    raw: bytes = flat.view(torch.uint8).numpy().tobytes()
    return raw


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is to be trained, on what, and where it is kept."""

    job: Job
    recipe: Recipe
    options: TrainOptions
    data: Data
    evaluation: Data | None
    folder: Path
    """Checkpoints and journal go there."""

    weights: Path | None
    """Folder of the weights that training begins with; None begins with random ones."""

    device: torch.device

    compare_code: bool = True
    """Whether it is resumed with the code that it began with alone."""

    ranks: Ranks = ALONE
    """This process among those that train together, in the mesh of the recipe."""

    def setup(self, recipe: Recipe) -> Setup:
        """What a recipe asks of the loop, with so many processes."""
        return on_gpus(recipe.setup(), self.ranks.size)

    def recipe_after(self, about: Mapping[str, Any]) -> Recipe:
        """The recipe that a run goes on with whose checkpoint says this: the last one that it had, shared by
        GPUs as is asked for now."""
        return _shared_as(Recipe.parse(about["recipe"]), self.recipe)

    def order(self, micro_batches: int) -> SampleOrder:
        """Which samples each step sees, in so many pieces."""
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
        """Optimizer steps of the whole run."""
        options = self.options
        return options.max_steps or math.ceil(options.num_train_epochs * order.steps_per_epoch)

    def about(self, recipe: Recipe) -> dict[str, Any]:
        """What every checkpoint says of its run, which goes on under `recipe`."""
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
        """Names and sizes of the files that training begins with. Adapters are kept without the weights that
        they adapt, so a resumed run must begin with the same ones, wherever these lie by then."""
        if self.weights is None:
            return None
        return sorted([file.name, file.stat().st_size] for file in self.weights.glob("*.safetensors"))


def depends_on_length(schedule: str, warmup_steps: float) -> bool:
    """Whether the learning rate of a step depends on how many there are, by transformers' name for the
    schedule; below 1 the warm-up is a share of them."""
    return schedule not in LENGTH_FREE_SCHEDULES or 0 < warmup_steps < 1


def lengthens(run: Run, before: Mapping[str, Any], step: int) -> str:
    """Where a checkpoint after `step` is the end of a finished run and `run` is longer: what that means for
    its learning rate, a sentence. Empty for any other, and where the rate does not depend on the length."""
    saved = before.get("options", {})
    length = {name: saved[name] for name in LENGTH_OPTIONS if name in saved}
    options = run.options
    if not length or not depends_on_length(options.lr_scheduler_type, options.warmup_steps):
        return ""
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
    """How `run` differs from the run that a checkpoint after `step` says it is of: in what would change a
    number, so that it cannot be resumed, and in what only keeps the numbers from being the same bit for bit.
    A run that was finished may be made longer."""
    now = {"gpus": 1, **json.loads(json.dumps(run.about(run.recipe)))}
    options = before.get("options", {})
    depends = depends_on_length(run.options.lr_scheduler_type, run.options.warmup_steps)
    free = FREE_OPTIONS | (LENGTH_OPTIONS if not depends or lengthens(run, before, step) else frozenset())
    another_mesh = _on_another_mesh(before, run)
    as_asked = {"gpus": 1, **before}
    before, asked = _on_these_gpus(as_asked, run)
    if before.get("asked") != now.get("asked"):  # another recipe, which is named as it was asked for
        before, asked = as_asked, []
    wrong = differences(before, now, ("asked", "weights", "samples")) + another_mesh
    job = _earlier_job(before.get("job", {}), now["job"])
    if _folder_change(job.get("model", {}), now["job"]["model"]):
        job = {**job, "model": now["job"]["model"]}
    wrong += differences(job, now["job"], prefix="job.")
    wrong += compare_facts(before, now)
    wrong += differences(
        options, now["options"], [name for name in {**now["options"], **options} if name not in free]
    )
    if before.get("data") != now["data"] and before.get("samples") == now["samples"]:
        wrong.append("data has the same number of samples, but other samples")
    changed = differences(before.get("versions", {}), now["versions"])
    return wrong, changed + asked + differences(before, now, ("device", "gpus"))


def _on_these_gpus(before: Mapping[str, Any], run: Run) -> tuple[Mapping[str, Any], list[str]]:
    """What a checkpoint says of its run, shared by GPUs as this one in its recipe, which may be otherwise:
    the same mathematics on other GPUs. And what was changed by that."""
    try:
        recipe = Recipe.parse(before["asked"])
    except (KeyError, SnugfitError):
        return before, []
    shared = _shared_as(recipe, run.recipe)
    if shared == recipe:
        return before, []
    changed = [
        f"{slot} was {recipe[slot]} and is {shared[slot]}" for slot in Slot if recipe[slot] != shared[slot]
    ]
    return {**before, "asked": str(shared)}, changed


def _on_another_mesh(before: Mapping[str, Any], run: Run) -> list[str]:
    """What a checkpoint cannot be read with: its optimizer's groups are those of the ranks that its matrices
    were cut over (`optimizer_groups`)."""
    try:
        own, other = (
            (recipe.setup().parallel or ParallelWish()).tensor
            for recipe in (run.recipe, Recipe.parse(before["asked"]))
        )
    except (KeyError, SnugfitError):
        return []
    return [f"matrices were cut over {other} GPUs and are over {own}"] if own != other else []


def _shared_as(recipe: Recipe, other: Recipe) -> Recipe:
    """The recipe, whose work GPUs share as in another one."""
    for slot in roster.slots_of_several_gpus():
        recipe = recipe.with_(other[slot])
    return recipe


def _earlier_job(before: Mapping[str, Any], now: Mapping[str, Any]) -> Mapping[str, Any]:
    """The job of a checkpoint, with what earlier ones did not name: the class of a preset, the dtype of its
    checkpoint, and the one in which weights were loaded, which was float32."""
    model, now_model = before.get("model", {}), now["model"]
    if model.get("origin") == "path" and now_model["origin"] == "config":
        model = {**model, "origin": "config"}  # which had this name
    if "dtype" not in before:
        stored = {key: value for key, value in now_model.items() if key == "dtype"}
        before, model = {**before, "dtype": "float32"}, {**stored, **model}
    if model.get("origin") == "preset" and "architectures" not in model["config"]:
        named = {key: value for key, value in now_model["config"].items() if key == "architectures"}
        model = {**model, "config": {**model["config"], **named}}
    return {**before, "model": model}


def moved_model(before: Mapping[str, Any], run: Run) -> str:
    """Return a sentence where the model's folder is another than in a checkpoint, and its content the same.
    The weights that training begins with are compared by their files."""
    return _folder_change(
        before.get("job", {}).get("model", {}), json.loads(json.dumps(run.job.to_json()["model"]))
    )


def _folder_change(model: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if model.get("origin") != "path" or model == now or {**model, "name": now["name"]} != now:
        return ""
    return f"The model's folder was {model['name']} and is {now['name']}; its content is the same."


def _device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
