"""Fused kernels and compiled layers in several processes: training, refusals, law 1 for compiled layers.

The runs use the CPU and gloo, as in `test_ranks.py` and `test_train_many.py`. There fused kernels are plain
torch, and those of compiled layers compute nothing.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_ranks import BATCH

from aligned import Event
from clean_forks import Forks, forks_of
from gloo_ranks import Ran, assert_same_account, by_case, run_ranks
from many_ranks import LAST, run_of, trained, weights_in
from reported import foreseen
from small_models import small_job
from small_runs import losses
from snugfit.errors import RecipeError, UsageError
from snugfit.prediction.predict import predict
from snugfit.rehearsal.device.policy import CpuPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import job_of_rank, on_gpus
from tiers import few_of, slow_but
from tolerance import same_losses, same_parameters

pytestmark = [pytest.mark.whole, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")]

COMPILED = [
    ("llama", "ddp + compiled + bf16_pure"),
    ("bert", "ddp + compiled + bf16"),
    ("llama", "fsdp + compiled + bf16 + lora(r=4) + every_layer"),
    ("llama", "fsdp(reshard=all) + compiled + micro_batches(2)"),
]
COMPILED = few_of(COMPILED, [one for one in COMPILED if one is not COMPILED[0]])


@functools.cache
def really_compiled() -> dict[tuple[str, str, int], Ran]:
    """Start two ranks once, and return the results of each compiled case and rank."""
    cases = [(small_job(family, 2, batch_size=BATCH), recipe) for family, recipe in COMPILED]
    return by_case(COMPILED, run_ranks(2, cases, within="idle_compiler:idle_kernels", trains=False))


@pytest.mark.parametrize("rank", slow_but([1, 0], 1))
@pytest.mark.parametrize(("family", "recipe"), COMPILED)
def test_compiled_layers_of_two_real_ranks_allocate_what_their_traces_have(
    family: str, recipe: str, rank: int
) -> None:
    """torch copies the state of the CPU's generator while it compiles."""
    job, setup = small_job(family, 2, batch_size=BATCH), on_gpus(Recipe.parse(recipe).setup(), 2)
    trace = foreseen(rehearse(job_of_rank(job, setup), setup, CpuPolicy(), rank=rank))
    account = really_compiled()[family, recipe, rank].account
    assert_same_account(account, trace, f"{family}, {recipe}, rank {rank}", kept=in_runs)


def in_runs(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if not any("dynamo_timed" in one for one in event.operators)]


# ---- training --------------------------------------------------------------------------------------------


HOW: dict[str, Any] = {"job": "llama", "layers": 1, "lr_scheduler_type": "constant"}

TRAINED = [
    ("fsdp", "fused + chunked_loss(tokens=64) + lora(r=4, targets=all-linear) + bf16_pure", "plain", 1),
    ("fsdp", "fused", "ddp", 2),
    ("ddp", "fused + qlora(r=4) + bf16_pure", "fsdp", 2),
]
"""Techniques for two processes, the rest of the recipe, and the processes of another resumed run."""


@pytest.fixture(scope="module")
def forks() -> Forks:
    return forks_of("many_ranks")


@pytest.mark.parametrize(("many", "kernels", "other", "others"), slow_but(TRAINED, 1))
def test_kernels_train_and_resume_as_in_one_process(
    tmp_path: Path, forks: Forks, many: str, kernels: str, other: str, others: int
) -> None:
    """A resumed run equals the uninterrupted one bit for bit on as many processes, and up to rounding on
    others. Each checkpoint has whole adapters in peft's files.
    """
    recipe = f"{many} + {kernels}"
    run_of(str(tmp_path / "alone"), recipe=kernels, **HOW)
    assert trained(forks, tmp_path / "whole", 2, recipe=recipe, **HOW) == [0, 0]
    assert trained(forks, tmp_path / "half", 2, recipe=recipe, max_steps=3, **HOW) == [0, 0]
    shutil.copytree(tmp_path / "half", tmp_path / "moved")
    if "lora" in kernels:
        saved = {file.name for file in (tmp_path / "half" / "checkpoint-3").iterdir()}
        assert {"adapter_model.safetensors", "adapter_config.json"} <= saved
        assert not {"model.safetensors", "shards"} & saved
    assert trained(forks, tmp_path / "half", 2, recipe=recipe, **HOW) == [0, 0]
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")
    if others == 1:
        assert run_of(str(tmp_path / "moved"), recipe=kernels, **HOW).exit_code == 0
    else:
        elsewhere = {"recipe": f"{other} + {kernels}", **HOW}
        assert trained(forks, tmp_path / "moved", others, **elsewhere) == [0] * others
    same = {one: losses(tmp_path / one) for one in ("whole", "moved", "alone")}
    for name in ("whole", "moved"):
        same_losses(*([row[0] for row in same[at].values()] for at in (name, "alone")))
        if "lora" in kernels:
            same_parameters(weights_in(tmp_path / name, LAST), weights_in(tmp_path / "alone", LAST))


# ---- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("many", ["tensor(2)", "context(2)", "zero2", "zero3"])
def test_kernels_are_refused_where_processes_share_layers(many: str) -> None:
    job = small_job("llama", 2, batch_size=2, sequence_length=8)
    with pytest.raises(RecipeError, match="fused"):
        predict(job, f"{many} + fused", gpu="h200", gpus=2)


@pytest.mark.parametrize(
    "recipe",
    ["fsdp + compiled(what=model)", "ddp + compiled(mode=reduce-overhead)", "ddp + compiled + qlora(r=4)"],
)
def test_other_compiled_code_is_refused_on_several_gpus(recipe: str) -> None:
    job = small_job("llama", 2, batch_size=2, sequence_length=8)
    with pytest.raises(RecipeError, match="compiled"):
        predict(job, recipe, gpu="h200", gpus=2)


@pytest.mark.parametrize("loop", ["accelerate", "trainer"])
@pytest.mark.parametrize("recipe", ["ddp + fused", "fsdp + compiled"])
def test_they_are_refused_in_loops_of_other_libraries(recipe: str, loop: str) -> None:
    job = small_job("llama", 1, batch_size=2, sequence_length=8)
    with pytest.raises(UsageError, match="not tested in several processes of accelerate"):
        predict(job, recipe, gpu="h200", gpus=2, loop=loop)


def test_sharded_weights_of_a_joint_product_are_not_copied_until_the_backward_pass() -> None:
    """A saved copy would keep the weights of all layers."""
    peaks = {}
    for layers in (1, 3):
        job = small_job("llama", layers, {"hidden_size": 512}, batch_size=2, sequence_length=8)
        for recipe in ("fsdp + sgd", "fsdp + fused + sgd"):
            peaks[layers, recipe] = predict(job, recipe, gpu="h200", gpus=2).footprint.requested_bytes
    plain, fused = (peaks[3, one] - peaks[1, one] for one in ("fsdp + sgd", "fsdp + fused + sgd"))
    assert fused < 1.05 * plain


@pytest.mark.parametrize("adapters", slow_but(["lora(r=4, targets=all-linear)", "full"], 1))
def test_gathered_weights_of_a_joint_product_are_not_joined_by_a_copy(adapters: str) -> None:
    """Copies of joint weights would be `cat` kernels of the forward and of the backward pass."""
    joins = {}
    for many in ("ddp", "fsdp"):
        job = small_job("llama", 2, batch_size=2, sequence_length=8)
        setup = on_gpus(Recipe.parse(f"{many} + fused + {adapters}").setup(), 2)
        trace = rehearse(job_of_rank(job, setup), setup, CpuPolicy())
        in_layers = [kernel for kernel in trace.kernels if ".layers." in kernel.module]
        joins[many] = sum(kernel.operator == "aten::cat" for kernel in in_layers)
    assert joins["fsdp"] == joins["ddp"]


@pytest.mark.parametrize("many", slow_but(["fsdp", "ddp"], 1))
def test_logits_in_chunks_never_exist_as_a_whole(many: str) -> None:
    """FSDP2 registers a hook on each output of the model, and logits are one."""
    job = small_job("llama", 1, {"vocab_size": 32_000}, batch_size=16, sequence_length=1024)
    recipes = f"{many} + bf16_pure", f"{many} + chunked_loss + bf16_pure"
    whole, chunked = (predict(job, one, gpu="h200", gpus=2).footprint.requested_bytes for one in recipes)
    logits = 2 * 8 * 1024 * 32_000
    assert whole - chunked > 2 * logits
