"""`snugfit train` in several processes of which one runs out of memory: all restart and lose nothing.

The runs use the CPU and gloo. The host's memory runs out, since one process allocates more than exists
(`many_ranks.FAULTS`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import many_ranks
from clean_forks import Forks, forks_of
from many_ranks import fault_told, run_of, trained, weights_in
from small_runs import bert_job, events, losses, rows, small_run
from snugfit.errors import OutOfMemory
from snugfit.features.distributed import launch
from snugfit.features.distributed.start_again import RECORD, MemoryRanOut, end_of_several, record_of
from snugfit.frontends.next_recipe import next_recipe
from snugfit.frontends.one_of_several import STARTED_AGAIN, _record, is_started_again
from snugfit.frontends.predicted import begin_to_import, run_predictor
from snugfit.job.gpu import find_gpu
from snugfit.report.watching import Watching
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot
from snugfit.training.checkpoint.manifest import verify
from snugfit.training.ranks import Ranks
from snugfit.training.recovery import PLANNING, Exhausted
from snugfit.training.run import opening
from snugfit.training.run.run import Run
from snugfit.training.run.train import train
from tiers import slow_but
from tolerance import same_losses, same_parameters

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")

LAST = 6
"""Number of the last step in the small runs."""

HOW: dict[str, Any] = {"layers": 1, "lr_scheduler_type": "constant", "save_steps": 2}


@pytest.fixture(scope="module")
def forks() -> Forks:
    return forks_of("many_ranks")


CASES = [
    ("fsdp", 2, 1, 2, LAST), ("ddp", 2, 0, 500, 5), ("ddp", 2, 1, 2, 5), ("zero1", 2, 1, 2, 5),
    ("hsdp(2)", 4, 3, 2, 5),
]  # fmt: skip


@needs_fork
@pytest.mark.whole
@pytest.mark.parametrize(("recipe", "size", "victim", "every", "stop"), slow_but(CASES, 1))
def test_a_run_goes_on_in_finer_pieces(
    tmp_path: Path, forks: Forks, recipe: str, size: int, victim: int, every: int, stop: int
) -> None:
    """The run resumes from its last checkpoint or the beginning, and ends like an undisturbed one.

    A start after step `stop` uses the saved smaller recipe.
    """
    how: dict[str, Any] = {**HOW, "recipe": recipe, "fault": {str(victim): "short"}, "save_steps": every}
    codes = trained(forks, tmp_path / "run", size, max_steps=stop, **how)
    assert codes[victim] == 4
    assert [codes[rank] for rank in range(size) if rank != victim] == [1] * (size - 1)
    told = fault_told(tmp_path / "run", victim)
    assert told.startswith(f"MemoryRanOut: Memory ran out in step 3 (forward, host-oom) under '{recipe}'.")
    assert f"It was rank {victim}. All processes have to start again. Give the same command once more" in told
    assert trained(forks, tmp_path / "run", size, max_steps=stop, **how) == [0] * size
    assert not (tmp_path / "run" / RECORD).exists()
    (replanned,) = events(tmp_path / "run", "replanned")
    assert replanned.pop("planning_seconds") >= 0
    assert any(PLANNING in event["text"] for event in events(tmp_path / "run", "note"))
    smaller = str(Recipe.parse(f"{recipe} + micro_batches(2)"))
    resumed = 2 if every == 2 else 0
    assert replanned == {
        "event": "replanned", "step": 3, "cause": "host-oom", "before": recipe, "recipe": smaller,
        "rank": victim, "resumed_from": resumed,
    }  # fmt: skip
    taken = [event["step"] for event in events(tmp_path / "run", "step")]
    assert taken == [1, 2, *range(resumed + 1, stop + 1)]
    assert verify(tmp_path / "run" / f"checkpoint-{stop}", stop).about["recipe"] == smaller
    starts = [recipe, smaller]
    if stop < LAST:
        assert trained(forks, tmp_path / "run", size, max_steps=LAST, **how) == [0] * size
        starts.append(smaller)
    assert [event["recipe"] for event in events(tmp_path / "run", "started")] == starts
    run_of(str(tmp_path / "whole"), max_steps=LAST, **HOW)
    ours, theirs = losses(tmp_path / "run"), losses(tmp_path / "whole")
    assert list(ours) == list(theirs) == list(range(1, LAST + 1))
    for column in range(3):
        same_losses([row[column] for row in ours.values()], [row[column] for row in theirs.values()])
    same_parameters(weights_in(tmp_path / "run", LAST), weights_in(tmp_path / "whole", LAST))


@needs_fork
@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize(("sharing", "cuts"), [("ddp", [4]), ("fsdp", [1, 2, 4])])
def test_it_ends_when_nothing_smaller_is_left(
    tmp_path: Path, forks: Forks, sharing: str, cuts: list[int]
) -> None:
    """The run ends with one message and removes its record. With more memory the next start resumes."""
    before = [str(Recipe.parse(f"{sharing} + micro_batches({n})" if n > 1 else sharing)) for n in cuts]
    how = {**HOW, "recipe": before[0], "max_steps": 4}
    for recipe in before:
        assert trained(forks, tmp_path / "run", 2, fault={"1": "exhausted"}, **how) == [1, 4]
        assert json.loads((tmp_path / "run" / RECORD).read_text())["recipes"][-1] == recipe
    assert trained(forks, tmp_path / "run", 2, fault={"1": "exhausted"}, **how) == [4, 4]
    told = fault_told(tmp_path / "run", 0)
    assert told.startswith("OutOfMemory: Memory ran out in step 3")
    assert "There is no other recipe to try" in told
    assert fault_told(tmp_path / "run", 1).startswith("ToldElsewhere")
    assert not (tmp_path / "run" / RECORD).exists()
    assert [event["recipe"] for event in events(tmp_path / "run", "replanned")] == before[1:]
    assert trained(forks, tmp_path / "run", 2, **how) == [0, 0]
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4]


@needs_fork
@pytest.mark.slow
@pytest.mark.whole
def test_a_batch_whose_samples_look_at_each_other_is_not_cut(tmp_path: Path, forks: Forks) -> None:
    """Several processes do not split the batch either, since each of them compares gradients first."""
    how = {**HOW, "recipe": "fsdp", "max_steps": 4, "fault": {"0": "mixing", "1": "mixing short"}}
    assert trained(forks, tmp_path / "run", 2, **how) == [1, 4]
    assert trained(forks, tmp_path / "run", 2, **how) == [4, 4]
    assert "the batch cannot be cut: its loss is not a mean" in fault_told(tmp_path / "run", 0)
    assert not events(tmp_path / "run", "replanned")
    assert not (tmp_path / "run" / RECORD).exists()


@pytest.mark.whole
@pytest.mark.parametrize(
    ("recipe", "mixes", "why"),
    [
        ("micro_batches(4)", "", "There is no other recipe to try. With more free memory"),
        (
            "plain",
            "it compares samples",
            "There is no other recipe to try (the batch cannot be cut: its loss",
        ),
    ],
)
def test_in_what_is_left_to_the_first_process_one_is_as_several(
    tmp_path: Path, recipe: str, mixes: str, why: str
) -> None:
    """The run ends with one message if no smaller recipe is left, or if samples depend on each other. The
    next start tries once more."""
    run = small_run(tmp_path, recipe, max_steps=2)
    end_of_several(run, SHORT, run.recipe, 0, None)
    with pytest.raises(OutOfMemory, match=re.escape(why)):
        train(
            run,
            replan=next_recipe(torch.device("cpu")),
            compare=lambda job, *given: replace(job, mixes_samples=mixes) if mixes else job,
        )
    assert not (tmp_path / RECORD).exists()
    assert train(run).step == 2


# ---- the record ------------------------------------------------------------------------------------------


def one_of_two(folder: Path, rank: int = 1, **changes: Any) -> Run:
    folder.mkdir(exist_ok=True)
    return replace(small_run(folder, "ddp", **changes), ranks=Ranks(rank, 2))


SHORT = Exhausted(cause="host-oom", phase="forward", message="no memory")


def checkpoint_under(recipe: str) -> Any:
    return SimpleNamespace(about={"recipe": recipe})


def test_it_counts_for_the_same_run_until_there_is_a_checkpoint_of_what_followed(tmp_path: Path) -> None:
    run, finer = one_of_two(tmp_path), Recipe.parse("micro_batches(2) + ddp")
    for other in (
        replace(run, ranks=Ranks(0, 4)),
        replace(run, recipe=Recipe.parse("fsdp")),
        replace(run, job=bert_job(8, clip=1.0)),
    ):
        end_of_several(run, SHORT, run.recipe, 2, None)
        assert record_of(other, None) is None
        assert not (tmp_path / RECORD).exists(), "an outdated record is removed"
    end_of_several(run, SHORT, run.recipe, 2, None)
    first = record_of(run, None)
    assert first is not None
    assert (first.recipe, first.step, first.rank, first.exhausted) == (run.recipe, 3, 1, SHORT)
    end_of_several(run, SHORT, finer, 3, first)  # there is no checkpoint
    second = record_of(run, checkpoint_under("ddp"))
    assert second is not None
    assert (second.recipe, second.recipes) == (finer, ("ddp", "micro_batches(2) + ddp"))
    assert record_of(run, checkpoint_under("micro_batches(4) + ddp")) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"recipes": []}', '{"recipes": ["no such"]}'])
def test_what_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / RECORD).write_text(text)
    assert record_of(one_of_two(tmp_path), None) is None


def test_where_it_cannot_be_written_nobody_starts_again(tmp_path: Path) -> None:
    """If the record cannot be written, no restart follows: it would run out of memory again and again."""
    run = one_of_two(tmp_path)
    (tmp_path / RECORD).mkdir()
    error = end_of_several(run, SHORT, run.recipe, 2, None)
    assert not isinstance(error, MemoryRanOut)
    assert "It was rank 1. out-of-memory.json cannot be written" in str(error)


# ---- the launcher ----------------------------------------------------------------------------------------


def failures(path: Path, error: Exception) -> dict[int, ProcessFailure]:
    """Return the failure that torch's launcher reports for this error in the second of two processes."""
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(path)
    _record(error)
    return {1: ProcessFailure(local_rank=1, pid=1, exitcode=4, error_file=str(path))}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_ERROR_FILE", STARTED_AGAIN, launch.LAUNCHED, "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")


@pytest.mark.usefixtures("environment")
def test_the_launcher_starts_again_as_long_as_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ends: list[Any] = [failures(tmp_path / name, MemoryRanOut(name)) for name in ("1", "2")]
    seen: list[str | None] = []

    def run(processes: int, words: Any) -> int | Mapping[int, Any]:
        seen.append(os.environ.get(STARTED_AGAIN))
        end: int | Mapping[int, Any] = ends.pop(0)
        return end

    monkeypatch.setattr(launch, "_run", run)
    ends.append(0)
    assert launch.launch(2, ["train"]) == 0
    assert seen == [None, "1", "1"]
    assert capfd.readouterr().err.count("all start again") == 2
    for error in (MemoryError("none"), ValueError("a mistake of ours")):
        ends.append(failures(tmp_path / "3", error))
        with pytest.raises(launch.RankFailed):
            launch.launch(2, ["train"])


@pytest.mark.parametrize(
    ("variable", "value", "again"),
    [
        (STARTED_AGAIN, "1", True),
        ("TORCHELASTIC_RESTART_COUNT", "1", True),
        (None, "", False),
        ("TORCHELASTIC_RESTART_COUNT", "0", False),
    ],
)
def test_a_process_knows_that_its_command_was_started_before(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, value: str, again: bool
) -> None:
    for name in (STARTED_AGAIN, "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, value)
    assert is_started_again() is again


@pytest.mark.usefixtures("environment")
def test_a_run_that_is_told_to_stop_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(processes: int, words: Any) -> Mapping[int, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        return failures(tmp_path / "1", MemoryRanOut("It was rank 1."))

    monkeypatch.setattr(launch, "_run", run)
    monkeypatch.setattr("psutil.Process.children", lambda process: [])  # the tests' own fork server is one
    with pytest.raises(launch.RankFailed, match="It was rank 1"):
        launch.launch(2, ["train"])


SHORT_OF_MEMORY = """
import os, sys
sys.path.insert(0, TESTS)
from many_ranks import short_of_memory
from snugfit.cli.main import main
with short_of_memory() if os.environ["RANK"] == "1" else __import__("contextlib").nullcontext():
    main()
"""

LAUNCHER = """
import sys
from snugfit.features.distributed import launch
launch.ENTRY = ("-c", ENTRY)
sys.exit(launch.launch(2, sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.whole
def test_the_command_goes_on_by_itself(tmp_path: Path) -> None:
    """With `--gpus 2 --restart`, the second start continues the run and keeps the smaller recipe."""
    (tmp_path / "config.json").write_text(json.dumps(bert_job(8).model.config))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows(41))))
    job = {
        "model": tmp_path / "config.json", "task": "sequence-classification", "batch_size": 8,
        "sequence_length": 16, "dataset": tmp_path / "rows.jsonl", "from_scratch": "true", "recipe": "fsdp",
        "output_dir": tmp_path / "out", "device": "cpu", "max_steps": 6, "save_steps": 2,
    }  # fmt: skip
    (tmp_path / "job.yaml").write_text("\n".join(f"{key}: {value}" for key, value in job.items()))
    entry = SHORT_OF_MEMORY.replace("TESTS", repr(str(Path(many_ranks.__file__).parent)))
    words = ["train", str(tmp_path / "job.yaml"), "--offline", "--restart"]
    ended = subprocess.run(
        [sys.executable, "-c", LAUNCHER.replace("ENTRY)", f"{entry!r})"), *words],
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "all start again" in ended.stderr
    assert [event["resumed_from"] for event in events(tmp_path / "out", "started")] == [None, 2]
    assert [event["step"] for event in events(tmp_path / "out", "step")] == [*range(1, 7)]
    assert not (tmp_path / "out" / RECORD).exists()
    assert not [*(tmp_path / "out").glob("*before-restart*")]


# ---- while the model is built ---------------------------------------------------------------------------


def test_a_model_that_cannot_be_built_says_what_to_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*given: Any, **more: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 30.00 GiB.")

    monkeypatch.setattr(opening, "build_model", build)
    with pytest.raises(OutOfMemory, match="while the model was built, under 'plain'") as told:
        train(small_run(tmp_path, "plain"))
    assert "snugfit plan --memory finds a recipe that needs less" in str(told.value)


@pytest.mark.parametrize(
    ("recipe", "build_on", "can_be_spread"),
    [
        ("fsdp", "device", True), ("hsdp(2)", "device", True), ("fsdp", "host", False),
        ("ddp", "device", False), ("fsdp(offload=cpu)", "device", False),
        ("fsdp + tensor(2)", "device", False),
    ],
)  # fmt: skip
def test_whoever_builds_whole_models_is_told_of_the_host(
    recipe: str, build_on: str, can_be_spread: bool
) -> None:
    run: Any = SimpleNamespace(job=replace(bert_job(8), build_on=build_on), ranks=Ranks(rank=0, size=4))
    told = str(opening.not_built(run, Recipe.parse(recipe), "oom:torch"))
    assert ("--set build_on=host" in told) is can_be_spread


# ---- the choice, and its message -------------------------------------------------------------------------


def test_pieces_are_those_of_one_gpu_s_part() -> None:
    """Each of four GPUs has two samples of a batch of 8, so they can be split only once."""
    following = next_recipe(torch.device("cpu"), gpus=4)
    assert str(following(bert_job(8), Recipe.parse("fsdp"), "host-oom")) == "micro_batches(2) + fsdp"
    assert following(bert_job(8), Recipe.parse("fsdp + micro_batches(2)"), "host-oom") is None


def test_a_recipe_for_as_many_gpus_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def smaller(job: Any, recipe: Any, **given: Any) -> Any:
        asked.update(given)
        return Recipe.parse("bf16 + every_layer + fsdp")

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr("snugfit.features.distributed.plan.smaller.smaller_on_several", smaller)
    before = Recipe.parse("bf16 + fsdp + adamw_fused")
    following = next_recipe(torch.device("cuda"), gpus=2)(bert_job(8), before, "oom:torch")
    assert str(following) == "bf16 + every_layer + fsdp"
    assert (asked["gpus"], asked["share"], asked["gpu"].name) == (2, 0.9, find_gpu("h200").name)
    assert asked["searched"] == {Slot.CHECKPOINTING, Slot.BATCHING}


@pytest.mark.whole
def test_a_process_that_trains_with_others_is_predicted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a process has a real default process group, which a simulation must not use."""
    import torch.distributed as dist

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        answer = run_predictor(torch.device("cuda"), 2)(bert_job(8), Recipe.parse("fsdp"))
        assert isinstance(answer, Future), "it trains meanwhile"
        figures = answer.result()
    finally:
        dist.destroy_process_group()
    assert not isinstance(figures, str | None)
    assert figures.reserved_bytes


@pytest.mark.parametrize(
    ("device", "gpus", "begins"), [("cuda", 2, True), ("cuda", 1, False), ("cpu", 2, False)]
)
def test_what_simulates_is_imported_while_data_is_read(
    device: str, gpus: int, begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process imports the modules of the simulation and the model's own code."""
    begun: list[str] = []
    monkeypatch.setattr(
        "snugfit.prediction.worker_pool.start_fork_server", lambda modules, **_: begun.extend(modules)
    )
    begin_to_import(bert_job(8), torch.device(device), gpus)
    assert bool(begun) is begins
    assert not begins or "transformers.models.bert.modeling_bert" in begun


def test_whoever_watches_is_told_from_where(capsys: pytest.CaptureFixture[str]) -> None:
    with Watching(10) as shown:
        shown({
            "event": "replanned", "step": 3, "cause": "oom:torch", "before": "ddp", "rank": 1,
            "recipe": "micro_batches(2) + ddp", "resumed_from": 2,
        })  # fmt: skip
    said = capsys.readouterr()
    assert (
        "in step 3 with ddp, on rank 1. All processes have started again: the run continues from step 2"
        in (said.out + said.err).replace("\n", " ")
    )
