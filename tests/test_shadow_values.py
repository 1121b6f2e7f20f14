"""Rehearsals compute decisions by the batch, and report assumptions about decisions by weights.

Law 7 compares modules that decide by their batch with a real run on the CPU (`awkward_shapes.py`). This
file tests messages about decisions by weights, the destinations of routed tokens, and steps that differ.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from math import log2
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertEmbeddings

from aligned import peak
from cpu_scratch import compared
from reported import foreseen, reports
from small_models import small_job
from snugfit.errors import JobError
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.planning.search.search import plan
from snugfit.rehearsal.device.policy import CpuPolicy, CudaPolicy
from snugfit.rehearsal.record.shadow import DEEPEST, NotFollowed, Shadow
from snugfit.rehearsal.record.shadows import Shadows
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.splice import rehearse_passes, rehearse_update, splice
from snugfit.rehearsal.trace.trace import Trace
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot

WIDTH = 128
STATES = torch.randn(4, 64, WIDTH, generator=torch.Generator().manual_seed(0))


class Decides(nn.Module):
    """A model that runs one of the functions below on its layers."""

    def __init__(self, decides: Callable[..., Tensor], experts: int = 0) -> None:
        super().__init__()
        self.decides = decides
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.router = nn.Linear(WIDTH, max(experts, 1))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))

    def forward(self, states: Tensor) -> Tensor:
        return self.decides(self, states)


def job_of(decides: Callable[..., Tensor], experts: int = 0) -> Job:
    model = Model.from_module(Decides(decides, experts), {"states": STATES})
    return Job(model=model, task=Task.CUSTOM, batch_size=4)


def assumptions(trace: Trace) -> list[str]:
    """Return the doubts, except those about parameters that a module does not use."""
    return [doubt for doubt in trace.doubts if "no gradient" not in doubt]


def test_torch_is_as_it_was_when_a_rehearsal_is_over() -> None:
    """A replaced method can leave traces in a C class."""
    rehearse(job_of(compares_a_number), Recipe().setup(), CpuPolicy())
    assert torch.tensor([torch.tensor(1), 2]).tolist() == [1, 2]
    assert not {"item", "tolist", "numpy", "__getitem__"} & vars(torch.Tensor).keys()
    assert f"{torch.tensor(2.5):.2f}" == "2.50"


# ---- decisions that depend on weights --------------------------------------------------------------------


def compares_a_number(m: Any, states: Tensor) -> Tensor:
    hidden = m.inner(states)
    mean = hidden.mean().item() + 1
    return m.head(hidden).mean() if mean > 0 else hidden.sum()  # a line that is named


def copies_and_compares(m: Any, states: Tensor) -> Tensor:
    hidden = m.inner(states)
    mean = hidden.detach().mean().cpu() * 2
    return m.head(hidden).mean() if mean > 0 else hidden.sum()  # a line that is named


def scales_what_is_known(m: Any, states: Tensor) -> Tensor:
    hidden = m.inner(states)
    positions = torch.arange(64, device=states.device) * (hidden.mean().item() * 3)
    return m.head(hidden[:, positions > 2]).mean()  # a line that is named


def makes_a_tensor_of_it(m: Any, states: Tensor) -> Tensor:
    hidden = m.inner(states)
    mean = torch.tensor(hidden.mean().item() - 1.5)
    return m.head(hidden).mean() if mean.abs() > 1 else hidden.sum()  # a line that is named


def compares_a_root(m: Any, states: Tensor) -> Tensor:
    hidden = m.inner(states)
    norm = math.sqrt(hidden.mean().item() + 1)
    return m.head(hidden).mean() if norm > 1 else hidden.sum()  # a line that is named


def compares_a_logarithm(m: Any, states: Tensor) -> Tensor:
    hidden = m.inner(states)
    bits = log2(hidden.mean().item())
    return m.head(hidden).mean() if bits > 1 else hidden.sum()  # a line that is named


def compares_the_root_of_numpy(m: Any, states: Tensor) -> Tensor:
    hidden = m.inner(states)
    norm = numpy.sqrt(hidden.mean().item())  # a line that is named
    return m.head(hidden).mean() if norm > 1 else hidden.sum()


def compares_a_plain_float(m: Any, states: Tensor) -> Tensor:
    hidden = m.inner(states)
    mean = float(hidden.mean().item())  # a line that is named
    return m.head(hidden).mean() if mean > 2 else hidden.sum()


def compares_the_root_of_a_draw(m: Any, states: Tensor) -> Tensor:
    hidden = m.inner(states)
    return m.head(hidden).mean() if math.sqrt(random.random()) > 0.5 else hidden.sum()


@pytest.mark.parametrize(
    "decides",
    [
        compares_a_number,
        compares_a_root,
        compares_a_logarithm,
        compares_the_root_of_numpy,
        compares_a_plain_float,
        copies_and_compares,
        scales_what_is_known,
        makes_a_tensor_of_it,
    ],
)
def test_what_weights_decide_is_assumed_and_its_line_named(decides: Callable[..., Tensor]) -> None:
    (doubt,) = assumptions(rehearse(job_of(decides), Recipe().setup(), CpuPolicy()))
    assert "depends on weights" in doubt
    assert f"in {decides.__name__} (test_shadow_values.py, line" in doubt
    assert "a line that is named" in doubt


def test_the_root_of_a_number_that_was_drawn_is_a_doubt() -> None:
    (doubt,) = assumptions(rehearse(job_of(compares_the_root_of_a_draw), Recipe().setup(), CpuPolicy()))
    assert "compares_the_root_of_a_draw" in doubt
    assert type(math.sqrt).__name__ == "builtin_function_or_method"


def routes(m: Any, states: Tensor) -> Tensor:
    rows = states.view(-1, WIDTH)
    weights, chosen = m.router(rows).softmax(-1).topk(2, -1)
    out = torch.zeros_like(rows)
    for number, expert in enumerate(m.experts):
        row, choice = torch.where(chosen == number)
        out.index_add_(0, row, expert(rows[row]) * weights[row, choice, None])
    return m.head(out).mean()


def splits(m: Any, states: Tensor) -> Tensor:
    rows = states.view(-1, WIDTH)
    chosen = m.router(rows).topk(2, -1)[1].flatten()
    parts = rows[chosen.argsort(stable=True) // 2].split(chosen.bincount(minlength=4).tolist())
    return m.head(torch.cat([expert(part) for expert, part in zip(m.experts, parts, strict=True)])).mean()


@pytest.mark.parametrize(("routing", "rows"), [("balanced", [128] * 4), ("worst", [256, 256, 0, 0])])
@pytest.mark.parametrize("decides", [routes, splits])
def test_tokens_go_to_experts_as_the_routing_says(
    decides: Callable[..., Tensor], routing: str, rows: list[int]
) -> None:
    job = replace(job_of(decides, experts=4), routing=routing)
    trace = rehearse(job, Recipe().setup(), CpuPolicy())
    assert any(f"{routing} routing" in doubt for doubt in trace.doubts)
    products = [
        kernel.shapes[1][0]
        for kernel in trace.kernels
        if kernel.operator == "aten::addmm" and kernel.phase == "forward" and "experts" in kernel.module
    ]
    assert products == rows


def test_the_routing_is_balanced_or_worst() -> None:
    with pytest.raises(JobError, match=r"'balanced' .* or 'worst'"):
        replace(job_of(routes), routing="fair")


# ---- steps that differ -----------------------------------------------------------------------------------


def embed_once(self: Any, input_ids: Tensor, **_: Any) -> Tensor:
    """Embed each token once, like BERT. The number of distinct tokens differs from batch to batch."""
    tokens, places = torch.unique(input_ids, return_inverse=True)
    return self.LayerNorm(self.word_embeddings(tokens))[places]


@pytest.mark.whole
def test_micro_batches_that_values_tell_apart_are_all_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BertEmbeddings, "forward", embed_once)
    job, setup = small_job("bert", 2, batch_size=16), Recipe.parse("micro_batches(4)").setup()
    trace = rehearse(job, setup, CpuPolicy())
    assert any(doubt.startswith("The allocations of a step depend on the values") for doubt in trace.doubts)
    assert peak(compared(foreseen(trace))) == peak(compared(reports(job, setup)))
    passes = rehearse_passes(job, setup, CudaPolicy())
    assert splice(passes, rehearse_update(job, setup, CudaPolicy(), passes.gradients)) is None


@pytest.mark.whole
def test_a_plan_for_steps_that_differ_simulates_each_recipe_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BertEmbeddings, "forward", embed_once)
    settled = {slot: roster.plain(slot) for slot in Slot if slot is not Slot.BATCHING}
    answer = plan(small_job("bert", 2, batch_size=4), gpu="h200", keep=settled, workers=1)
    assert answer.verified
    assert any(doubt.startswith("The allocations of a step depend on the values") for doubt in answer.doubts)


def test_a_new_storage_at_an_old_address_has_no_shadow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python reuses addresses. A shadow keyed by address alone would make predictions depend on the
    placement of objects."""
    monkeypatch.setattr(torch.UntypedStorage, "_cdata", 1, raising=False)
    shadows = Shadows()
    old, new = (torch.empty(4, dtype=torch.long, device="meta") for _ in range(2))
    shadows.set(old, torch.arange(4))
    assert shadows.of(old) is not None
    assert shadows.of(new) is None
    shadows.set(new, torch.arange(4))
    del old
    assert shadows.of(new) is not None
    del new
    assert shadows.of(torch.empty(4, dtype=torch.long, device="meta")) is None


def test_what_the_cpu_refuses_is_not_followed_where_a_chain_is_long() -> None:
    """A Mixtral counts tokens with an operator that takes no integers on a CPU."""

    def counted() -> torch.UntypedStorage:
        return torch.histc(torch.ones(4, dtype=torch.int32), 4).untyped_storage()

    refused = Shadow(counted, depth=DEEPEST)
    with pytest.raises(NotFollowed):
        refused.contents()
