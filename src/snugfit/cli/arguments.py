"""The arguments that several commands share, each with its help, written once.

`about_a_job` gives a command all arguments that describe a job, in front of its own. typer reads a command's
arguments from its signature, so the signature is assembled: no argument is listed twice.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from snugfit.errors import UsageError
from snugfit.job.phases import added_phases
from snugfit.techniques.registry import hooks
from snugfit.techniques.several_gpus import MOST_GPUS

if TYPE_CHECKING:
    from snugfit.cli.request import Request

AUTO_COMMANDS = ("predict", "measure", "train")
"""Commands in which `auto` in a recipe is replaced by a found recipe: those that run one recipe on one GPU.
"""
JOB, HOW, WHERE = "The job", "How it is done", "Where it has to fit"


def option(panel: str, help: str, *names: str, **more: Any) -> Any:
    """Return a typer option, shown in a named panel of the help."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def _complete_model(incomplete: str) -> list[str]:
    from snugfit.job.find import preset_names

    names = preset_names() if "/" in incomplete else [name.split("/")[1] for name in preset_names()]
    return [name for name in names if name.lower().startswith(incomplete.lower())]


def _complete_task(incomplete: str) -> list[str]:
    from snugfit.job.job import Task

    return [task.value for task in Task if task.value.startswith(incomplete)]


def _complete_gpu(incomplete: str) -> list[str]:
    from snugfit.job.gpu import all_gpus

    names = [gpu.name.removeprefix("NVIDIA ").lower().replace(" ", "-") for gpu in all_gpus()]
    return [name for name in names if name.startswith(incomplete.lower())]


def _complete_recipe(incomplete: str) -> list[str]:
    """Return completions of the last word of a recipe: names of techniques."""
    from snugfit.techniques.roster import techniques

    before, plus, word = incomplete.rpartition("+")
    start = f"{before}+ " if plus else ""
    return [start + one.name for one in techniques() if one.name.startswith(word.strip())]


Model = Annotated[
    str | None,
    typer.Argument(
        autocompletion=_complete_model,
        help="A preset (bert-large-uncased), a folder, a config.json, or a model name on the Hugging "
        "Face hub.",
        show_default=False,
    ),
]
Task = Annotated[
    str | None,
    option(
        JOB,
        "sequence-classification, causal-lm, seq2seq-lm, ... \\[from the architecture]",
        autocompletion=_complete_task,
    ),
]
SequenceLength = Annotated[int | None, option(JOB, "Tokens per sequence. [512]")]
TargetLength = Annotated[int | None, option(JOB, "Tokens per target, for encoder-decoder models. [128]")]
Images = Annotated[int | None, option(JOB, "Images in a sample, for models of images and text. [1]")]
Seconds = Annotated[float | None, option(JOB, "Seconds of a sample's sound, for audio encoders. [30]")]
Padding = Annotated[float | None, option(JOB, "Fraction of each sequence that is padding. [0]")]
BatchSize = Annotated[
    int | None, option(JOB, "Global batch: samples per optimizer step, over all micro-batches. [4]")
]
Labels = Annotated[int | None, option(JOB, "Number of classes of a classification head. [2]")]
VocabSize = Annotated[
    str | None,
    option(
        JOB,
        "Rows of the embedding after a resize: 32064, or x64 for a multiple. \\[the model's own]",
        metavar="ROWS",
    ),
]
Clip = Annotated[float | None, option(JOB, "Clip gradients to this norm. \\[no clipping]")]
Phase = Annotated[
    str | None,
    option(JOB, f"{', '.join(('train', *added_phases()))}, or evaluate: the loss over all logits. \\[train]"),
]
JobFile = Annotated[
    Path | None,
    option(JOB, "Read the job from a YAML file. Its keys are the names of these options.", "--job"),
]
Settings = Annotated[
    list[str] | None,
    option(JOB, "Change one key of the job file. Can be repeated.", "--set", metavar="KEY=VALUE"),
]
Online = Annotated[bool, typer.Option("--online", hidden=True)]
Offline = Annotated[bool, option(JOB, "Do not download a model's config.json from the hub.", "--offline")]
RecipeText = Annotated[
    str | None,
    option(
        HOW,
        'Techniques: "bf16 + every_layer + micro_batches(4)"; with "+ auto" the least recomputing that fits. '
        "\\[plain]",
        "--recipe",
        autocompletion=_complete_recipe,
    ),
]
Loop = Annotated[str | None, option(HOW, "plain, accelerate or trainer. \\[plain]")]
GpuName = Annotated[
    str | None,
    option(
        WHERE,
        "h200, v100-16gb, 'rtx 4090', ...; `snugfit gpus` lists all.",
        "--gpu",
        autocompletion=_complete_gpu,
    ),
]
Gpus = Annotated[
    int | None,
    option(
        WHERE,
        "Number of such GPUs in the run; the global batch stays. \\[1]",
        "--gpus",
        min=1,
        max=MOST_GPUS,
        metavar="<int>",
    ),
]
Mesh = Annotated[
    str | None,
    option(
        WHERE,
        "Mesh of GPUs, in the place of --gpus and of its techniques: 'fsdp=4, tensor=2'.",
        "--mesh",
        metavar="AXIS=GPUS,...",
    ),
]
Memory = Annotated[
    str | None, option(WHERE, "GPU memory that may be used: 24GiB, 16GB, 16000MiB. \\[all of the GPU's]")
]
Dtype = Annotated[
    str | None,
    option(
        JOB,
        "Dtype in which weights are loaded: float32, bfloat16, float16, or auto: as in the checkpoint. "
        "\\[auto]",
    ),
]


def _headroom(text: str) -> str:
    from snugfit.prediction.headroom import headroom_of

    # The GPU is not known yet, so the limit is larger than any.
    headroom_of(text, None, sys.maxsize)
    return text


Headroom = Annotated[
    str | None,
    option(
        WHERE,
        "Memory to leave free: 1GiB, 2% or 0. \\[2%, more where the prediction is less certain; 0 "
        "with --memory]",
        parser=_headroom,
        metavar="<str>",
    ),
]
Routing = Annotated[
    Literal["balanced", "worst"] | None,
    option(
        JOB,
        "For mixtures of experts: tokens go evenly to all experts (balanced), or all to the same "
        "(worst). \\[balanced]",
    ),
]
Format = Annotated[Literal["terminal", "markdown", "json"], typer.Option("--format", help="Output format.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]


def file_option(name: str, help: str, endings: Sequence[str], rule: str) -> Any:
    """Return typer's option for a file to which the command writes its result. Its name is checked before
    long work begins.

    `rule` is the error's sentence that lists the allowed endings.
    """

    def check(path: Path | None) -> Path | None:
        if path is not None:
            from snugfit.report.text.files import check_output

            check_output(name, path, endings, rule)
        return path

    return typer.Option(name, help=help, dir_okay=False, metavar="FILE", callback=check)


PLOT_FILE = ((".png", ".svg"), "a plot is a .png or a .svg file")
"""Allowed file endings of a plot, and the sentence of the error for any other."""
Details = Annotated[
    bool, typer.Option("--details", "-v", "--verbose", help="Print the whole report, with tables.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the first line of the answer only.")]
Fresh = Annotated[
    bool, typer.Option("--no-cache", "--fresh", help="Do not use a stored answer; compute it again.")
]


def _job_arguments(
    model: Model = None,
    *,
    task: Task = None,
    sequence_length: SequenceLength = None,
    target_length: TargetLength = None,
    images: Images = None,
    seconds: Seconds = None,
    padding: Padding = None,
    batch_size: BatchSize = None,
    labels: Labels = None,
    vocab_size: VocabSize = None,
    clip: Clip = None,
    dtype: Dtype = None,
    phase: Phase = None,
    job_file: JobFile = None,
    settings: Settings = None,
    online: Online = False,
    offline: Offline = False,
    recipe: RecipeText = None,
    loop: Loop = None,
    gpu: GpuName = None,
) -> None:
    """Declare the parameters of every command about a job, in the order of its help."""


def show_version(requested: bool) -> None:
    """Print the version of snugfit and exit if the user passed `--version`."""
    if requested:
        from snugfit.versions import __version__

        typer.echo(f"snugfit {__version__}")
        raise typer.Exit


class Command(TyperCommand):
    """A command that accepts flags with underscores, and the further flags that a feature reads."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command's arguments, and return those that the parser did not use. Raises `UsageError` for
        two output formats at once, and for an empty value, such as an unset shell variable gives.
        """
        # `--version` has priority over a mistake in the arguments after a command.
        show_version(not {"-V", "--version"}.isdisjoint(args))
        own = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        args = [_with_dashes(word, own) for word in args]
        for rewrite in hooks("rewrite_words"):
            args = rewrite(args, own)
        # click turns an empty path into Path(".").
        empty = ("", Path()) if any(word == "" or word.endswith("=") for word in args) else ("",)
        rest = super().parse_args(ctx, args)
        for parameter in self.params:
            value = ctx.params.get(parameter.name)
            if value in empty or (isinstance(value, list) and "" in value):
                name = parameter.opts[0] if parameter.param_type_name == "option" else "A name"
                instead = "write plain or leave it out" if parameter.name == "recipe" else "leave it out"
                raise UsageError(f"{name} is empty. Give it a value, or {instead}.")
        if ctx.params.get("as_json") and (form := ctx.params.get("form", "json")) not in ("terminal", "json"):
            raise UsageError(f"--json and --format {form} are two forms of output. Leave one of them out.")
        if ctx.params.get("quiet") and ctx.params.get("details"):
            raise UsageError("--quiet prints one line, --details the whole report. Leave one of them out.")
        return rest


def _with_dashes(word: str, declared: Collection[str]) -> str:
    """Return an option with its underscores replaced by dashes, if the command declares it with dashes."""
    flag, equals, value = word.partition("=")
    dashed = flag.replace("_", "-")
    return f"{dashed}{equals}{value}" if flag not in declared and dashed in declared else word


def about_a_job(command: Callable[..., int]) -> Callable[..., int]:
    """Return the command with parameters that describe a job, before its own parameters.

    The command is called with the parsed `Request` (job, recipe, GPU), then with its own arguments.
    """
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    def with_job(**given: Any) -> int:
        request = read_request(given, command.__name__)
        return command(request, **{parameter.name: given[parameter.name] for parameter in own})

    # typer reads the name, the help and the signature of a function.
    with_job.__name__, with_job.__doc__ = command.__name__, command.__doc__
    with_job.__signature__ = inspect.Signature([*job_parameters(command.__name__), *own])  # type: ignore[attr-defined]
    return with_job


def job_parameters(command: str, *, without: Collection[str] = ()) -> list[inspect.Parameter]:
    """Return the arguments of a command about a job, in the order of its help, those of features last."""
    shared = inspect.signature(_job_arguments, eval_str=True).parameters.values()
    return [one for one in (*shared, *feature_parameters(command)) if one.name not in without]


def feature_parameters(command: str) -> list[inspect.Parameter]:
    """Return the options that features add to a command."""
    return [parameter for options in hooks("options") for parameter in options(command)]


def job_options(command: str) -> list[str]:
    """Return the names of features' options that describe a job themselves, so that `--model` is not
    needed.
    """
    declared = {
        one.name: next(iter(getattr(one.annotation, "__metadata__", ())), one.default)
        for one in feature_parameters(command)
    }
    return [name for name, of_typer in declared.items() if getattr(of_typer, "rich_help_panel", "") == JOB]


def say_written(path: Path) -> None:
    """Print the path of a written file on stderr, since stdout is for the command's result."""
    typer.echo(f"Written: {path}", err=True)


def read_request(given: Mapping[str, Any], command: str) -> Request:
    """Return the `Request` (job, recipe, GPU) that a command's arguments describe. Print how a configuration
    file was used.
    """
    from snugfit.cli.request import Request

    request = Request.read(given, takes_auto=command in AUTO_COMMANDS)
    for prepare in hooks("prepare"):
        request = prepare(command, request)
    if request.configuration:
        request.configuration.show()
    return request


def hand_over(flags: Mapping[str, Any], answer: object) -> None:
    """Pass a command's result and output options to the features, which may write it to a file or draw it."""
    for take in hooks("take_answer"):
        take(flags, answer)
