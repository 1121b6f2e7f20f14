"""Seconds of a step: the queue, the tiles, the rates, and profiles from an H200."""

from __future__ import annotations

import json
import statistics
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from small_models import small_job
from snugfit.errors import GpuError
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.prediction.kernel_seconds import KernelClock, tile_seconds
from snugfit.prediction.predict import predict
from snugfit.prediction.rates import HostLaunchCosts, Rates, packaged_rates, rates_for
from snugfit.prediction.seconds import (
    PREPARED,
    loader_seconds,
    simulate_queue,
    step_seconds,
    with_worker_batches,
)
from snugfit.prediction.timeline import QUEUE_DEPTH, queue_moments
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.record.kernels import CONTRACTIONS, group_of
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import GENERATED, Kernel
from snugfit.techniques.recipe import Recipe

RESULTS = Path(__file__).parents[1] / "results"
H200 = rates_for(find_gpu("h200"))
FREE = HostLaunchCosts(**dict.fromkeys((field.name for field in fields(HostLaunchCosts)), 0.0))


# ---- the queue -----------------------------------------------------------------------------------------


def test_the_host_of_a_timeline_is_no_further_ahead_than_the_queue_is_deep() -> None:
    """Test a step of 2,000 kernels and a short one. The device's times stay the same."""
    for count in (2000, 10):
        moments = queue_moments([1.0] * count, [0.001] * count, (), FREE)
        assert max(start - launch for launch, start in moments) <= QUEUE_DEPTH
        pauses = [later - start for (_, start), (_, later) in pairwise(moments)]
        assert pauses == pytest.approx([1.0] * (count - 1))
        assert simulate_queue([1.0] * count, [0.001] * count, (), FREE) == pytest.approx(count)


def test_a_device_that_has_work_sets_the_pace() -> None:
    assert simulate_queue([2.0, 3.0], [0.1, 0.1], (), FREE) == pytest.approx(5.0)


def test_a_host_that_asks_slowly_sets_the_pace() -> None:
    """The last kernel of a step still runs at the launch of the next step's first kernel."""
    assert simulate_queue([0.1, 3.0], [2.0, 2.0], (), FREE) == pytest.approx(4.0)


def test_waiting_adds_what_would_have_run_side_by_side() -> None:
    """Host and device take 1 s per kernel: 2 s in parallel, and one after the other with a wait at the
    end."""
    assert simulate_queue([1.0, 1.0], [1.0, 1.0], (), FREE) == pytest.approx(2.0)
    assert simulate_queue([1.0, 1.0], [1.0, 1.0], (2,), FREE) == pytest.approx(3.0)
    assert simulate_queue([1.0, 1.0], [1.0, 1.0], (1, 2), replace(FREE, wait=0.25)) == pytest.approx(4.5)


def test_a_step_costs_the_host_something_beside_its_kernels() -> None:
    assert simulate_queue([0.0], [1.0], (), replace(FREE, step=0.5)) == pytest.approx(1.5)


# ---- products ------------------------------------------------------------------------------------------


def product(rows: int, columns: int, inner: int, dtype: str = "torch.bfloat16", batch: int = 1) -> Kernel:
    item = 2 if "16" in dtype else 4
    return Kernel(
        "aten::bmm",
        "",
        "forward",
        2 * batch * rows * columns * inner,
        item * batch * (rows * inner + inner * columns + rows * columns),
        ((batch, rows, inner), (batch, inner, columns)),
        dtype,
        2,
        leading=(inner, columns, columns),
    )


def test_a_wave_that_is_not_full_takes_as_long_as_one_that_is() -> None:
    """An H200 runs 132 tiles of 256 x 128 in one wave, and 133 tiles in two."""
    rate = replace(H200.products["bf16"], efficiency=(0.1, 0.1, 0.1, 0.1))  # nothing but the largest tile
    one, two = (tile_seconds(rate, 132, 1e15, (1, 256 * tiles, 128, 4096)) for tiles in (132, 133))
    assert two == pytest.approx(2 * one)
    assert tile_seconds(rate, 133, 1e15, (1, 256 * 133, 128, 4096)) < two


def test_large_products_come_near_the_rate_and_small_ones_do_not() -> None:
    clock = KernelClock(H200)
    large, small = product(8192, 8192, 8192), product(128, 128, 512)
    assert large.flops / clock.seconds(large) > 0.85 * H200.products["bf16"].flops
    assert small.flops / clock.seconds(small) < 0.05 * H200.products["bf16"].flops


def test_rows_that_are_no_multiple_of_16_bytes_are_slower() -> None:
    clock = KernelClock(H200)
    assert clock.seconds(product(1024, 1023, 1024)) > 1.5 * clock.seconds(product(1024, 1024, 1024))


def test_a_generated_kernel_named_after_attention_moves_bytes() -> None:
    """A compiler names a kernel after all fused operators, and its shapes are arbitrary."""
    kernel = product(128, 128, 128)._replace(
        operator=f"{GENERATED}triton_poi_fused__scaled_dot_product_attention_backward_convolution_0",
        shapes=((32, 12),),
    )
    assert KernelClock(H200).seconds(kernel) == KernelClock(H200).seconds(
        kernel._replace(operator=f"{GENERATED}triton_poi_fused_add_0")
    )
    assert group_of(kernel.operator) != CONTRACTIONS


def test_precision_decides() -> None:
    clock = KernelClock(H200)
    seconds = [
        clock.seconds(product(4096, 4096, 4096, dtype))
        for dtype in ("torch.bfloat16", "tf32", "torch.float32")
    ]
    assert seconds == sorted(seconds)
    assert seconds[2] > 5 * seconds[1]


def test_a_product_without_elements_takes_a_kernel_s_start() -> None:
    assert KernelClock(H200).seconds(product(0, 8, 8)) == H200.start


# ---- rates ---------------------------------------------------------------------------------------------


def test_attention_of_a_gpu_that_was_never_measured() -> None:
    """FlashAttention-2 reaches a far larger share of an A100's peak than of a Hopper's.

    Attention in fp32 scales with the fp32 peak, with and without dropout.
    """
    hopper, ampere = (
        packaged_rates(find_gpu("h200")).attention,
        packaged_rates(find_gpu("a100-40gb")).attention,
    )
    peaks = {name: find_gpu(name).peak_dense for name in ("h200", "a100-40gb")}
    assert 0.4 < ampere["flash"][0] / peaks["a100-40gb"]["fp16"] < 0.73
    assert hopper["flash"][0] / peaks["h200"]["fp16"] < 0.3
    for name in ("efficient", "efficient with dropout", "efficient backward with dropout"):
        ratio = peaks["a100-40gb"]["fp32"] / peaks["h200"]["fp32"]
        assert ampere[name][0] / hopper[name][0] == pytest.approx(ratio)


def test_a_gpu_that_was_never_measured_is_scaled_and_says_so() -> None:
    a100 = rates_for(find_gpu("a100-80gb"))
    assert not a100.measured
    assert a100.bandwidth / H200.bandwidth == pytest.approx(
        (find_gpu("a100-80gb").bandwidth or 0) / (find_gpu("h200").bandwidth or 1)
    )
    found = predict(small_job("bert", 1), gpu="a100-80gb")
    assert any("no rates were measured" in doubt for doubt in found.doubts)
    assert not any("no rates were measured" in d for d in predict(small_job("bert", 1), gpu="h200").doubts)


def test_volta_has_no_tf32_and_computes_bf16_slowly() -> None:
    v100 = rates_for(find_gpu("v100-16gb"))
    assert "tf32" not in v100.products
    assert v100.products["bf16"].flops < 0.2 * v100.products["fp16"].flops


def test_what_is_not_in_the_table_is_not_guessed() -> None:
    """Bytes are predicted anyway, and the answer names the reason for missing seconds."""
    unknown = replace(find_gpu("h200"), key="H999", bandwidth=None)
    with pytest.raises(GpuError, match="H999: its bandwidth"):
        rates_for(unknown)
    found = predict(small_job("bert", 1), gpu=unknown)
    assert found.timing is None
    assert found.footprint.reserved_bytes
    assert any("seconds are not known" in doubt for doubt in found.doubts)


def test_without_a_gpu_there_are_no_seconds() -> None:
    assert predict(small_job("bert", 1)).to_json()["timing"] is None


# ---- a step --------------------------------------------------------------------------------------------


def test_a_step_s_seconds_add_up() -> None:
    job = small_job("gpt2", 2)
    trace = rehearse(job, Recipe.parse("every_layer").setup(), CudaPolicy())
    found = step_seconds(trace, find_gpu("h200"), batch_size=job.batch_size)
    assert sum(line.device_seconds for line in found.phases) == pytest.approx(found.device_seconds)
    assert found.step_seconds >= max(found.device_seconds, 0.99 * found.host_seconds)
    assert found.samples_per_second == pytest.approx(job.batch_size / found.step_seconds)
    assert found.bound == "host"
    assert all(line.roofline_seconds <= line.device_seconds for line in found.phases)
    known = packaged_rates(find_gpu("h200"))
    rates = replace(known, host=known.host.slower(3.0))
    slower = step_seconds(trace, find_gpu("h200"), batch_size=job.batch_size, rates=rates)
    assert slower.step_seconds == pytest.approx(3 * found.step_seconds, rel=0.05)


def test_what_runs_forward_again_is_marked() -> None:
    job = small_job("bert", 2)
    again = [
        sum(kernel.recomputed for kernel in rehearse(job, Recipe.parse(recipe).setup(), CudaPolicy()).kernels)
        for recipe in ("plain", "every_layer")
    ]
    assert again[0] == 1  # the one that backward begins with
    assert again[1] > 20


class _Doubles(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


class _OfALibrary(torch.nn.Module):
    """A module that calls a Function of its own twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = _Doubles.apply(self.block(_Doubles.apply(self.block(x))))
        return doubled.square().mean()


def test_pictures_of_16_bits_are_made_in_32() -> None:
    """The step copies half the bytes, and draws as many numbers."""
    host = packaged_rates(find_gpu("h200")).host
    took = {}
    for recipe in ("plain", "bf16_pure"):
        trace = rehearse(small_job("vit", 2), Recipe.parse(recipe).setup(), CudaPolicy())
        kernels = with_worker_batches(1, trace.kernels)
        copied = sum(one.nbytes for one in kernels if one.operator == PREPARED and one.shapes[0][1:])
        took[recipe] = copied, sum(loader_seconds(one, host) for one in kernels)
    assert took["plain"][0] == 2 * took["bf16_pure"][0] > 0
    assert took["plain"][1] == pytest.approx(took["bf16_pure"][1])


def test_functions_of_a_library_cost_the_host_forward_and_backward() -> None:
    model = Model.from_module(_OfALibrary(), {"x": torch.ones(2, 8)})
    job = Job(model=model, task=Task.CUSTOM, batch_size=2)
    trace = rehearse(job, Recipe().setup(), CudaPolicy())
    assert {
        phase: sum(kernel.functions for kernel in trace.kernels if kernel.phase == phase)
        for phase in ("forward", "backward", "update")
    } == {"forward": 2, "backward": 2, "update": 0}
    free = replace(H200, host=replace(H200.host, function=0.0))
    costs = [
        step_seconds(trace, find_gpu("h200"), batch_size=2, rates=rates).host_seconds
        for rates in (H200, free)
    ]
    assert costs[0] - costs[1] == pytest.approx(4 * H200.host.function)


@pytest.mark.parametrize(("layers", "less"), [(2, 1), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_more_layers_take_longer(layers: int, less: int) -> None:
    seconds = [predict(small_job("llama", n), gpu="h200").timing for n in (less, layers)]
    assert seconds[0]
    assert seconds[1]
    assert seconds[0].step_seconds < seconds[1].step_seconds
    assert seconds[0].device_seconds < seconds[1].device_seconds


# ---- the truth -----------------------------------------------------------------------------------------

DEVICE_MEDIAN, DEVICE_WORST = 0.10, 0.30
"""Allowed errors of the device's seconds: over the sample below, over half of it, and of each run."""

SAMPLE = (0, 42)
"""Profiled runs that are quick to rehearse."""


def test_the_profiled_device_seconds_are_predicted() -> None:
    document = json.loads((RESULTS / "h200-2026-11-20" / "profiled-steps.json").read_text())
    clock, errors = KernelClock(H200), {}
    for number in SAMPLE:
        run = document["runs"][number]
        recipe = Recipe.parse(run["recipe"])
        if any(technique.missing_package() for technique in recipe):
            continue
        trace = rehearse(Job.from_json(run["job"]), recipe.setup(), CudaPolicy())
        seconds = sum(map(clock.seconds, trace.kernels))
        errors[f"{run['job']['model']['name']} {recipe}"] = seconds / run["device_seconds"] - 1
    assert statistics.median(map(abs, errors.values())) <= DEVICE_MEDIAN, errors
    assert max(map(abs, errors.values())) <= DEVICE_WORST, errors


def test_rates_are_read_as_they_stand() -> None:
    text = (Path(rates_for.__code__.co_filename).parent / "rates.json").read_text()
    assert {key: Rates.from_json(entry).gpu for key, entry in json.loads(text).items()} == {
        "H200-SXM": "H200-SXM"
    }
