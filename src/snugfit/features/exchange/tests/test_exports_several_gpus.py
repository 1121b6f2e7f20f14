"""Exports for several GPUs: their libraries train with them in two CPU processes, and they are read back.

Their losses are those of one process with the whole batch. Read back, they are the same recipe for as many
GPUs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_exchange_export import job_in, namespace, ours, samples

import exported_processes
from clean_forks import forks_of
from exported_processes import STEPS, one_rank
from in_roster import needs_techniques
from many_ranks import free_port
from snugfit.cli.main import run
from snugfit.errors import RecipeError, UsageError
from snugfit.features.exchange.check import check
from snugfit.features.exchange.export import Export, export
from snugfit.features.exchange.read import read_arguments
from snugfit.job.job import Job
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot
from tiers import few_of, slow_but

PROCESSES = Path(exported_processes.__file__)
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node")
TIME_LIMIT = 400
"""Seconds after which processes that wait for each other count as deadlocked."""


def written(job: Job, recipe: str, to: str, gpus: int, folder: Path) -> Path:
    """Return the folder with the files of an export and the samples that its processes train on."""
    folder.mkdir(parents=True)
    for name, text in export(job, Recipe.parse(recipe), to, gpus).files.items():
        (folder / name).write_text(text)
    data = samples(job, recipe)
    torch.save([data[index] for index in range(job.batch_size * STEPS)], folder / "samples.pt")
    return folder


def forked(size: int, folders: Sequence[Path], variables: Mapping[str, str] | None = None) -> None:
    """Train by each folder's script in `size` processes, with the environment variables that a launcher
    sets.
    """
    forks, port, names = forks_of("many_fits"), free_port(), [*map(str, folders)]
    environment = {**os.environ, **(variables or {})}
    children = [
        forks.start(one_rank, rank, size, port, names, environment=environment) for rank in range(size)
    ]
    failed = [rank for rank, child in enumerate(children) if forks.ended(child, TIME_LIMIT)]
    assert not failed, "\n".join((folders[0] / f"said{rank}").read_text() for rank in failed)


def losses_of(folder: Path) -> list[float]:
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    return losses


def alone(job: Job, recipe: str) -> list[float]:
    """Return the losses of one process's plain loop with the whole batch, without techniques for several
    GPUs."""
    one = Recipe(tuple(each for each in Recipe.parse(recipe) if each.slot is not Slot.SHARDING))
    return ours(job, str(one), "plain")


def started(*command: str) -> None:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu",
        "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def run_all(
    tmp_path: Path, to: str, gpus: int, cases: Sequence[tuple[str, str]], *, by_torchrun: bool = False
) -> None:
    """Export and train these recipes, each with its model family, in one start of the processes."""
    jobs = {
        family: job_in(tmp_path / family, family, batch_size=8, clip=1.0, padding=0.4) for family, _ in cases
    }
    folders = [
        written(jobs[family], recipe, to, gpus, tmp_path / str(number))
        for number, (family, recipe) in enumerate(cases)
    ]
    if by_torchrun:
        started(*TORCHRUN, str(gpus), str(PROCESSES), *map(str, folders))
    else:
        forked(gpus, folders)
    for folder, (family, recipe) in zip(folders, cases, strict=True):
        expected = alone(jobs[family], recipe)
        assert len(set(expected)) == STEPS
        assert losses_of(folder) == pytest.approx(expected, rel=1e-5), recipe


@pytest.mark.whole
@pytest.mark.parametrize("by_torchrun", slow_but([False, True], 1))
def test_a_torch_script_on_two_processes_has_the_losses_of_one(tmp_path: Path, by_torchrun: bool) -> None:
    """Forks have the variables that torchrun sets (`exported_processes.one_rank`)."""
    cases = [
        ("bert", "ddp"),
        ("llama", "ddp(bucket_views=true) + micro_batches(2)"),
        ("llama", "fsdp + every_layer + micro_batches(2)"),
        ("bert", "fsdp(reshard=all, offload=cpu)"),
        ("llama", "zero1 + micro_batches(2)"),
        ("bert", "hsdp(2, reshard=none) + sgd"),
    ]
    cases = few_of(cases, [cases[1], cases[3], cases[5]])
    run_all(tmp_path, "torch", 2, cases, by_torchrun=by_torchrun)


@pytest.mark.slow
@pytest.mark.whole
def test_copies_of_shards_on_four_processes(tmp_path: Path) -> None:
    run_all(tmp_path, "torch", 4, [("llama", "hsdp(2) + micro_batches(2)"), ("bert", "hsdp(2)")])


@pytest.mark.slow
def test_deepspeed_trains_by_its_file_on_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    cases = [("llama", "zero2(offload=none) + micro_batches(2)"), ("bert", "zero3(offload=none)")]
    run_all(tmp_path, "deepspeed", 2, cases)


BY_ACCELERATE = ["fsdp + micro_batches(2) + every_layer", "ddp(bucket_views=true) + micro_batches(2)"]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("recipe", "launches"),
    slow_but([(BY_ACCELERATE[0], False), *((recipe, True) for recipe in BY_ACCELERATE)], 1),
)
def test_accelerate_launch_trains_by_its_file(tmp_path: Path, recipe: str, launches: bool) -> None:
    """The model is BERT: transformers forbids splitting its embeddings, and accelerate cannot group those.

    Forks have the variables that `accelerate launch` sets.
    """
    job = job_in(tmp_path / "model", batch_size=8, clip=1.0)
    folder = written(job, recipe, "accelerate", 2, tmp_path / "case")
    config = folder / "accelerate_config.yaml"
    if launches:
        words = ("--config_file", str(config), str(PROCESSES), str(folder))
        started("-m", "accelerate.commands.launch", *words)
    else:
        forked(2, [folder], variables_of_launch(config))
    assert losses_of(folder) == pytest.approx(alone(job, recipe), rel=1e-5)


def variables_of_launch(config: Path) -> dict[str, str]:
    """Return the variables that `accelerate launch` sets by this file."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    words = ["--config_file", str(config), "train.py"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    variables: dict[str, str] = prepare_multi_gpu_env(arguments)
    return variables


@pytest.mark.whole
def test_the_trainer_trains_by_its_arguments(tmp_path: Path) -> None:
    """BERT's loss is not divided by the number of labels, but is still the mean."""
    cases = [
        ("llama", "ddp + micro_batches(2)"),
        ("llama", "fsdp + every_layer"),
        ("bert", "fsdp(reshard=none)"),
    ]
    cases = few_of(cases, cases[1:2])
    if _has_deepspeed():
        with_zero = ("bert", "zero2(offload=none)")
        cases += few_of([with_zero], [with_zero])
    folders, expected = [], []
    for number, (family, recipe) in enumerate(cases):
        job = job_in(tmp_path / family, family, batch_size=8, clip=1.0)
        folders.append(written(job, recipe, "hf", 2, tmp_path / str(number)))
        expected.append(alone(job, recipe))
    forked(2, folders)
    for folder, losses in zip(folders, expected, strict=True):
        assert losses_of(folder) == pytest.approx(losses, rel=1e-4)


def _has_deepspeed() -> bool:
    from importlib.util import find_spec

    return find_spec("deepspeed") is not None


# ---- written files -----------------------------------------------------------------------------------------


def made(tmp_path: Path, recipe: str, to: str, gpus: int, **changes: Any) -> Export:
    return export(job_in(tmp_path / "model", batch_size=8, **changes), Recipe.parse(recipe), to, gpus)


def test_the_global_batch_is_kept(tmp_path: Path) -> None:
    arguments = json.loads(made(tmp_path, "ddp + micro_batches(2)", "hf", 2).files["training_arguments.json"])
    assert (arguments["per_device_train_batch_size"], arguments["gradient_accumulation_steps"]) == (2, 2)
    config = json.loads(made(tmp_path, "zero3 + micro_batches(2)", "deepspeed", 4).files["ds_config.json"])
    assert config["train_batch_size"] == 8
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (1, 2)
    with pytest.raises(UsageError, match=r"cannot be shared evenly by 3 GPUs\. Try 6 or 9"):
        made(tmp_path, "ddp", "torch", 3)


@pytest.mark.parametrize(
    ("recipe", "to", "gpus", "says"),
    [
        ("ddp(bucket_views=true)", "hf", 2, r"ddp\(bucket_views=true\): TrainingArguments"),
        ("zero1", "hf", 2, "zero1: TrainingArguments"),
        ("zero1", "accelerate", 2, "zero1 cannot be exported: accelerate"),
        ("fsdp(reshard=all)", "hf", 2, r"fsdp\(reshard=all\): TrainingArguments"),
        ("fsdp(reshard=all)", "accelerate", 2, r"fsdp\(reshard=all\) cannot be exported: accelerate"),
        ("fsdp", "deepspeed", 2, "fsdp cannot be exported: its steps"),
        ("bf16", "deepspeed", 1, "unsharded cannot be exported: its steps"),
        ("zero2", "torch", 2, r"zero2 cannot be exported.*--export hf or deepspeed"),
        ("zero2 + qlora", "hf", 2, "zero2 cannot be exported: 4-bit weights under DeepSpeed's engine"),
    ],
)
def test_what_a_target_cannot_do_is_refused_by_name(
    tmp_path: Path, recipe: str, to: str, gpus: int, says: str
) -> None:
    with pytest.raises(RecipeError, match=says):
        made(tmp_path, recipe, to, gpus)


def test_tools_that_fine_tune_take_one_gpu(tmp_path: Path) -> None:
    job = job_in(tmp_path / "model", "llama", batch_size=8)
    with pytest.raises(RecipeError, match="ddp cannot be exported to trl"):
        export(job, Recipe.parse("ddp"), "trl", 2)


@pytest.mark.parametrize(("recipe", "gpus"), [("ddp", 1), ("bf16", 2), ("hsdp(4)", 2)])
def test_the_number_of_gpus_is_one_that_the_recipe_takes(tmp_path: Path, recipe: str, gpus: int) -> None:
    with pytest.raises(UsageError):
        made(tmp_path, recipe, "torch", gpus)


def test_where_accelerate_s_fsdp_is_another_it_says_so(tmp_path: Path) -> None:
    for to, name in (("hf", "training_arguments.py"), ("accelerate", "train.py")):
        one = made(tmp_path, "bf16 + fsdp", to, 2)
        assert "sums gradients in bf16" in one.note
        assert "group of its own" in " ".join(one.files[name].split())
    assert not made(tmp_path, "bf16 + fsdp", "torch", 2).note
    assert "reduce_dtype=torch.float32" in made(tmp_path, "bf16 + fsdp", "torch", 2).files["train.py"]


def test_a_loss_that_the_trainer_would_count_per_gpu_is_not(tmp_path: Path) -> None:
    """T5 averages over its own labels; Llama divides by those of the whole batch."""
    means = made(tmp_path, "ddp", "hf", 2, family="t5", target_length=8)
    assert "means of the GPUs then count alike" in means.note
    assert json.loads(means.files["training_arguments.json"])["average_tokens_across_devices"] is False
    whole = export(job_in(tmp_path / "llama", "llama", batch_size=8), Recipe.parse("ddp"), "hf", 2)
    assert not whole.note
    assert "average_tokens_across_devices" not in whole.files["training_arguments.json"]


def test_training_arguments_take_what_is_written(tmp_path: Path) -> None:
    """The cases are FSDP2, with layers as groups, and a mesh of accelerate's own class."""
    from transformers import TrainingArguments

    arguments = json.loads(
        made(tmp_path, "fsdp(reshard=none) + bf16", "hf", 2).files["training_arguments.json"]
    )
    plugin = TrainingArguments(**arguments | {"output_dir": str(tmp_path), "bf16": False}).fsdp_plugin_args
    assert (plugin["fsdp_version"], plugin["reshard_after_forward"]) == (2, False)
    assert plugin["transformer_cls_names_to_wrap"] == "BertLayer"
    mesh = made(tmp_path, "hsdp(2)", "hf", 4)
    assert list(mesh.files) == ["training_arguments.py"]  # a mesh has no JSON value
    assert "ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)" in mesh.files["training_arguments.py"]


def test_accelerate_loads_the_mesh(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    file = tmp_path / "accelerate_config.yaml"
    file.write_text(made(tmp_path, "hsdp(2) + bf16", "accelerate", 4).files[file.name])
    assert load_config_from_file(str(file)).num_processes == 4
    told = variables_of_launch(file)
    assert (told["FSDP_VERSION"], told["FSDP_RESHARD_AFTER_FORWARD"], told["FSDP_OFFLOAD_PARAMS"]) == (
        "2",
        "true",
        "false",
    )
    assert (told["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"], told["PARALLELISM_CONFIG_DP_SHARD_SIZE"]) == (
        "2",
        "2",
    )
    assert told["ACCELERATE_MIXED_PRECISION"] == "bf16"


# ---- and read back ---------------------------------------------------------------------------------------

FILES = {"hf": "training_arguments.py", "accelerate": "accelerate_config.yaml", "deepspeed": "ds_config.json"}


@pytest.mark.parametrize(
    ("recipe", "gpus", "to"),
    [
        ("bf16 + micro_batches(2) + ddp", 4, "hf"),
        ("fsdp", 2, "hf"),
        ("bf16 + fsdp(reshard=none, offload=cpu)", 2, "hf"),
        ("micro_batches(2) + hsdp(2)", 4, "hf"),
        ("bf16 + zero2(offload=none)", 2, "hf"),
        ("zero3", 4, "hf"),
        ("zero2(offload=none, bucket=2000000)", 2, "hf"),
        ("bf16 + ddp", 8, "accelerate"),
        ("bf16 + fsdp(reshard=none)", 2, "accelerate"),
        ("fsdp(offload=cpu)", 2, "accelerate"),
        ("hsdp(2)", 4, "accelerate"),
        ("bf16 + micro_batches(2) + zero2(offload=none)", 2, "deepspeed"),
        ("zero3", 4, "deepspeed"),
    ],
)
def test_an_export_reads_back(tmp_path: Path, recipe: str, gpus: int, to: str) -> None:
    file = tmp_path / FILES[to]
    file.write_text(made(tmp_path, recipe, to, gpus).files[file.name])
    reading = read_arguments(file)
    assert not reading.refused
    # DeepSpeed alone knows no `auto`, so its file has the number that is the default.
    read_back = reading.settings["recipe"]
    if to == "deepspeed":
        read_back = re.sub(r", bucket=\d+|\(bucket=\d+\)", "", read_back)
    assert (read_back, reading.settings["gpus"]) == (recipe, gpus)
    assert reading.settings.get("batch_size", 8) == 8
    assert not check(file).findings


def test_an_exported_script_of_accelerate_sends_to_its_file(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(made(tmp_path, "fsdp", "accelerate", 2).files[file.name])
    assert any("accelerate launch" in line.says for line in read_arguments(file).refused)


def read(tmp_path: Path, name: str, content: Any, gpus: int | None = None) -> Any:
    file = tmp_path / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_arguments(file, gpus=gpus)


FSDP = {"per_device_train_batch_size": 2, "fsdp": "shard_grad_op auto_wrap", "optim": "adamw_torch"}


def test_the_trainer_s_processes_are_named_beside_its_arguments(tmp_path: Path) -> None:
    unsaid = read(tmp_path, "arguments.json", FSDP)
    assert {(line.key, line.instead) for line in unsaid.refused} == {("fsdp", "gpus")}
    unsaid.refuse({"gpus": 4})
    told = read(tmp_path, "arguments.json", FSDP, gpus=4)
    assert (told.settings["recipe"], told.settings["gpus"], told.settings["batch_size"]) == (
        "fsdp(reshard=none)",
        4,
        8,
    )
    plain = {key: value for key, value in FSDP.items() if key != "fsdp"}
    assert read(tmp_path, "arguments.json", plain, gpus=2).settings["recipe"] == "ddp"
    assert "gpus" not in read(tmp_path, "arguments.json", plain).settings


CONFIG = "distributed_type: FSDP\nnum_processes: 4\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"


@pytest.mark.parametrize(
    ("name", "content", "key"),
    [
        ("a.yaml", CONFIG + "  fsdp_auto_wrap_policy: SIZE_BASED_WRAP", "fsdp_config.fsdp_auto_wrap_policy"),
        ("a.yaml", CONFIG + "  fsdp_reshard_after_forward: FULL_SHARD",
         "fsdp_config.fsdp_reshard_after_forward"),
        ("a.yaml", CONFIG + "  fsdp_forward_prefetch: true", "fsdp_config.fsdp_forward_prefetch"),
        ("a.yaml", CONFIG + "parallelism_config:\n  parallelism_config_tp_size: 2",
         "parallelism_config.parallelism_config_tp_size"),
        ("a.yaml", CONFIG + "parallelism_config:\n  parallelism_config_dp_shard_size: 2",
         "parallelism_config.parallelism_config_dp_shard_size"),
        ("a.yaml", CONFIG.replace("4", "1"), "distributed_type"),
        ("a.yaml", "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 0}",
         "distributed_type"),
        ("a.json", {**FSDP, "fsdp": "hybrid_shard"}, "fsdp"),
        ("a.json", {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4,
                    "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 1}},
         "zero_optimization.stage"),
    ],
)  # fmt: skip
def test_what_of_several_processes_is_not_predicted_is_refused(
    tmp_path: Path, name: str, content: Any, key: str
) -> None:
    named = 4 if name == "a.json" and "fsdp" in content else None
    reading = read(tmp_path, name, content, named)
    assert key in {line.key for line in reading.refused}
    is_about_their_number = content == CONFIG.replace("4", "1")
    with pytest.raises(UsageError, match=re.escape(key)):
        reading.refuse({} if is_about_their_number else {"gpus": 4})


def test_exchanges_overlap_on_several_gpus_alone(tmp_path: Path) -> None:
    arguments = json.loads(made(tmp_path, "zero3", "hf", 2).files["training_arguments.json"])
    arguments["deepspeed"]["zero_optimization"]["overlap_comm"] = True
    assert not read(tmp_path, "arguments.json", arguments, 2).refused
    (refused,) = read(tmp_path, "arguments.json", arguments).refused
    assert refused.key == "deepspeed.zero_optimization.overlap_comm"


def test_deepspeed_s_batches_say_how_many_gpus_there_are(tmp_path: Path) -> None:
    batch = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    reading = read(tmp_path, "ds.json", {**batch, "zero_optimization": {"stage": 2}})
    assert (reading.settings["gpus"], reading.settings["batch_size"]) == (4, 16)
    assert reading.settings["recipe"] == "micro_batches(2) + zero2(offload=none, bucket=500000000)"
    alone = read(tmp_path, "ds.json", {"zero_optimization": {"stage": 2}})
    assert any("on one GPU" in line.says for line in alone.differs)
    assert alone.settings["recipe"] == "plain"


LAUNCHED = "{} train.py --model_name_or_path gpt2 --per_device_train_batch_size 2 --optim adamw_torch {}"


@pytest.mark.parametrize(
    ("command", "more", "recipe", "gpus"),
    [
        ("torchrun --nproc_per_node=4", "", "ddp", 4),
        ("python -m torch.distributed.run --nproc-per-node 2", "--fsdp 'full_shard auto_wrap'", "fsdp", 2),
        ("accelerate launch --num_processes 2 --use_fsdp --fsdp_version 2", "", "fsdp", 2),
        ("accelerate launch --multi_gpu --num_processes 2", "", "ddp", 2),
        ("torchrun --nproc_per_node=1", "", "plain", 1),
    ],
)
def test_a_launcher_says_how_they_train_together(
    tmp_path: Path, command: str, more: str, recipe: str, gpus: int
) -> None:
    reading = read(tmp_path, "run.sh", LAUNCHED.format(command, more))
    assert not reading.refused
    assert (reading.settings["recipe"], reading.settings.get("gpus", 1)) == (recipe, gpus)
    assert reading.settings["batch_size"] == 2 * gpus


def test_a_launcher_that_counts_when_it_starts_is_asked_for_the_number(tmp_path: Path) -> None:
    needs_techniques("ddp")
    command = LAUNCHED.format("torchrun --nproc_per_node=gpu", "")
    assert {line.instead for line in read(tmp_path, "run.sh", command).refused} == {"gpus"}
    assert not read(tmp_path, "run.sh", command, gpus=2).refused


@pytest.mark.parametrize(
    ("more", "kind", "key"),
    [
        ("  fsdp_reshard_after_forward: FULL_SHARD", "conflict", "fsdp_config.fsdp_reshard_after_forward"),
        ("  fsdp_forward_prefetch: true", "conflict", "fsdp_config.fsdp_forward_prefetch"),
        ("parallelism_config: {parallelism_config_dp_shard_size: 2}", "conflict",
         "parallelism_config.parallelism_config_dp_shard_size"),
    ],
)  # fmt: skip
def test_what_accelerate_refuses_is_found(tmp_path: Path, more: str, kind: str, key: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(CONFIG + more)
    (finding,) = check(file).findings
    assert (finding.kind, finding.keys) == (kind, (key,))


def test_fsdp_of_old_is_found(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(CONFIG.replace("fsdp_version: 2", "fsdp_offload_params: false"))
    assert [(one.kind, one.keys) for one in check(file).findings] == [("trap", ("fsdp_config.fsdp_version",))]


# ---- the command -----------------------------------------------------------------------------------------


def test_the_command_takes_gpus_and_a_job_file_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job_in(tmp_path / "model")
    (tmp_path / "job.yaml").write_text(
        f"model: {tmp_path / 'model'}\ntask: sequence-classification\nsequence_length: 16\n"
        "batch_size: 8\ngpus: 2\n"
    )
    line = ["export", "ddp", "--job", str(tmp_path / "job.yaml"), "--to", "torch"]
    assert run(line) == 0
    assert "GPUS = 2" in capsys.readouterr().out
    assert run([*line, "--gpus", "4"]) == 0
    assert "GPUS = 4" in capsys.readouterr().out
    assert run([*line, "--gpus", "1"]) == 2
    assert "Add --gpus 2" in capsys.readouterr().err


@pytest.mark.slow
def test_a_prediction_is_exported_for_as_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job_in(tmp_path / "model")
    line = [
        "predict",
        str(tmp_path / "model"),
        "--task",
        "sequence-classification",
        "--sequence-length",
        "16",
    ]
    line += ["--batch-size", "8", "--gpu", "h200", "--gpus", "2", "--recipe", "fsdp"]
    assert run([*line, "--export", "accelerate", str(tmp_path / "out")]) == 0
    assert "num_processes: 2" in (tmp_path / "out" / "accelerate_config.yaml").read_text()
    assert "group of its own" in capsys.readouterr().err


def test_the_exported_script_refuses_another_number_of_processes(tmp_path: Path) -> None:
    script = namespace(made(tmp_path, "ddp", "torch", 2), "train.py")
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.HashStore(),
        rank=0,
        world_size=1,  # type: ignore[attr-defined]
    )
    try:
        with pytest.raises(SystemExit, match="for 2 processes, but 1 were started"):
            script["join"]("cpu")
    finally:
        torch.distributed.destroy_process_group()
