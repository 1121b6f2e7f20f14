"""`snugfit train` in several processes.

It has the losses and weights of one process, prints each message once, and loses no step when killed. The
runs use the CPU and gloo. Processes are forked from one with all imports (`clean_forks.py`), and get the
variables that torchrun sets.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from clean_forks import Forks, forks_of
from many_ranks import LAST, fault_told, run_of, start, trained, weights_in
from small_models import small_job
from small_runs import events, losses, rows
from snugfit.cli.train import _processes
from snugfit.errors import UsageError
from snugfit.features.distributed.launch import RankFailed, _ending, _error_of
from snugfit.features.distributed.stragglers import ROUNDS, Stragglers
from snugfit.frontends.one_of_several import LAUNCHED, one_of_several
from snugfit.training.checkpoint.manifest import verify
from snugfit.training.checkpoint.store import Store
from snugfit.training.journal import Journal
from snugfit.training.ranks import Ranks, ToldElsewhere, world
from snugfit.training.run.order import SampleOrder
from tiers import slow_but
from tolerance import same_losses, same_parameters

pytestmark = [pytest.mark.whole, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")]


@pytest.fixture(scope="module")
def forks() -> Forks:
    return forks_of("many_ranks")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that trains a model in one process and returns the run's folder."""
    root = tmp_path_factory.mktemp("alone")

    @functools.cache
    def run(job: str) -> Path:
        run_of(str(root / job), job=job, eval_strategy="steps", eval_steps=4)
        return root / job

    return run


@pytest.fixture(scope="module")
def half_of(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the folder of a recipe's run, stopped after step 3.

    It has no dropout. The plain recipe runs in one process, and all other recipes in two.
    """
    root = tmp_path_factory.mktemp("halves")

    @functools.cache
    def half(recipe: str) -> Path:
        how: dict[str, Any] = {"max_steps": 3, "lr_scheduler_type": "constant"}
        if recipe == "plain":
            run_of(str(root / recipe), **how)
        else:
            assert trained(forks, root / recipe, 2, recipe=recipe, **how) == [0, 0]
        return root / recipe

    return half


SAME = [
    ("fsdp + tensor(2)", 4, "llama"), ("ddp", 2, "bert"), ("fsdp + micro_batches(2)", 2, "gpt2"),
    ("context(2)", 2, "llama"), ("hsdp(2)", 4, "bert"), ("fsdp", 2, "bert"),
    ("fsdp + context(2) + micro_batches(2)", 4, "llama"), ("ddp + context(2)", 4, "llama"),
    ("context(2) + micro_batches(4)", 2, "llama"),
    ("ddp + micro_batches(2)", 2, "gpt2"), ("ddp", 2, "gpt2"), ("fsdp", 2, "gpt2"), ("hsdp(2)", 4, "gpt2"),
    ("ddp + micro_batches(2)", 2, "bert"), ("fsdp + micro_batches(4)", 2, "bert"), ("fsdp", 4, "gpt2"),
    ("ddp(bucket_views=true)", 2, "bert"), ("fsdp(reshard=none)", 2, "bert"), ("tensor(2)", 2, "llama"),
    ("ddp + micro_batches(2) + tensor(2)", 4, "llama"), ("tensor(2) + expert(2)", 2, "mixtral"),
    ("fsdp + tensor(2) + expert(2)", 4, "mixtral"),
    ("zero1", 2, "bert"), ("zero1(bucket_views=true) + micro_batches(2)", 2, "gpt2"), ("zero1", 4, "gpt2"),
    ("zero1 + context(2)", 4, "llama"),
]  # fmt: skip
OFTEN = SAME[1:3]


@pytest.mark.parametrize(("recipe", "size", "job"), slow_but(SAME, OFTEN.__contains__))
def test_as_one_process(
    tmp_path: Path, forks: Forks, alone: Callable[[str], Path], recipe: str, size: int, job: str
) -> None:
    """Losses, norms, evaluations and weights equal those of one process.

    Samples are padded unevenly. The last batch of an epoch has one sample, so that some processes have
    none.
    """
    how: dict[str, Any] = {"recipe": recipe, "job": job, "eval_strategy": "steps", "eval_steps": 4}
    assert trained(forks, tmp_path / "many", size, **how) == [0] * size
    ours, theirs = losses(tmp_path / "many"), losses(alone(job))
    assert list(ours) == list(theirs) == list(range(1, LAST + 1)), "one process writes the journal, once"
    for column in range(3):
        same_losses([row[column] for row in ours.values()], [row[column] for row in theirs.values()])
    both = (tmp_path / "many", alone(job))
    for name in ("samples", "tokens"):
        ours_and_theirs = [[event[name] for event in events(at, "step")] for at in both]
        assert ours_and_theirs[0] == ours_and_theirs[1], name
    same_losses(*([event["loss"] for event in events(at, "evaluated")] for at in both))
    same_parameters(weights_in(tmp_path / "many", LAST), weights_in(alone(job), LAST))


@pytest.mark.slow
def test_the_model_of_loaded_by_transformers(half_of: Callable[[str], Path]) -> None:
    """The last checkpoint holds the whole model, although no process does."""
    from transformers import AutoModelForSequenceClassification

    folder = half_of("fsdp") / "checkpoint-3"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert type(model).__name__ == "BertForSequenceClassification"
    assert model.config.architectures == ["BertForSequenceClassification"]
    same_parameters(dict(model.state_dict()), weights_in(half_of("plain"), 3))


AGAIN = [
    ("fsdp", 2, "bert"), ("tensor(2)", 2, "llama"), ("zero1", 2, "bert"), ("ddp", 2, "bert"),
    ("zero1 + micro_batches(2) + sgd", 4, "gpt2"), ("fsdp + micro_batches(2)", 2, "bert"),
    ("fsdp + tensor(2)", 4, "llama"), ("ddp + tensor(2)", 4, "llama"),
    ("tensor(2) + expert(2)", 2, "mixtral"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "size", "job"), slow_but(AGAIN, 0))
def test_resumed_on_as_many_it_is_the_same_run(
    tmp_path: Path, forks: Forks, recipe: str, size: int, job: str
) -> None:
    """The resumed run equals the uninterrupted one bit for bit. Each part of the batch has its own random
    stream for dropout.
    """
    how: dict[str, Any] = {"recipe": recipe, "dropout": True, "layers": 1, "lr_scheduler_type": "constant"}
    how["job"] = job
    assert trained(forks, tmp_path / "whole", size, **how) == [0] * size
    assert trained(forks, tmp_path / "half", size, max_steps=3, **how) == [0] * size
    assert trained(forks, tmp_path / "half", size, **how) == [0] * size
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")
    assert equal(weights_in(tmp_path / "half", LAST), weights_in(tmp_path / "whole", LAST))
    assert not events(tmp_path / "half", "warning")


def test_each_process_writes_the_states_that_it_has(tmp_path: Path, forks: Forks) -> None:
    """Under zero1, each weight and its moments are in the file of exactly one process."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    how: dict[str, Any] = {"recipe": "zero1", "layers": 1, "max_steps": 2, "save_steps": 1}
    assert trained(forks, tmp_path / "run", 2, **how) == [0, 0]
    folder = tmp_path / "run" / "checkpoint-1"
    written = FileSystemReader(folder / "shards").read_metadata().storage_data
    files = {index.fqn: place.relative_path for index, place in written.items()}
    weights = {name.removeprefix("model."): file for name, file in files.items() if name[:6] == "model."}
    assert set(weights.values()) == {"__0_0.distcp", "__1_0.distcp"}
    moments = {name: files.pop(f"optimizer.{name}/exp_avg") for name in weights}
    assert moments == {name: files.pop(f"optimizer.{name}/exp_avg_sq") for name in weights} == weights
    assert len(files) == len(weights), "step counts are beside them"
    beside = load_file(folder / "state.safetensors").values()
    assert all(value.dim() == 0 or value.dtype == torch.uint8 for value in beside)
    assert len(beside) >= len(weights)
    assert not (folder / "model.safetensors").exists()
    assert weights_in(tmp_path / "run", 2).keys() == weights.keys()


OTHERS = [
    ("fsdp", "plain", 1), ("ddp", "fsdp", 2), ("plain", "fsdp", 2), ("fsdp", "hsdp(2)", 4),
    ("fsdp", "ddp", 2), ("fsdp", "fsdp", 4), ("ddp", "ddp", 4), ("ddp", "plain", 1), ("plain", "ddp", 2),
    ("zero1", "plain", 1), ("zero1", "zero1", 4), ("zero1", "fsdp", 2), ("zero1", "ddp", 2),
    ("ddp", "zero1", 2), ("fsdp", "zero1", 2), ("plain", "zero1", 4),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "size"), slow_but(OTHERS, 1))
def test_resumed_on_others_it_has_the_same_numbers(
    tmp_path: Path, forks: Forks, half_of: Callable[[str], Path], before: str, after: str, size: int
) -> None:
    """Another number of processes loads weights and optimizer states. Without dropout the run ends with
    the same weights. The journal reports the redrawn random numbers."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    how: dict[str, Any] = {"lr_scheduler_type": "constant"}
    run_of(str(whole), **how)
    shutil.copytree(half_of(before), folder)
    if size == 1:
        assert run_of(str(folder), recipe=after, **how).exit_code == 0
    else:
        assert trained(forks, folder, size, recipe=after, **how) == [0] * size
    same_losses(*([row[0] for row in losses(at).values()] for at in (folder, whole)))
    same_parameters(weights_in(folder, LAST), weights_in(whole, LAST))
    said = [event["text"] for event in events(folder, "warning")]
    assert any("no longer bit for bit" in text for text in said)
    notes = [event["text"] for event in events(folder, "note")]
    were = 1 if before == "plain" else 2
    new = f"The random numbers of {size - were} of {size} GPUs start again."
    assert (new in notes) == (size > were)


def equal(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all(bool((ours[name] == theirs[name]).all()) for name in ours)


# ---- ends ------------------------------------------------------------------------------------------------


def until(what: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def steps_told(folder: Path) -> int:
    try:
        return max(losses(folder), default=0)
    except FileNotFoundError:
        return 0


def is_one_of_two_killed(forks: Forks, folder: Path, how: dict[str, Any], draw: random.Random) -> bool:
    """Start a run of two processes and kill one at a random moment.

    Return False if the run had ended before. Check that the other process ends silently by itself.
    """
    done = steps_told(folder)
    children = start(forks, folder, 2, how)
    until(lambda: steps_told(folder) > done)
    time.sleep(draw.uniform(0.0, 0.1))
    victim = draw.randrange(2)
    os.kill(children[victim], signal.SIGKILL)
    codes = [forks.ended(child) for child in children]
    if codes[victim] == 0:
        return False
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 1
    assert fault_told(folder, 1 - victim).startswith("ToldElsewhere: Another process")
    return True


KILLS = 2
"""Number of times that a run is killed in each test. `lab/kill_ranks.py` kills more often."""


STORMS = [("fsdp", 0), ("ddp", 1), ("fsdp", 2), ("ddp", 3), ("zero1", 4), ("zero1", 5)]


@pytest.mark.parametrize(("recipe", "seed"), slow_but(STORMS, 0))
def test_a_killed_process_ends_all_and_nothing_is_lost(
    tmp_path: Path, forks: Forks, recipe: str, seed: int
) -> None:
    """SIGKILL hits one process at seeded moments, and the other ends silently by itself. The restarted run
    has the numbers of an undisturbed one."""
    draw = random.Random(seed)
    how: dict[str, Any] = {"recipe": recipe, "dropout": True, "layers": 1, "max_steps": 24, "save_steps": 1}
    assert trained(forks, tmp_path / "whole", 2, **how) == [0, 0]
    for _ in range(KILLS):
        if not is_one_of_two_killed(forks, tmp_path / "run", how, draw):
            break
    assert trained(forks, tmp_path / "run", 2, **how) == [0, 0]
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert equal(weights_in(tmp_path / "run", 24), weights_in(tmp_path / "whole", 24))
    assert not Store(tmp_path / "run").broken


@pytest.mark.parametrize(("recipe", "victim"), slow_but([("fsdp", 1), ("ddp", 0), ("zero1", 1)], 1))
def test_a_signal_to_one_stops_all_at_one_boundary(
    tmp_path: Path, forks: Forks, recipe: str, victim: int
) -> None:
    """All processes save one checkpoint, exit with code 75, and resume bit for bit.

    Each part of the batch draws its dropout from a stream of its own.
    """
    how: dict[str, Any] = {"recipe": recipe, "dropout": True, "layers": 1, "max_steps": 20}
    children = start(forks, tmp_path / "run", 2, how)
    until(lambda: steps_told(tmp_path / "run") >= 2)
    os.kill(children[victim], signal.SIGTERM)
    assert [forks.ended(child) for child in children] == [75, 75]
    (told,) = events(tmp_path / "run", "ended")
    assert told["outcome"] == "stopped"
    assert 2 <= told["step"] < 20
    verify(tmp_path / "run" / f"checkpoint-{told['step']}", told["step"])
    assert trained(forks, tmp_path / "run", 2, **how) == [0, 0]
    assert trained(forks, tmp_path / "whole", 2, **how) == [0, 0]
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert equal(weights_in(tmp_path / "run", 20), weights_in(tmp_path / "whole", 20))
    assert not events(tmp_path / "run", "warning")


def test_a_loss_that_is_no_number_stops_all_before_the_update(tmp_path: Path, forks: Forks) -> None:
    """The loss of one process is NaN, so the loss of all is. One process reports it with the samples of
    all."""
    assert trained(forks, tmp_path / "run", 2, recipe="fsdp", fault={"1": "no_number"}) == [1, 1]
    assert fault_told(tmp_path / "run", 0).startswith("SnugfitError: Step 4: The loss is nan")
    assert fault_told(tmp_path / "run", 1).startswith("ToldElsewhere")
    assert Store(tmp_path / "run").newest() is not None
    written = json.loads((tmp_path / "run" / "nonfinite-step-4.json").read_text())
    assert len(written["samples"]) == 2
    assert list(losses(tmp_path / "run")) == [1, 2, 3]


@pytest.mark.parametrize("recipe", slow_but(["ddp", "fsdp", "context(2)"], 0))
def test_a_second_run_in_the_folder_ends_in_one_line(tmp_path: Path, forks: Forks, recipe: str) -> None:
    """The second run ends with an error, and the first one continues unchanged."""
    how: dict[str, Any] = {"recipe": recipe, "job": "llama", "layers": 1, "max_steps": 40, "save_steps": 20}
    first = start(forks, tmp_path / "run", 2, how)
    until(lambda: steps_told(tmp_path / "run") > 0)
    assert trained(forks, tmp_path / "run", 2, **how) == [2, 2]
    assert re.search(
        r"^UsageError: [^\n]*another training run writes there, process [^\n]*$",
        fault_told(tmp_path / "run", 0),
    )
    assert fault_told(tmp_path / "run", 1).startswith("ToldElsewhere")
    assert [forks.ended(child) for child in first] == [0, 0]
    assert list(losses(tmp_path / "run")) == list(range(1, 41))


REFUSED = [
    ("fsdp", 2, "bert"), ("context(2)", 2, "llama"), ("tensor(2)", 2, "llama"), ("zero1", 2, "bert"),
    ("hsdp(2)", 4, "bert"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "size", "job"), slow_but(REFUSED, 1))
def test_a_part_that_the_system_refuses_ends_in_one_line(
    tmp_path: Path, forks: Forks, recipe: str, size: int, job: str
) -> None:
    """Training continues, earlier checkpoints remain, and a failure of the last checkpoint sets the exit
    code."""
    how: dict[str, Any] = {"recipe": recipe, "job": job, "layers": 1, "save_steps": 3}
    writer, file = (0, "config") if recipe == "context(2)" else (1, "shards/__1_0")
    assert trained(forks, tmp_path / "run", size, **{**how, "max_steps": 3}) == [0] * size
    assert trained(forks, tmp_path / "run", size, fault={f"{writer}": "no_room"}, **how) == [1] * size
    refused = (
        rf"checkpoint-6 could not be saved: {file}\.[a-z]+: File too large "
        r"\(.* are needed, .*free\)"
    )
    said = fault_told(tmp_path / "run", 0)
    start = "LastCheckpointNotSaved: The last checkpoint was not saved:"
    assert re.search(rf"^{start} \S*{refused}\. [^\n]*$", said)
    assert all(fault_told(tmp_path / "run", rank).startswith("ToldElsewhere") for rank in range(1, size))
    if writer:  # the first process cannot write to its journal either
        warned = [event["text"] for event in events(tmp_path / "run", "warning")]
        assert any(re.search(refused, text) for text in warned)
    assert_goes_on_from_three(tmp_path / "run", forks, size, how)


@pytest.mark.parametrize(("recipe", "size", "job"), slow_but(REFUSED, 0))
def test_a_folder_that_becomes_read_only_ends_in_one_line(
    tmp_path: Path, forks: Forks, recipe: str, size: int, job: str
) -> None:
    how: dict[str, Any] = {"recipe": recipe, "job": job, "layers": 1, "save_steps": 3}
    assert trained(forks, tmp_path / "run", size, **{**how, "max_steps": 3}) == [0] * size
    fault = {f"{rank}": "read_only" for rank in range(size)}
    assert trained(forks, tmp_path / "run", size, fault=fault, **how) == [1] * size
    said = fault_told(tmp_path / "run", 0)
    refused = "checkpoint-6 could not be saved: .*Read-only file system"
    assert re.search(rf"^LastCheckpointNotSaved: .*{refused}", said)
    assert "\n" not in said
    assert all(fault_told(tmp_path / "run", rank).startswith("ToldElsewhere") for rank in range(1, size))
    assert_goes_on_from_three(tmp_path / "run", forks, size, how)


def assert_goes_on_from_three(folder: Path, forks: Forks, size: int, how: dict[str, Any]) -> None:
    """Assert that no partial checkpoint remains, and that the run ends once it can write."""
    names = [path.name for path in folder.iterdir() if path.is_dir() and "checkpoint" in path.name]
    assert names == ["checkpoint-3"]
    verify(folder / "checkpoint-3", 3)
    assert trained(forks, folder, size, **how) == [0] * size
    verify(folder / "checkpoint-6", 6)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fsdp", "ddp", "zero1"])
def test_the_best_model_comes_back(tmp_path: Path, forks: Forks, recipe: str) -> None:
    how: dict[str, Any] = {
        "recipe": recipe, "eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True,
        "early_stopping_patience": 1, "early_stopping_threshold": 1.0,
    }  # fmt: skip
    assert trained(forks, tmp_path / "run", 2, **how) == [0, 0]
    (ended,) = events(tmp_path / "run", "ended")
    assert (ended["outcome"], ended["step"]) == ("stopped early", 6)
    assert len(weights_in(tmp_path / "run", 6)) > 0


def test_a_straggler_is_named(tmp_path: Path, forks: Forks) -> None:
    how: dict[str, Any] = {"recipe": "ddp", "layers": 1, "max_steps": 20, "logging_steps": 5}
    assert trained(forks, tmp_path / "run", 2, fault={"1": "slow"}, **how) == [0, 0]
    (warning,) = events(tmp_path / "run", "warning")
    assert warning["rank"] == 1
    assert "rank 1 is slower than the others" in warning["text"]


ENDS_WITHOUT_A_WORD = """
from snugfit.features.distributed import launch
launch.ENTRY = ("-c", "raise SystemExit(3)")
try:
    launch.launch(1, [])
except launch.RankFailed as ended:
    print(ended)
"""


@pytest.mark.slow
def test_torchs_launcher_logs_nothing_beside_our_line() -> None:
    """The launcher's loggers are created at import, so the test starts a process that has not imported it."""
    command = [sys.executable, "-c", ENDS_WITHOUT_A_WORD]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert ran.stderr == ""
    assert ran.stdout.startswith("rank 0: its process ended with exit code 3, without a message.")


@pytest.mark.parametrize(
    ("recipe", "part"),
    [("plain", "2 GPUs were named"), ("hsdp(4)", "hsdp(4) takes")],
)
def test_what_cannot_be_is_told_by_the_first_alone(
    tmp_path: Path, forks: Forks, recipe: str, part: str
) -> None:
    assert trained(forks, tmp_path / "run", 2, recipe=recipe) == [2, 2]
    assert fault_told(tmp_path / "run", 0).startswith(f"UsageError: {part}")
    assert fault_told(tmp_path / "run", 1).startswith("ToldElsewhere: ")


# ---- parts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 2])
def test_shares_make_the_batch_of_one(cut: int) -> None:
    """The shares keep the batch's order. All processes have the same number of micro-batches, and none is
    empty."""
    one = SampleOrder(41, 8, 1, seed=3)
    ranks = [SampleOrder(41, 8, cut, seed=3, rank=rank, ranks=4) for rank in range(4)]
    for step in range(2 * one.steps_per_epoch):
        (whole,) = one.step(step)
        pieces = [order.step(step) for order in ranks]
        assert tuple(itertools.chain(*itertools.chain(*pieces))) == whole
        assert len({len(piece) for piece in pieces}) == 1
        assert all(itertools.chain(*(order.with_stand_ins(step) for order in ranks)))
        assert ranks[0].step_of_all(step) == tuple(itertools.chain(*pieces))


def test_a_straggler_must_keep_being_slow() -> None:
    told: list[Any] = []
    stragglers = Stragglers(Ranks(0, 3), Journal(None, told.append), every=10)
    for step, seconds in enumerate([[1.0, 1.0, 2.0]] * (ROUNDS - 1) + [[1.0, 1.2, 1.0], [2.0, 1.0, 1.0]]):
        stragglers.compare(step, seconds)
    assert not told
    for step in range(ROUNDS + 2):
        stragglers.compare(step, [1.0, 1.4, 1.0])
    (warning,) = told
    assert warning["rank"] == 1


def test_processes_are_those_that_were_started(monkeypatch: pytest.MonkeyPatch) -> None:
    request: Any = SimpleNamespace(gpus=1, has_auto=False)
    assert _processes(request, None) == 1
    assert _processes(request, 4) == 4
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    here = world()
    assert here is not None
    assert (here.rank, here.size, here.local_rank) == (1, 2, 1)
    assert _processes(request, None) == _processes(request, 2) == 2
    with pytest.raises(UsageError, match="3 GPUs were named, but 2 processes were started"):
        _processes(request, 3)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(UsageError, match="RANK=2, WORLD_SIZE=2"):
        world()


# ---- the launcher ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_starts_processes(tmp_path: Path) -> None:
    """`--gpus 2` trains like one process. The error names a killed process, and none remains."""
    job = "\n".join(f"{key}: {value}" for key, value in command(tmp_path).items())
    (tmp_path / "job.yaml").write_text(job)
    words = [sys.executable, "-m", "snugfit", "train", str(tmp_path / "job.yaml"), "--offline", "--gpus", "2"]
    running = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    until(lambda: steps_told(tmp_path / "out") >= 5)
    ranks = psutil.Process(running.pid).children()
    assert len(ranks) == 2
    ranks[1].kill()
    _, said = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "its process was ended by SIGKILL" in said.splitlines()[-1]
    assert not any(rank.is_running() for rank in ranks)
    running = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    before = steps_told(tmp_path / "out")
    until(lambda: steps_told(tmp_path / "out") >= before + 5)
    running.terminate()
    running.communicate(timeout=60)
    assert running.returncode == 75
    assert Store(tmp_path / "out").newest() is not None


def command(folder: Path) -> dict[str, Any]:
    """Return a job file's keys for a small run with many steps."""
    job = small_job("bert", 1)
    (folder / "config.json").write_text(json.dumps(job.model.config))
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows(41))))
    return {
        "model": folder / "config.json", "task": "sequence-classification", "batch_size": 8,
        "sequence_length": 16, "dataset": folder / "rows.jsonl", "from_scratch": "true", "recipe": "fsdp",
        "output_dir": folder / "out", "device": "cpu", "max_steps": 5000, "save_steps": 5,
    }  # fmt: skip


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make this process the second of two under a launcher, and return the path of its error file."""
    monkeypatch.setattr("snugfit.measurement.process.die_with_parent", lambda parent: None)
    file = tmp_path / "error.json"
    for name, value in {
        "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1",
        "TORCHELASTIC_ERROR_FILE": str(file),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return file


@pytest.mark.parametrize("fault", [UsageError("no model"), ValueError("a mistake of ours")])
def test_an_error_reaches_the_launcher(
    second_of_two: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fault: Exception
) -> None:
    """The error goes through torch's own file alone, and the exit code is the error's."""
    monkeypatch.setenv(LAUNCHED, "1")

    def work() -> None:
        with one_of_several():
            print("what the first process says too")
            print("the same on stderr", file=sys.stderr)
            raise fault

    with pytest.raises(ToldElsewhere) as ended:
        work()
    assert ended.value.exit_code == getattr(fault, "exit_code", 1)
    assert capfd.readouterr() == ("", "")
    read = ProcessFailure(local_rank=1, pid=1, exitcode=2, error_file=str(second_of_two))
    error = _error_of(read)
    assert error is not None
    assert error == "no model" or error.endswith("ValueError: a mistake of ours")


def test_a_process_that_another_has_ended_writes_nothing(second_of_two: Path) -> None:
    with pytest.raises(ToldElsewhere), one_of_several():
        raise ToldElsewhere("Another process has ended")
    assert not second_of_two.exists()


def failure(code: int, told: str | None = None, at: int = 0) -> Any:
    message = {"message": {"message": told, "extraInfo": {"py_callstack": told}}} if told else {}
    return SimpleNamespace(exitcode=code, error_file_data=message, timestamp=at)


@pytest.mark.parametrize(
    ("failures", "passed", "ending"),
    [
        ({0: failure(75), 1: failure(-15)}, [15], 75),
        ({0: failure(130), 1: failure(130)}, [2], 130),
        ({0: failure(-15), 1: failure(-15)}, [15], 143),
        ({0: failure(1), 1: failure(-9)}, [], ("rank 1: its process was ended by SIGKILL", 1)),
        ({0: failure(-9, at=9), 1: failure(4, "Memory")}, [], ("rank 1: Memory", 4)),
        ({0: failure(2, "No model"), 1: failure(2, "No model")}, [], ("No model", 2)),
        ({0: failure(-15), 1: failure(7)}, [], ("rank 1: its process ended with exit code 7", 7)),
    ],
)
def test_processes_end_in_one_message(failures: Any, passed: list[int], ending: Any) -> None:
    if isinstance(ending, int):
        assert _ending(failures, passed) == ending
        return
    with pytest.raises(RankFailed) as told:
        _ending(failures, passed)
    assert str(told.value).startswith(ending[0])
    assert told.value.exit_code == ending[1]
