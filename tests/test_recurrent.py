"""Recurrent networks as cuDNN runs them, held to the allocator's histories of an H200."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.rehearsal.device.notes import PolicyNotes
from snugfit.rehearsal.device.overrides import in_force
from snugfit.rehearsal.device.policy import CpuPolicy, CudaPolicy
from snugfit.rehearsal.device.recurrent import DOUBT
from snugfit.rehearsal.device.recurrent_sizes import RecurrentShape
from snugfit.rehearsal.record.recorder import Recorder
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe

HISTORIES = Path(__file__).parents[1] / "results" / "h200-2026-11-22"


@functools.cache
def records() -> list[dict[str, Any]]:
    names = ("recurrent-layers.json", "recurrent-layers-packed.json")
    return [
        draw
        for name in names
        for draw in json.loads((HISTORIES / name).read_text(encoding="utf-8"))["records"]
    ]


def lengths_of(draw: dict[str, Any]) -> torch.Tensor:
    """Of the packed sequences, as `benchmarks/rnn_on_gpu.py` draws them."""
    return torch.tensor(
        [max(1, draw["length"] - number % 4) for number in range(draw["batch"])], device="cpu"
    )


def shape_of(draw: dict[str, Any]) -> RecurrentShape:
    return RecurrentShape(
        kind="RNN_TANH" if draw["kind"] == "RNN" else draw["kind"], steps=draw["length"], batch=draw["batch"],
        inputs=draw["input"], hidden=draw["hidden"], projected=draw["proj"], layers=draw["layers"],
        directions=1 + draw["bidirectional"], drops=draw["dropout"] > 0,
        dtype=torch.float16 if draw["autocast"] else getattr(torch, draw["dtype"]),
        tokens=int(lengths_of(draw).sum()) if draw["packed"] else 0,
    )  # fmt: skip


def module_of(draw: dict[str, Any], device: str = "cpu") -> nn.RNNBase:
    extra = {"proj_size": draw["proj"]} if draw["proj"] else {}
    module: nn.RNNBase = getattr(nn, draw["kind"])(
        draw["input"], draw["hidden"], draw["layers"], bias=draw["bias"], batch_first=draw["batch_first"],
        dropout=draw["dropout"], bidirectional=draw["bidirectional"], device=device, **extra,
    )  # fmt: skip
    return module.train(draw["train"]).to(getattr(torch, draw["dtype"]))


def test_what_cudnn_keeps_is_computed_exactly() -> None:
    for draw in records():
        shape, saved = shape_of(draw), draw["saved"]
        assert shape.weight_elements() * shape.dtype.itemsize == saved["_saved_result4"]
        if draw["train"]:
            assert shape.reserve_bytes() == pytest.approx(saved["_saved_result3"], rel=1e-4, abs=80)


def test_a_recurrent_network_allocates_what_an_h200_did() -> None:
    """Event by event, but for the sizes of workspaces and roundings of the reserve."""
    errors = []
    for draw in records()[:: 1 if os.environ.get("SNUGFIT_ALL_TRUTH") == "1" else 8]:
        rehearsed = rehearsed_events(draw)
        for phase, truth in draw["events"].items():
            if phase not in ("forward", "backward"):
                continue
            mine, real = allocated(rehearsed[phase]), allocated(truth)
            assert len(mine) == len(real), (draw, phase, mine, real)
            for own, size in zip(mine, real, strict=True):
                error = own / size - 1 if size else float(own)
                if own > 8 << 20 and error:
                    errors.append(abs(error))
                else:
                    assert own == pytest.approx(size, rel=1e-4, abs=80), (draw, phase, mine, real)
            assert order(rehearsed[phase]) == order(truth), (draw, phase)
    assert statistics.median(errors) < 0.002
    assert statistics.quantiles(errors, n=10)[8] < 0.025
    assert max(errors) < 0.31


def test_the_state_of_dropout_is_kept_once() -> None:
    firsts = (allocated(draw["events"].get("first", [])) for draw in records())
    (sizes,) = (sizes for sizes in firsts if 8 in sizes)
    nbytes = sizes[sizes.index(8) + 1]
    network = nn.LSTM(16, 24, 2, batch_first=True, bidirectional=True, dropout=0.2)
    for recipe in ("plain", "bf16 + micro_batches(2)"):
        module = Tagger()
        module.network = network
        trace = rehearse(job_of(module), Recipe.parse(recipe).setup(), CudaPolicy())
        assert [block.kind for block in trace.blocks if block.nbytes == nbytes] == ["workspaces"]
        assert trace.doubts == (DOUBT,)


def allocated(events: list[list[int]]) -> list[int]:
    return [event[1] for event in events if len(event) == 2]


def order(events: list[list[int]]) -> list[int]:
    """Allocations and frees of the phase's own blocks; frees of others' stand nowhere in particular."""
    return [event[0] for event in events if event[0]]


def rehearsed_events(draw: dict[str, Any]) -> dict[str, list[list[int]]]:
    """As `benchmarks/rnn_on_gpu.py` writes them."""
    notes = PolicyNotes()
    low = draw["autocast"]
    recorder = Recorder(CudaPolicy(), 1)
    shape = (draw["batch"], draw["length"]) if draw["batch_first"] else (draw["length"], draw["batch"])
    with in_force(CudaPolicy(), notes), recorder, torch.device("meta"):
        module = module_of(draw, "meta")
        dtype = getattr(torch, draw["dtype"])
        data = torch.empty(*shape, draw["input"], dtype=dtype, requires_grad=True)
        operand: Any = data
        if draw["packed"]:
            operand = nn.utils.rnn.pack_padded_sequence(
                data, lengths_of(draw), batch_first=draw["batch_first"], enforce_sorted=False
            )
        if draw["dropout"]:
            module(operand)  # dropout's state stays
        start = len(recorder.memory.events)
        with torch.autocast("cuda", getattr(torch, low)) if low else contextlib.nullcontext():
            out = module(operand)[0]
            out = out.data if draw["packed"] else out
            middle = len(recorder.memory.events)
            gradient = torch.ones_like(out)
        begins = len(recorder.memory.events)
        if draw["train"]:
            recorder.phase("backward")
            out.backward(gradient)
        events, blocks = list(recorder.memory.events), recorder.memory._blocks
        del out, gradient

    def numbered(part: list[int]) -> list[list[int]]:
        numbers: dict[int, int] = {}
        written: list[list[int]] = []
        for event in part:
            if event > 0:
                numbers[event] = len(allocated(written)) + 1
                written.append([numbers[event], blocks[event - 1][0]])
            else:
                written.append([-numbers.pop(-event, 0)])
        return written

    return {"forward": numbered(events[start:middle]), "backward": numbered(events[begins:])}


class Tagger(nn.Module):
    """A recurrent network over sequences, whole or packed."""

    def __init__(self, *, packed: bool = False, kind: str = "LSTM") -> None:
        super().__init__()
        self.packed = packed
        self.network: nn.RNNBase = getattr(nn, kind)(16, 24, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            lengths = torch.tensor([7, 5, 3, 1])
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            out, _ = nn.utils.rnn.pad_packed_sequence(self.network(packed)[0], batch_first=True)
        else:
            out = self.network(x)[0]
        return self.head(out).pow(2).mean()


def job_of(module: nn.Module) -> Job:
    model = Model.from_module(module, {"x": torch.ones(4, 7, 16)})
    return Job(model=model, task=Task.CUSTOM, batch_size=4)


@pytest.mark.parametrize("loop", ["plain", "accelerate"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_a_step_runs_cudnn_and_says_what_is_uncertain(loop: str, packed: bool) -> None:
    for recipe in ("plain", "bf16 + micro_batches(2)" if not packed else "bf16"):
        module = Tagger(packed=packed)
        trace = rehearse(job_of(module), Recipe.parse(recipe).setup(), CudaPolicy(), loop=loop)
        names = [kernel.operator for kernel in trace.kernels]
        assert names.count("aten::_cudnn_rnn") == names.count("aten::_cudnn_rnn_backward") > 0
        assert trace.doubts == (DOUBT,)
        flat = sum(weight.numel() for weight in module.network.parameters()) * 4
        assert flat in [block.nbytes for block in trace.blocks if block.kind == "weights"]


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_flops_of_cudnn_are_those_of_the_composition(kind: str) -> None:
    """cuDNN computes the gradients of input and first states in any case; here nobody wants them."""
    job, setup = job_of(Tagger(kind=kind)), Recipe().setup()
    flops = [
        sum(kernel.flops for kernel in trace.kernels if "rnn" in kernel.operator or "mm" in kernel.operator)
        for trace in (rehearse(job, setup, CudaPolicy()), rehearse(job, setup, CpuPolicy()))
    ]
    hidden, gates = 24, {"LSTM": 4, "GRU": 3}.get(kind, 1)
    of_input = 2 * (4 * 7) * 2 * gates * hidden * 16
    of_states = 2 * 4 * 2 * 2 * gates * hidden * hidden
    assert flops[0] == flops[1] + of_input + of_states


def test_without_cudnn_it_is_composed() -> None:
    torch.backends.cudnn.enabled = False
    try:
        trace = rehearse(job_of(Tagger()), Recipe().setup(), CudaPolicy())
    finally:
        torch.backends.cudnn.enabled = True
    assert trace.doubts == ()
    assert "aten::_cudnn_rnn" not in {kernel.operator for kernel in trace.kernels}
