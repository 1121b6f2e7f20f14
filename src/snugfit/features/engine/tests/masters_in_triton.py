"""Compare the kernels over weights and the halves of their masters with plain torch.

Run as a process. With `TRITON_INTERPRET=1`, which Triton reads when kernels are defined, it runs on the CPU
in Triton's interpreter. With the argument `cuda` it runs on a GPU, also within a CUDA graph. With `cuda time`
it times updates with several launch settings beside torch's fused AdamW.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

from snugfit.features.engine.masters import adamw, launches
from snugfit.features.engine.masters.adamw import MOMENTS, MasterAdamW
from snugfit.features.engine.masters.block import LaunchSettings
from snugfit.features.engine.masters.compact_adamw import CompactTable
from snugfit.features.engine.masters.halves import RESIDUAL, join, split_weights
from snugfit.features.engine.masters.table import WeightTable
from snugfit.step.clipping import gradient_norm, scale
from triton_cases import asks_all

ALL_SIZES = ((33, 200), (1000,), (3, 4, 5, 6), (), (4099,), (2048,), (1,), (65, 64))
SIZES = ALL_SIZES if asks_all(*sys.argv[1:2]) else ((33, 40), *ALL_SIZES[1:-1])
"""Sizes below, at and beyond a block, and a single number."""

CLOSE = {"rtol": 1e-6, "atol": 1e-8}
"""Tolerance between a GPU and the interpreter, which may differ in fused multiply-adds."""

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))
"""True if programs run one after the other."""

SETTINGS = (
    LaunchSettings(),
    LaunchSettings(block=2048, warps=8),
    LaunchSettings(block=4096, narrow=16),
)


@contextlib.contextmanager
def updated_by(kernel: bool, settings: LaunchSettings = SETTINGS[0]) -> Iterator[None]:
    """Context in which optimizers update with Triton kernels (on a GPU or in the interpreter), or with plain
    torch.
    """
    with (
        patch.object(adamw, "is_on_gpu", lambda tensor: kernel),
        patch.object(WeightTable, "usual_settings", settings),
        patch.object(CompactTable, "usual_settings", settings),
        patch.object(launches, "NORM_PROGRAMS", 3 if INTERPRETED else launches.NORM_PROGRAMS),
    ):
        yield


def two_models(device: str, dtype: torch.dtype) -> list[torch.nn.ParameterList]:
    """Return two models with equal weights, split in two halves or in fp32."""
    draw = torch.Generator().manual_seed(7)
    made = [torch.randn(size, generator=draw) / 20 for size in SIZES]
    models = [
        torch.nn.ParameterList([torch.nn.Parameter(one.to(device, copy=True)) for one in made])
        for _ in range(2)
    ]
    if dtype is torch.bfloat16:
        for model in models:
            split_weights(model)
    return models


def exact(optimizer: MasterAdamW, weight: torch.Tensor) -> torch.Tensor:
    state = optimizer.state[weight]
    return join(weight.data, state[RESIDUAL]) if RESIDUAL in state else weight.data


def compare_states(label: str, pairs: list[tuple[Any, Any]], ours: MasterAdamW, theirs: MasterAdamW) -> None:
    largest = 0.0
    for one, other in pairs:
        left = [exact(ours, one), *(ours.state[one][name] for name in MOMENTS)]
        right = [exact(theirs, other), *(theirs.state[other][name] for name in MOMENTS)]
        for a, b in zip(left, right, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True, **CLOSE)
            if a.numel():
                largest = max(largest, float((a - b).abs().nan_to_num().max()))
        assert ours.state[one]["step"] == theirs.state[other]["step"]
    print(f"{label}: largest difference {largest:.2e}")


def compare_steps(
    device: str, dtype: torch.dtype, settings: LaunchSettings, most: float | None, *, graph: bool = False
) -> None:
    """Compare several steps by the kernel and by plain torch, from the same gradients. One gradient is NaN,
    some weights have none, and gradients may be clipped by their norm."""
    both = two_models(device, dtype)
    groups = [[{"params": list(m)[:3]}, {"params": list(m)[3:], "weight_decay": 0.0}] for m in both]
    plain, launched = (MasterAdamW(one, lr=1e-2) for one in groups)
    draw = torch.Generator().manual_seed(11)
    played: Any = None
    for step in range(5 if asks_all(device) else 4):
        for ours, theirs in zip(*both, strict=True):
            slope = (torch.randn(ours.shape, generator=draw) / 10).to(device, ours.dtype)
            if step == 2 and ours.numel() == 1000:
                slope[:3] = float("nan")
            skipped = step == 1 and ours.numel() == 2048 and not graph
            ours.grad = None if skipped else slope.clone()
            if graph and theirs.grad is not None:
                theirs.grad.copy_(slope)
            else:
                theirs.grad = None if skipped else slope.clone()
        with updated_by(False):
            if most is not None:
                norm = gradient_norm(plain, both[0])
                scale(both[0], most, norm, plain)
            plain.step()
        with updated_by(True, settings):
            if graph and step > 0:
                played = played or captured(launched, both[1], most)
                launched.prepare()
                played.replay()
                continue
            if most is not None:
                taken = gradient_norm(launched, both[1])
                torch.testing.assert_close(taken, norm, rtol=1e-6, atol=0.0, equal_nan=True)
                scale(both[1], most, taken, launched)
            launched.step()
    name = f"{dtype}, {settings}, clip {most}, {'a graph' if graph else 'launched'}"
    compare_states(name, list(zip(*both, strict=True)), plain, launched)
    if dtype is torch.bfloat16:
        bad = int(both[1][1].isnan().sum())
        assert bad == (3 if most is None else 0), "a step with a NaN norm changes no weight"


def captured(optimizer: MasterAdamW, weights: Any, most: float | None) -> Any:
    """Return a CUDA graph of the gradient norm, clipping and the update."""
    graph = torch.cuda.CUDAGraph()
    optimizer.find_gradients()
    with torch.cuda.graph(graph):
        if most is not None:
            scale(weights, most, gradient_norm(optimizer, weights), optimizer)
        optimizer.launch()
    return graph


# ---- seconds ---------------------------------------------------------------------------------------------

MODELS = {
    "llama-3.2-1b's layers, 940M": [(2048, 8192)] * 56 + [(2048,)] * 64,
    "bert-large, 335M": (
        [(30522, 1024), (512, 1024), (2, 1024)]
        + [(1024, 1024)] * 97 + [(4096, 1024)] * 24 + [(1024, 4096)] * 24 + [(1024,)] * 220 + [(4096,)] * 24
    ),
}  # fmt: skip
"""Shapes of the weights to time."""


SHARES = ((512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8))
"""Elements of a block and warps: 4, 8 or 16 elements for a thread."""


def settings_to_time(shares: tuple[tuple[int, int], ...]) -> list[LaunchSettings]:
    """Return launch settings to time: each block size, with one further setting changed at a time. All
    combinations would take too long, because each takes seconds to compile.
    """
    tried = [LaunchSettings(block, warps) for block, warps in shares]
    usual = LaunchSettings()
    few_threads = LaunchSettings(1024, 4, exact=False)
    return [*tried, usual._replace(narrow=16), usual._replace(exact=False), few_threads]


def launched_with(optimizer: MasterAdamW, settings: LaunchSettings) -> None:
    """Run one step with tables that are rebuilt for these settings."""
    with patch.object(type(optimizer).table_of, "usual_settings", settings):
        vars(optimizer)["_tables"] = None
        optimizer.step()


def milliseconds(run: Callable[[], Any], repeats: int = 20) -> float:
    """Return the median of a few runs, measured by CUDA events."""
    for _ in range(3):
        run()
    taken = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return sorted(taken)[repeats // 2]


def say(what: str, model: str, count: int, taken: float, nbytes: float, **more: Any) -> None:
    rate = nbytes * count / taken / 1e6
    print(json.dumps({"what": what, "model": model, "ms": round(taken, 4), "GB/s": round(rate), **more}))


def weights_on_gpu(sizes: list[Any], *, halves: bool) -> torch.nn.ParameterList:
    weights = torch.nn.ParameterList(
        [torch.nn.Parameter(torch.randn(size, device="cuda") / 50) for size in sizes]
    )
    if halves:
        split_weights(weights)
    for weight in weights:
        weight.grad = torch.randn_like(weight) / 100
    return weights


def time_kernels(model: str, sizes: list[Any], *, halves: bool) -> None:
    """Time the norm, the host's part and the update with many settings."""
    weights = weights_on_gpu(sizes, halves=halves)
    count, nbytes = sum(weight.numel() for weight in weights), 26 if halves else 28
    kind = "halves" if halves else "fp32"
    optimizer = MasterAdamW(weights)
    best: tuple[float, Any] = (float("inf"), None)
    for settings in settings_to_time(SHARES):
        launched_with(optimizer, settings)
        taken = milliseconds(optimizer.launch, 7)
        say(f"update, {kind}", model, count, taken, nbytes, **settings._asdict())
        best = min(best, (taken, settings), key=lambda one: one[0])
    print(json.dumps({"what": f"best update, {kind}", "model": model, "ms": best[0], **best[1]._asdict()}))
    launched_with(optimizer, best[1])
    say("norm", model, count, milliseconds(optimizer.gradient_norm), 2 if halves else 4)
    norm = optimizer.gradient_norm()

    def clipped() -> None:
        optimizer.clip_by(norm, 1.0)
        optimizer.launch()

    say(f"clip and update, {kind}", model, count, milliseconds(clipped), nbytes)
    say(f"step, host and device, {kind}", model, count, milliseconds(optimizer.step), nbytes)
    gradients = [weight.grad for weight in weights]
    torch_norm = milliseconds(lambda: torch._foreach_norm(gradients, 2.0, torch.float32))
    say("torch._foreach_norm", model, count, torch_norm, 2 if halves else 4)


def time_torch(model: str, sizes: list[Any]) -> None:
    """Time torch's fused AdamW over fp32, alone and after clipping."""
    weights = weights_on_gpu(sizes, halves=False)
    count = sum(weight.numel() for weight in weights)
    optimizer = torch.optim.AdamW(weights, fused=True)
    say("torch fused", model, count, milliseconds(optimizer.step), 28)

    def clipped() -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()

    say("torch clip and fused", model, count, milliseconds(clipped), 40)
    scaled: Any = optimizer
    scaled.grad_scale = torch.ones((), device="cuda")
    say("torch fused that scales", model, count, milliseconds(optimizer.step), 32)


def time_updates() -> None:
    for model, sizes in MODELS.items():
        for halves in (True, False):
            time_kernels(model, sizes, halves=halves)
            torch.cuda.empty_cache()
        time_torch(model, sizes)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    asked = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    norms = (None, 0.5, 1e6)
    for (at, chosen), (place, largest_norm) in itertools.product(enumerate(SETTINGS), enumerate(norms)):
        for turn, kind in enumerate((torch.bfloat16, torch.float32)):
            if asks_all(asked) or (place == at and at % 2 == turn):  # each setting, norm and dtype
                compare_steps(asked, kind, chosen, largest_norm)
    if asked == "cuda":
        for largest_norm in (None, 0.5):
            compare_steps(asked, torch.bfloat16, SETTINGS[0], largest_norm, graph=True)
    print("as the reference")
    if sys.argv[2:] == ["time"]:
        time_updates()
