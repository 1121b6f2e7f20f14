"""Law 1 (real and simulated allocations are equal) for one rank of several under accelerate or the Trainer.

As in `test_ranks.py`, the reference is real gloo processes on the CPU. The comparison covers each
allocation and free from the first step on, and the bytes allocated before it.

The construction of a model is not compared. A rehearsal moves it from the host group by group, and on the
CPU it is already in place. accelerate has no FSDP2 for the CPU, so `placed_on` declares the devices as
GPUs. The remaining work of a rank is accelerate's own code.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

import accelerate
import pytest
import torch
from test_ranks import case

from aligned import Event, compare
from gloo_ranks import Case, Ran, assert_same_account, by_case, in_steps, losses_of, run_ranks
from rank_events import without_own
from reported import foreseen
from snugfit.errors import UsageError
from snugfit.features.distributed.simulate.ranks import process_group
from snugfit.prediction.predict import predict
from snugfit.rehearsal.device.policy import CpuPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import Trace
from snugfit.results.footprint import Kind
from snugfit.step.applier import refuse_unsupported
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import job_of_rank, on_gpus
from tiers import few_of, slow_but

TWO = {
    "accelerate": (
        ("llama", "ddp"),
        ("llama", "ddp(bucket_views=true) + bf16 + micro_batches(2)"),
        ("llama", "fsdp"),
        ("llama", "fsdp + bf16_pure + every_layer"),
        ("bert", "fsdp(reshard=none) + bf16 + micro_batches(2)"),
        ("llama", "ddp + lora(r=4, targets=all-linear) + bf16"),
        ("llama", "fsdp + lora(r=4, targets=all-linear)"),
        ("llama", "ddp + qlora(r=4) + bf16"),
        ("llama", "ddp + chunked_loss(tokens=64) + bf16"),
    ),
    "trainer": (
        ("llama", "ddp + micro_batches(2)"),
        ("llama", "fsdp + bf16"),
        ("bert", "fsdp(reshard=none) + bf16 + micro_batches(2)"),
        ("llama", "ddp + qlora(r=4) + micro_batches(2)"),
        ("llama", "fsdp + lora(r=4, targets=all-linear) + bf16 + chunked_loss(tokens=64)"),
    ),
}
LATER = {"accelerate": [0, 1, 2, 4, 5, 6, 7, 8], "trainer": [1, 2, 3, 4]}
"""Cases that `make test` omits, by training loop. The Trainer covers DDP, because it uses accelerate."""
TWO = {loop: tuple(few_of(cases, [cases[number] for number in LATER[loop]])) for loop, cases in TWO.items()}
CASES = [(loop, *one) for loop, cases in TWO.items() for one in cases]
FOUR = ("llama", "hsdp(2) + bf16")
FSDP = "fsdp + bf16_pure + every_layer"


@pytest.fixture(autouse=True)
def foreach_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose foreach as on a GPU, as in `test_law_loops.py`, since the Trainer leaves the choice to torch."""
    module = importlib.import_module("torch.optim.optimizer")
    monkeypatch.setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cpu", "meta"])


def clipped(family: str, recipe: str) -> Case:
    """Return the test case with gradient clipping, which the Trainer always applies."""
    job, text = case(family, recipe)
    return replace(job, clip=1.0), text


@functools.cache
def real(loop: str, ranks: int) -> dict[tuple[str, str, int], Ran]:
    """Start this number of ranks once for a loop, and return the results of each case and rank."""
    cases = TWO[loop] if ranks == 2 else (FOUR,)
    return by_case(cases, run_ranks(ranks, [clipped(*one) for one in cases], loop))


def trace_of(loop: str, ranks: int, family: str, recipe: str, rank: int = 0) -> Trace:
    job, _ = clipped(family, recipe)
    setup = on_gpus(Recipe.parse(recipe).setup(), ranks)
    return rehearse(job_of_rank(job, setup), setup, CpuPolicy(), loop=loop, rank=rank)


def stands_before(events: Sequence[Event]) -> int:
    """Return the bytes allocated before the first step.

    gloo frees the weights that DDP broadcasts from the first rank, and the profiler misses those frees.
    """
    dead = {event.block for event in events if event.nbytes < 0}
    return sum(
        event.nbytes
        for event in events
        if event.step < 0 and (event.block in dead or "aten::flatten_dense_tensors" not in event.operators)
    )


def hold(loop: str, ranks: int, family: str, recipe: str, rank: int) -> None:
    account = without_own(real(loop, ranks)[family, recipe, rank].account)
    trace = without_own(foreseen(trace_of(loop, ranks, family, recipe, rank)))
    assert stands_before(account) == stands_before(trace)
    assert_same_account(account, trace, f"{loop}, {family}, {recipe}, rank {rank}", kept=in_steps)


@pytest.mark.whole
@pytest.mark.parametrize(("loop", "family", "recipe"), CASES)
def test_one_of_two_real_ranks_allocates_what_its_trace_says(loop: str, family: str, recipe: str) -> None:
    """In `make test` one rank of each case is compared, the first and the last one in turn."""
    for rank in few_of([0, 1], [CASES.index((loop, family, recipe)) % 2]):
        hold(loop, 2, family, recipe, rank)


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize("loop", ["accelerate", "trainer"])
def test_so_does_one_of_four_in_two_groups(loop: str) -> None:
    hold(loop, 4, *FOUR, rank=0)
    hold(loop, 4, *FOUR, rank=3)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("loop", "family", "recipe"), [one for one in CASES if one[:2] != ("trainer", "bert")]
)
def test_ranks_train_on_the_global_batch(loop: str, family: str, recipe: str) -> None:
    """Law 3 (equal training): each rank takes its part of the batch, and the mean of their losses is that of
    one process.

    The Trainer multiplies a classifier's loss, which is a mean, by the number of processes.
    """
    job, _ = clipped(family, recipe)
    alone = " + ".join(part for part in recipe.split(" + ") if not part.startswith(("ddp", "fsdp")))
    expected = losses_of(job, Recipe.parse(alone or "plain").setup(), loop)
    per_rank = [real(loop, 2)[family, recipe, rank].losses for rank in range(2)]
    together = [mean(losses) for losses in zip(*per_rank, strict=True)]
    assert together == pytest.approx(expected, rel=2e-2 if "bf16" in recipe else 1e-4)


@pytest.mark.whole
def test_a_rank_of_the_plain_loop_is_not_accelerate_s() -> None:
    """The plain loop has other process groups, and sums gradients in fp32 under bf16."""
    account = in_steps(without_own(real("accelerate", 2)["llama", FSDP, 0].account))
    plain = in_steps(without_own(foreseen(trace_of("plain", 2, "llama", FSDP))))
    assert compare(account, plain).similarity < 1.0


def test_a_spread_model_is_built_on_the_host() -> None:
    """The device never holds all weights, unlike in the plain loop, which builds them there."""
    building = {
        loop: max(level_while_building(trace_of(loop, 4, "llama", "fsdp")))
        for loop in ("plain", "accelerate")
    }
    assert building["accelerate"] < 0.7 * building["plain"]  # the model has two layers


def level_while_building(trace: Trace) -> list[int]:
    level, levels = 0, [0]
    for event in trace.events:
        block = trace.blocks[abs(event) - 1]
        if event > 0 and block.phase != "build":
            break
        level += block.nbytes if event > 0 else -block.nbytes
        levels.append(level)
    return levels


@pytest.mark.parametrize("loop", slow_but(["accelerate", "trainer"], 1))
def test_a_prediction_is_of_the_loop_s_own_groups(loop: str) -> None:
    """The simulated optimizer has the shards, although accelerate first passes it the whole weights."""
    job, _ = case("llama", "fsdp + bf16")
    one, two = (
        predict(job, "fsdp + bf16", gpu="h200", gpus=2, loop=each).footprint for each in ("plain", loop)
    )
    assert one.kinds[Kind.OPTIMIZER_STATES] == pytest.approx(two.kinds[Kind.OPTIMIZER_STATES], rel=0.01)
    assert one.kinds[Kind.WEIGHTS] == pytest.approx(two.kinds[Kind.WEIGHTS], rel=0.01)
    assert one.requested_bytes != two.requested_bytes
    assert two.communication_bytes


@pytest.mark.parametrize(
    ("loop", "recipe", "why"),
    [
        ("accelerate", "zero1", "cannot place the states of torch's ZeroRedundancyOptimizer"),
        ("trainer", "zero1", "the Trainer cannot place the states"),
        ("accelerate", "fsdp(reshard=all)", "Try reshard=layers or reshard=none"),
        ("trainer", "ddp(bucket_views=true)", "Try ddp without bucket_views"),
        ("trainer", "fsdp(offload=cpu)", "snugfit's own loop alone"),
    ],
)
def test_what_a_loop_has_no_word_for_is_refused(loop: str, recipe: str, why: str) -> None:
    setup = on_gpus(Recipe.parse(recipe).setup(), 2)
    with pytest.raises(UsageError, match=why):
        refuse_unsupported(loop, setup)
    refuse_unsupported("plain", setup)


def test_one_of_several_is_said_where_accelerate_asks() -> None:
    """Test a rank on shapes.

    accelerate treats its group as one of GPUs, and reads no variables of a launcher. It receives the
    model's layers before it shards them.
    """
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    from snugfit.features.distributed.apply.by_accelerate import one_of_several
    from snugfit.features.distributed.fields import ParallelWish
    from snugfit.step.transformers_internals import placed_on

    before = dict(os.environ)
    shapes, wish = torch.device("meta"), ParallelWish(weights="sharded", ranks=4)
    with process_group(1, 4), placed_on(shapes), one_of_several(shapes, wish):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        accelerator = accelerate.Accelerator(fsdp_plugin=plugin, mixed_precision="bf16")
        assert accelerator.distributed_type is DistributedType.FSDP
        assert (accelerator.num_processes, accelerator.process_index) == (4, 1)
        assert accelerator.device.type == "meta"
        assert plugin.mixed_precision_policy.reduce_dtype is torch.bfloat16
        assert plugin.transformer_cls_names_to_wrap is None
    assert dict(os.environ) == before
