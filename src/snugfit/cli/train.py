"""The command `snugfit train`: train on a dataset in this machine, with checkpoints from which a killed run
resumes.

A second start with the same arguments continues where the first stopped. Exit code 75 means that a signal
stopped the run (130 for Ctrl-C) and that it can be resumed. Exit code 4 means that no recipe is left that
needs less memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from snugfit.cli import arguments as given
from snugfit.cli.request import Request
from snugfit.cli.streams import print_outcome
from snugfit.errors import NothingFits, UsageError
from snugfit.frontends.one_of_several import COMMAND_LINE, is_started_again
from snugfit.measurement.target import gpu_here
from snugfit.techniques.registry import hooks
from snugfit.techniques.several_gpus import job_of_rank, on_gpus
from snugfit.training.ranks import Ranks, world

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.training.run.run import Run

DATA, RUN = "The data", "The run"

Dataset = Annotated[
    str | None,
    given.option(
        DATA,
        "The data: JSONL, CSV, Parquet or text files, a folder or pattern of them, a saved `datasets` "
        "folder, or a folder of images by class.",
    ),
]
EvalDataset = Annotated[str | None, given.option(DATA, "Data to evaluate on, in the same forms.")]
Tokenizer = Annotated[str | None, given.option(DATA, "Folder of the tokenizer. \\[the model's]")]
Processor = Annotated[
    str | None, given.option(DATA, "Folder of the processor for images and audio. \\[the model's]")
]
Columns = Annotated[str | None, given.option(DATA, 'Role of each column: "text=review, label=stars".')]
Pack = Annotated[
    bool | None, given.option(DATA, "Packing: join texts until each sequence is full.", "--pack")
]
Weights = Annotated[
    str | None,
    given.option(RUN, "Folder of the initial weights. \\[the model's, or the local hub cache]"),
]
FromScratch = Annotated[bool | None, given.option(RUN, "Start with random weights.", "--from-scratch")]
OutputDir = Annotated[str | None, given.option(RUN, "Folder for checkpoints and the journal.")]
Device = Annotated[
    str | None, given.option(RUN, "cuda, cuda:1 or cpu. \\[a GPU if there is one, else the CPU]")
]
MaxSteps = Annotated[int | None, given.option(RUN, "Optimizer steps.")]
Epochs = Annotated[float | None, given.option(RUN, "Number of epochs. [3]")]
ReportTo = Annotated[str | None, given.option(RUN, "Trackers, such as tensorboard or wandb. [none]")]
LearningRate = Annotated[float | None, given.option(RUN, "The peak learning rate. [5e-5]")]
Restart = Annotated[
    bool,
    given.option(RUN, "Start from the beginning. Old checkpoints are renamed, not deleted.", "--restart"),
]
ResumeFrom = Annotated[
    str | None,
    given.option(RUN, "Resume from this checkpoint-N. Later ones are renamed, not deleted. \\[the newest]"),
]
NoPredict = Annotated[bool, given.option(RUN, "On a GPU: start without a prediction.", "--no-predict")]

DryRun = Annotated[
    bool,
    given.option(
        RUN, "Show what would run, with its memory and seconds. Nothing is trained or written.", "--dry-run"
    ),
]


@given.about_a_job
def train(
    request: Request,
    *,
    gpus: given.Gpus = None,
    mesh: given.Mesh = None,
    dataset: Dataset = None,
    eval_dataset: EvalDataset = None,
    tokenizer: Tokenizer = None,
    processor: Processor = None,
    columns: Columns = None,
    pack: Pack = None,
    weights: Weights = None,
    from_scratch: FromScratch = None,
    output_dir: OutputDir = None,
    device: Device = None,
    max_steps: MaxSteps = None,
    num_train_epochs: Epochs = None,
    learning_rate: LearningRate = None,
    report_to: ReportTo = None,
    restart: Restart = False,
    resume_from_checkpoint: ResumeFrom = None,
    no_predict: NoPredict = False,
    dry_run: DryRun = False,
) -> int:
    """Train a model under a recipe, resumably. Further options: in the job file, or by --set."""
    from snugfit.frontends.own import make_run, options_of
    from snugfit.frontends.own import train as run
    from snugfit.report.watching import Watching

    _refuse(request)
    # Comes before the search, because `auto` is refused for several processes.
    processes = _processes(request, gpus)
    arguments = request.training
    request = request.with_least(lambda: gpu_here(arguments.get("device")))
    options = _options(arguments)
    logged, run_options = options_of(options).logging_steps, options | _run_arguments(request)
    if dry_run:
        run_options["ranks"] = Ranks(size=processes)
        run_here = make_run(request.job, request.recipe, _require(arguments, "dataset"), **run_options)
        return _show_run(request, run_here, _start(run_here.folder, resume_from_checkpoint, restart=restart))
    if processes > 1 and world() is None:
        return _launch(request, processes)
    if is_started_again():  # the first start of this run used these options
        restart, resume_from_checkpoint = False, None
    with Watching(logged) as shown:
        trained = run(
            request.job,
            request.recipe,
            _require(arguments, "dataset"),
            restart=restart,
            resume_from_checkpoint=resume_from_checkpoint,
            foresee=not no_predict,
            watch=shown,
            **run_options,
        )
    print_outcome(f"{trained.outcome} after step {trained.step:,}: {trained.folder}")
    return trained.exit_code


def _options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the training run that were given, by name."""
    from snugfit.training.options import TrainOptions

    return {field.name: arguments[field.name] for field in fields(TrainOptions) if field.name in arguments}


def _run_arguments(request: Request) -> dict[str, Any]:
    """Return the arguments of `snugfit.train` from a request, without the data."""
    arguments = request.training
    return {
        "output_dir": _require(arguments, "output_dir"),
        "evaluation": arguments.get("eval_dataset"),
        "tokenizer": arguments.get("tokenizer") or _own_folder(request),
        "processor": arguments.get("processor"),
        "columns": _columns(arguments.get("columns")),
        "pack": arguments.get("pack", False),
        "weights": _weights(request),
        "device": arguments.get("device"),
    }


def _launch(request: Request, processes: int) -> int:
    """Run the same command in this number of processes, and return their exit code.

    Raises `UsageError` for mistakes that all of them would refuse.
    """
    from snugfit.frontends.own import refuse_more_than_here
    from snugfit.step.applier import refuse_training

    setup = on_gpus(request.recipe.setup(), processes)
    job_of_rank(request.job, setup)
    refuse_training(request.recipe, setup)
    refuse_more_than_here(processes, request.training.get("device"))
    return int(hooks("processes")[0]().launch(processes, COMMAND_LINE.get()))


def _start(folder: Path, resume_from: str | None, *, restart: bool) -> Path | None:
    """Return the checkpoint from which a new run in this folder would resume; None without one.

    Raises `UsageError` for a named checkpoint that does not exist.
    """
    from snugfit.training.checkpoint.manager import named_step

    if resume_from is not None:
        named_step(Path(resume_from), folder)
        return Path(resume_from)
    checkpoints = () if restart else folder.glob("checkpoint-*[0-9]")
    return max(checkpoints, key=lambda path: int(path.name.split("-")[-1]), default=None)


def _show_run(request: Request, run: Run, start: Path | None) -> int:
    """Print a description of the run, the checkpoint that it starts from, and its prediction. The prediction
    is for the named GPU, or else the local one. Return the exit code.
    """
    job, order = run.job, run.order(1)
    steps, weights = run.steps(order), f"the weights in {run.weights}" if run.weights else "random weights"
    gpu = request.gpu or gpu_here(str(run.device))
    device = str(run.device) if not run.ranks.are_many else f"{run.ranks.size} times {run.device.type}"
    typer.echo(f"would train {job.model.name}, {job.task.value}, under {run.recipe} on {device}")
    typer.echo(
        f"{steps:,} steps of {job.batch_size:,} samples, {steps / order.steps_per_epoch:.3g} epochs over "
        f"{len(run.data.samples):,}; starts from {start or weights}; writes into {run.folder}"
    )
    fits = _show_prediction(request, run, gpu, steps) if gpu or request.memory_bytes else None
    if gpu is None:
        typer.echo(
            "This run uses no GPU, but memory and seconds are predicted only for GPUs. Add --gpu NAME."
        )
    typer.echo("Dry run: nothing was trained or written.")
    return NothingFits.exit_code if fits is False else 0


def _show_prediction(request: Request, run: Run, gpu: Gpu | str | None, steps: int) -> bool | None:
    """Print the prediction of a run on this GPU, and return True if it fits."""
    from snugfit.prediction.predict import predict
    from snugfit.units import show_bytes, show_seconds

    predicted = predict(run.job, run.recipe, gpu=gpu, gpus=run.ranks.size, memory_bytes=request.memory_bytes)
    reserved, allocated = predicted.footprint.reserved_bytes, predicted.footprint.allocated_bytes
    memory = f"{show_bytes(reserved)} reserved" if reserved else f"{show_bytes(allocated or 0)} allocated"
    named = predicted.gpu.name if predicted.gpu else "any GPU"
    elsewhere = ", which this run would not use" if predicted.gpu and run.device.type == "cpu" else ""
    line = f"predicted for {named}{elsewhere}: {memory}"
    if predicted.timing:
        seconds = predicted.timing.step_seconds
        line += f", {show_seconds(seconds)} a step, {show_seconds(seconds * steps)} for the steps"
    typer.echo(line)
    if predicted.fits is False:
        typer.echo("it does not fit; snugfit plan finds a recipe that fits")
    return predicted.fits


def _refuse(request: Request) -> None:
    """Raise `UsageError` for settings that training does not take.

    A GPU may be named, because the same job file serves predictions.
    """
    if request.loop != "plain" and not request.configuration:
        raise UsageError(f"--loop {request.loop}: snugfit train uses its own loop. Leave --loop out.")
    if request.job.model.resized:
        raise UsageError(
            "--vocab-size is for predictions. Resize the embeddings of the checkpoint "
            "(resize_token_embeddings), and give its folder as the model."
        )
    if request.software != "installed":
        raise UsageError("Training uses the installed software. Leave the software profile out.")


def _processes(request: Request, gpus: int | None) -> int:
    """Return the number of processes that train: the world size of a distributed launch, else one for each
    named GPU.

    Raises `UsageError` if both are given and differ.
    """
    process, named = world(), request.gpus if gpus is None else gpus
    if process is None or (gpus is None and named == 1):
        processes = process.size if process else named
    elif process.size != named:
        raise UsageError(
            f"{named} GPUs were named, but {process.size} processes were started (WORLD_SIZE). Start {named} "
            "with torchrun --nproc-per-node, or leave gpus out."
        )
    else:
        processes = named
    if processes > 1 and request.has_auto:
        raise UsageError(
            "'auto' searches for one GPU. For several, name all techniques (snugfit techniques)."
        )
    return processes


def _require(arguments: Mapping[str, Any], key: str) -> str:
    if not arguments.get(key):
        option = f"--{key.replace('_', '-')}"
        problem = {"dataset": "Nothing to train on", "output_dir": "No folder for checkpoints and journal"}[
            key
        ]
        raise UsageError(f"{problem}: add {option}, or `{key}:` to the job file.")
    return str(arguments[key])


def _weights(request: Request) -> str | None:
    """Return the folder of the initial weights, or the word for random ones; None means those of the job's
    model.

    If the job's model is only a preset of equal sizes, the weights are those of the model that was named.
    """
    from snugfit.frontends.own import RANDOM

    arguments = request.training
    weights: str | None = arguments.get("weights")
    if arguments.get("from_scratch"):
        if weights not in (None, RANDOM):
            raise UsageError(
                f"--from-scratch means random weights, but weights is {weights}. Leave one of them out."
            )
        return RANDOM
    return weights or (request.model_name if request.uses_similar_preset else None)


def _own_folder(request: Request) -> str | None:
    """Return the model's folder, if it has a tokenizer."""
    from snugfit.job.weights import own_folder

    folder = own_folder(request.job.model.name, request.job.model.origin)
    return str(folder) if folder and any(folder.glob("tokenizer*")) else None


def _columns(text: str | None) -> dict[str, str] | None:
    """Parse `text=review, label=stars`, and return the dataset's column for each role."""
    if text is None:
        return None
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if not pairs or any(not key.strip() or not sign or not name.strip() for key, sign, name in pairs):
        raise UsageError(f"columns: {text!r}; write ROLE=NAME, ROLE=NAME, such as text=review, label=stars.")
    return {key.strip(): name.strip() for key, _, name in pairs}
