"""Exports, each loaded by its library, and trained beside snugfit's own loop of that name.

The losses are the same, bit for bit, in fp32 without dropout from one seed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from small_models import FAMILIES
from snugfit.cli.main import run
from snugfit.errors import RecipeError, UsageError
from snugfit.features.exchange.check import Checked, Finding, Fix
from snugfit.features.exchange.export import TARGETS, Export, export
from snugfit.features.exchange.feature import Exchange
from snugfit.features.exchange.read import read_arguments
from snugfit.features.exchange.trainer_arguments import training_arguments, write_arguments
from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.step.batches import collate, dataset
from snugfit.step.build import build_model
from snugfit.step.open_step import open_step
from snugfit.step.wishes.precision import matmul_precision
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe, unused_slots
from test_reference import hold_to_schema
from tiers import crossed, slow_but

CPU = torch.device("cpu")
STEPS = 3
WITHOUT_DROPOUT = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {},
    "t5": {"dropout_rate": 0.0},
    "vit": {},
    "mixtral": {},
}


class Silent:
    """An observer of steps that does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


@pytest.fixture(autouse=True)
def as_before() -> Any:
    """Restore torch's precision, which the scripts set for their process."""
    with matmul_precision("ieee"):
        yield


@pytest.fixture
def seeded_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Initialize peft's adapters from a separate seed, independent of earlier models."""
    import peft

    real = peft.get_peft_model

    def seeded(*arguments: Any, **keywords: Any) -> Any:
        torch.manual_seed(1)
        return real(*arguments, **keywords)

    monkeypatch.setattr(peft, "get_peft_model", seeded)


def job_in(folder: Path, family: str = "bert", recipe: str = "", **changes: Any) -> Job:
    """Return a job on a tiny model whose weights are in `folder`, drawn from the seed of `ours`.

    The weights have the recipe's dtype: in bfloat16 torch 2.11 draws other numbers for a truncated normal.
    """
    facts, task, keys = FAMILIES[family]
    whole = {"model_type": family, **facts, **dict.fromkeys(keys, 2), **WITHOUT_DROPOUT[family]}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(whole))
    given = {"task": task, "batch_size": 4, "sequence_length": 16, "learning_rate": 1e-3} | changes
    job = Job(model=Model.find(str(folder)), **given)
    torch.manual_seed(0)
    build_model(job, Recipe.parse(recipe).setup(), CPU).save_pretrained(folder)
    return job


def ours(job: Job, recipe: str, loop: str) -> list[float]:
    torch.manual_seed(0)
    step = open_step(job, Recipe.parse(recipe).setup(), loop, CPU, keep_losses=True)
    return step.run(STEPS, Silent())


def namespace(made: Export, name: str) -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": "exported"}
    exec(compile(made.files[name], name, "exec"), scope)
    return scope


def samples(job: Job, recipe: str) -> Any:
    return dataset(job, Recipe.parse(recipe).setup(), CPU, STEPS)


RECIPES = (
    "plain",
    "micro_batches(2) + every_layer",
    "sgd + eager + workers(n=1)",
    "adafactor + micro_batches(4)",
    "every_nth_layer(2) + adamw_fused",
)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("family", "changes", "recipe"),
    crossed(
        [("bert", {"padding": 0.25}), ("gpt2", {"clip": 0.5})],
        [*RECIPES, "adamw_8bit + expandable", "adamw_loop", "bf16_pure"],
        keep=3,
    ),
)
def test_a_torch_script_runs_as_the_plain_loop(
    tmp_path: Path, family: str, changes: dict[str, Any], recipe: str
) -> None:
    job = job_in(tmp_path / "model", family, **changes)
    script = namespace(export(job, Recipe.parse(recipe), "torch"), "train.py")
    _, losses = script["train"](samples(job, recipe), STEPS, device="cpu", shuffle=False)
    assert losses == ours(job, recipe, "plain")
    assert len(set(losses)) == STEPS


@pytest.mark.whole
@pytest.mark.parametrize(
    ("family", "recipe"),
    slow_but(
        [
            ("t5", "micro_batches(2)"),
            ("vit", "bf16_pure + sgd"),
            ("llama", "selective(every_other_product)"),
            ("bert", "fp16"),
            ("mixtral", "every_layer"),
            ("llama", "bf16 + micro_batches(2)"),
        ],
        4,
    ),
)
def test_any_family_and_precision_runs_alike(tmp_path: Path, family: str, recipe: str) -> None:
    job = job_in(tmp_path / "model", family, recipe, target_length=8, clip=1.0)
    script = namespace(export(job, Recipe.parse(recipe), "torch"), "train.py")
    _, losses = script["train"](samples(job, "plain"), STEPS, device="cpu", shuffle=False)
    assert losses == ours(job, recipe, "plain")


@pytest.mark.whole
def test_a_decoder_that_classifies_is_told_its_padding(tmp_path: Path) -> None:
    """`Model.settings` sets it too; without it transformers refuses batches of more than one."""
    job = job_in(tmp_path / "model", "gpt2", task="sequence-classification", labels=3)
    made = export(job, Recipe(), "torch")
    assert "num_labels=3" in made.files["train.py"]
    _, losses = namespace(made, "train.py")["train"](
        samples(job, "plain"), STEPS, device="cpu", shuffle=False
    )
    assert losses == ours(job, "plain", "plain")


@pytest.mark.whole
def test_decay_groups_and_uneven_labels_are_exported(tmp_path: Path) -> None:
    job = job_in(tmp_path / "model", "llama", decay_groups=True, padding=0.5)
    script = namespace(export(job, Recipe.parse("micro_batches(2)"), "torch"), "train.py")
    _, losses = script["train"](samples(job, "plain"), STEPS, device="cpu", shuffle=False)
    assert losses == ours(job, "micro_batches(2)", "plain")


@pytest.mark.whole
@pytest.mark.parametrize("recipe", slow_but(RECIPES, 2))
def test_an_accelerate_export_runs_as_our_accelerate_loop(tmp_path: Path, recipe: str) -> None:
    from accelerate.state import AcceleratorState, PartialState

    job = job_in(tmp_path / "model", clip=1.0)
    made = export(job, Recipe.parse(recipe), "accelerate")
    expected = ours(job, recipe, "accelerate")
    for state in (PartialState, AcceleratorState):
        state._reset_state()
    _, losses = namespace(made, "train.py")["train"](samples(job, recipe), STEPS, shuffle=False, cpu=True)
    assert losses == expected


@pytest.mark.parametrize("precision", ["plain", "bf16", "fp16"])
def test_accelerate_loads_the_launch_config(tmp_path: Path, precision: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    made = export(job_in(tmp_path / "model"), Recipe.parse(precision), "accelerate")
    file = tmp_path / "accelerate_config.yaml"
    file.write_text(made.files[file.name])
    config = load_config_from_file(str(file))
    assert config.mixed_precision == {"plain": "no"}.get(precision, precision)
    assert (config.num_processes, config.distributed_type.value) == (1, "NO")


def trainer_losses(made: Export, job: Job, recipe: str, folder: Path) -> list[float]:
    """Return the losses of transformers' Trainer with the exported arguments as JSON, and further arguments
    for the test.
    """
    import transformers

    arguments = json.loads(made.files["training_arguments.json"]) | {
        "output_dir": str(folder), "max_steps": STEPS, "use_cpu": True, "save_strategy": "no",
        "logging_steps": 1, "disable_tqdm": True,
    }  # fmt: skip
    scope = namespace(made, "training_arguments.py")
    losses: list[float] = []

    class Seen(transformers.Trainer):  # type: ignore[misc]
        def training_step(self, *given: Any, **keywords: Any) -> Any:
            loss = super().training_step(*given, **keywords)
            losses.append(float(loss.detach()))
            return loss

    trainer = Seen(
        model=scope["build_model"](),
        args=transformers.TrainingArguments(**arguments),
        train_dataset=samples(job, recipe),
        data_collator=collate,
    )
    trainer.train()
    pieces = Recipe.parse(recipe).setup().micro_batches
    return [sum(losses[start : start + pieces]) for start in range(0, len(losses), pieces)]


@pytest.mark.whole
@pytest.mark.usefixtures("seeded_adapters")
@pytest.mark.parametrize("recipe", slow_but([*RECIPES, "lora(r=4) + every_layer"], 2))
def test_an_hf_export_runs_as_our_trainer_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    import transformers

    job = job_in(tmp_path / "model")
    made = export(job, Recipe.parse(recipe), "hf")
    monkeypatch.setattr(
        transformers.Trainer,
        "_get_train_sampler",
        lambda self, *given: torch.utils.data.SequentialSampler(self.train_dataset),
    )
    expected = ours(job, recipe, "trainer")
    assert trainer_losses(made, job, recipe, tmp_path) == expected


@pytest.mark.whole
@pytest.mark.usefixtures("seeded_adapters")
@pytest.mark.parametrize("recipe", ["lora(r=4)", "lora(targets=all-linear) + every_layer"])
def test_adapters_are_written_without_snugfit(tmp_path: Path, recipe: str) -> None:
    job = job_in(tmp_path / "model")
    made = export(job, Recipe.parse(recipe), "torch")
    assert "import snugfit" not in made.files["train.py"]
    assert "from snugfit" not in made.files["train.py"]
    _, losses = namespace(made, "train.py")["train"](samples(job, recipe), STEPS, device="cpu", shuffle=False)
    assert losses == ours(job, recipe, "plain")


@pytest.mark.parametrize(
    ("recipe", "to", "word"),
    [
        ("segments", "hf", "segments"),
        ("segments", "torch", "segments"),
        ("segments(k=2)", "accelerate", "segments"),
        ("adafactor_torch", "hf", "adafactor_torch"),
        ("adamw_loop + bf16", "hf", "adamw_loop"),
        ("adamw_8bit(embeddings=8)", "hf", "adamw_8bit(embeddings=8)"),
        ("muon", "hf", "muon"),
        ("host_adamw", "hf", "host_adamw"),
        ("muon", "torch", "muon"),
        ("apollo", "hf", "apollo"),
        ("galore", "hf", "galore: .*galore-torch"),
        ("galore", "torch", "galore"),
        ("adamw_4bit", "hf", "adamw_4bit"),
        ("bf16_pure + adamw_stochastic", "hf", "adamw_stochastic"),
        ("bf16_pure + adamw_stochastic", "torch", "adamw_stochastic"),
    ],
)
def test_what_a_target_cannot_say_is_refused_by_name(tmp_path: Path, recipe: str, to: str, word: str) -> None:
    with pytest.raises(RecipeError, match=word.replace("(", r"\(").replace(")", r"\)")):
        export(job_in(tmp_path / "model"), Recipe.parse(recipe), to)


def test_what_the_installed_version_calls_checkpointing_is_read_from_its_source() -> None:
    import inspect

    from transformers import PreTrainedModel, TrainingArguments

    from snugfit.features.exchange import installed

    name = installed.checkpointing_name()
    assert hasattr(TrainingArguments, name)
    enable = inspect.signature(getattr(PreTrainedModel, f"{name}_enable")).parameters
    assert installed.checkpointing_options() == {"every_n_layers", "offload"} & enable.keys()


def test_an_older_transformers_is_told_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 5.17 has the old name, and no option to leave layers out."""
    from snugfit.features.exchange import installed

    monkeypatch.setattr(installed, "checkpointing_name", lambda: "gradient_checkpointing")
    monkeypatch.setattr(installed, "checkpointing_options", frozenset)
    job = job_in(tmp_path / "model")
    arguments = training_arguments(job, Recipe.parse("every_layer"))
    assert arguments["gradient_checkpointing"] is True
    assert arguments["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
    assert not [key for key in arguments if key.startswith("activation")]
    with pytest.raises(RecipeError, match="every_n_layers"):
        training_arguments(job, Recipe.parse("every_nth_layer(3)"))


@pytest.mark.parametrize("technique", roster.techniques(), ids=lambda each: each.name)
def test_what_a_technique_says_of_itself_reads_back(technique: Any, tmp_path: Path) -> None:
    """Each technique of the roster, exported to hf and read again, is the same recipe for the same job.

    A technique that casts the weights then appears beside the recipe, as the dtype that they are loaded in.
    """
    job = job_in(tmp_path / "model")
    each = next(iter(technique.settings(job)), None)
    if each is None and (technique.needs_several_gpus or technique.slot in unused_slots(job)):
        pytest.skip(f"{technique.name} has no setting that goes with {job.model.name}")
    each = each or technique(**({"parts": ("norm",)} if technique.name == "frozen" else {}))
    recipe = Recipe((each,))
    if list(each.objections(job, recipe)):
        pytest.skip(f"{each} cannot be combined with {job.model.name}")
    gpus = 4 if each.needs_several_gpus else 1
    if write_arguments(recipe)[1]:
        with pytest.raises(RecipeError):
            export(job, recipe, "hf", gpus)
        return
    file = tmp_path / "training_arguments.py"
    file.write_text(export(job, recipe, "hf", gpus).files[file.name])
    reading = read_arguments(file)
    cast = recipe.setup().weights_dtype
    assert reading.settings["dtype"] == (cast or job.dtype)
    beside = {"allocator"} | ({"precision"} if cast else set())  # set beside the call
    expected = Recipe(tuple(one for one in recipe if one.slot not in beside))
    assert reading.settings["recipe"] == str(expected)
    assert reading.settings["batch_size"] == job.batch_size
    assert reading.settings.get("gpus", 1) == gpus
    assert reading.settings["model"] == job.model.name
    assert reading.settings["task"] == job.task
    assert not reading.refused


@pytest.mark.parametrize("technique", roster.techniques(), ids=lambda each: each.name)
def test_the_trainer_s_name_of_an_optimizer_is_the_one_that_the_loop_uses(technique: Any) -> None:
    if technique.slot != "optimizer":
        return
    name = Recipe((technique(),)).setup().optimizer.trainer_name
    said = write_arguments(Recipe((technique(),)))[0].get("optim")
    assert name is None or name == said


def test_the_command_writes_files_and_never_over_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job_in(tmp_path / "model")
    line = ["export", "bf16 + micro_batches(2)", str(tmp_path / "model"), "--task", "sequence-classification"]
    line += ["--sequence-length", "16"]
    line += ["--batch-size", "8", "--to", "accelerate", "--output", str(tmp_path / "out")]
    assert run(line) == 0
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "accelerate_config.yaml",
        "train.py",
    ]
    (tmp_path / "out" / "train.py").write_text("mine")
    assert run(line) == 2
    assert "train.py" in capsys.readouterr().err
    assert (tmp_path / "out" / "train.py").read_text() == "mine"
    assert run([*line, "--force"]) == 0
    assert (tmp_path / "out" / "train.py").read_text() != "mine"


def test_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job_in(tmp_path / "model")
    line = ["export", "bf16", str(tmp_path / "model"), "--task", "sequence-classification"]
    line += ["--sequence-length", "16", "--to", "hf"]
    assert run([*line, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert json.loads(document["files"]["training_arguments.json"])["bf16"] is True
    assert run([*line[:-1], "keras"]) == 2
    assert run(line) == 0
    assert "TrainingArguments(" in capsys.readouterr().out


def test_only_training_is_exported(tmp_path: Path) -> None:
    job = job_in(tmp_path / "model", phase="evaluate")
    for target in TARGETS:
        with pytest.raises(UsageError, match="is for training"):
            export(job, Recipe(), target)


def test_exports_are_valid_against_the_schema() -> None:
    """`snugfit schema` describes each key of `export` and of `check`."""
    exported = Export(to="trl", files={"sft.py": "import trl\n"}, note="without packing")
    fix = Fix(set={"bf16": True}, remove=("fp16",), rename={"old": "new"})
    finding = Finding(kind="conflict", keys=("fp16",), says="the GPU supports bfloat16", fix=fix)
    checked = Checked(path="a.yaml", kind="TrainingArguments", findings=(finding,), unread=("x=y",))
    hold_to_schema(Exchange().documents(), [("export --json", exported), ("check --json", checked)])
