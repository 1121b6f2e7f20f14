"""What a step decides by its batch is known in a rehearsal; what depends on weights is assumed, and said.

Each module here allocates by values: it trims its batch, gathers by masks, loops as often as a length says.
Those that decide by the batch alone are held to a real run on the CPU, as law 1 does, and have no doubt.
Those that decide by weights have a doubt that names the line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.bert.modeling_bert import BertEmbeddings

from aligned import peak
from reported import foreseen, reports
from small_models import small_job
from snugfit.errors import JobError, RehearsalError
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.planning.search.search import plan
from snugfit.rehearsal.device.policy import CpuPolicy, CudaPolicy
from snugfit.rehearsal.record.shadows import Shadows
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.splice import rehearse_passes, rehearse_update, splice
from snugfit.rehearsal.trace.trace import Trace
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot
from test_law_rehearsed_equals_real import compared

WIDTH = 128
IDS = torch.randint(3, 50, (4, 64), generator=torch.Generator().manual_seed(0))
IDS[:, 40:] = IDS[1, 20:] = 0
IDS[2, 30] = 2
MASK = (IDS != 0).long()
LENGTHS = MASK.sum(1)
STATES = torch.randn(4, 64, WIDTH, generator=torch.Generator().manual_seed(0))


class Decides(nn.Module):
    """Runs one of the functions below on its layers."""

    def __init__(self, decides: Callable[..., Tensor], experts: int = 0) -> None:
        super().__init__()
        self.decides = decides
        self.emb, self.inner, self.head = (
            nn.Embedding(50, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 2),
        )
        self.gate = nn.Parameter(torch.zeros(()))
        self.router = nn.Linear(WIDTH, max(experts, 1))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))
        self.register_buffer("steps", torch.tensor([7, 3]))

    def forward(self, **batch: Tensor) -> Tensor:
        return self.decides(self, **batch)


def trims(m: Any, ids: Tensor, mask: Tensor) -> Tensor:
    return m.head(m.inner(m.emb(ids[:, : mask.sum(1).max().item()]))).mean()


def counts_positions(m: Any, lengths: Tensor) -> Tensor:
    return m.head(m.emb(torch.arange(lengths.max().item(), device=lengths.device))).mean()


def makes_room(m: Any, lengths: Tensor) -> Tensor:
    room = torch.zeros(4, lengths.max() + int(m.steps[0]), WIDTH, device=lengths.device)
    return m.head(m.inner(room)).mean()


def loops(m: Any, ids: Tensor, lengths: Tensor) -> Tensor:
    states = m.emb(ids)
    for _ in range(int(lengths[0]) // 16):
        states = m.inner(states)
    return m.head(states).mean()


def leaves_out_labels(m: Any, ids: Tensor, mask: Tensor) -> Tensor:
    labels = torch.where(mask > 0, ids % 2, -100)
    logits = m.head(m.inner(m.emb(ids)))
    return functional.cross_entropy(logits[labels != -100], labels[labels != -100])


def embeds_once(m: Any, ids: Tensor) -> Tensor:
    tokens, places = torch.unique(ids, return_inverse=True)
    return m.head(m.inner(m.emb(tokens))[places]).mean()


def packs(m: Any, ids: Tensor, lengths: Tensor) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(
        m.emb(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
    )
    return m.head(m.inner(packed.data)).mean()


def cuts_sequences(m: Any, ids: Tensor, mask: Tensor) -> Tensor:
    ends = functional.pad(mask.sum(1).cumsum(0), (1, 0)).tolist()
    states = m.inner(m.emb(ids))[mask.bool()]
    return sum(m.head(m.inner(states[a:b])).mean() for a, b in pairwise(ends))


def aligns(m: Any, ids: Tensor, mask: Tensor) -> Tensor:
    lengths = mask.sum(1) // 4
    labels = torch.where(torch.arange(64, device=ids.device) < lengths[:, None], ids, -100)
    assert not labels.max() >= WIDTH
    scores = m.inner(m.emb(ids)).log_softmax(-1).transpose(0, 1)
    full = torch.full((4,), 64, device=ids.device)
    return functional.ctc_loss(scores, labels[labels >= 0], full, lengths, zero_infinity=True)


def repeats(m: Any, lengths: Tensor) -> Tensor:
    return m.head(m.inner(torch.repeat_interleave(m.emb.weight[:4], lengths, dim=0))).mean()


def selects(m: Any, ids: Tensor, mask: Tensor) -> Tensor:
    return torch.masked_select(m.inner(m.emb(ids)), mask[..., None].bool()).pow(2).mean()


def counts_on_the_host(m: Any, mask: Tensor) -> Tensor:
    rows = int(mask.cpu().numpy().sum())
    return m.head(m.inner(torch.ones(rows, WIDTH, device=mask.device))).mean()


def branches(m: Any, ids: Tensor, mask: Tensor) -> Tensor:
    states = m.inner(m.emb(ids))
    if (ids == 2).any() and not (ids == 77).any() and not torch.equal(mask, torch.ones_like(mask)):
        states = m.inner(states)
    return m.head(states).mean()


def fills_a_mask(m: Any, ids: Tensor, mask: Tensor) -> Tensor:
    chosen = torch.zeros(4, 64, dtype=torch.bool, device=ids.device)
    for row in range(4):
        chosen[row, : int(mask[row].sum())] = True
    return m.head(m.inner(m.emb(ids)[chosen])).sum()


def writes_by_a_mask(m: Any, ids: Tensor, mask: Tensor) -> Tensor:
    states = m.inner(m.emb(ids)).clone()
    states[mask == 0] = m.gate.expand(WIDTH)
    return m.head(states).mean()


def calls_by_name(m: Any, ids: Tensor) -> Tensor:
    named = {"expert_2": m.inner}
    states = named[f"expert_{ids[2, 30]}"](m.emb(ids))
    width = torch.tensor([ids[2, 30], 7], device=ids.device).max()
    return m.head(states[:, :width] if 0 in ids[:, -1] else m.inner(states)).mean()


def logs_and_checks(m: Any, states: Tensor) -> Tensor:
    hidden = m.inner(states)
    m.last, m.copy = hidden.mean().item() * 2, hidden.detach().mean().cpu()
    assert torch.isfinite(hidden).all()
    assert not hidden.isnan().any()
    return m.head(hidden / hidden.std().item()).mean() if f"{m.last:.3f}" else hidden.mean()


EXACT: list[tuple[Callable[..., Tensor], dict[str, Tensor]]] = [
    (trims, {"ids": IDS, "mask": MASK}),
    (counts_positions, {"lengths": LENGTHS}),
    (makes_room, {"lengths": LENGTHS}),
    (loops, {"ids": IDS, "lengths": LENGTHS}),
    (leaves_out_labels, {"ids": IDS, "mask": MASK}),
    (embeds_once, {"ids": IDS}),
    (packs, {"ids": IDS, "lengths": LENGTHS}),
    (cuts_sequences, {"ids": IDS, "mask": MASK}),
    (aligns, {"ids": IDS, "mask": MASK}),
    (repeats, {"lengths": LENGTHS}),
    (selects, {"ids": IDS, "mask": MASK}),
    (counts_on_the_host, {"mask": MASK}),
    (branches, {"ids": IDS, "mask": MASK}),
    (fills_a_mask, {"ids": IDS, "mask": MASK}),
    (writes_by_a_mask, {"ids": IDS, "mask": MASK}),
    (calls_by_name, {"ids": IDS}),
    (logs_and_checks, {"states": STATES}),
]


def job_of(decides: Callable[..., Tensor], batch: dict[str, Tensor], experts: int = 0) -> Job:
    torch.manual_seed(0)
    return Job(model=Model.from_module(Decides(decides, experts), batch), task=Task.CUSTOM, batch_size=4)


def assumptions(trace: Trace) -> list[str]:
    """Doubts but for those about parameters that a module here does not use."""
    return [doubt for doubt in trace.doubts if "no gradient" not in doubt]


@pytest.mark.whole
@pytest.mark.parametrize(("decides", "batch"), EXACT, ids=lambda value: getattr(value, "__name__", ""))
def test_what_the_batch_decides_is_known(decides: Callable[..., Tensor], batch: dict[str, Tensor]) -> None:
    job, setup = job_of(decides, batch), Recipe().setup()
    trace = rehearse(job, setup, CpuPolicy())
    assert assumptions(trace) == []
    assert peak(compared(foreseen(trace))) == peak(compared(reports(job, setup)))


def test_torch_is_as_it_was_when_a_rehearsal_is_over() -> None:
    """A method that is replaced can leave its traces in a class of C."""
    rehearse(job_of(trims, {"ids": IDS, "mask": MASK}), Recipe().setup(), CpuPolicy())
    assert torch.tensor([torch.tensor(1), 2]).tolist() == [1, 2]
    assert not {"item", "tolist", "numpy", "__getitem__"} & vars(torch.Tensor).keys()
    assert f"{torch.tensor(2.5):.2f}" == "2.50"


# ---- what depends on weights -----------------------------------------------------------------------------


def branches_on_weights(m: Any, states: Tensor) -> Tensor:
    hidden = m.inner(states)
    if hidden.mean() > 0:  # a line that is named
        hidden = m.inner(hidden)
    return m.head(hidden).mean()


def compares_a_number(m: Any, states: Tensor) -> Tensor:
    hidden = m.inner(states)
    mean = hidden.mean().item() + 1
    return m.head(hidden).mean() if mean > 0 else hidden.sum()  # a line that is named


def picks_by_weights(m: Any, states: Tensor) -> Tensor:
    hidden = m.inner(states).view(-1, WIDTH)
    return m.head(hidden[hidden.sum(1) > 0]).mean()  # a line that is named


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


@pytest.mark.parametrize(
    "decides",
    [
        branches_on_weights,
        compares_a_number,
        picks_by_weights,
        copies_and_compares,
        scales_what_is_known,
        makes_a_tensor_of_it,
    ],
)
def test_what_weights_decide_is_assumed_and_its_line_named(decides: Callable[..., Tensor]) -> None:
    (doubt,) = assumptions(rehearse(job_of(decides, {"states": STATES}), Recipe().setup(), CpuPolicy()))
    assert "depends on weights" in doubt
    assert f"in {decides.__name__} (test_shadow_values.py, line" in doubt
    assert "a line that is named" in doubt


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
    job = replace(job_of(decides, {"states": STATES}, experts=4), routing=routing)
    trace = rehearse(job, Recipe().setup(), CpuPolicy())
    assert any(f"{routing} routing" in doubt for doubt in trace.doubts)
    products = [
        kernel.shapes[1][0]
        for kernel in trace.kernels
        if kernel.operator == "aten::addmm" and kernel.phase == "forward" and "experts" in kernel.module
    ]
    assert products == rows


def test_the_routing_is_balanced_or_worst() -> None:
    with pytest.raises(JobError, match="'balanced', or 'worst'"):
        replace(job_of(routes, {"states": STATES}), routing="fair")


def loops_on_weights(m: Any, states: Tensor) -> Tensor:
    gate = m.gate
    while gate < 1:
        states, gate = m.inner(states), gate + 0.3
    return m.head(states).mean() + m.gate


def test_a_loop_that_weights_end_is_an_error() -> None:
    with pytest.raises(RehearsalError, match=r"loops on a value.*`while gate < 1:`.*1,000 times"):
        rehearse(job_of(loops_on_weights, {"states": STATES}), Recipe().setup(), CpuPolicy())


# ---- steps that differ -----------------------------------------------------------------------------------


def embed_once(self: Any, input_ids: Tensor, **_: Any) -> Tensor:
    """As BERT embeds, each token once: how many there are differs from batch to batch."""
    tokens, places = torch.unique(input_ids, return_inverse=True)
    return self.LayerNorm(self.word_embeddings(tokens))[places]


@pytest.mark.whole
def test_micro_batches_that_values_tell_apart_are_all_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BertEmbeddings, "forward", embed_once)
    job, setup = small_job("bert", 2, batch_size=16), Recipe.parse("micro_batches(4)").setup()
    trace = rehearse(job, setup, CpuPolicy())
    assert any(doubt.startswith("What a step allocates depends on values") for doubt in trace.doubts)
    assert peak(compared(foreseen(trace))) == peak(compared(reports(job, setup)))
    passes = rehearse_passes(job, setup, CudaPolicy())
    assert splice(passes, rehearse_update(job, setup, CudaPolicy(), passes.gradients)) is None


@pytest.mark.whole
def test_a_plan_for_steps_that_differ_simulates_each_recipe_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BertEmbeddings, "forward", embed_once)
    settled = {slot: roster.plain(slot) for slot in Slot if slot is not Slot.BATCHING}
    answer = plan(small_job("bert", 2, batch_size=16), gpu="h200", settled=settled, workers=1)
    assert answer.verified
    assert any(doubt.startswith("What a step allocates depends on values") for doubt in answer.doubts)


def test_a_new_storage_at_an_old_address_has_no_shadow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses are used again. Were a shadow found by one alone, a prediction would depend on where Python
    happens to put its objects."""
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
