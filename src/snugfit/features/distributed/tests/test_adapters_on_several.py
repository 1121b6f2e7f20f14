"""Low-rank adapters in several processes: training, checkpoints, refusals. `test_ranks.py` has law 1.

The runs use the CPU and gloo, as in `test_ranks.py` and `test_train_many.py`.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clean_forks import Forks, forks_of
from deepspeed_here import with_deepspeed
from many_ranks import LAST, run_of, trained, weights_in
from small_models import small_job
from small_runs import events, losses
from snugfit.errors import SnugfitError, UsageError
from snugfit.features.distributed.plan.shared import Shared
from snugfit.prediction.predict import predict
from snugfit.results.footprint import Kind
from snugfit.techniques.recipe import Recipe
from snugfit.training.checkpoint.packed_state import SAVED_ON, pack, unpack
from tiers import slow_but
from tolerance import same_losses, same_parameters

pytestmark = [pytest.mark.whole, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")]


# ---- training --------------------------------------------------------------------------------------------


HOW: dict[str, Any] = {"job": "llama", "layers": 1, "lr_scheduler_type": "constant"}

TRAINED = [
    ("ddp", 2, "lora(r=4) + bf16_pure", "plain", 1),
    ("fsdp", 2, "lora(r=4, dora=true) + bf16_pure", "ddp", 4),
    ("hsdp(2, offload=cpu)", 4, "lora(r=4)", "fsdp", 2),
    ("ddp", 2, "qlora(r=4) + bf16", "ddp", 4),
    ("fsdp", 2, "qlora(r=4) + bf16_pure", "fsdp", 4),
]
"""Techniques for several processes, their number, the adapters, and the processes of another resumed run."""


@pytest.fixture(scope="module")
def forks() -> Forks:
    return forks_of("many_ranks")


def checksums(folder: Path) -> dict[str, int]:
    """Return the checksums of frozen weights in the last checkpoint."""
    state = json.loads((folder / f"checkpoint-{LAST}" / "model_state.json").read_text())
    return dict(state["frozen"])


@pytest.mark.parametrize(("many", "size", "adapters", "other", "others"), slow_but(TRAINED, 0))
def test_adapters_train_and_resume_as_in_one_process(
    tmp_path: Path, forks: Forks, many: str, size: int, adapters: str, other: str, others: int
) -> None:
    """Losses and adapters equal those of one process. A resumed run equals the uninterrupted one bit for bit
    on as many processes, and up to rounding on others. Each checkpoint has whole adapters in peft's files.
    """
    recipe = f"{many} + {adapters}"
    run_of(str(tmp_path / "alone"), recipe=adapters, **HOW)
    assert trained(forks, tmp_path / "whole", size, recipe=recipe, **HOW) == [0] * size
    assert trained(forks, tmp_path / "half", size, recipe=recipe, max_steps=3, **HOW) == [0] * size
    shutil.copytree(tmp_path / "half", tmp_path / "moved")
    saved = {file.name for file in (tmp_path / "half" / "checkpoint-3").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= saved
    assert not {"model.safetensors", "shards"} & saved
    assert trained(forks, tmp_path / "half", size, recipe=recipe, **HOW) == [0] * size
    assert checksums(tmp_path / "half") == checksums(tmp_path / "alone")
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")
    ours, theirs = (weights_in(tmp_path / name, LAST) for name in ("half", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(bool((ours[name] == theirs[name]).all()) for name in ours)
    assert not events(tmp_path / "half", "warning")
    if others == 1:
        assert run_of(str(tmp_path / "moved"), recipe=adapters, **HOW).exit_code == 0
    else:
        elsewhere = {"recipe": f"{other} + {adapters}", **HOW}
        assert trained(forks, tmp_path / "moved", others, **elsewhere) == [0] * others
    alone = tmp_path / "alone"
    for folder in (tmp_path / "whole", tmp_path / "moved"):
        same_losses(*([row[0] for row in losses(at).values()] for at in (folder, alone)))
        same_parameters(weights_in(folder, LAST), weights_in(alone, LAST))


def test_a_sharded_run_resumes_from_adapters_of_one_process(tmp_path: Path, forks: Forks) -> None:
    """Each process keeps its shards of the whole adapters and moments."""
    run_of(str(tmp_path / "alone"), recipe="lora(r=4)", **HOW)
    run_of(str(tmp_path / "run"), recipe="lora(r=4)", max_steps=3, **HOW)
    assert trained(forks, tmp_path / "run", 2, recipe="fsdp + lora(r=4)", **HOW) == [0, 0]
    same_parameters(weights_in(tmp_path / "run", LAST), weights_in(tmp_path / "alone", LAST))


@pytest.mark.slow
def test_a_run_that_ends_early_saves_its_adapters_once(tmp_path: Path, forks: Forks) -> None:
    ends = {"eval_strategy": "steps", "early_stopping_patience": 1, "early_stopping_threshold": 1e9}
    every = {"eval_steps": 1, **HOW, "save_steps": 1}
    assert trained(forks, tmp_path, 2, recipe="fsdp + lora(r=4)", **every, **ends) == [0, 0]
    saved = [event["step"] for event in events(tmp_path, "saved")]
    assert saved == [*range(1, len(saved) + 1)]
    assert len(saved) < LAST


# ---- plans -----------------------------------------------------------------------------------------------


def test_sharded_frozen_weights_may_take_more_memory_than_copies() -> None:
    """A gathered embedding exceeds half of a small model. Without adapters, sharded states outweigh it."""
    job = small_job("llama", 2, {"vocab_size": 4096}, batch_size=2, sequence_length=8)
    for adapters, sharded_needs_more in (("lora(r=4)", True), ("full", False)):
        fsdp, ddp = (f"{many} + {adapters} + sgd" for many in ("fsdp", "ddp(bucket_views=true)"))
        peaks = [predict(job, one, gpu="h200", gpus=2).footprint.requested_bytes for one in (fsdp, ddp)]
        layouts = [Shared(2, Recipe.parse(one)) for one in (fsdp, ddp)]
        assert (peaks[0] > peaks[1]) is sharded_needs_more
        assert layouts[0].holds_no_more_than(layouts[1]) is not sharded_needs_more


# ---- weights of several kinds ----------------------------------------------------------------------------


def test_a_gpu_has_its_part_of_packed_weights() -> None:
    """Their scales stay whole on each GPU. They move with the weights of a model that the host builds."""
    job = small_job("llama", 2, batch_size=2, sequence_length=8)
    kinds = [
        predict(replace(job, build_on=place), f"{many} + qlora(r=4)", gpu="h200", gpus=2).footprint.kinds
        for many, place in (("ddp", "device"), ("fsdp", "device"), ("fsdp", "host"))
    ]
    whole, part, from_host = (one[Kind.WEIGHTS] for one in kinds)
    assert part < 0.7 * whole
    assert from_host == pytest.approx(part, rel=0.02)


@pytest.mark.parametrize("loop", ["accelerate", "trainer"])
def test_accelerate_does_not_shard_packed_weights(loop: str) -> None:
    job = small_job("llama", 1, batch_size=2, sequence_length=8)
    with pytest.raises(SnugfitError, match=r"leaves 4-bit weights whole on each GPU.*try ddp"):
        predict(job, "fsdp + qlora(r=4)", gpu="h200", gpus=2, loop=loop)


@with_deepspeed
@pytest.mark.parametrize("loop", ["accelerate", "trainer"])
def test_packed_weights_of_the_engine_are_for_snugfits_own_loop(loop: str) -> None:
    job = small_job("llama", 1, batch_size=2, sequence_length=8)
    with pytest.raises(SnugfitError, match=r"tested in snugfit's own loop only.*or try lora"):
        predict(job, "zero2 + qlora(r=4)", gpu="h200", loop=loop)


def test_layers_that_are_recomputed_together_are_refused_on_shards() -> None:
    job = small_job("llama", 4, batch_size=2, sequence_length=8)
    with pytest.raises(SnugfitError, match="recomputes several layers at once"):
        predict(job, "fsdp + qlora(r=4) + segments", gpu="h200", gpus=2)


def test_gathered_states_are_restored_on_the_device_of_the_weights() -> None:
    """They are gathered on the host. A run of one GPU has them on the GPU."""
    state = torch.ones(3)
    setattr(state, SAVED_ON, "cuda")
    tree, tensors = pack({"exp_avg": state, "step": torch.ones(())})
    restored = unpack(tree, tensors, torch.device("meta"))
    assert restored["exp_avg"].device.type == "meta"
    assert restored["step"].device.type == "cpu"


def test_trained_weights_of_two_dtypes_in_a_layer_are_refused() -> None:
    job = small_job("llama", 2, batch_size=2, sequence_length=8)
    recipe = "fsdp + bf16_pure + lora(r=4, save=input_layernorm)"
    with pytest.raises(UsageError, match="LlamaDecoderLayer has bfloat16 and float32"):
        predict(job, recipe, gpu="h200", gpus=2)
