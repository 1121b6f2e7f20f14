"""Gradients reveal losses that train differently in micro-batches. Examples are class weights, a user's mean
over tokens, and ignored answers. Further ones are two means in one loss, and the balance of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional
from torch.utils.data import DataLoader

from fitted import classified, model_of, padded, spoken, trainer_of
from small_models import small_job
from snugfit import accelerate, fit, train
from snugfit.errors import OutOfMemory
from snugfit.job.batch_layout import BatchLayout
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.techniques.recipe import Recipe
from snugfit.training.recovery import compares_again
from snugfit.training.run.cut_loss import chosen_samples
from tiers import crossed

WEIGHTS = torch.tensor([1.0, 10.0])
RARE = [{**row, "labels": int(index % 10 == 7)} for index, row in enumerate(classified(24))]
"""Samples of which nine in ten belong to one class."""


def without_labels(model: Any, batch: dict[str, Any]) -> Any:
    return model(**{name: value for name, value in batch.items() if name not in ("labels", "targets")})


def weighted(model: Any, batch: dict[str, Any]) -> Any:
    return functional.cross_entropy(without_labels(model, batch).logits, batch["labels"], weight=WEIGHTS)


def own_names(model: Any, batch: dict[str, Any]) -> Any:
    logits = without_labels(model, batch).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), batch["targets"][:, 1:].flatten())


def renamed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    batch = padded(rows)
    return {**{name: value for name, value in batch.items() if name != "labels"}, "targets": batch["labels"]}


def loop_of(
    model: Any, rows: Any, heard: list[Any], loss: Any = None, recipe: str = "micro_batches(4)", **more: Any
) -> Any:
    """Return a loop over batches of 8 that appends its events to `heard`."""
    collate = renamed if loss is own_names else padded
    loader = DataLoader(rows, 8, collate_fn=collate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerate(model, optimizer, loader, recipe, loss=loss, watch=heard.append, **more)


def warnings_of(heard: list[Any]) -> list[str]:
    return [event["text"] for event in heard if event["event"] == "warning"]


def gpt2() -> Any:
    return model_of("gpt2", dropout=0.1)


def bert() -> Any:
    return model_of("bert", dropout=0.1)


# ---- a hand-written loop -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "rows", "loss"),
    [(bert, RARE, weighted), (gpt2, spoken(24), own_names)],
    ids=["classes", "tokens"],
)
def test_a_loss_with_its_own_weights_is_named_once(make: Any, rows: Any, loss: Any) -> None:
    heard: list[Any] = []
    loop_of(make(), rows, heard, loss)
    (text,) = warnings_of(heard)
    assert "micro_batches(4): its loss is not a mean over samples" in text
    assert "gradients" in text
    assert "items=" in text


def test_a_count_that_fits_the_loss_is_no_warning() -> None:
    heard: list[Any] = []
    loop_of(bert(), RARE, heard, weighted, items=lambda batch: WEIGHTS[batch["labels"]].sum())
    loop_of(gpt2(), spoken(24), heard, own_names, items=lambda batch: (batch["targets"][:, 1:] != -100).sum())
    assert not warnings_of(heard)


@pytest.mark.parametrize(
    ("recipe", "make", "rows"),
    crossed(
        ["", "every_layer + ", "selective(products) + ", "fused + ", "bf16 + "],
        [(bert, RARE), (gpt2, spoken(24))],
    ),
)
def test_the_models_own_mean_is_no_warning(make: Any, rows: Any, recipe: str) -> None:
    heard: list[Any] = []
    loop_of(make(), rows, heard, recipe=f"{recipe}micro_batches(4)")
    assert not warnings_of(heard)


class Dropping(torch.nn.Module):
    """Layers of torch with a dropout rate of their own, and a function that drops."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.head = layer, torch.nn.Linear(8, 1)

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        """Return a plain mean."""
        is_attention = isinstance(self.layer, torch.nn.MultiheadAttention)
        out, _ = self.layer(x, x, x) if is_attention else self.layer(x)
        out = self.head(functional.dropout1d(out, 0.5, self.training))
        return {"loss": (out.mean((1, 2)) - labels).square().mean()}


@pytest.mark.parametrize(
    "layer",
    [
        torch.nn.LSTM(8, 8, num_layers=2, dropout=0.3, batch_first=True),
        torch.nn.MultiheadAttention(8, 2, 0.3, batch_first=True),
    ],
    ids=["lstm", "attention"],
)
def test_dropout_is_no_difference(layer: Any) -> None:
    heard: list[Any] = []
    model = Dropping(layer)
    samples = [{"x": torch.randn(5, 8), "labels": float(index % 3)} for index in range(16)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerate(model, optimizer, DataLoader(samples, 8), "micro_batches(4)", watch=heard.append)
    assert not warnings_of(heard)
    assert layer.dropout == 0.3


@pytest.mark.whole
def test_a_count_of_weights_trains_as_the_whole_batch() -> None:
    """The counts of a loss may be fractions."""
    halves, weights = WEIGHTS / 4, []
    for recipe in ("plain", "micro_batches(4)"):
        model = model_of("bert")
        run = loop_of(
            model, RARE, [], weighted, recipe, items=lambda batch: float(halves[batch["labels"]].sum())
        )
        for batch in run:
            run.step(batch)
        weights.append([weight.detach().clone() for weight in model.parameters()])
    for whole, cut in zip(*weights, strict=True):
        torch.testing.assert_close(whole, cut, atol=1e-6, rtol=1e-4)


class Counting(torch.nn.Module):
    """A layer with dropout and a buffer that counts; its loss adds noise if it is `noisy`."""

    def __init__(self, noisy: bool = False, blind: int = 0) -> None:
        super().__init__()
        self.layer, self.noisy = torch.nn.Linear(8, 2), noisy
        self.register_buffer("calls", torch.zeros(()))
        self.blind = blind
        self.last: Any = None

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        """Return a weighted mean; equal for all samples while the model is `blind`."""
        self.calls += 1
        self.last = x
        x = functional.dropout(x, 0.5, self.training)
        if self.noisy:
            x = x + torch.randn_like(x)
        logits = self.layer(x)
        if int(self.calls) <= self.blind:
            return {"loss": logits.sum() * 0.0}
        return {"loss": functional.cross_entropy(logits, labels, weight=None if self.noisy else WEIGHTS)}


SAMPLES = [{"x": torch.randn(8), "labels": index % 5 // 4} for index in range(48)]


def counting_loop(model: Any, heard: list[Any], recipe: str = "micro_batches(4)") -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerate(model, optimizer, DataLoader(SAMPLES, 8), recipe, watch=heard.append)


def test_the_comparison_leaves_no_trace() -> None:
    model, heard = Counting(), []
    before = torch.get_rng_state()
    counting_loop(model, heard)
    assert warnings_of(heard)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.calls
    assert model.last is None
    assert all(weight.grad is None for weight in model.parameters())
    assert model.training


def test_a_loss_that_draws_noise_is_not_decided() -> None:
    heard: list[Any] = []
    counting_loop(Counting(noisy=True), heard)
    (text,) = warnings_of(heard)
    assert "it is not known whether a batch in pieces trains the same" in text
    assert "not a mean" not in text


@pytest.mark.whole
def test_a_loss_that_is_not_decided_is_not_cut_when_memory_runs_out() -> None:
    run = counting_loop(Counting(noisy=True), [], "plain")

    def exhausts(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    run._step.loss_of = exhausts
    with pytest.raises(OutOfMemory, match="no recipe for the same training"):
        run.step(next(iter(run)))


@pytest.mark.whole
def test_a_model_that_shows_nothing_at_first_is_compared_again() -> None:
    heard: list[Any] = []
    model = Counting(blind=16)
    run = counting_loop(model, heard)
    (first,) = warnings_of(heard)
    assert "not known" in first
    for _ in run.epochs(1):
        for batch in run:
            run.step(batch)
    (_, then) = warnings_of(heard)
    assert "not a mean over samples" in then


@pytest.mark.whole
def test_train_compares_again(tmp_path: Path) -> None:
    """It compares after the first step, whose gradients were 0."""
    example = {"x": torch.randn(4, 8), "labels": torch.tensor([0, 0, 0, 1])}
    job = Job(model=Model.from_module(Counting(blind=2), example), task=Task.CUSTOM, batch_size=4)
    heard: list[Any] = []
    train(
        job, "micro_batches(2)", SAMPLES, output_dir=tmp_path, max_steps=2, device="cpu", save_strategy="no",
        watch=heard.append,
    )  # fmt: skip
    assert ["not a mean over samples" in text for text in warnings_of(heard)] == [False, True]


# ---- a fitted trainer --------------------------------------------------------------------------------------


class Weighted(transformers.Trainer):  # type: ignore[misc]
    """A trainer with class weights in `compute_loss`."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        """Return a weighted mean."""
        out = without_labels(model, inputs)
        loss = functional.cross_entropy(out.logits, inputs["labels"], weight=WEIGHTS)
        return (loss, out) if return_outputs else loss


def of_weights(out: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return functional.cross_entropy(out.logits, labels, weight=WEIGHTS)


def of_sums(out: Any, labels: Any, num_items_in_batch: Any) -> Any:
    """Return a loss that is correct in micro-batches: a sum, divided by a count of the whole batch."""
    losses = functional.cross_entropy(out.logits, labels, weight=WEIGHTS, reduction="sum")
    return losses / num_items_in_batch


def told_by(trainer: Any, recipe: str | None = "micro_batches(4)", train: bool = False) -> list[str]:
    heard: list[Any] = []
    fit(trainer, recipe, watch=heard.append)
    if train:
        trainer.train()
    return warnings_of(heard)


@pytest.mark.parametrize(
    ("kind", "more", "warned"),
    [
        (Weighted, {}, True),
        (transformers.Trainer, {"compute_loss_func": of_weights}, True),
        (transformers.Trainer, {"compute_loss_func": of_sums}, False),
        (transformers.Trainer, {}, False),
    ],
    ids=["compute_loss", "compute_loss_func", "sums", "model"],
)
def test_fit_names_weights_of_classes(kind: Any, more: Any, warned: bool, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, bert(), RARE, kind=kind, micro=(8, 1), more=more)
    told = told_by(trainer)
    assert len(told) == warned
    assert all("not a mean over samples" in text and "num_items_in_batch" in text for text in told)


def test_micro_batches_of_one_sample_are_compared(tmp_path: Path) -> None:
    for kind, warned in ((Weighted, True), (transformers.Trainer, False)):
        trainer = trainer_of(tmp_path, bert(), RARE, kind=kind, micro=(1, 8))
        texts = told_by(trainer, None)
        assert ["not a mean over samples" in text for text in texts] == [True] * warned


@pytest.mark.parametrize("own", [True, False])
def test_losses_decide_where_memory_runs_out(own: bool, tmp_path: Path) -> None:
    """Noise on the weights reveals a difference that a new model hides; the weights are restored
    afterwards."""

    def refuse(module: Any, given: Any) -> None:
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model = bert()
    before = [weight.detach().clone() for weight in model.parameters()]
    model.register_forward_pre_hook(refuse)
    trainer = trainer_of(tmp_path, model, RARE, kind=Weighted if own else transformers.Trainer, micro=(8, 1))
    texts = told_by(trainer)
    assert ["the loss of 4 samples is" in text for text in texts] == [True] * own
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.whole
@pytest.mark.parametrize("recipe", ["micro_batches(4)", None], ids=["recipe", "own"])
def test_no_share_is_praised_where_the_comparison_failed(recipe: Any, tmp_path: Path) -> None:
    micro = (8, 1) if recipe else (8, 2)
    trainer = trainer_of(tmp_path, bert(), RARE, kind=Weighted, micro=micro, max_steps=1)
    (text,) = told_by(trainer, recipe, train=True)
    assert "not a mean over samples" in text


class Blind(Weighted):
    """A trainer whose gradients are all 0 in the first step."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        """Return a weighted mean from the second step on."""
        loss, out = super().compute_loss(model, inputs, True)
        loss = loss if self.state.global_step else loss * 0.0
        return (loss, out) if return_outputs else loss


@pytest.mark.whole
def test_fit_compares_again(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, bert(), RARE, kind=Blind, micro=(8, 1), max_steps=3)
    texts = told_by(trainer, train=True)
    assert ["not a mean over samples" in text for text in texts] == [False, True]


def question(index: int) -> dict[str, Any]:
    where = 1 + index % 4 if index % 4 else 999
    return {
        "input_ids": [5 + index, 6, 7, 8, 9, 10, 11, 12],
        "start_positions": where,
        "end_positions": where,
    }


def pretrained(index: int) -> dict[str, Any]:
    ids = [5 + (index + place) % 40 for place in range(8)]
    labels = [token if place < 1 + index % 6 else -100 for place, token in enumerate(ids)]
    return {"input_ids": ids, "labels": labels, "next_sentence_label": index % 2}


def stacked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def small_bert(kind: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=512, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    return kind(config)


def experts(balance: float) -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=512, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=32, max_position_embeddings=32, num_local_experts=4,
        output_router_logits=bool(balance), router_aux_loss_coef=balance,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


@pytest.mark.parametrize(
    ("model", "row", "warned"),
    [
        (lambda: small_bert(transformers.BertForQuestionAnswering), question, True),
        (lambda: small_bert(transformers.BertForPreTraining), pretrained, True),
        (lambda: experts(0.02), None, True),
        (lambda: experts(0.0), None, False),
        (lambda: small_bert(transformers.BertForMaskedLM), None, False),
    ],
    ids=["questions", "two means", "balance", "experts", "masked"],
)
def test_fit_names_losses_of_transformers(model: Any, row: Any, warned: bool, tmp_path: Path) -> None:
    rows = spoken(16) if row is None else [row(index) for index in range(16)]
    trainer = trainer_of(tmp_path, model(), rows, micro=(8, 1))
    if row is not None:
        trainer.data_collator = stacked
    told = told_by(trainer)
    assert len(told) == warned
    assert all("not a mean over samples" in text for text in told)


# ---- the samples -------------------------------------------------------------------------------------------


def test_unlike_samples_are_chosen_and_the_alike_put_together() -> None:
    labels = torch.tensor([0] * 13 + [1, 1, 0])
    mask = (torch.arange(12) < torch.tensor([12] * 15 + [3])[:, None]).long()
    batch = {"input_ids": torch.ones(16, 12), "attention_mask": mask, "labels": labels}
    few, many = chosen_samples(batch, BatchLayout.of(batch), 6)
    assert {*few} == {13, 15}
    assert len({*few, *many}) == 6


def test_recorded_steps_are_compared_once() -> None:
    job, setup = small_job("bert", 2), Recipe.parse("micro_batches(2)").setup()
    recorded = Recipe.parse("captured + micro_batches(2)").setup()
    assert [compares_again(job, setup, steps) for steps in (0, 1, 2, 4)] == [False, True, False, True]
    assert not any(compares_again(job, recorded, steps) for steps in range(5))
