"""The function `snugfit.train`: a job, a recipe and a dataset, trained by snugfit's own loop.

    trained = snugfit.train(job, "bf16 + micro_batches(4)", "reviews.jsonl", tokenizer="./bert",
                            output_dir="out", num_train_epochs=1)

A second start with the same arguments resumes the run. When memory runs out, the run switches to the fastest
recipe that needs less memory. It keeps the global batch and repeats the failed step (`next_recipe.py`). A run
of several processes switches after all of them have restarted (`Feature.processes`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.errors import JobError, ModelError, UsageError, did_you_mean, require_packages
from snugfit.frontends.next_recipe import next_recipe
from snugfit.frontends.predicted import begin_to_import, run_predictor
from snugfit.job.gpu import capability_of
from snugfit.job.job import Job, refuse_what_is_no_job
from snugfit.job.weights import find_weights, own_folder
from snugfit.step.applier import refuse_training, refuse_unsupported
from snugfit.techniques.recipe import Recipe, without_auto
from snugfit.techniques.registry import hooks
from snugfit.techniques.several_gpus import job_of_rank, on_gpus
from snugfit.techniques.wish import processes_of
from snugfit.training.options import TrainOptions
from snugfit.training.predicted import predict_nothing
from snugfit.training.ranks import ALONE, Ranks, process_group, world
from snugfit.training.recovery import cut_warning
from snugfit.training.run.cut_loss import job_with_mixing, weighed_by_items
from snugfit.training.run.dataset import Source, data_of
from snugfit.training.run.run import Data, Run
from snugfit.training.run.train import train as run_to_its_end
from snugfit.user_files import user_path, writable_folder

if TYPE_CHECKING:
    import torch

    from snugfit.training.journal import Event
    from snugfit.training.run.loop import TrainingStep
    from snugfit.training.run.trained import Trained

RANDOM = "random"
"""Value of the argument `weights` for random weights instead of a checkpoint folder."""

MADE_IN_PYTHON = ("python", "config", "drawn")
"""Origins of models without a checkpoint. A module has its own weights, and a config gets random ones."""


def train(
    job: Job,
    recipe: Recipe | str,
    dataset: Source,
    *,
    output_dir: str | os.PathLike[str],
    evaluation: Source | None = None,
    tokenizer: Any | None = None,
    processor: Any | None = None,
    columns: Mapping[str, str] | None = None,
    pack: bool = False,
    collate: Callable[[list[Any]], dict[str, Any]] | None = None,
    weights: str | os.PathLike[str] | None = None,
    device: str | None = None,
    restart: bool = False,
    resume_from_checkpoint: str | os.PathLike[str] | None = None,
    compare_code: bool = True,
    foresee: bool = True,
    watch: Callable[[Event], None] = lambda event: None,
    **options: Any,
) -> Trained:
    """Train `job` under `recipe` (or its text) on `dataset`; return a summary of the run.

    `dataset` and `evaluation` are a path, rows in memory, or samples in the model's format, which `collate`
    forms into batches. A path is text, JSONL, CSV, Parquet, several of them, a saved `datasets` folder, or
    pictures. `tokenizer` is a tokenizer or its folder; `processor` prepares pictures or sound. `columns`
    names the columns of the text and the label, if their names are not the usual ones. `weights` is the
    folder of the initial weights, or "random". The default is the model's own folder, here or in the hub's
    local cache. `device` is `cpu`, `cuda` or `cuda:1`. `options` are those of `TrainOptions`.

    A run in `output_dir` is resumed if it is the same. That includes its functions (`collate`, forward
    passes), unless `compare_code` is False. `restart` starts from the beginning, and `resume_from_checkpoint`
    returns to one of its checkpoints. On a known GPU, memory and seconds are predicted first, unless
    `foresee` is False. `watch` receives every event of the journal.

    Raises `UsageError` for arguments that cannot be run or resumed, and `SnugfitError` for a NaN or infinite
    loss. Raises `OutOfMemory` when no recipe needs less memory, or when processes have to start again.
    """
    require_packages("Training", "psutil")
    how: dict[str, Any] = options | {
        "evaluation": evaluation, "tokenizer": tokenizer, "processor": processor, "columns": columns,
        "pack": pack, "collate": collate, "weights": weights, "device": device, "compare_code": compare_code,
    }  # fmt: skip
    target = device_of(device)
    with process_group(target) as ranks:
        # Worker processes import packages for the prediction while this process reads the data.
        if foresee and ranks.is_first:
            begin_to_import(job, target, ranks.size)
        heard = watch if ranks.is_first else _nobody
        how |= {"output_dir": output_dir, "watch": heard, "ranks": ranks}
        run = ranks.all_do(lambda: make_run(job, recipe, dataset, **how))
        foresees = foresee and ranks.is_first
        predict = run_predictor(run.device, ranks.size) if foresees else predict_nothing
        how = {"restart": restart, "resume_from": resume_from_checkpoint, "predict": predict, "watch": heard}
        replan = next_recipe(run.device, gpus=ranks.size)
        about = run.job, run.recipe, run.device, ranks.size, heard
        ends = (changes().end_with_ways_out(*about) for changes in hooks("changes_that_fit"))
        with next(ends, nullcontext()):
            return run_to_its_end(run, replan=replan, compare=compare_cut, **how)


def make_run(
    job: Job,
    recipe: Recipe | str,
    dataset: Source,
    *,
    output_dir: str | os.PathLike[str],
    evaluation: Source | None = None,
    collate: Callable[[list[Any]], dict[str, Any]] | None = None,
    weights: str | os.PathLike[str] | None = None,
    device: str | None = None,
    compare_code: bool = True,
    watch: Callable[[Event], None] = lambda event: None,
    ranks: Ranks = ALONE,
    **options: Any,
) -> Run:
    """Return the run of `train` from its arguments, in this process of several.

    The data is read, and nothing is written. Raises `UsageError` for arguments that cannot be run.
    """
    # An output folder that cannot be written is rejected before the data is read.
    folder = writable_folder(folder_of(output_dir))
    how = {name: options.pop(name, None) for name in ("tokenizer", "processor", "columns")}
    pack = options.pop("pack", False)
    chosen, target = _options_for(options, evaluation), device_of(device)
    recipe = _recipe_for(job, recipe, target, watch, ranks.size)
    begins_with = weights_of(job, weights)
    read: Callable[..., Data] = functools.partial(
        data_of, job=job, collate=collate, options=chosen, pack=pack, **how
    )
    data = read(dataset)
    return Run(
        job=job,
        recipe=recipe,
        options=chosen,
        data=data,
        evaluation=None if evaluation is None else read(evaluation, like=data),
        folder=folder,
        weights=begins_with,
        device=target,
        compare_code=compare_code,
        ranks=ranks.sharing(processes_of(on_gpus(recipe.setup(), ranks.size))),
    )


def _nobody(event: Event) -> None:
    """Ignore an event of a run. This is the `watch` function of processes other than the first."""


def compare_cut(
    job: Job, step: TrainingStep, model: Any, batch: Mapping[str, Any], again: bool = False
) -> Job:
    """Compare the gradients of a whole batch with those of its micro-batches, and return the job with the
    result.
    """
    loss_of = weighed_by_items(step.loss_of, step.items_of)
    context = step.forward_context
    return job_with_mixing(job, model, loss_of, batch, max_pieces=step.rows, context=context, again=again)


def _options_for(given: Mapping[str, Any], evaluation: Source | None) -> TrainOptions:
    """Return the training options, checked for missing requirements before any data is read."""
    chosen = options_of(given)
    if evaluation is None and chosen.eval_strategy != "no":
        raise UsageError(
            f"eval_strategy is {chosen.eval_strategy!r}, but there is no evaluation data. Add "
            "eval_dataset (--eval-dataset), or leave eval_strategy out."
        )
    if chosen.reports and not hooks("trackers"):
        raise UsageError(
            f"report_to is {chosen.report_to!r}, but no feature here has trackers. Leave it out."
        )
    for trackers in hooks("trackers"):
        # Called only for its errors: a missing package must end the run before the data is read.
        trackers().callbacks_for(chosen)
    return chosen


def _recipe_for(
    job: Job, recipe: Recipe | str, target: torch.device, watch: Callable[[Event], None], gpus: int
) -> Recipe:
    """Return the recipe after a check that it can train this job on this device and this number of GPUs.

    `watch` receives warnings about changes of the training.
    """
    refuse_what_is_no_job(job)
    if not job.trains:
        raise JobError("The job's phase is 'evaluate', but this command trains. Leave the phase out.")
    if isinstance(recipe, str):
        recipe = _without_auto(job, recipe, target, watch)
    setup = on_gpus(recipe.setup(), gpus)
    recipe.check(job_of_rank(job, setup), capability_of(target))
    refuse_training(recipe, setup)
    refuse_unsupported("plain", setup)
    for warning in cut_warning(job, recipe):
        watch(warning)
    if target.type == "cpu":  # on a GPU, the prediction has this warning
        for text in recipe.lost_updates(job):
            watch({"event": "warning", "text": text})
    return recipe


def _without_auto(job: Job, text: str, target: torch.device, watch: Callable[[Event], None]) -> Recipe:
    """Parse a recipe, and replace `auto` for the training GPU; `watch` receives a note about the
    replacement."""
    rest = without_auto(text)
    if rest is None:
        return Recipe.parse(text)
    import torch

    from snugfit.planning.search.auto import resolve

    gpu = torch.cuda.get_device_name(target) if target.type == "cuda" else None
    recipe, why = resolve(job, rest, gpu=gpu)
    watch({"event": "warning", "text": why})
    return recipe


def options_of(given: Mapping[str, Any]) -> TrainOptions:
    """Return the options from their names. Raises `UsageError` for an unknown one, with the nearest known
    one."""
    known = [field.name for field in fields(TrainOptions)]
    for name in given:
        if name not in known:
            raise UsageError(
                f"Unknown option {name!r}.{did_you_mean(name, known)} Options: {', '.join(known)}."
            )
    return TrainOptions(**given)


def device_of(name: str | None) -> torch.device:
    """Return the device of this name. Without a name, return a GPU, or the CPU if there is none.

    Each of several processes has a GPU of its own. Raises `UsageError` for an unknown or missing device.
    """
    import torch

    count, process = torch.cuda.device_count(), world()
    if process is not None and process.size > 1 and (name or count) and name != "cpu":
        if name not in (None, "cuda"):
            raise UsageError(
                f"device is {name!r}, but {process.size} processes train together; write cuda or cpu."
            )
        if process.local_rank >= count:
            raise UsageError(
                f"This host has {process.local_rank + 1} or more processes, but torch can use {count} GPUs "
                "here. Start one process for each GPU."
            )
        return torch.device("cuda", process.local_rank)
    if name is None:
        return torch.device("cuda", torch.cuda.current_device()) if count else torch.device("cpu")
    kind, _, number = str(name).partition(":")
    if kind == "cpu" and not number:
        return torch.device("cpu")
    if kind != "cuda" or (number and not number.isdecimal()):
        raise UsageError(f"device is {name!r}; it must be cpu, cuda or cuda:1.")
    if int(number or 0) >= count:
        raise UsageError(f"device is {name!r}, but torch can use {count} GPUs here. Try cpu.")
    return torch.device("cuda", int(number or 0))


def refuse_more_than_here(processes: int, device: str | None) -> None:
    """Raise `UsageError` for more processes than GPUs on this host; without any GPU they train on the CPU."""
    import torch

    count = torch.cuda.device_count()
    if device != "cpu" and processes > count and (count or device is not None):
        raise UsageError(
            f"{processes} GPUs were named, but torch can use {count} here. Name {count} or fewer."
        )


def weights_of(job: Job, given: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder of initial weights: the given one, or the model's own, here or in the hub's local
    cache.

    None for random weights: on request, or for a model made in Python. Raises `ModelError` without weights,
    because fine-tuning of random weights is never intended.
    """
    if given is not None:
        if not isinstance(given, str | os.PathLike):
            raise UsageError(f"weights is {given!r}; it must be a folder, a name on the hub, or {RANDOM!r}.")
        return None if given == RANDOM else find_weights(given)
    model = job.model
    if model.origin in MADE_IN_PYTHON:
        return None
    try:
        return find_weights((model.origin == "path" and own_folder(model.name, "path")) or model.name)
    except ModelError as problem:
        raise ModelError(
            f"{problem} To start with random weights: --from-scratch (from_scratch: true in a job file, "
            "weights='random' from Python)."
        ) from None


def folder_of(output_dir: str | os.PathLike[str]) -> Path:
    """Return the folder for checkpoints and the journal. Raises `UsageError` for an invalid value."""
    if not isinstance(output_dir, str | os.PathLike) or not os.fspath(output_dir):
        raise UsageError(
            f"output_dir is {output_dir!r}; it must be the folder for checkpoints and the journal."
        )
    return user_path(output_dir)
