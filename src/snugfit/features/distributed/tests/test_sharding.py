"""DeepSpeed on one GPU: its own engine on tensors without data, compared with a real run on the CPU.

Law 1 covers both stages with everything on the device. Both runs have a process group that sends nothing,
since a real group allocates differently on a CPU than on a GPU. The tensors on the host are checked by
their bytes, since a CPU cannot distinguish host from device.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import initialization
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from aligned import compare, peak
from bare_process import command
from cpu_scratch import compared
from deepspeed_here import compiles, with_deepspeed
from reported import foreseen, reports
from small_models import small_job
from snugfit.errors import ModelError, RecipeError, UsageError
from snugfit.features.distributed.engine.config import (
    PROCESS_GROUP,
    bucket_sizes,
    engine_config,
    refuse_without_file_operator,
)
from snugfit.features.distributed.engine.loop import in_numbers
from snugfit.features.distributed.engine.sharding import ShardingHandler
from snugfit.features.distributed.fields import ShardingWish
from snugfit.features.distributed.simulate.host_tensors import HostTensors
from snugfit.features.distributed.simulate.ranks import one_search_for_strides
from snugfit.features.distributed.techniques.zero2 import Zero2
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.planning.keep import Kept
from snugfit.planning.search.reasons import cures
from snugfit.planning.search.search import plan
from snugfit.prediction.device import context_of
from snugfit.prediction.pinned import host_state_bytes, pinned_bytes
from snugfit.prediction.predict import predict
from snugfit.prediction.profile import Software
from snugfit.prediction.seconds import DISK_BANDWIDTH, step_seconds
from snugfit.rehearsal.device.policy import CpuPolicy, CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import STAGE_BACK, STAGE_OUT, SWAPPED, UPDATE_ON_HOST, Block, Trace
from snugfit.step.applier import group_bytes
from snugfit.step.host_link import LinkObserver, MetaLink
from snugfit.step.open_step import open_step
from snugfit.step.step import LOOPS, Observer
from snugfit.techniques import technique
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity
from tiers import crossed, slow_but

GIB = 1 << 30

# ---- without DeepSpeed -----------------------------------------------------------------------------------


def test_without_the_package_it_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(technique, "version_of", lambda package: None)
    with pytest.raises(RecipeError, match=r'zero2 needs deepspeed.*pip install "snugfit\[deepspeed\]"'):
        predict(small_job("bert", 2), "zero2", gpu="h200")


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("zero2 + adafactor", "Try 'adamw'"),
        ("zero3 + qlora(r=2, bits=8)", "8-bit weights are not simulated together with zero3"),
        ("zero2 + frozen(parts=classifier)", "is not simulated together with frozen"),
        ("zero2 + bf16_pure", "Try 'bf16' over weights in float32"),
        ("zero2 + fp16", "Try 'bf16' over weights in float32"),
    ],
)
def test_what_it_does_not_go_with(recipe: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        Recipe.parse(recipe).check(small_job("bert", 2), installed=False)


def test_autocast_becomes_the_dtype_of_weights() -> None:
    setup = Recipe.parse("bf16 + zero3").setup()
    assert setup.autocast is None
    assert setup.sharding is not None
    assert (setup.sharding.stage, setup.sharding.weights, setup.sharding.dtype) == (3, "cpu", "bfloat16")


@pytest.mark.whole
def test_a_plan_leaves_it_out_and_says_why() -> None:
    with pytest.raises(UsageError, match=r"plans do not search with zero2.*Predict one"):
        plan(small_job("bert", 2), gpu=None, memory_bytes=GIB, keep="zero2", workers=1)
    assert "fits without DeepSpeed, leave it out" in Zero2.planning_objection(small_job("bert", 2))


@with_deepspeed
def test_where_nothing_fits_a_plan_gives_the_order_in_which_to_try() -> None:
    texts = [*cures(Recipe(), 2 * GIB, small_job("bert", 2), GIB, Fidelity.LEARNS, Kept())]
    two, three = (
        next(at for at, text in enumerate(texts) if f"search with '{stage}'" in text)
        for stage in ("zero2", "zero3")
    )
    assert two < three
    assert sum("begin with zero2" in text for text in texts) == 1


def test_gpus_are_named_to_deepspeed_by_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement exposes one GPU to its process by UUID, which DeepSpeed would parse as a number."""
    import pynvml

    def numbered(handle: str) -> int:
        if not handle.startswith("GPU-"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return int(handle[-1])

    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetIndex", numbered)
    assert in_numbers("1,0") == "1,0"
    assert in_numbers("GPU-4c92-3, GPU-77aa-0") == "3,0"
    with pytest.raises(UsageError, match=r"CUDA_VISIBLE_DEVICES='MIG-1'.*to a number"):
        in_numbers("MIG-1")


def test_a_process_group_takes_memory_of_its_own() -> None:
    trace = rehearse(small_job("bert", 2), Recipe.parse("plain").setup(), CudaPolicy())
    h200 = find_gpu("h200")
    setups = [Recipe.parse(recipe).setup() for recipe in ("plain", "zero2", "zero3")]
    alone, *grouped = (context_of(h200, Software(), trace, group=group_bytes(setup))[0] for setup in setups)
    assert [one - alone for one in grouped] == [PROCESS_GROUP[2], PROCESS_GROUP[3]]


def test_buckets_are_those_of_auto() -> None:
    setup = Recipe.parse("zero3 + micro_batches(2)").setup()
    config = engine_config(setup, batch_size=8, clip=None, width=64)
    assert config["train_batch_size"] == 8
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (4, 2)
    section = config["zero_optimization"]
    assert section["reduce_bucket_size"] == 64 * 64
    assert section["stage3_param_persistence_threshold"] == 640
    assert section["offload_param"] == {"device": "cpu", "pin_memory": True}


# ---- the host's memory -----------------------------------------------------------------------------------


def test_memory_of_the_host_is_counted_and_not_taken() -> None:
    host = HostTensors(lambda tensor, dtype: tensor.to(dtype))
    size = 64 * GIB  # bytes, more than any test machine has
    with host:
        tensor = torch.zeros(size // 4, device="cpu")
        assert host.nbytes == size
        half = tensor.to(torch.bfloat16)
        assert half.dtype is torch.bfloat16
        tensor.add_(1.0).copy_(half)
        assert host.nbytes == size + size // 2
        del half
    assert (host.nbytes, host.most) == (size, size + size // 2)
    host.pin(tensor)
    assert (host.pinned, host.nbytes) == (size, size)


class Told(LinkObserver):
    """An observer that counts the bytes of the host's reads and writes."""

    def __init__(self) -> None:
        self.nbytes = 0

    def work_on_host(self, nbytes: int) -> None:
        self.nbytes += nbytes


def test_what_the_host_reads_and_writes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """In-place products read their target, copies do not, and `is_pinned` reads nothing."""
    host, told = HostTensors(lambda tensor, dtype: tensor.to(dtype)), Told()
    monkeypatch.setattr(MetaLink, "observer", told)
    seen = []
    with host:
        one, two = torch.empty(1 << 20, device="cpu"), torch.empty(1 << 20, device="cpu")
        for work in (lambda: one.mul_(2.0), lambda: one.copy_(two), lambda: one.add_(two), one.is_pinned):
            before = told.nbytes
            work()
            seen.append((told.nbytes - before) // one.nbytes)
    assert seen == [2, 2, 3, 0]


def test_page_locked_memory_comes_in_powers_of_two() -> None:
    host = HostTensors(lambda tensor, dtype: tensor.to(dtype))
    with host:
        tensor = torch.empty(3000, dtype=torch.uint8, device="cpu")
    host.pin(tensor)
    assert (host.pinned, host.most) == (4096, 4096)


# ---- with DeepSpeed --------------------------------------------------------------------------------------


@contextlib.contextmanager
def group_that_sends_nothing() -> Iterator[None]:
    from torch.testing._internal.distributed import fake_pg

    dist.init_process_group("fake", rank=0, world_size=1, store=fake_pg.FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@with_deepspeed
@pytest.mark.whole
@pytest.mark.parametrize(
    ("stage", "family", "more"),
    slow_but(
        [
            (f"zero{stage}(offload=none)", family, more)
            for stage in (2, 3)
            for family, more in (
                ("bert", ""),
                ("gpt2", " + bf16"),
                ("t5", " + micro_batches(2)"),
                ("gpt2", " + every_layer + bf16"),
                ("llama", " + lora(r=4, dora=true) + bf16"),
                ("llama", " + qlora(r=4) + bf16"),
            )
        ],
        0,
    ),
)
def test_a_real_step_allocates_what_its_trace_says(stage: str, family: str, more: str) -> None:
    hold(stage + more, family, "plain")


@with_deepspeed
@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("recipe", "loop"),
    crossed(
        ["zero2(offload=none)", "zero3(offload=none) + micro_batches(2)"], ["accelerate", "trainer"], keep=1
    ),
)
def test_so_does_one_of_accelerate_and_of_the_trainer(
    recipe: str, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Trainer's AdamW uses foreach on a GPU, and so does this test."""
    module = importlib.import_module("torch.optim.optimizer")  # torch.optim has a class of the same name
    monkeypatch.setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cpu", "meta"])
    hold(recipe, "bert", loop)


def hold(recipe: str, family: str, loop: str) -> None:
    """Assert law 1 (real and simulated allocations are equal) for a step of the engine in this loop."""
    from test_law_rehearsed_equals_real import job

    this = replace(job(family), clip=1.0)
    setup = Recipe.parse(recipe).setup()
    trace = compared(foreseen(rehearse(this, setup, CpuPolicy(), loop=loop)))
    with group_that_sends_nothing():
        real = compared(reports(this, setup, loop=loop))
    third = [[event for event in events if event.step == 2] for events in (real, trace)]
    assert all(third)
    comparison = compare(*third)
    assert comparison.similarity == 1.0, f"{loop}, {family}: {comparison}"
    assert peak(real) == peak(trace)


def copied(trace: Trace, operator: str) -> int:
    return sum(kernel.nbytes // 2 for kernel in trace.kernels if kernel.operator == operator)


@with_deepspeed
@pytest.mark.whole
@pytest.mark.parametrize("stage", slow_but([2, 3], [3].__contains__))
def test_states_and_weights_wait_on_the_host(stage: int) -> None:
    this = small_job("bert", 1)
    alone, offloaded = (
        rehearse(this, Recipe.parse(f"zero{stage}{where} + bf16").setup(), CudaPolicy())
        for where in ("(offload=none)", "")
    )
    weights = copied(offloaded, UPDATE_ON_HOST) // 4
    moments = 8 * weights
    assert host_state_bytes(offloaded.kernels) >= moments
    assert pinned_bytes(offloaded.kernels) >= 8 * weights  # the updated weights and their gradients
    assert not host_state_bytes(alone.kernels)
    assert copied(offloaded, STAGE_OUT) >= 2 * weights
    back = copied(offloaded, STAGE_BACK)
    assert back == pytest.approx((2 if stage == 2 else 4) * weights, rel=0.05)
    states = [trace.blocks for trace in (alone, offloaded)]
    held = [sum(one.nbytes for one in blocks if one.kind == "optimizer states") for blocks in states]
    assert held[0] >= moments
    assert held[1] == 0


class SeedAfterBuilding(Observer):
    """An observer that seeds the random generator after the model is built, so that batches do not depend on
    its initialisation.
    """

    def build_ends(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        torch.manual_seed(5)


def by_shape(weight: torch.Tensor, *numbers: Any, **named: Any) -> torch.Tensor:
    """Fill the weight with values that depend on its shape alone."""
    values = 0.03 * torch.sin(12.9898 * torch.arange(weight.numel(), dtype=torch.float32))
    with torch.no_grad():
        return weight.copy_(values.view(weight.shape))


@with_deepspeed
@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("loop", "recipe"),
    [
        *slow_but(
            itertools.product(LOOPS, ["zero2(offload=none)", "zero3(offload=none) + micro_batches(2)"]),
            lambda case: case[0] != "accelerate" and case[1].startswith("zero2"),
        ),
        *(
            pytest.param(loop, recipe, marks=[compiles, pytest.mark.slow])
            for loop in LOOPS
            for recipe in ("zero2", "zero3")
        ),
    ],
)
def test_it_trains_as_the_same_loop_does_without(recipe: str, loop: str) -> None:
    """The engine of accelerate or the Trainer clips, accumulates and updates like the loop without it.

    Weights partitioned during construction are drawn in another order. These models therefore begin with
    values that depend on the shape alone.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    losses, engines = [], []
    stepped = DeepSpeedEngine.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepSpeedEngine, "step", lambda self: (engines.append(self), stepped(self))[1])
        patch.setattr(initialization, "normal_", by_shape)
        for text in (recipe, recipe.split(" + ")[1] if " + " in recipe else "plain"):
            this = replace(small_job("bert", 2, batch_size=4), learning_rate=1e-3, clip=0.5)
            step = open_step(this, Recipe.parse(text).setup(), loop, torch.device("cpu"), keep_losses=True)
            losses.append(step.run(3, SeedAfterBuilding()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert len(engines) == 3
    section = engines[0].config["zero_optimization"]
    assert section["stage"] == int(recipe[4])
    assert (
        section["reduce_bucket_size"] == bucket_sizes(this.model.config["hidden_size"])["reduce_bucket_size"]
    )
    assert not is_deepspeed_zero3_enabled()
    assert not dist.is_initialized()


@with_deepspeed
@pytest.mark.whole
def test_weights_are_joined_on_the_host_where_the_gpu_has_no_room() -> None:
    """The second stage reads the free memory, and first moves the weights away if two copies do not fit."""
    this = small_job("bert", 1)
    setup = Recipe.parse("zero2 + bf16").setup()
    roomy = rehearse(this, setup, CudaPolicy())
    weights = copied(roomy, UPDATE_ON_HOST) // 2  # in bf16
    full = rehearse(this, setup, CudaPolicy(free_bytes=PROCESS_GROUP[2] + int(1.5 * weights)))
    joined = [any(one.operator == "aten::cat" for one in built_blocks(trace)) for trace in (roomy, full)]
    assert joined == [True, False]
    mine, others = ([one.nbytes for one in trace.blocks if one.step == 2] for trace in (roomy, full))
    assert mine == others


def test_deepspeed_writes_to_stderr_while_it_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The import's output goes to stderr, so that only a command's result is on stdout."""
    real = builtins.__import__

    def write(name: str, *given: Any) -> Any:
        if name.partition(".")[0] != "deepspeed":
            return real(name, *given)
        print("found an accelerator")
        return ModuleType(name)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", write)
        ShardingHandler().import_code(ShardingWish(stage=2))
    assert capsys.readouterr() == ("", "found an accelerator\n" * 2)


@with_deepspeed
@pytest.mark.slow
def test_an_answer_in_json_is_alone_on_stdout(tmp_path: Path) -> None:
    """Without a redirection, DeepSpeed's import would also write to stdout."""
    asked = ["predict", "bert-base-uncased", "--task", "sequence-classification"]
    told = command(*asked, "--recipe", "zero2", "--json", stdout=tmp_path / "stdout")
    assert json.loads(told)["recipe"] == "zero2"


def built_blocks(trace: Trace) -> list[Block]:
    return [block for block in trace.blocks if block.step < 0]


@with_deepspeed
@pytest.mark.slow
@pytest.mark.whole
def test_t5_3b_trains_in_a_batch_of_four_on_15_gb() -> None:
    """DeepSpeed's guide claims this for training with offload. On a larger GPU the allocator keeps more
    memory cached.
    """
    model = Model.find("google-t5/t5-3b")
    large = Job(model=model, task=Task.SEQ2SEQ_LM, batch_size=4, sequence_length=512, dtype="float32")
    recipe = "bf16 + every_layer + zero2"
    squeezed = predict(large, recipe, gpu="rtx 4080")
    assert squeezed.job.batch_size == 4
    assert squeezed.needed_bytes < 15e9
    assert squeezed.footprint.retries == 1
    assert any("releases its cached memory" in doubt for doubt in squeezed.doubts)
    roomy = predict(large, recipe, gpu="rtx 3090")
    assert roomy.fits
    assert roomy.needed_bytes > 15e9
    assert roomy.footprint.retries == 0


@with_deepspeed
@pytest.mark.whole
def test_a_disk_takes_from_the_host_and_takes_seconds() -> None:
    """DeepSpeed's swappers run unchanged, with page-locked host buffers in sizes of their choice.

    At least weights, moments and gradients pass through them. The GPU holds the same tensors as with
    offload to the host.
    """
    this = job_with_large_layers()
    host, disk = (
        rehearse(this, Recipe.parse(f"zero3(offload={where}) + bf16").setup(), CudaPolicy())
        for where in ("cpu", "nvme")
    )
    assert disk.peak().nbytes == pytest.approx(host.peak().nbytes, rel=0.01)
    weights = copied(host, UPDATE_ON_HOST)
    assert not copied(host, SWAPPED)
    assert copied(disk, SWAPPED) >= 6 * weights  # weights and both moments, in both directions
    assert copied(disk, UPDATE_ON_HOST) == weights
    seconds = [step_seconds(one, find_gpu("h200"), batch_size=2).step_seconds for one in (host, disk)]
    assert seconds[1] > seconds[0] + 6 * weights / DISK_BANDWIDTH


@with_deepspeed
def test_a_disk_without_the_operator_for_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: False)
    setup = Recipe.parse("zero3(offload=nvme)").setup()
    assert setup.sharding is not None
    with pytest.raises(UsageError, match=r"async_io.*libaio.*offload=cpu"):
        refuse_without_file_operator(setup.sharding)
    refuse_without_file_operator(replace(setup.sharding, states="cpu", weights="cpu"))


def job_with_large_layers() -> Job:
    """Return a job with matrices of 4 MiB, since smaller ones stay on the host."""
    small = small_job("bert", 1)
    config = {**small.model.config, "hidden_size": 1024, "intermediate_size": 2048}
    return replace(small, model=Model.from_config(config, name="large layers"))


@with_deepspeed
@pytest.mark.whole
@pytest.mark.slow
def test_a_rehearsal_leaves_no_group_and_deepspeed_s_own_accelerator() -> None:
    from deepspeed.accelerator import get_accelerator

    before = get_accelerator(), torch.nn.functional.linear
    rehearse(small_job("bert", 2), Recipe.parse("zero3").setup(), CudaPolicy())
    assert not dist.is_initialized()
    assert (get_accelerator(), torch.nn.functional.linear) == before


def test_a_failure_of_deepspeed_while_a_model_is_built_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed 0.19.8 parses `9.0a` in TORCH_CUDA_ARCH_LIST as a number when it compiles an operator."""
    room: dict[str, Any] = {"__name__": "deepspeed.ops.op_builder.builder"}
    exec(compile("def load(*given, **named):\n    int('0a')", "builder.py", "exec"), room)
    monkeypatch.setattr("snugfit.job.build._from_facts", room["load"])
    with pytest.raises(ModelError, match=r"DeepSpeed failed.*0a.*TORCH_CUDA_ARCH_LIST"):
        rehearse(small_job("bert", 1), Setup(), CudaPolicy())


def test_strided_shards_are_searched_once_for_all_tensors_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own function, which changes strategies, still runs for each tensor if a shard is strided."""
    from torch.distributed.tensor import Shard, _sharding_prop
    from torch.distributed.tensor.placement_types import _StridedShard

    ran: list[str] = []
    name = "_propagate_use_strided_shard_flag"
    monkeypatch.setattr(_sharding_prop, name, lambda strategy, schema: ran.append(strategy), raising=False)
    ((_, _, propagate),) = one_search_for_strides()
    plain = SimpleNamespace(args_spec=(SimpleNamespace(placements=(Shard(0),)),))
    strided = SimpleNamespace(args_spec=(SimpleNamespace(placements=(_StridedShard(0, split_factor=2),)),))
    for strategy, schema in (("a", plain), ("b", strided), ("c", strided), ("d", plain)):
        propagate(strategy, schema)
    assert ran == ["b", "c"]
