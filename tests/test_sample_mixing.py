"""Losses that are no mean over samples are detected by layers, operators or data, and keep the batch
uncut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional
from torch.utils.data import DataLoader

from fitted import classified, model_of, padded, spoken, trainer_of
from small_models import small_job
from small_runs import events, small_run
from snugfit import accelerate, fit, predict
from snugfit import train as snugfit_train
from snugfit.errors import OutOfMemory
from snugfit.features.loops.trainer.plan import compared_job
from snugfit.frontends import own
from snugfit.frontends.next_recipe import cut_smaller, next_recipe
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.job.sample_mixing import is_plain_by_source, mixing_of, norm_layers_of_job
from snugfit.planning.search.space import space_of
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot
from snugfit.training.run.train import train
from test_fit_memory import limited


class Pairs(torch.nn.Module):
    """A model of two towers with a loss of this `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.left, self.right = kind, torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: Any, y: Any) -> dict[str, Any]:
        """Return a loss over the samples x (B, 8) and y (B, 8)."""
        left, right = self.left(x), self.right(y)
        if self.kind == "in-batch negatives":
            loss = functional.cross_entropy(left @ right.T, torch.arange(len(x), device=x.device))
        elif self.kind == "cross-correlation":
            loss = (left.T @ right / len(x) - torch.eye(8, device=x.device)).square().sum()
        elif self.kind == "centred":
            loss = (left.mean(1) - left.mean()).square().mean()
        else:
            loss = functional.mse_loss(left, right)
        return {"loss": loss}


BATCH = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}


def pairs_job(kind: str) -> Job:
    return Job(model=Model.from_module(Pairs(kind), BATCH), task=Task.CUSTOM, batch_size=8)


def resnet_job(**more: Any) -> Job:
    facts = {
        "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
        "layer_type": "basic", "image_size": 32,
    }  # fmt: skip
    model = Model.from_config(facts, name="resnet")
    return Job(model=model, task="image-classification", batch_size=8, **more)


def clip() -> tuple[Any, dict[str, Any]]:
    """Return a small CLIP, and a batch with `return_loss`."""
    tower = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    }  # fmt: skip
    tokens = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.CLIPConfig(
        text_config=tower | tokens, vision_config={**tower, "image_size": 32, "patch_size": 16}
    )
    ids = torch.tensor([[1, 7, 9, 2]] * 4)
    return transformers.CLIPModel(config), {
        "input_ids": ids, "pixel_values": torch.randn(4, 3, 32, 32), "return_loss": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("in-batch negatives", "square of the samples"),
        ("cross-correlation", "sums over the samples"),
        ("plain", ""),
    ],
)
def test_a_modules_operators_tell(kind: str, says: str) -> None:
    found = mixing_of(pairs_job(kind))
    assert says in found.reason
    assert bool(found.reason) == bool(says)
    assert not found.unknown


def test_models_of_transformers() -> None:
    assert "BatchNorm2d) normalise over the batch" in mixing_of(resnet_job()).reason
    assert mixing_of(resnet_job(phase="evaluate")) == ("", "")
    for family in ("bert", "vit", "llama"):
        assert mixing_of(small_job(family)) == ("", "")
    module, example = clip()
    job = Job(model=Model.from_module(module, example), task=Task.CUSTOM)
    assert "square of the samples" in mixing_of(job).reason


def test_what_cannot_be_run_without_data_is_a_doubt() -> None:
    class Reading(Pairs):
        def forward(self, x: Any, y: Any) -> dict[str, Any]:
            """Read a value of the batch."""
            return {"loss": self.left(x).mean() * float(x.numpy().mean())}

    job = Job(model=Model.from_module(Reading("plain"), BATCH), task=Task.CUSTOM, batch_size=8)
    assert mixing_of(job).unknown
    (doubt,) = Recipe.parse("micro_batches(2)").check(job)
    assert "not known whether its loss is a mean over samples" in doubt
    assert not Recipe().check(job)


@pytest.mark.parametrize(
    "made", [resnet_job, partial(pairs_job, "in-batch negatives")], ids=["resnet", "pairs"]
)
def test_no_plan_and_no_recovery_cuts(made: Callable[[], Job]) -> None:
    job = made()
    space = space_of(job)
    assert all(candidate.setup.micro_batches == 1 for candidate in space.candidates)
    (why,) = [entry.why for entry in space.excluded if entry.what == "micro_batches"]
    assert "not a mean over samples" in why
    assert cut_smaller(job, Recipe()) is None
    assert next_recipe(torch.device("cpu"))(job, Recipe.parse("micro_batches(2)"), "oom:torch") is None


def test_a_cut_that_is_named_is_predicted_with_a_doubt() -> None:
    prediction = predict(resnet_job(), "micro_batches(2)")
    assert [doubt for doubt in prediction.doubts if "its loss is not a mean over samples" in doubt]
    assert not [doubt for doubt in predict(resnet_job()).doubts if "mean over samples" in doubt]


# ---- with data --------------------------------------------------------------------------------------------


def loop_of(kind: str, recipe: str, heard: list[dict[str, Any]]) -> Any:
    torch.manual_seed(0)
    model = Pairs(kind)
    samples = [{"x": torch.randn(8), "y": torch.randn(8)} for _ in range(16)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerate(model, optimizer, DataLoader(samples, 8), recipe, watch=heard.append)


@pytest.mark.parametrize("kind", ["in-batch negatives", "centred", "plain"])
def test_a_hand_written_loop_is_warned(kind: str) -> None:
    heard: list[dict[str, Any]] = []
    loop_of(kind, "micro_batches(2)", heard)
    loop_of(kind, "plain", heard)
    warned = [event["text"] for event in heard if event["event"] == "warning"]
    assert len(warned) == (kind != "plain")
    if kind == "centred":
        assert "the gradients of 4 samples are others" in warned[0]


@pytest.mark.whole
def test_a_hand_written_loop_is_given_no_cut_when_memory_runs_out() -> None:
    run = loop_of("centred", "plain", [])

    def exhausts(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    run._step.loss_of = exhausts
    with pytest.raises(OutOfMemory, match="no recipe for the same training"):
        run.step(next(iter(run)))


class Centred(transformers.Trainer):  # type: ignore[misc]
    """A Trainer whose loss compares with the mean of the batch. It counts its calls."""

    asked = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        """Return a loss that is no mean over samples."""
        self.asked += 1
        out = model(**{name: value for name, value in inputs.items() if name != "labels"})
        loss = (out.logits - out.logits.mean()).square().mean()
        return (loss, out) if return_outputs else loss


def test_a_loss_that_is_no_mean_is_reported_for_micro_batches_of_the_user(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    more = {"kind": Centred, "gradient_accumulation_steps": 2}
    fit(trainer_of(tmp_path, model_of("bert"), classified(8), **more), watch=told.append)
    warned = [event["text"] for event in told if event["event"] == "warning"]
    assert len(warned) == 1
    assert "gradients of" in warned[0]


def test_a_trainers_own_loss_is_compared_and_left_as_it_was(tmp_path: Path) -> None:
    told: list[str] = []
    trainer = trainer_of(tmp_path, model_of("bert").train(), classified(8), kind=Centred)
    state = torch.get_rng_state()
    fit(trainer, "micro_batches(2)", watch=lambda event: told.append(event["event"] + event.get("text", "")))
    assert [text for text in told if text.startswith("warning") and "the gradients of 4 samples" in text]
    assert trainer.asked == 0
    assert trainer.model.training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("family", "data"), [("bert", classified(8)), ("llama", spoken(8))])
def test_ordinary_losses_are_means(family: str, data: Any, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, model_of(family), data)
    model = Model.from_module(trainer.model, padded(data[:4]))
    job = replace(small_job(family), model=model, task=Task.CUSTOM)
    assert not compared_job(trainer, job).mixes_samples


@pytest.mark.whole
def test_a_fitted_trainer_is_not_cut_when_memory_runs_out(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, limited(model_of("bert"), 2), classified(22), kind=Centred, micro=(8, 1))
    fit(trainer, "plain", watch=lambda event: None)
    with pytest.raises(OutOfMemory, match=r"the batch cannot be cut: its loss is not a mean over samples"):
        trainer.train()
    assert trainer.snugfit.recipe == Recipe()
    assert Slot.BATCHING not in trainer.snugfit.user_slots


# ---- our own loop ----------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize("sums", [True, False])
def test_train_compares_the_whole_and_the_cut_loss_of_a_head(
    sums: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of transformers sums its loss over the samples, as CTC does with the config's reduction."""
    kind = transformers.BertForSequenceClassification
    forward = kind.forward

    def summing(self: Any, *arguments: Any, **keywords: Any) -> Any:
        output = forward(self, *arguments, **keywords)
        output.loss = output.loss * len(keywords["labels"])
        return output

    if sums:
        monkeypatch.setattr(kind, "forward", summing)
    text = "the gradients of 4 samples"
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(small_run(whole, "plain", max_steps=1), compare=own.compare_cut)
    train(small_run(cut, "micro_batches(2)", max_steps=1), compare=own.compare_cut)
    warned = [event["text"] for event in events(cut, "warning")]
    assert sum(text in line for line in warned) == sums
    assert not events(whole, "warning")


@pytest.mark.whole
def test_train_compares_before_a_recovery_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison changes no number of the run."""

    class Summed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = torch.nn.Linear(2, 1), 0

        def forward(self, x: Any) -> dict[str, Any]:
            self.calls += 1
            if torch.is_grad_enabled() and len(x) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return {"loss": self.layer(x).square().sum()}

    model = Summed()
    job = Job(model=Model.from_module(model, {"x": torch.ones(4, 2)}), task=Task.CUSTOM, batch_size=4)
    samples = [{"x": torch.full((2,), float(number))} for number in range(4)]
    with pytest.raises(OutOfMemory, match=r"the batch cannot be cut: .*the gradients of 2 samples"):
        snugfit_train(job, "plain", samples, output_dir=tmp_path, max_steps=1, device="cpu")


@pytest.mark.parametrize(
    ("name", "task", "plain"),
    [
        ("llama", Task.CAUSAL_LM, True),
        ("bert", Task.SEQUENCE_CLASSIFICATION, True),
        ("mobilenet_v2", "image-classification", False),  # batch norms
        ("gemma3", Task.CAUSAL_LM, False),  # made of two models
    ],
)
def test_files_of_transformers_tell_of_most_models_without_being_imported(
    name: str, task: Task, plain: bool
) -> None:
    """The answer from the source agrees with the model's classes, and is missing for the remaining models."""
    model = Model.from_config({"model_type": name}, name=name)
    assert is_plain_by_source(model, task) is plain
    assert not plain or norm_layers_of_job(Job(model=model, task=task)) == ""
