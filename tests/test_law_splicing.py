"""Law 5, for recipes: a step spliced from parts rehearsed alone equals the step rehearsed whole."""

from __future__ import annotations

import os
import random

import pytest

from small_models import small_job
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.splice import Part, rehearse_passes, rehearse_update, splice
from test_law_scaling import CUDA, same, setup_of, whole

SEED = 20_261_120
DRAWS = range(12) if os.environ.get("SNUGFIT_ALL_TRUTH") == "1" else (1, 2, 5, 6, 7, 10)
"""All that are drawn, or six in which every word of theirs is met."""

OPTIMIZERS = ("adamw", "adamw_fused", "adamw_loop", "sgd", "adafactor", "adafactor_torch", "adamw_8bit")
SPANS = ("keep_all", "every_layer", "every_nth_layer(2)", "segments(2)")
ADAPTERS = ("full", "lora", "lora(targets=all-linear)")


def drawn(number: int) -> tuple[Job, str]:
    """A family, a job and a recipe, by chance; the same number draws the same."""
    rng = random.Random(SEED + number)
    family = rng.choice(("bert", "gpt2", "llama", "t5"))
    words = (
        rng.choice(ADAPTERS if family != "t5" else ("full",)),
        rng.choice(("eager", "sdpa")),
        rng.choice(("fp32", "bf16", "fp16", "bf16_pure")),
        rng.choice(SPANS if family != "t5" else SPANS[:2]),
        rng.choice(("whole_batch", "micro_batches(2)", "micro_batches(4)")),
        rng.choice(OPTIMIZERS),
    )
    job = small_job(
        family,
        rng.choice((1, 2)) if words[3] == "keep_all" else 3,
        batch_size=8,
        clip=rng.choice((None, 1.0)),
        padding=rng.choice((0.0, 0.3)),
        decay_groups=rng.random() < 0.3,
    )
    return job, " + ".join(words)


@pytest.mark.parametrize("number", DRAWS)
def test_spliced_equals_whole(number: int) -> None:
    job, recipe = drawn(number)
    if "adamw_8bit" in recipe:
        pytest.importorskip("bitsandbytes")
    if "lora" in recipe:
        pytest.importorskip("peft")
    setup = setup_of(recipe)
    passes = rehearse_passes(job, setup, CUDA)
    update = rehearse_update(job, setup, CUDA, passes.gradients)
    same(splice(passes, update, micro_batches=setup.micro_batches), whole(job, setup)[0])


def test_one_rehearsal_of_the_passes_serves_every_optimizer_and_number_of_pieces() -> None:
    """What a planner gains: two rehearsals of passes, one of each update, and every pair of them."""
    job = small_job("llama", 2, batch_size=24)
    parts = {n: rehearse_passes(small_job("llama", 2, batch_size=4 * n), setup, CUDA)
             for n, setup in ((1, setup_of("bf16")), (2, setup_of("bf16 + micro_batches(2)")))}  # fmt: skip
    for optimizer in ("adamw_fused", "adafactor"):
        update = rehearse_update(job, setup_of(optimizer), CUDA, parts[1].gradients)
        for pieces in (1, 2, 6):
            setup = setup_of(f"bf16 + {optimizer}" + (f" + micro_batches({pieces})" if pieces > 1 else ""))
            same(
                splice(parts[min(pieces, 2)], update, micro_batches=pieces),
                rehearse(small_job("llama", 2, batch_size=4 * pieces), setup, CUDA),
            )


@pytest.mark.parametrize("recipe", ["bf16 + adafactor"])
def test_bert_large_is_spliced(recipe: str) -> None:
    """Its widths, so that blocks are large and small; of its layers three, which differ in nothing."""
    found = Model.find("bert-large-uncased")
    model = Model.from_config({**found.config, "num_hidden_layers": 3}, name=found.name)
    job, setup = Job(model=model, task=Task.SEQUENCE_CLASSIFICATION, batch_size=4), setup_of(recipe)
    passes = rehearse_passes(job, setup, CUDA)
    update = rehearse_update(job, setup, CUDA, passes.gradients)
    same(splice(passes, update, micro_batches=setup.micro_batches), whole(job, setup)[0])


def test_parts_that_do_not_meet_are_refused() -> None:
    job, plain, lora = small_job("bert", 2), setup_of("plain"), setup_of("lora")
    passes = rehearse_passes(job, plain, CUDA)
    other = rehearse_update(job, lora, CUDA, rehearse_passes(job, lora, CUDA).gradients)
    update = rehearse_update(job, plain, CUDA, passes.gradients)
    assert splice(passes, update) is not None
    assert splice(passes, other) is None
    assert splice(passes, Part(other.trace, passes.gradients)) is None
    fewer = passes.gradients[:-1]
    assert splice(passes, rehearse_update(job, plain, CUDA, fewer)) is None
    assert splice(passes, Part(rehearse_update(job, plain, CUDA, fewer).trace, passes.gradients)) is None
    assert splice(passes, update, micro_batches=2) is None, "passes of one piece tell nothing of two"


def test_pure_and_mixed_precision_do_not_meet() -> None:
    """Gradients of two bytes each, and an update rehearsed with four."""
    job = small_job("gpt2", 2)
    passes = rehearse_passes(job, setup_of("bf16_pure"), CUDA)
    assert splice(passes, rehearse_update(job, setup_of("bf16"), CUDA, passes.gradients)) is None


def test_only_parameters_that_train_have_gradients() -> None:
    """With LoRA: two low-rank matrices at each of two projections of each layer, and the classifier."""
    passes = rehearse_passes(small_job("bert", 3), setup_of("lora"), CUDA)
    assert passes.gradients == tuple(range(3 * 2 * 2 + 2))
