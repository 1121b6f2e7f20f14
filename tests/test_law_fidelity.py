"""Law 3: a technique's declared fidelity is true. Over the whole roster, on the CPU, through the plain
loop.

Every setting that a planner may try runs next to the plain recipe: same seed, same batches, no dropout.

- SAME runs in 64 bits, so that the same sums in another order agree to many digits. A gradient that is zero
  by symmetry (a key's bias in attention) stays zero. In fp32 it is noise, which Adam enlarges to a full
  step.
- ROUNDS runs at its own precision: losses stay within the tolerance's bound and parameters move the same
  way.
- LEARNS must learn a small real task: to separate high tokens from low ones.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import pytest
import torch

from snugfit.job.config import check_facts
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.step.open_step import open_step
from snugfit.step.plain_loop import PlainStep
from snugfit.step.step import Step
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Technique
from tiers import crossed, slow_but
from tolerance import ROUNDS, SAME, same_losses, same_parameters

pytestmark = pytest.mark.whole

STEPS = 3
VOCABULARY = 96
STEPS_TO_LEARN = 50
LEARNED = 0.3
"""Largest mean loss over five steps of a model that separates two classes; a guess gives 0.69."""

ALIKE = 0.98
"""Least cosine between parameter changes under a ROUNDS technique and under the plain recipe."""

BERT = {
    "model_type": "bert",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 2,
    "n_positions": 32,
    "vocab_size": VOCABULARY,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
JOBS = {
    "bert": (BERT, Task.SEQUENCE_CLASSIFICATION),
    "small bert": (
        {**BERT, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 32},
        Task.SEQUENCE_CLASSIFICATION,
    ),
    "bert padded": (BERT, Task.MASKED_LM),
    "gpt2": (GPT2, Task.CAUSAL_LM),
}
BESIDE = ("bert", "bert padded", "gpt2")
"""Jobs for the comparison with the plain recipe; the remaining job is for the learning task."""


def job(name: str, **changes: Any) -> Job:
    facts, task = JOBS[name]
    model = Model.from_config(check_facts(facts, where=name), name=name)
    fields: dict[str, Any] = {"batch_size": 4, "sequence_length": 16, "learning_rate": 1e-3}
    if name.endswith("padded"):
        fields["padding"] = 0.3
    return Job(model=model, task=task, **fields | changes)


@cache
def candidates(fidelity: Fidelity) -> list[Technique]:
    """Return every technique of this fidelity that is not plain, at each setting a planner may try.

    `test_ranks.py` tests techniques that need several processes against this law.
    """
    found = [technique for technique in roster.techniques() if technique.fidelity is fidelity]
    settings = [setting for technique in found for setting in technique.settings(job("bert"))]
    alone = [setting for setting in settings if not setting.needs_several_gpus]
    return [setting for setting in alone if setting != roster.plain(setting.slot)]


class Silent:
    """A step observer without effect."""

    def step_begins(self, index: int) -> None: ...

    def step_ends(self, index: int) -> None: ...

    def phase(self, name: str) -> None: ...

    def build_ends(self, model: Any, optimizer: Any) -> None: ...


@dataclass
class Run:
    """Losses and final parameters of a run of the plain loop."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]


def run(this: Job, setup: Setup, *, steps: int = STEPS) -> Run:
    torch.manual_seed(7)
    step: Step = open_step(this, setup, "plain", torch.device("cpu"), keep_losses=True)
    losses = step.run(steps, Silent())
    assert step.model is not None
    return Run(losses, {name: whole(value) for name, value in step.model.named_parameters()})


def whole(parameter: Any) -> torch.Tensor:
    """Return a parameter's values. ZeRO's third stage leaves the parameter empty and keeps the values in
    shards. A single process has the only shard."""
    part = getattr(parameter, "ds_tensor", None)
    numbers = parameter if part is None else part[: parameter.ds_numel].view(parameter.ds_shape)
    return cast(torch.Tensor, numbers.detach())


def installed(technique: Technique) -> Recipe:
    if lacking := technique.missing_package():
        pytest.skip(lacking)
    return Recipe((technique,))


def wide(setup: Setup) -> Setup:
    """Return the same setup in 64 bits."""
    return replace(setup, weights_dtype="float64")


@cache
def plainly(name: str, *, wider: bool, steps: int = STEPS) -> Run:
    """Return the plain recipe's run, the reference of each technique. The cache shares it, so it must not
    change."""
    setup = Recipe().setup()
    return run(job(name), wide(setup) if wider else setup, steps=steps)


def in_turn(case: tuple[Technique, str]) -> bool:
    """True for the job of `make test` of a technique. `test_law_rehearsed_equals_real.py` has another one."""
    technique, name = case
    return name == BESIDE[candidates(technique.fidelity).index(technique) % len(BESIDE)]


SAMES = [(technique, name) for technique in candidates(Fidelity.SAME) for name in BESIDE]


@pytest.mark.parametrize(("technique", "name"), slow_but(SAMES, in_turn), ids=str)
def test_same_is_the_plain_recipe_s_mathematics(technique: Technique, name: str) -> None:
    plain, other = plainly(name, wider=True), run(job(name), wide(installed(technique).setup()))
    same_losses(plain.losses, other.losses)
    same_parameters(plain.parameters, other.parameters)


@pytest.mark.parametrize("name", slow_but(BESIDE, 1))
def test_the_law_would_notice_another_mathematics(name: str) -> None:
    """SAME must not pass with planted faults: a learning rate off by 1 %, other data, another momentum."""
    plain = plainly(name, wider=True)
    for wrong in (
        run(job(name, learning_rate=1.01e-3), wide(Recipe().setup())),
        run(job(name), wide(Recipe.parse("sgd").setup())),
        run(job(name, clip=1e-3), wide(Recipe().setup())),
    ):
        with pytest.raises(AssertionError):
            same_parameters(plain.parameters, wrong.parameters)


COSTLY = ("zero2", "zero3", "compiled", "budget")
"""Techniques that first build C++, in minutes, or compile a model. Without the C++, a test below checks
ZeRO against the law; compiled models have tests of real steps elsewhere."""

DEARER = {"lora(r=16)", "lora(r=64)", "apollo(rank=8)", "galore(rank=8)", "lora(r=64, targets=all-linear)"}
DEARER |= {"lora(targets=all-linear)", "qlora(r=64, targets=all-linear)", "lion_8bit(embeddings=8)"}
"""Dear settings. Another setting of the same technique runs in every `make test`."""


def is_costly(technique: Technique) -> bool:
    return technique.name in COSTLY or str(technique) in DEARER


ROUNDED = [(technique, name) for technique in candidates(Fidelity.ROUNDS) for name in BESIDE]


@pytest.mark.parametrize(
    ("technique", "name"),
    slow_but(ROUNDED, lambda case: not is_costly(case[0]) and in_turn(case)),
    ids=str,
)
def test_rounds_stays_within_its_bound(technique: Technique, name: str) -> None:
    hold_to_bound(technique, name)


@pytest.mark.parametrize(
    ("technique", "name"),
    slow_but(
        [case for case in ROUNDED if case[0].name in ("zero2", "zero3")],
        lambda case: (case[0].name, case[1]) == ("zero3", "gpt2"),
    ),
    ids=str,
)
def test_so_do_engines_whose_host_updates_in_plain_torch(
    technique: Technique, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test runs all code of DeepSpeed and snugfit but DeepSpeed's compiled C++.

    In every `make test`, `test_train_zero.py` compares the second stage with one process.
    """
    installed(technique)
    monkeypatch.setattr("deepspeed.ops.adam.cpu_adam.CPUAdamBuilder", PlainAdam)
    PlainAdam.updates = 0
    hold_to_bound(technique, name)
    assert PlainAdam.updates


class PlainAdam:
    """A substitute for DeepSpeed's compiled AdamW for the host: both the builder and the built extension."""

    updates = 0

    def load(self) -> PlainAdam:
        return self

    def create_adam(self, *_: Any) -> None: ...

    def destroy_adam(self, _: int) -> None: ...

    def adam_update(
        self, _: int, step: int, rate: float, first: float, second: float, eps: float, decay: float,
        corrects: bool, weight: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor,
        square: torch.Tensor,
    ) -> None:  # fmt: skip
        assert corrects
        type(self).updates += 1
        mean.lerp_(gradient.float(), 1 - first)
        square.lerp_(gradient.float() ** 2, 1 - second)
        weight.mul_(1 - rate * decay)
        root = (square / (1 - second**step)).sqrt() + eps
        weight.sub_(rate * (mean / (1 - first**step)) / root)


def hold_to_bound(technique: Technique, name: str) -> None:
    start, plain = plainly(name, wider=False, steps=0), plainly(name, wider=False)
    other = run(job(name), installed(technique).setup())
    same_losses(plain.losses, other.losses, ROUNDS)
    assert cosine(moves(start, plain), moves(start, other)) > ALIKE


def moves(start: Run, end: Run) -> torch.Tensor:
    """Return the change of all parameters as one vector."""
    return torch.cat(
        [(end.parameters[name] - value).flatten().double() for name, value in start.parameters.items()]
    )


def cosine(left: torch.Tensor, right: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(left, right, dim=0))


class HighOrLow:
    """A task that a model can learn: detect sequences with tokens from the upper half of the vocabulary."""

    def __init__(self, this: Job, samples: int) -> None:
        self.job, self.length, self.samples = this, this.sequence_length, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        half, generator = self.job.model.config["vocab_size"] // 2, torch.Generator().manual_seed(index)
        ids = torch.randint(half, (self.length,), generator=generator) + half * (index % 2)
        return {"input_ids": ids, "labels": torch.tensor(index % 2)}


LEARNS_ELSEWHERE = {"fp8", "adafactor_torch", "qlora(targets=all-linear)", "paged_lion"}
"""Techniques with another test in every `make test`: `test_fp8.py` has fp8; `adafactor`, `lion` and other
adapters run here."""


@pytest.mark.parametrize(
    "technique",
    slow_but(candidates(Fidelity.LEARNS), lambda one: str(one) not in DEARER | LEARNS_ELSEWHERE),
    ids=str,
)
def test_learns_reduces_the_loss(technique: Technique, monkeypatch: pytest.MonkeyPatch) -> None:
    """The technique must learn at one of three usual learning rates. The user chooses the rate, and it
    differs by optimizer."""
    monkeypatch.setattr("snugfit.step.batches.SyntheticDataset", HighOrLow)
    setup = installed(technique).setup()
    reached = []
    for rate in (1e-2, 1e-3, 1e-1):
        reached.append(least_loss(losses_until_learned(job_to_learn(rate), setup)))
        if reached[-1] < LEARNED:
            return
    pytest.fail(f"{technique}: losses {reached}, not below {LEARNED}")


class Learned(Exception):
    """Raised when the loss is low enough."""


def losses_until_learned(this: Job, setup: Setup) -> list[float]:
    """Return the losses of a run that ends with the first low ones."""
    losses: list[float] = []

    def note(loss: torch.Tensor) -> None:
        losses.append(float(loss))
        if least_loss(losses[-5:]) < LEARNED:
            raise Learned

    torch.manual_seed(7)
    step = cast(PlainStep, open_step(this, setup, "plain", torch.device("cpu"), keep_losses=True))
    step.computed = note
    with contextlib.suppress(Learned):
        step.run(STEPS_TO_LEARN, Silent())
    return losses


def job_to_learn(rate: float) -> Job:
    return job("small bert", batch_size=8, sequence_length=8, learning_rate=rate)


def least_loss(losses: list[float]) -> float:
    """Return the least mean loss of five steps."""
    return min((sum(losses[end - 5 : end]) / 5 for end in range(5, len(losses) + 1)), default=math.inf)


class Uneven(HighOrLow):
    """Samples of every length: sample i has 2 + (5 i mod 14) tokens, and the rest is padding."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        kept = torch.arange(self.length) < 2 + 5 * index % 14
        ids = super().__getitem__(index)["input_ids"] * kept
        labels = torch.where(kept, ids, torch.full_like(ids, -100))
        return {"input_ids": ids, "attention_mask": kept.long(), "labels": labels}


@pytest.mark.parametrize(
    ("precision", "clip", "name"), crossed(["", " + fp16"], [None, 0.05], ["gpt2", "bert padded"])
)
def test_micro_batches_equal_the_whole_batch_when_padding_is_uneven(
    monkeypatch: pytest.MonkeyPatch, name: str, clip: float | None, precision: str
) -> None:
    """In a mean over tokens, micro-batches with few tokens weigh less. SGD does not hide a wrong scale."""
    monkeypatch.setattr("snugfit.step.batches.SyntheticDataset", Uneven)
    this = job(name, batch_size=8, clip=clip, learning_rate=0.1)
    tolerance, widen = (ROUNDS, lambda setup: setup) if precision else (SAME, wide)
    plain = run(this, widen(Recipe.parse(f"sgd{precision}").setup()))
    for pieces in (2, 8):
        cut = run(this, widen(Recipe.parse(f"sgd + micro_batches({pieces}){precision}").setup()))
        same_losses(plain.losses, cut.losses, tolerance)
        same_parameters(plain.parameters, cut.parameters, tolerance)
