"""`snugfit train` with DeepSpeed's engine.

It has the losses and weights of one process without the engine. Its checkpoints have each weight by name. The
runs use the CPU and gloo, as in `test_train_many.py`.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_many import equal, is_one_of_two_killed, steps_told, until

from clean_forks import Forks, forks_of
from deepspeed_here import compiles, with_deepspeed
from many_ranks import LAST, fault_told, run_of, start, trained, weights_in
from small_runs import events, losses
from snugfit.errors import UsageError
from snugfit.features.distributed.techniques import deepspeed_zero
from snugfit.training.checkpoint.manifest import verify
from snugfit.training.checkpoint.store import Store
from tiers import slow_but
from tolerance import ROUNDS, SAME, same_losses, same_parameters

pytestmark = [
    pytest.mark.whole,
    with_deepspeed,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
]

ZERO2, ZERO3 = "zero2(offload=none)", "zero3(offload=none)"


@pytest.fixture(scope="module")
def forks() -> Forks:
    return forks_of("zero_ranks_warm")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that trains a model in one process without an engine, and returns the run's
    folder.
    """
    root = tmp_path_factory.mktemp("alone")

    @functools.cache
    def run(job: str) -> Path:
        run_of(str(root / job), job=job, eval_strategy="steps", eval_steps=4)
        return root / job

    return run


@pytest.fixture(scope="module")
def half_of(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Return a function that gives the folder of a recipe's run in this many processes.

    The run has no dropout and stopped after step 3.
    """
    root = tmp_path_factory.mktemp("halves")

    @functools.cache
    def half(recipe: str, size: int) -> Path:
        folder = root / f"{size}-{recipe}"
        how: dict[str, Any] = {"max_steps": 3, "lr_scheduler_type": "constant"}
        ran(forks, folder, size, recipe=recipe, **how)
        return folder

    return half


def ran(forks: Forks, folder: Path, size: int, **how: Any) -> None:
    """Train the run in `folder` to its end in `size` processes."""
    assert trained(forks, folder, size, **how) == [0] * size


CASES = [
    (ZERO2, 2, "bert"), (f"{ZERO3} + micro_batches(2)", 2, "gpt2"), (ZERO3, 2, "bert"),
    (f"{ZERO2} + micro_batches(2)", 2, "gpt2"), (ZERO3, 1, "bert"), (ZERO2, 1, "gpt2"),
    (f"{ZERO3} + every_layer", 4, "gpt2"), (f"{ZERO2} + adamw_fused", 2, "bert"), (ZERO2, 4, "bert"),
    (f"{ZERO3} + micro_batches(4)", 2, "bert"), (f"{ZERO2} + micro_batches(2)", 1, "bert"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "size", "job"), slow_but(CASES, CASES[1:2].__contains__))
def test_as_one_process_without_an_engine(
    tmp_path: Path, forks: Forks, alone: Callable[[str], Path], recipe: str, size: int, job: str
) -> None:
    """Losses, norms, evaluations and weights equal those of one process.

    Samples are padded unevenly. The last batch of an epoch has one sample, so that some processes have
    none.
    """
    how: dict[str, Any] = {"recipe": recipe, "job": job, "eval_strategy": "steps", "eval_steps": 4}
    ran(forks, tmp_path / "run", size, **how)
    both = (tmp_path / "run", alone(job))
    ours, theirs = (losses(at) for at in both)
    assert list(ours) == list(theirs) == list(range(1, LAST + 1))
    for column in range(3):
        same_losses([row[column] for row in ours.values()], [row[column] for row in theirs.values()])
    for kind, name in (("step", "samples"), ("step", "tokens")):
        assert len({json.dumps([event[name] for event in events(at, kind)]) for at in both}) == 1
    same_losses(*([event["loss"] for event in events(at, "evaluated")] for at in both))
    same_parameters(*(weights_in(at, LAST) for at in both))


@pytest.mark.parametrize("recipe", slow_but([f"bf16 + {ZERO3}", f"bf16 + {ZERO2}"], 1))
def test_in_bf16_it_begins_with_the_weights_in_fp32(
    tmp_path: Path, forks: Forks, alone: Callable[[str], Path], recipe: str
) -> None:
    """The engine would round the weights to its compute dtype. After a few small steps, the rounding error
    still exceeds the updates."""
    from transformers import AutoModelForSequenceClassification

    ran(forks, tmp_path / "run", 2, recipe=recipe)
    both = (tmp_path / "run", alone("bert"))
    same_losses(*([row[0] for row in losses(at).values()] for at in both), ROUNDS)
    ours, theirs = (weights_in(at, LAST) for at in both)
    assert all(value.dtype == torch.float32 for value in ours.values())
    for name, value in ours.items():
        assert (value - theirs[name]).abs().max() < LAST * 1e-4, name
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / f"checkpoint-{LAST}")
    assert loaded.dtype == torch.float32
    same_parameters(dict(loaded.state_dict()), ours)


@pytest.mark.parametrize(
    ("recipe", "adapters"),
    slow_but(
        [(ZERO2, "lora(r=4)"), (ZERO3, "lora(r=4)"), (ZERO2, "qlora(r=4)"), (ZERO3, "qlora(r=4)")],
        lambda case: case == (ZERO3, "qlora(r=4)"),
    ),
)
def test_adapters_are_whole_in_each_checkpoint(
    tmp_path: Path, forks: Forks, recipe: str, adapters: str
) -> None:
    """A run with adapters resumes bit for bit, and in one process without the engine up to rounding."""
    how: dict[str, Any] = {"job": "llama", "layers": 1, "lr_scheduler_type": "constant"}
    run_of(str(tmp_path / "alone"), recipe=adapters, **how)
    ran(forks, tmp_path / "whole", 2, recipe=f"{recipe} + {adapters}", **how)
    ran(forks, tmp_path / "half", 2, recipe=f"{recipe} + {adapters}", max_steps=3, **how)
    assert (tmp_path / "half" / "checkpoint-3" / "adapter_model.safetensors").is_file()
    shutil.copytree(tmp_path / "half", tmp_path / "moved")
    ran(forks, tmp_path / "half", 2, recipe=f"{recipe} + {adapters}", **how)
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")
    assert equal(weights_in(tmp_path / "half", LAST), weights_in(tmp_path / "whole", LAST))
    assert run_of(str(tmp_path / "moved"), recipe=adapters, **how).exit_code == 0
    for name in ("whole", "moved"):
        same_losses(*([row[0] for row in losses(tmp_path / at).values()] for at in (name, "alone")))
        same_parameters(weights_in(tmp_path / name, LAST), weights_in(tmp_path / "alone", LAST))


def test_adapters_train_in_fp32_beside_weights_in_bf16(tmp_path: Path, forks: Forks) -> None:
    """The engine casts adapters to bf16, and updates the fp32 values that they had before."""
    how: dict[str, Any] = {"job": "llama", "layers": 1, "dtype": "bfloat16"}
    run_of(str(tmp_path / "alone"), recipe="bf16 + lora(r=4)", **how)
    ran(forks, tmp_path / "run", 2, recipe=f"bf16 + {ZERO2} + lora(r=4)", **how)
    both = (tmp_path / "run", tmp_path / "alone")
    same_losses(*([row[0] for row in losses(at).values()] for at in both), ROUNDS)
    ours, theirs = (weights_in(at, LAST) for at in both)
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype == torch.float32
        assert (value - theirs[name]).abs().max() < LAST * 1e-4, name


@pytest.fixture(scope="module")
def cpu_adam() -> None:
    """Compile DeepSpeed's Adam for the host in this process. Two processes that compile at once would wait
    for each other and exceed the time limit."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load()


@compiles
@pytest.mark.slow
@pytest.mark.usefixtures("cpu_adam")
@pytest.mark.parametrize("recipe", ["zero2", "bf16 + zero3"])
def test_with_states_on_the_host(
    tmp_path: Path, forks: Forks, alone: Callable[[str], Path], recipe: str
) -> None:
    """Losses and weights equal those of one process, and a resumed run is equal bit for bit."""
    ran(forks, tmp_path / "run", 2, recipe=recipe)
    both = (tmp_path / "run", alone("bert"))
    same_losses(
        *([row[0] for row in losses(at).values()] for at in both), ROUNDS if "bf16" in recipe else SAME
    )
    if "bf16" not in recipe:
        same_parameters(*(weights_in(at, LAST) for at in both))
    how: dict[str, Any] = {"recipe": recipe, "dropout": True, "layers": 1, "lr_scheduler_type": "constant"}
    ran(forks, tmp_path / "whole", 2, **how)
    ran(forks, tmp_path / "half", 2, max_steps=3, **how)
    ran(forks, tmp_path / "half", 2, **how)
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")
    assert equal(weights_in(tmp_path / "half", LAST), weights_in(tmp_path / "whole", LAST))
    assert not events(tmp_path / "half", "warning")


@compiles
@pytest.mark.slow
@pytest.mark.usefixtures("cpu_adam")
@pytest.mark.parametrize(("before", "after"), [("zero3", ZERO2), ("ddp", "zero2"), (ZERO3, "zero3")])
def test_states_go_to_the_host_and_back(
    tmp_path: Path, forks: Forks, half_of: Callable[[str, int], Path], before: str, after: str
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "run"
    run_of(str(whole), lr_scheduler_type="constant")
    shutil.copytree(half_of(before, 2), folder)
    ran(forks, folder, 2, recipe=after, lr_scheduler_type="constant")
    same_losses(*([row[0] for row in losses(at).values()] for at in (folder, whole)))
    same_parameters(weights_in(folder, LAST), weights_in(whole, LAST))


AGAIN = [
    (f"bf16 + {ZERO2}", 2, "bert"), (f"{ZERO3} + micro_batches(2)", 2, "bert"),
    (f"bf16 + {ZERO3}", 2, "gpt2"), (ZERO2, 1, "bert"),
    (f"bf16 + {ZERO3}", 1, "bert"), (f"{ZERO2} + micro_batches(2)", 4, "gpt2"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "size", "job"), slow_but(AGAIN, 0))
def test_resumed_on_as_many_it_is_the_same_run(
    tmp_path: Path, forks: Forks, recipe: str, size: int, job: str
) -> None:
    """The runs are equal bit for bit. Each part of the batch draws its dropout from a stream of its own.

    Further tests resume runs whose process died.
    """
    how: dict[str, Any] = {"recipe": recipe, "dropout": True, "layers": 1, "lr_scheduler_type": "constant"}
    how["job"] = job
    ran(forks, tmp_path / "whole", size, **how)
    ran(forks, tmp_path / "half", size, max_steps=3, **how)
    ran(forks, tmp_path / "half", size, **how)
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")
    assert equal(weights_in(tmp_path / "half", LAST), weights_in(tmp_path / "whole", LAST))
    assert not events(tmp_path / "half", "warning")


OTHERS = [
    (ZERO3, 2, "fsdp", 2), ("ddp", 2, ZERO2, 2), (ZERO2, 2, "plain", 1), (ZERO2, 2, ZERO3, 4),
    ("plain", 1, ZERO3, 2), (ZERO3, 2, ZERO2, 1), (ZERO2, 2, "ddp", 2), ("fsdp", 2, ZERO3, 2),
    (ZERO3, 2, "zero1", 2), ("zero1", 2, ZERO2, 4), (ZERO2, 1, "plain", 1), ("plain", 1, ZERO2, 1),
]  # fmt: skip


@pytest.mark.parametrize(("before", "were", "after", "size"), slow_but(OTHERS, OTHERS[2:3].__contains__))
def test_resumed_on_others_it_has_the_same_numbers(
    tmp_path: Path,
    forks: Forks,
    half_of: Callable[[str, int], Path],
    before: str,
    were: int,
    after: str,
    size: int,
) -> None:
    """Another number of processes loads weights and optimizer states, with or without an engine. Without
    dropout the run ends with the same weights."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    how: dict[str, Any] = {"lr_scheduler_type": "constant"}
    run_of(str(whole), **how)
    shutil.copytree(half_of(before, were), folder)
    ran(forks, folder, size, recipe=after, **how)
    same_losses(*([row[0] for row in losses(at).values()] for at in (folder, whole)))
    same_parameters(weights_in(folder, LAST), weights_in(whole, LAST))
    said = [event["text"] for event in events(folder, "warning")]
    assert any("no longer bit for bit" in text for text in said)


def test_each_process_writes_some_of_the_weights_whole(tmp_path: Path, forks: Forks) -> None:
    """The files hold weights in fp32 with their moments, by name, and nothing of DeepSpeed's own."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    ran(forks, tmp_path / "run", 2, recipe=f"bf16 + {ZERO3}", layers=1, max_steps=2, save_steps=1)
    folder = tmp_path / "run" / "checkpoint-1"
    written = FileSystemReader(folder / "shards").read_metadata()
    files = {index.fqn: place.relative_path for index, place in written.storage_data.items()}
    weights = {name.removeprefix("model."): file for name, file in files.items() if name[:6] == "model."}
    assert set(weights.values()) == {"__0_0.distcp", "__1_0.distcp"}
    moments = {name: files.pop(f"optimizer.{name}/exp_avg") for name in weights}
    assert moments == {name: files.pop(f"optimizer.{name}/exp_avg_sq") for name in weights} == weights
    assert len(files) == len(weights), "step counts are beside them"
    known: Any = written.state_dict_metadata
    assert {part.properties.dtype for part in known.values()} == {torch.float32}
    whole = weights_in(tmp_path / "run", 2)
    assert {name: tuple(known[f"model.{name}"].size) for name in weights} == {
        name: tuple(value.shape) for name, value in whole.items()
    }
    sizes = [
        sum(whole[name].numel() for name, file in weights.items() if file == one)
        for one in set(weights.values())
    ]
    assert max(sizes) < 1.1 * min(sizes)
    beside = load_file(folder / "state.safetensors").values()
    assert all(value.dim() == 0 or value.dtype == torch.uint8 for value in beside)
    assert {path.name for path in folder.iterdir()} == {
        "manifest.json", "model_state.json", "model_state.safetensors", "shards", "state.json",
        "state.safetensors",
    }  # fmt: skip
    assert '"ds_' not in (folder / "model_state.json").read_text()


# ---- ends ------------------------------------------------------------------------------------------------

KILLS = 2
"""Number of times that a run is killed in each test."""


@pytest.mark.parametrize(
    ("recipe", "seed"), slow_but([(ZERO2, 1), (f"bf16 + {ZERO3}", 0), (ZERO3, 2), (f"bf16 + {ZERO2}", 3)], 0)
)
def test_a_killed_process_ends_all_and_nothing_is_lost(
    tmp_path: Path, forks: Forks, recipe: str, seed: int
) -> None:
    """SIGKILL hits one process at seeded moments, mostly within a write.

    The other process ends by itself. The restarted run has the numbers of an undisturbed one.
    """
    draw = random.Random(seed)
    how: dict[str, Any] = {"recipe": recipe, "dropout": True, "layers": 1, "max_steps": 24, "save_steps": 1}
    ran(forks, tmp_path / "whole", 2, **how)
    for _ in range(KILLS):
        if not is_one_of_two_killed(forks, tmp_path / "run", how, draw):
            break
        store = Store(tmp_path / "run")
        store.newest()
        assert not store.broken
    ran(forks, tmp_path / "run", 2, **how)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert equal(weights_in(tmp_path / "run", 24), weights_in(tmp_path / "whole", 24))


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "victim"), [(ZERO3, 1), (ZERO2, 0)])
def test_a_process_that_dies_in_a_write_leaves_the_checkpoint_before(
    tmp_path: Path, forks: Forks, recipe: str, victim: int
) -> None:
    """SIGKILL hits a process after it wrote half of its part of the third checkpoint.

    The other process ends by itself. The restarted run has the numbers of an undisturbed one.
    """
    how: dict[str, Any] = {"recipe": recipe, "dropout": True, "layers": 1, "max_steps": 4, "save_steps": 1}
    codes = trained(forks, tmp_path / "run", 2, fault={str(victim): "dies_writing"}, **how)
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 1
    assert fault_told(tmp_path / "run", 1 - victim).startswith("ToldElsewhere: Another process")
    store = Store(tmp_path / "run")
    newest = store.newest()
    assert newest is not None
    assert newest.step == 2
    assert not store.broken
    ran(forks, tmp_path / "run", 2, **how)
    ran(forks, tmp_path / "whole", 2, **how)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert equal(weights_in(tmp_path / "run", 4), weights_in(tmp_path / "whole", 4))


@pytest.mark.slow
def test_a_signal_to_one_stops_all_at_one_boundary(tmp_path: Path, forks: Forks) -> None:
    how: dict[str, Any] = {"recipe": ZERO2, "dropout": True, "layers": 1, "max_steps": 30}
    children = start(forks, tmp_path / "run", 2, how)
    until(lambda: steps_told(tmp_path / "run") >= 3)
    os.kill(children[1], signal.SIGTERM)
    assert [forks.ended(child) for child in children] == [75, 75]
    (told,) = events(tmp_path / "run", "ended")
    assert told["outcome"] == "stopped"
    verify(tmp_path / "run" / f"checkpoint-{told['step']}", told["step"])
    ran(forks, tmp_path / "run", 2, **how)
    ran(forks, tmp_path / "whole", 2, **how)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.parametrize("recipe", slow_but([ZERO2, ZERO3, f"bf16 + {ZERO2}", f"bf16 + {ZERO3}"], 0))
def test_a_loss_that_is_no_number_changes_nothing(tmp_path: Path, forks: Forks, recipe: str) -> None:
    """The loss of one process is NaN, so the loss of all is."""
    how: dict[str, Any] = {"recipe": recipe, "layers": 1, "lr_scheduler_type": "constant"}
    assert trained(forks, tmp_path / "run", 2, fault={"1": "no_number"}, **how) == [1, 1]
    assert fault_told(tmp_path / "run", 0).startswith("SnugfitError: Step 4: The loss is nan")
    assert fault_told(tmp_path / "run", 1).startswith("ToldElsewhere")
    ran(forks, tmp_path / "run", 2, **how)
    ran(forks, tmp_path / "whole", 2, **how)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.parametrize("recipe", slow_but([ZERO2, ZERO3, f"bf16 + {ZERO2}", f"bf16 + {ZERO3}"], 1))
def test_a_skipped_step_leaves_no_gradient(tmp_path: Path, forks: Forks, recipe: str) -> None:
    how: dict[str, Any] = {"recipe": recipe, "layers": 1, "lr_scheduler_type": "constant"}
    ran(forks, tmp_path / "whole", 2, **how)
    ran(forks, tmp_path / "skipped", 2, fault={"1": "no_number"}, on_nonfinite="skip", **how)
    skipped, whole = losses(tmp_path / "skipped"), losses(tmp_path / "whole")
    assert [skipped[step] for step in (1, 2, 3)] == [whole[step] for step in (1, 2, 3)]
    assert abs(skipped[5][0] - whole[5][0]) < 0.02, "the next step has the gradients of its own batch"


@pytest.mark.parametrize("recipe", slow_but([ZERO2, ZERO3, f"bf16 + {ZERO2}", f"bf16 + {ZERO3}"], 0))
def test_gradients_that_are_no_numbers_change_nothing(tmp_path: Path, forks: Forks, recipe: str) -> None:
    """The loss is finite. The engine detects the gradients in all processes and updates nothing."""
    how: dict[str, Any] = {"recipe": recipe, "layers": 1, "lr_scheduler_type": "constant"}
    assert trained(forks, tmp_path / "run", 2, fault={"1": "no_gradient"}, **how) == [1, 1]
    assert fault_told(tmp_path / "run", 0).startswith("SnugfitError: Step 4: The gradients' norm is inf")
    ran(forks, tmp_path / "run", 2, **how)
    ran(forks, tmp_path / "whole", 2, **how)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert equal(weights_in(tmp_path / "run", LAST), weights_in(tmp_path / "whole", LAST))


@pytest.mark.parametrize("recipe", slow_but([ZERO2, ZERO3], 0))
def test_the_best_model_comes_back(tmp_path: Path, forks: Forks, recipe: str) -> None:
    how: dict[str, Any] = {
        "recipe": recipe, "eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True,
        "early_stopping_patience": 1, "early_stopping_threshold": 1.0,
    }  # fmt: skip
    ran(forks, tmp_path / "run", 2, **how)
    (ended,) = events(tmp_path / "run", "ended")
    assert (ended["outcome"], ended["step"]) == ("stopped early", 6)
    assert len(weights_in(tmp_path / "run", 6)) > 0


@pytest.mark.slow
def test_a_straggler_is_named(tmp_path: Path, forks: Forks) -> None:
    how: dict[str, Any] = {"recipe": ZERO2, "layers": 1, "max_steps": 20, "logging_steps": 5}
    ran(forks, tmp_path / "run", 2, fault={"1": "slow"}, **how)
    (warning,) = events(tmp_path / "run", "warning")
    assert warning["rank"] == 1
    assert "rank 1 is slower than the others" in warning["text"]


@pytest.mark.parametrize("recipe", slow_but([ZERO2, ZERO3], 0))
def test_gradients_of_a_step_that_is_left_out_are_dropped(tmp_path: Path, forks: Forks, recipe: str) -> None:
    """A step is skipped for a jump of the loss, whose gradients are finite. The steps after it equal those of
    a run without an engine.
    """
    how: dict[str, Any] = {
        "layers": 1, "on_loss_spike": "skip", "loss_spike_rtol": 1.0, "max_steps": 14,
        "fault": {"0": "spike"},
    }  # fmt: skip
    for name, asked in (("run", recipe), ("ddp", "ddp")):
        ran(forks, tmp_path / name, 2, recipe=asked, **how)
        (warning,) = events(tmp_path / name, "warning")
        assert warning["text"].startswith("Step 11: The loss is")
    same_losses(*([row[0] for row in losses(tmp_path / name).values()] for name in ("run", "ddp")))
    same_parameters(*(weights_in(tmp_path / name, 14) for name in ("run", "ddp")))


@pytest.mark.parametrize(("recipe", "size"), slow_but([(ZERO3, 2), (ZERO2, 2)], 0))
def test_it_goes_on_in_finer_pieces_when_memory_runs_out(
    tmp_path: Path, forks: Forks, recipe: str, size: int
) -> None:
    how: dict[str, Any] = {"layers": 1, "lr_scheduler_type": "constant", "save_steps": 2, "recipe": recipe}
    ran(forks, tmp_path / "whole", size, **how)
    assert 4 in trained(forks, tmp_path / "run", size, fault={"1": "short"}, **how)
    ran(forks, tmp_path / "run", size, fault={"1": "short"}, **how)
    (replanned,) = events(tmp_path / "run", "replanned")
    assert "micro_batches(2)" in replanned["recipe"]
    same_losses(*([row[0] for row in losses(tmp_path / name).values()] for name in ("run", "whole")))
    same_parameters(*(weights_in(tmp_path / name, LAST) for name in ("run", "whole")))


def test_states_on_a_disk_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"states on a disk.*offload=nvme.*offload=cpu"):
        run_of(str(tmp_path / "run"), recipe="bf16 + zero3(offload=nvme)")
    with pytest.raises(UsageError, match=r"offload=optimizer.*predicted only.*offload=cpu"):
        run_of(str(tmp_path / "run"), recipe="bf16 + zero3(offload=optimizer)")


def test_an_older_deepspeed_is_refused_by_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed_zero, "version_of", lambda package: "0.18.2")
    with pytest.raises(UsageError, match=r"deepspeed>=0\.19\.8 for zero2, but 0\.18\.2 is installed"):
        run_of(str(tmp_path / "run"), recipe=ZERO2)
