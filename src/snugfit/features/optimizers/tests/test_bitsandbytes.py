"""Optimizers of bitsandbytes: simulated like a real step, with paged states, and without leftovers in the
process.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from optimizer_steps import shapes_of, three_steps
from small_models import small_job
from snugfit.features.optimizers.updates.bitsandbytes_states import keep_embeddings
from snugfit.job.gpu import find_gpu
from snugfit.prediction.kernel_seconds import KernelClock
from snugfit.prediction.predict import predict
from snugfit.prediction.rates import rates_for
from snugfit.rehearsal.device.policy import CpuPolicy, CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import PREFETCH, Kernel
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.registry import hooks

QMAP_BYTES = 256 * 4
"""Bytes of bitsandbytes' code book, which has 256 fp32 values."""


@pytest.mark.whole
@pytest.mark.parametrize("embeddings", [32, 8])
def test_adamw_8bit_on_shapes_gives_birth_as_on_data(embeddings: int) -> None:
    """Simulated tensors are allocated as in a real step, in order. A GPU gets its code books by a copy; a CPU
    has them already.
    """
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    text = f"adamw_8bit({embeddings})"
    real, state = three_steps(text, "cpu")
    with shapes_of(Recipe.parse(text).setup().optimizer):
        on_shapes, _ = three_steps(text, "meta")
    copies = [("aten._to_copy.default", QMAP_BYTES)] * 2
    first = [birth for birth in on_shapes[0] if birth != copies[0]]
    assert [birth for birth in on_shapes[0] if birth == copies[0]] == copies
    assert [first, *on_shapes[1:]] == real
    assert all(size == 0 for step in real[1:] for _, size in step), "later steps give birth to nothing"
    table = torch.float32 if embeddings == 32 else torch.uint8
    assert state["table.weight.state1"] == ((101, 67), table)
    assert state["wide.weight.state2"] == ((129, 67), torch.uint8)
    assert state["wide.weight.absmax1"] == ((-(-129 * 67 // 256),), torch.float32)
    assert state["edge.weight.state1"] == ((64, 64), torch.uint8)
    assert state["below.weight.state1"] == ((65, 63), torch.float32)
    assert state["small_table.weight.state1"] == ((4, 8), torch.float32)


def test_adamw_8bit_waits_for_the_device_after_each_parameter() -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    job = small_job("bert", layers=1)
    trace = rehearse(job, Recipe.parse("adamw_8bit").setup(), CudaPolicy())
    updates = [kernel for kernel in trace.kernels if kernel.operator.startswith("bitsandbytes::")]
    assert trace.syncs == len(updates) > 20
    assert all(kernel.views < 2 for kernel in updates[1:]), "waiting costs the host no views"
    assert rehearse(job, Recipe.parse("adamw").setup(), CudaPolicy()).syncs == 0


@pytest.mark.parametrize("bits", [32, 8])
def test_paged_states_are_no_part_of_a_gpu_s_trace(bits: int) -> None:
    """On a CPU bitsandbytes creates ordinary states instead."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    job = small_job("bert", layers=1, facts={"hidden_size": 320, "intermediate_size": 320})
    large = 4 * 320 * 320  # attention's four matrices have 102,400 elements each
    plain, paged = (
        rehearse(job, Recipe.parse(name).setup(), CudaPolicy())
        for name in ("adamw" if bits == 32 else "adamw_8bit", f"paged_adamw({bits})")
    )
    assert [doubt for doubt in paged.doubts if "managed memory" in doubt]
    told = sum(kernel.nbytes // 2 for kernel in paged.kernels if kernel.operator == PREFETCH)
    assert told >= 2 * large * bits // 8
    assert states(plain) - states(paged) == pytest.approx(told, abs=4096)
    pages = [
        len([block for block in trace.blocks if block.kind == "optimizer states"]) for trace in (plain, paged)
    ]
    asked_for = [kernel.operator for trace in (plain, paged) for kernel in trace.kernels].count(PREFETCH)
    assert asked_for == pages[0] - pages[1] >= 8
    on_cpu = rehearse(job, Recipe.parse(f"paged_adamw({bits})").setup(), CpuPolicy())
    assert states(on_cpu) == pytest.approx(states(plain), abs=4096)
    assert not [doubt for doubt in on_cpu.doubts if "managed memory" in doubt]


def test_paged_states_count_on_the_gpu_while_there_is_room_and_never_against_it() -> None:
    """NVML has them in steps of 128 MiB (results/accuracy-seed2611.json)."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    job = small_job("bert", layers=2, facts={"hidden_size": 1280, "intermediate_size": 5120})
    with_room = predict(job, "paged_adamw", gpu="h200")
    shape = with_room.footprint
    assert shape.managed_bytes == 3 * (128 << 20), "329 MB of moments"
    assert shape.nvml_bytes == shape.reserved_bytes + shape.context_bytes + shape.managed_bytes
    assert with_room.needed_bytes == shape.nvml_bytes - shape.managed_bytes
    little = with_room.needed_bytes + 5
    without = predict(job, "paged_adamw", gpu="h200", memory_bytes=little)
    assert (without.fits, without.footprint.managed_bytes) == (True, 5)
    assert not predict(job, "adamw", gpu="h200").footprint.managed_bytes


def states(trace: Any) -> int:
    return sum(block.nbytes for block in trace.blocks if block.kind == "optimizer states")


@pytest.mark.whole
def test_adamw_8bit_leaves_nothing_behind() -> None:
    """Overrides of one run do not reach the next, and those of a simulation do not reach the process."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from bitsandbytes.optim import GlobalOptimManager

    three_steps("adamw_8bit", "cpu")
    _, state = three_steps("adamw_8bit(8)", "cpu")
    assert state["table.weight.state1"][1] is torch.uint8
    own = GlobalOptimManager.get_instance()
    with shapes_of(Recipe.parse("adamw_8bit").setup().optimizer):
        three_steps("adamw_8bit", "meta")
        assert GlobalOptimManager.get_instance() is not own
    assert GlobalOptimManager.get_instance() is own
    with pytest.raises(ZeroDivisionError), shapes_of(Recipe.parse("adamw_8bit").setup().optimizer):
        raise ZeroDivisionError
    assert GlobalOptimManager.get_instance() is own


def test_what_bitsandbytes_holds_goes_with_the_model() -> None:
    """Its manager would keep an embedding table and its gradient on the GPU when training is over."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from bitsandbytes.functional import GlobalPageManager
    from bitsandbytes.optim import GlobalOptimManager

    model = torch.nn.Sequential(torch.nn.Embedding(4, 2))
    table = weakref.ref(model[0])
    keep_embeddings(model, bits=32)
    manager, pages = GlobalOptimManager._instance, GlobalPageManager._instance
    assert manager.module_weight_config_triple[0][0] is table()
    del model, manager
    gc.collect()
    assert table() is None
    assert GlobalOptimManager._instance is GlobalPageManager._instance is None
    other = torch.nn.Linear(2, 2)
    keep_embeddings(other, bits=32)
    assert GlobalPageManager._instance is not pages


def test_bitsandbytes_updates_one_state_faster_than_two() -> None:
    name = "bitsandbytes::optimizer_update_8bit_blockwise"
    two = Kernel(name, "", "update", 0, 10**9, ((10**6,),), "torch.float32", 8)
    clock = KernelClock(rates_for(find_gpu("h200")))
    assert clock.seconds(two._replace(tensors=5)) < 0.7 * clock.seconds(two)


class PagedOnGpu:
    """An optimizer with paged states of a GPU weight, imitated on a machine without a GPU."""

    is_paged = True

    def __init__(self) -> None:
        self.state: dict[Any, dict[str, Any]] = {}
        self.pages: list[torch.Tensor] = []

    def get_state_buffer(self, weight: Any, dtype: torch.dtype) -> torch.Tensor:
        self.pages.append(torch.zeros(weight.shape, dtype=dtype))
        return self.pages[-1]


class WeightOnGpu:
    device, shape = torch.device("cuda"), torch.Size([3])


def test_restored_moments_return_to_their_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    optimizer, weight, moment = PagedOnGpu(), WeightOnGpu(), torch.tensor([1, 2, 3], dtype=torch.uint8)
    optimizer.state[weight] = {"step": 4, "state1": moment, "absmax1": torch.ones(1)}
    for place_state in hooks("place_state"):
        place_state(optimizer, weight)
    state = optimizer.state[weight]
    assert [page is state["state1"] for page in optimizer.pages] == [True]
    assert torch.equal(state["state1"], moment)
    assert (state["step"], len(state["absmax1"])) == (4, 1)
