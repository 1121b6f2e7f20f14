"""The `Request` of a command: flags, `--set`, a job file and a user's configuration file, merged and checked.

The later overrides the earlier: another library's configuration file, a job file, `--set` for one of its
keys, a flag. A key that none of them gives has the job's own default.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import typer

from snugfit.cli.plugins import words_in
from snugfit.errors import UsageError, did_you_mean
from snugfit.feature_folders import use_plugins
from snugfit.techniques.registry import hooks

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.job.model import Model
    from snugfit.techniques.feature import Configuration
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.technique import Slot, Technique


@dataclass(frozen=True, kw_only=True)
class Request:
    """The checked input of a command: a job, a recipe, and the GPU or memory that it must fit."""

    job: Job
    """The training job: model, task, lengths and batch."""

    recipe: Recipe
    """The training recipe (one technique per slot). A search replaces `auto` in it first."""

    named: Mapping[Slot, Technique] = field(default_factory=dict)
    """The techniques that the user's recipe names, by slot, including those that are defaults."""

    gpu: Gpu | None
    """The GPU that the user named; None for none."""

    gpus: int
    """Number of GPUs of that model that train together."""

    memory_bytes: int | None
    """GPU memory in bytes that the user named, which overrides the GPU's own; None without one."""

    headroom: str | None
    """GPU memory that a plan leaves free, as the user's text; None for the default amount."""

    keep: str | None
    """Techniques that a plan must use, as a recipe."""

    free: str | tuple[()]
    """Slots (groups of alternative techniques) that a plan may change, separated by commas."""

    loop: str
    """Name of the training loop, such as the HF Trainer's."""

    software: str
    """Name of a set of package versions to predict for; `installed` for the installed packages."""

    flags: Mapping[str, Any] = field(default_factory=dict)
    """The command's options with the values that the user gave."""

    configuration: Configuration | None = None
    """The user's configuration file after parsing; None without one."""

    model_name: str = ""
    """The model's name or path as the user typed it."""

    training: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `snugfit train` beyond the job: data, folders, and the options of the run."""

    has_auto: bool = False
    """True if the recipe contains `auto`, which the search has not replaced yet."""

    ranked: int = 0
    """Number of recipes in a plan's ranking, the best ones first."""

    follow_up: Callable[[Any, str], None] | None = None
    """Function that runs after a plan that fits, with the plan and the output format. It prints its result;
    for JSON, one document that includes the plan."""

    @classmethod
    def read(cls, flags: Mapping[str, Any], *, takes_auto: bool = False) -> Self:
        """Return the request that a command's parameters describe. Raises `UsageError` for every mistake in
        them.

        `auto` in the recipe is a mistake too, unless `takes_auto`.
        """
        from snugfit.cli.jobfile import training_keys
        from snugfit.job.gpu import choice_of, find_gpu
        from snugfit.techniques.recipe import Recipe, techniques_of, without_auto
        from snugfit.units import parse_bytes

        settings = own = _with_number_of_gpus(_settings(flags))
        configuration = _configuration(flags, settings)
        settings = {**(configuration.settings if configuration else {}), **settings}
        settings |= _on_mesh(settings)
        if isinstance(settings.get("gpu"), str) and (chosen := choice_of(settings["gpu"])):
            typer.echo(chosen, err=True)
        # Plugins may add techniques, so they are loaded before the recipe is parsed.
        use_plugins(words_in(settings.get("plugin", "")))
        text = settings.get("recipe", "plain")
        rest = without_auto(text) if takes_auto else None
        request = cls(
            flags=flags,
            configuration=configuration,
            model_name=str(settings.get("model", "")),
            recipe=Recipe.parse(text if rest is None else rest),
            named=techniques_of(text if rest is None else rest),
            has_auto=rest is not None,
            gpu=find_gpu(settings["gpu"]) if "gpu" in settings else None,
            gpus=settings.get("gpus", 1),
            memory_bytes=parse_bytes(settings["memory"], quantity="memory") if "memory" in settings else None,
            headroom=settings.get("headroom"),
            keep=settings.get("keep"),
            free=settings.get("free", ()),
            loop=_known_loop(settings.get("loop", "plain")),
            software=settings.get("software", "installed"),
            training={key: value for key, value in settings.items() if key in training_keys()},
            job=_job(settings, online=_may_ask_hub(flags)),
        )
        if unused := ", ".join(_without_effect(own, request)):
            typer.echo(f"{unused}: no effect in the phase {request.job.phase}, so leave it out", err=True)
        return request

    def with_least(
        self, local_gpu: Callable[[], Gpu | str | None] = lambda: None, *, fresh: bool = False
    ) -> Request:
        """Return a copy of the request in which `auto` in the recipe is replaced by the settings that fit its
        GPU, or else the local one.

        The choice is printed on stderr. Raises `UsageError` where there is no GPU, and `NothingFits` if no
        choice fits it.
        """
        if not self.has_auto:
            return self
        from snugfit.cli.plan_cache import answer
        from snugfit.job.gpu import find_gpu
        from snugfit.planning.search.auto import AUTO_ALONE, ResolvedRecipe, resolve

        if self.gpus != 1:
            raise UsageError(AUTO_ALONE)
        named = self.gpu or (None if self.memory_bytes else local_gpu())
        gpu = None if named is None else find_gpu(named)
        options: dict[str, Any] = {
            "memory_bytes": self.memory_bytes,
            "headroom": self.headroom,
            "loop": self.loop,
            "software": self.software,
        }
        recipe, reason = answer(
            ResolvedRecipe.from_json,
            lambda tell: ResolvedRecipe(*resolve(self.job, self.recipe, gpu=gpu, **options)),
            self.job,
            gpu,
            fresh=fresh,
            first=f"searching the recipe for 'auto' with {self.job.model.name}",
            what="auto",
            recipe=str(self.recipe),
            **options,
        )
        typer.echo(reason, err=True)
        return replace(self, recipe=recipe, has_auto=False)

    def answer_of(
        self,
        search: Callable[..., Any],
        form: Any,
        kinds: Sequence[Gpu],
        options: Mapping[str, Any],
        progress_label: str,
        **arguments: Any,
    ) -> Any:
        """Return the result of `search` for the job on these GPU models, cached on disk as a document of the
        class `form`.

        The arguments of a plan come from the request, the command's `options` and `arguments`.
        """
        from snugfit.cli.plan_cache import answer

        of_request = {"keep": self.keep, "free": self.free, "headroom": self.headroom}
        arguments = {"fidelity": options["fidelity"], **of_request, **arguments}
        suffix = f" on {len(kinds)} GPU models" if len(kinds) > 1 else ""
        return answer(
            form.from_json,
            lambda tell: search(self.job, kinds, workers=options["workers"], tell=tell, **arguments),
            self.job,
            *kinds,
            fresh=options["fresh"],
            first=f"planning {self.job.model.name}{suffix}",
            what=progress_label,
            **arguments,
        )

    @property
    def doubts(self) -> tuple[str, ...]:
        """Return warnings about parts of the user's configuration file that were not read."""
        return tuple(self.configuration.doubts) if self.configuration else ()

    @property
    def uses_similar_preset(self) -> bool:
        """True if the named model is unknown, and a preset with the same sizes is used instead."""
        from snugfit.job.find import preset_named

        return self.job.model.origin == "preset" and not preset_named(self.model_name)

    def refuse_recipe_and_loop(self) -> None:
        """Raise `UsageError` if a recipe or a loop was given to a plan, which chooses its own.

        A recipe of the user's configuration file is allowed: the plan starts from it.
        """
        from snugfit.techniques.recipe import Recipe

        if self.recipe != Recipe() and not self.configuration:
            raise UsageError(
                f"--recipe {str(self.recipe)!r}: a plan chooses the recipe. Leave --recipe out, or use "
                "snugfit predict with it. To fix some techniques, use --keep."
            )
        self.refuse_loop()

    def refuse_loop(self) -> None:
        """Raise `UsageError` if a loop was given to a plan, unless it came from the user's configuration
        file.
        """
        if self.loop != "plain" and not self.configuration:
            raise UsageError(
                f"--loop {self.loop}: a plan is for the plain loop. Leave --loop out, then use snugfit "
                f"predict --loop {self.loop} with the plan's recipe."
            )


def steps_of(samples: int | None, steps: int | None, batch_size: int) -> int | None:
    """Return the number of optimizer steps in a run from its samples or steps; None without either. Raises
    `UsageError` if both were given.
    """
    if samples is not None and steps is not None:
        raise UsageError("--samples and --steps both give the length of the run. Give one of them.")
    return math.ceil(samples / batch_size) if samples is not None else steps


def _on_mesh(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe and the number of GPUs that the option `--mesh` sets; empty without it."""
    if "mesh" not in settings:
        return {}
    from snugfit.techniques.recipe import Recipe

    if not (readers := hooks("read_mesh")):
        raise UsageError("--mesh needs techniques for several GPUs, and none is installed. Leave it out.")
    recipe, gpus = readers[0](Recipe.parse(settings.get("recipe", "plain")), settings["mesh"])
    if settings.get("gpus", gpus) != gpus:
        raise UsageError(
            f"--mesh {settings['mesh']!r} makes {gpus} GPUs, but --gpus is {settings['gpus']}. Leave --gpus "
            "out."
        )
    return {"recipe": str(recipe), "gpus": gpus}


def _settings(flags: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    # A YAML file in the place of the model is a job file.
    if str(flags.get("model") or "").endswith((".yaml", ".yml")) and not flags.get("job_file"):
        flags = {**flags, "job_file": Path(flags["model"]), "model": None}
    if flags.get("job_file") or flags.get("settings"):
        from snugfit.cli.jobfile import read_job_file, read_setting

        if flags.get("job_file"):
            settings |= read_job_file(flags["job_file"])
        settings |= dict(read_setting(text) for text in flags.get("settings") or ())
    return settings | {
        name: value for name, value in flags.items() if value is not None and name != "settings"
    }


def _with_number_of_gpus(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with the number of GPUs taken out of a name like `2x h100`."""
    several = re.fullmatch(r"(\d{1,4})\s*[x*]\s*(\D.*)", str(settings.get("gpu", "")).strip(), re.IGNORECASE)
    if several is None:
        return settings
    number = int(several[1])
    if settings.get("gpus", number) not in (number, str(number)):
        raise UsageError(f"--gpu {settings['gpu']!r} and --gpus {settings['gpus']} contradict each other.")
    return {**settings, "gpu": several[2], "gpus": number}


def _configuration(flags: Mapping[str, Any], settings: dict[str, Any]) -> Configuration | None:
    # Each feature adds its settings from the command's options, even without a configuration file.
    read = [reader(flags, settings) for reader in hooks("read_configuration")]
    return next(filter(None, read), None)


def _job(settings: Mapping[str, Any], *, online: bool) -> Job:
    from snugfit.job.find import preset_named
    from snugfit.job.inputs import setting_keys
    from snugfit.job.job import Job
    from snugfit.job.model import Model

    if "model" not in settings:
        raise UsageError(
            "No model given. Name one, for example: bert-large-uncased --task sequence-classification"
        )
    given = {field.name: settings[field.name] for field in fields(Job) if field.name in settings}
    model = Model.find(settings["model"], online=online, tell=functools.partial(typer.echo, err=True))
    if model.origin == "preset" and not preset_named(settings["model"]):
        typer.echo(f"model: {settings['model']} has the same sizes as {model.name}", err=True)
    if "vocab_size" in settings:
        model = model.with_vocabulary(_rows(model, str(settings["vocab_size"])))
    given["model"] = model
    given["phase_settings"] = {key: settings[key] for key in setting_keys() if key in settings}
    if "task" not in given:
        given["task"] = _task(model)
    given |= _default_length(given)
    job = Job(**given)
    _refuse_unused(settings, job)
    return job


def _default_length(given: Mapping[str, Any]) -> dict[str, int]:
    """Return the sequence length of a job's phase for a model with few positions, and print it on stderr.
    Empty if the user's settings have a length, or the default of `Job` applies.
    """
    from snugfit.job.phases import added_phases

    phase = added_phases().get(str(given.get("phase")))
    if phase is None or "sequence_length" in given:
        return {}
    length = phase.default_length(given["model"], str(given["task"]), given["phase_settings"])
    if length is None:
        return {}
    typer.echo(f"sequence length: {length}, since the model has few positions", err=True)
    return {"sequence_length": length}


def _rows(model: Model, text: str) -> int:
    """Return an embedding's number of rows from the user's text. The text is a number, or `x64` for the
    model's own rounded up to a multiple.
    """
    match = re.fullmatch(r"(x?)([1-9]\d{0,7})", text)
    if match is None or not model.vocabulary:
        reason = (
            "a whole number of rows, or x64 for a multiple" if model.vocabulary else "for models of tokens"
        )
        raise UsageError(f"vocab size is {text!r}; it must be {reason}.")
    number = int(match[2])
    return -(-model.vocabulary // number) * number if match[1] else number


def _may_ask_hub(flags: Mapping[str, Any]) -> bool:
    """Return True if a model's config may be downloaded from the Hugging Face hub. Raises `UsageError` for
    contradicting flags.
    """
    if flags.get("online") and flags.get("offline"):
        raise UsageError(
            "--online and --offline contradict each other. Give one of them, or neither: then the hub "
            "is used if needed."
        )
    return not flags.get("offline")


def _task(model: Model) -> str:
    """Return the task that the model's architecture implies, and print it on stderr. Raises `UsageError` if
    there is not exactly one.
    """
    from snugfit.job.architectures import tasks_of

    if task := model.task:
        typer.echo(f"task: {task}, from the architecture", err=True)
        return task
    possible = ", ".join(tasks_of(model.architecture))
    several = f"several. Add --task, one of: {possible}." if possible else "none that is installed here."
    raise UsageError(f"No task: {model.name} ({model.architecture}) can be trained for {several}")


def _refuse_unused(settings: Mapping[str, Any], job: Job) -> None:
    """Raise `UsageError` for settings that the task does not use, such as a sequence length for pictures."""
    from snugfit.job.inputs import unused_sizes

    unused = unused_sizes(job.task)
    for key in unused:
        if key in settings:
            raise UsageError(
                f"{key.replace('_', ' ')} is {settings[key]}, but the task {job.task} does not use it. "
                "Leave it out."
            )
    if settings.get("largest") == "sequence-length" and "sequence_length" in unused:
        raise UsageError(
            f"--largest sequence-length: the task {job.task} has no sequences. Try --largest batch."
        )


def _without_effect(own: Mapping[str, Any], request: Request) -> Iterator[str]:
    """Yield the user's `own` settings, and the techniques of the recipe, that have no effect in the job's
    phase.
    """
    from snugfit.job.job import UPDATE_FIELDS
    from snugfit.techniques.recipe import unused_slots

    unused = unused_slots(request.job)
    yield from () if request.job.trains else (key.replace("_", " ") for key in UPDATE_FIELDS if key in own)
    yield from (str(one) for one in request.recipe if one.slot in unused and not one.plain)


def _known_loop(loop: str) -> str:
    from snugfit.step.step import LOOPS

    if loop not in LOOPS:
        raise UsageError(f"Unknown loop {loop!r}.{did_you_mean(loop, LOOPS)} Loops: {', '.join(LOOPS)}.")
    return loop
