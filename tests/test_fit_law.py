"""Law: a fitted Trainer and our own loop train alike, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from fitted import classified, copy_of, dropping, losses_of, model_of, padded, quiet, spoken, trainer_of
from small_models import small_job
from small_runs import losses
from snugfit import fit
from snugfit.frontends.own import train
from tiers import slow_but

pytestmark = pytest.mark.whole

CUTS = {(4, 1): "", (2, 2): "micro_batches(2)", (1, 4): "micro_batches(4)"}


RECIPES = ("plain", "every_layer", "adamw_fused", "adafactor_torch")
LINES = [("bert", cut, recipe) for cut in CUTS for recipe in RECIPES]
LINES += [("llama", (2, 2), "every_layer"), ("bert", (2, 2), "selective(products)")]
LINES += [("bert", (2, 2), "muon"), ("bert", (2, 2), "lion_8bit"), ("bert", (2, 2), "host_adamw")]
LINES += [("bert", (2, 2), "adamw_4bit"), ("bert", (2, 2), "apollo(rank=4, renew=3)")]
LINES += [("llama", (2, 2), "bf16_pure"), ("bert", (2, 2), "bf16_pure")]
LINES += [("bert", (2, 2), "galore(rank=4, update_proj_gap=3)")]
LINES += [("llama", (2, 2), "bf16 + padding_free"), ("llama", (4, 1), "bf16 + every_layer + padding_free")]
LINES += [("bert", (2, 2), "fused"), ("bert", (2, 2), "bf16 + every_layer + fused")]


OFTEN = [("bert", (4, 1), "plain"), ("bert", (2, 2), "muon"), ("bert", (1, 4), "every_layer")]
OFTEN += [("bert", (2, 2), "bf16 + every_layer + fused"), ("llama", (2, 2), "bf16 + padding_free")]
OFTEN += [("llama", (2, 2), "bf16_pure")]
"""Cases of `make test`: each way to split a batch, and a technique of each slot."""


@pytest.mark.parametrize(("family", "cut", "recipe"), slow_but(LINES, OFTEN.__contains__))
def test_the_trainer_fitted_equals_our_own_loop(
    family: str, cut: tuple[int, int], recipe: str, tmp_path: Path
) -> None:
    """Compare losses, gradient norms and learning rates over one epoch with a smaller last batch, and one
    step more."""
    named = " + ".join(each for each in (recipe, CUTS[cut]) if each and (each != "plain" or not CUTS[cut]))
    data = classified(10) if family == "bert" else spoken(10)
    model = _model(family)
    model.save_pretrained(tmp_path / "weights")
    job = replace(small_job(family, 2, dropping(family)), clip=1.0, decay_groups=True, learning_rate=1e-3)
    train(
        job, named, data, output_dir=tmp_path / "ours", weights=tmp_path / "weights", collate=padded,
        device="cpu", max_steps=4, weight_decay=0.0, train_sampling_strategy="sequential", save_strategy="no",
    )  # fmt: skip
    trainer = trainer_of(tmp_path / "theirs", copy_of(model), data, micro=cut, max_steps=4)
    fit(trainer, named, watch=quiet).train()
    log = [line for line in trainer.state.log_history if "grad_norm" in line]
    ours = losses(tmp_path / "ours")
    assert losses_of(trainer) == [loss for loss, _, _ in ours.values()]
    assert [float(line["grad_norm"]) for line in log] == [norm for _, norm, _ in ours.values()]
    assert [line["learning_rate"] for line in log] == [rate for _, _, rate in ours.values()]


@cache
def _model(family: str):  # type: ignore[no-untyped-def]
    return model_of(family)
