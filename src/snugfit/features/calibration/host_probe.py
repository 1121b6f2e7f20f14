"""Prices of this machine's host: the seconds that Python and torch take for small repeated work.

Each reading repeats one sort of work in slices, with the device drained before each. The median of the slices
counts. The thread moves to a quiet core between slices (`measurement/quiet_core.py`).

`HostPrices` names the sorts. `host_at` multiplies each field of `HostLaunchCosts` by the price of its sort,
relative to the price on the host of the packaged rates.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from snugfit.errors import one_line
from snugfit.prediction.rates import HostLaunchCosts

SLICES = 20
LAUNCHES, LINEARS, TENSORS, SAMPLES = 1_000, 100, 300, 32
"""Repetitions in one slice: launches, linear layers, tensors of a list, and samples of a batch."""

LINEAR_SLICES_EACH = 5
"""Number of passes through the linear layers in one slice: 500 layers."""

FIELDS: Mapping[str, tuple[str, ...]] = {
    "launch": ("update", "product", "copy", "wait"),
    "module": ("module",),
    "forward": ("forward", "cast", "view", "checkpoint", "intercepted"),
    "backward": ("backward",),
    "function": (
        "function", "python_launched", "shard_hook", "sharded_operand", "part_operator", "weight_apart",
    ),
    "tensor": ("tensor",),
    "program": ("generated", "in_program", "program", "backward_program"),
    "collate": ("sample", "byte", "prepared", "step"),
}  # fmt: skip
"""Fields of `HostLaunchCosts` by the sort of work whose price they follow.

Both readings of the linear layers, `forward` and `backward`, are one probe. So seven probes give eight
prices.
"""


PACKAGED_PRICES: Mapping[str, float] = {
    "launch": 6.16e-06,
    "module": 1.37e-06,
    "forward": 1.68e-05,
    "backward": 6.25e-05,
    "function": 2.83e-05,
    "tensor": 3.08e-07,
    "program": 0.000201,
    "collate": 9.38e-07,
}
"""Seconds of each sort on a host with the packaged costs.

They were measured on the host of an H200 (2026-11-30, torch 2.11). Steps of three models took it 1.003 times
the packaged seconds, by which the measured prices are divided (results/h200-2026-11-30/seconds.json).
"""


def host_at(
    known: HostLaunchCosts, prices: Mapping[str, float], reference: Mapping[str, float]
) -> HostLaunchCosts:
    """Return the costs on a host with these prices.

    `known` are the costs on the host whose prices are `reference`. A sort without a price above 0 takes the
    geometric mean of the other ratios. Without any, the costs stay as they are.
    """
    shared = [name for name in FIELDS if prices.get(name, 0.0) > 0 and reference.get(name, 0.0) > 0]
    if not shared:
        return known
    ratios = {name: prices[name] / reference[name] for name in shared}
    usual = math.exp(statistics.fmean(map(math.log, ratios.values())))
    factors = {field: ratios.get(name, usual) for name, fields in FIELDS.items() for field in fields}
    return HostLaunchCosts(**{name: seconds * factors[name] for name, seconds in asdict(known).items()})


def measure_prices(device: str = "cuda", *, slices: int = SLICES, compiled: bool = True) -> dict[str, Any]:
    """Return the seconds of each sort of work as `prices`, and the 90th percentiles as `p90`.

    `disturbed` is the share of checks with other processes on the core. `failed` has the reasons for absent
    prices.
    """
    from snugfit.measurement.quiet_core import QuietCore

    prices: dict[str, float] = {}
    p90: dict[str, float] = {}
    failed: dict[str, str] = {}
    core = QuietCore()
    core.sample()
    try:
        for name, work, repeats in _works(device, compiled=compiled):
            try:
                work()
                rows = []
                for _ in range(slices):
                    core.rebalance()
                    _drain(device)
                    rows.append(work())
            except Exception as error:  # a compiler may be missing, or fail
                failed[name] = one_line(error)
                continue
            _drain(device)
            for part, times in _by_name(rows, name).items():
                seconds = sorted(value / repeats for value in times)
                prices[part] = statistics.median(seconds)
                p90[part] = seconds[int(0.9 * (len(seconds) - 1))]
        disturbed = core.disturbed_share()
    finally:
        core.release()
    # A chain of three modules launches one kernel. Without the price of a launch, theirs is not known.
    chain = prices.pop("module", None)
    if chain is not None and "launch" in prices:
        prices["module"] = max(0.0, chain - prices["launch"]) / 3
    return {"prices": prices, "p90": p90, "disturbed": disturbed, "failed": failed}


def _drain(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def _by_name(rows: list[Any], name: str) -> dict[str, list[float]]:
    """Return the seconds of the slices by price. A slice with several prices is a mapping."""
    if not isinstance(rows[0], dict):
        return {name: rows}
    return {part: [row[part] for row in rows] for part in rows[0]}


def _seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _works(device: str, *, compiled: bool) -> Iterator[tuple[str, Callable[[], Any], int]]:
    """Yield a name, a function that returns the seconds of one slice, and the repetitions of a slice."""
    import torch
    from torch import nn

    one = torch.zeros(1, device=device)

    class Add(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Add one to the tensor in place."""
            return x.add_(1)

    nested = nn.Sequential(nn.Sequential(Add()))

    def launches() -> None:
        for _ in range(LAUNCHES):
            one.add_(1)

    def modules() -> None:
        for _ in range(LAUNCHES):
            nested(one)

    yield "launch", lambda: _seconds_of(launches), LAUNCHES
    yield "module", lambda: _seconds_of(modules), LAUNCHES
    yield from _autograd_works(device)
    lists = [[torch.zeros(8, device=device) for _ in range(TENSORS)] for _ in range(2)]
    yield "tensor", lambda: _seconds_of(lambda: torch._foreach_add_(*lists)), TENSORS
    if compiled:
        yield "program", _program(device), 1
    samples = [
        {name: torch.ones(128, dtype=torch.long) for name in ("input_ids", "attention_mask", "labels")}
        for _ in range(SAMPLES)
    ]
    collate = torch.utils.data.default_collate
    yield "collate", lambda: _seconds_of(lambda: [collate(samples) for _ in range(10)]), 10 * SAMPLES


def _autograd_works(device: str) -> Iterator[tuple[str, Callable[[], Any], int]]:
    import torch
    from torch import nn

    linears = nn.Sequential(*(nn.Linear(8, 8, device=device) for _ in range(LINEARS)))
    x = torch.ones(8, 8, device=device, requires_grad=True)

    def passes() -> dict[str, float]:
        forward = backward = 0.0
        for _ in range(LINEAR_SLICES_EACH):
            start = time.perf_counter()
            loss = linears(x).sum()
            middle = time.perf_counter()
            loss.backward()
            backward += time.perf_counter() - middle
            forward += middle - start
        return {"forward": forward, "backward": backward}

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            """Return the doubled tensor and save it."""
            ctx.save_for_backward(value)
            return value * 2

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            """Return the doubled gradient."""
            return grads[0] * 2

    def functions() -> None:
        value: Any = x
        for _ in range(LINEARS):
            value = Double.apply(value)  # type: ignore[no-untyped-call]
        value.sum().backward()

    yield "linear", passes, LINEARS * LINEAR_SLICES_EACH
    yield "function", lambda: _seconds_of(functions), LINEARS


def _program(device: str) -> Callable[[], float]:
    """Return a function that times one call of compiled code with 10 products and 10 generated kernels."""
    import torch

    weights = [torch.ones(16, 16, device=device) for _ in range(10)]
    x = torch.ones(16, 16, device=device)

    def chain(value: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            value = torch.relu(value @ weight)
        return value

    program: Callable[[torch.Tensor], torch.Tensor] = torch.compile(chain)

    def calls() -> None:
        with torch.no_grad():
            for _ in range(10):
                program(x)

    return lambda: _seconds_of(calls) / 10
