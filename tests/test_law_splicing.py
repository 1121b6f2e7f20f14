"""Law 5, for recipes: a step spliced from separately recorded parts equals the step simulated in full.

The recipes are drawn from the whole roster, so a new technique is spliced before it has a test of its own.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Collection
from dataclasses import MISSING, fields

import pytest

from covering import covering
from small_models import small_job
from snugfit.errors import RecipeError
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.splice import Part, rehearse_passes, rehearse_update, splice
from snugfit.rehearsal.trace.trace import Trace
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot, Technique
from test_law_scaling import CUDA, same, setup_of, whole

SEED = 20_261_120

FURTHER = ("lora(targets=all-linear)", "micro_batches(4)")
"""Techniques of the roster again, at settings that change allocations."""

GIVEN = {"selective": "products", "host": "all", "budget": 0.5}
"""Required settings that are not numbers, by technique."""

GOES_WITH = {"budget(0.5)": ("compiled",), "adamw_stochastic": ("bf16_pure",), "flash": ("bf16",)}
"""Techniques that require another technique, with the required one."""

FAMILIES = ("bert", "gpt2", "llama", "t5")

EVERY_RECIPE = ("bert", "llama")
"""Families, at least one of which supports each recipe that any family supports."""

Words = tuple[str, ...]
"""A recipe: the notation of one technique per slot."""


def is_spliced(technique: type[Technique]) -> bool:
    """True if plans splice recipes with this technique from parts.

    They do not for DeepSpeed's engine, which wraps a whole step, nor for steps of several GPUs. Steps
    recorded as graphs, or with updates inside the backward pass, are also simulated whole. Two techniques are
    for phases without an update.
    """
    whole = technique.needs_several_gpus or technique.name in (
        "captured",
        "released",
        "released_late",
    )
    return technique.searched and not whole and technique.name not in ("kv_cache", "low_bits")


def notations() -> list[list[str]]:
    """Return the notations of all techniques, by slot. A required setting is 2 or the value in `GIVEN`."""
    by_slot: dict[Slot, list[str]] = {slot: [] for slot in Slot}
    for technique in filter(is_spliced, roster.techniques()):
        needed = [declared for declared in fields(technique) if declared.default is MISSING]
        twos = {declared.name: GIVEN.get(technique.name, 2) for declared in needed}
        if technique.name == "frozen":  # one of its settings must be given
            twos = {"last": 1}
        by_slot[technique.slot].append(str(technique(**twos)))
    for word in FURTHER:
        by_slot[slot_of(word)].append(word)
    return list(by_slot.values())


@functools.cache
def taken(words: Words) -> bool:
    """True if a small job supports a recipe with these techniques and plain ones in all other slots."""
    recipe = Recipe.parse(" + ".join(words))
    for family in EVERY_RECIPE:
        with contextlib.suppress(RecipeError):  # a classifier has no vocabulary
            recipe.check(small_job(family, 3, batch_size=8, padding=0.3), installed=False)
            return True
    return False


def may_meet(words: Words) -> bool:
    """True if these techniques are compatible, together with the techniques they need in free slots."""
    slots = {slot_of(word) for word in words}
    needed = [other for word in words for other in GOES_WITH.get(word, ())]
    return taken((*words, *(word for word in needed if slot_of(word) not in slots)))


@functools.cache
def slot_of(word: str) -> Slot:
    return roster.find(word.partition("(")[0]).slot


@functools.cache
def recipes(together: int) -> list[Words]:
    """Return recipes that cover each technique, or each compatible pair of techniques."""
    return covering(notations(), may_meet, together=together, seed=SEED)


PARTS = 7
"""Number of tests that share the recipes. The first test builds the covering array, so collection does not
wait for it."""


COSTLY = {
    "compiled": "uncompiled", "budget(0.5)": "keep_all", "micro_batches(4)": "micro_batches(2)",
    "fp8": "bf16",
}  # fmt: skip
"""Slow techniques with their substitutes. Only the first recipe with a slow technique runs it; later
recipes use the substitute."""


COMPILED = {"compiled", "budget(0.5)"}
"""Those that compile, which go together."""

SLOWEST = COMPILED | {"micro_batches(4)"}
"""Those that `make test` leaves to its other tests: of compiled steps, and of six micro-batches below."""


def lighter(number: int, *, leave: Collection[str] = ()) -> Words:
    """Return the recipe of this number, with substitutes for slow techniques.

    They are those of earlier recipes, and the slowest ones that are not in `leave`.
    """
    before = {word for words in recipes(1)[:number] for word in words}
    met = (before | SLOWEST) - {*leave}
    return tuple(COSTLY.get(word, word) if word in met else word for word in recipes(1)[number])


def job_for(words: Words, number: int) -> Job:
    """Return a small job that supports the recipe of this number."""
    rng = random.Random(SEED + number)
    is_compiled = "compiled" in words  # its time grows with the operators of a layer
    sizes = {
        "layers": 3 if {"segments", "every_nth_layer", "first_layers(2)"} & {*words} else 2,
        "batch_size": 8,
        "clip": rng.choice((None, 1.0)),
        "padding": rng.choice((0.0, 0.3)),
        "decay_groups": rng.random() < 0.3,
    }
    for family in (EVERY_RECIPE[0] if is_compiled else FAMILIES[number % len(FAMILIES)], *EVERY_RECIPE):
        job = small_job(family, **sizes)
        try:
            Recipe.parse(" + ".join(words)).check(job, installed=False)
        except RecipeError:  # T5's layers differ, a classifier has no vocabulary
            continue
        return job
    raise AssertionError(f"no job takes {words}")


def test_every_technique_of_the_roster_is_spliced() -> None:
    met = {word.partition("(")[0] for words in recipes(1) for word in words}
    assert met == {technique.name for technique in filter(is_spliced, roster.techniques())}


def spliced(passes: Part, update: Part, micro_batches: int) -> Trace | None:
    """Return the trace of a step with these parts."""
    run = splice(passes, update, micro_batches=micro_batches)
    return run and run.relative().trace()


@pytest.mark.whole
@pytest.mark.parametrize("part", range(PARTS))
def test_spliced_equals_whole(part: int) -> None:
    for number in range(part, len(recipes(1)), PARTS):
        hold(lighter(number), number)


@pytest.mark.whole
@pytest.mark.slow
def test_a_compiled_step_is_spliced() -> None:
    number = next(number for number, words in enumerate(recipes(1)) if COMPILED & {*words})
    hold(lighter(number, leave=COMPILED), number)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4 * PARTS))
def test_so_is_each_pair_of_techniques(part: int) -> None:
    for number, words in [*enumerate(recipes(2))][part :: 4 * PARTS]:
        hold(words, number)


def hold(words: Words, number: int) -> None:
    """Check law 5 for one recipe."""
    if any(roster.find(word.partition("(")[0]).missing_package() for word in words):
        return
    job, setup = job_for(words, number), setup_of(" + ".join(words))
    passes = rehearse_passes(job, setup, CUDA)
    update = rehearse_update(job, setup, CUDA, passes.gradients, passes.shared)
    same(spliced(passes, update, setup.micro_batches), whole(job, setup)[0])


def test_one_rehearsal_of_the_passes_serves_every_optimizer_and_number_of_pieces() -> None:
    """A planner simulates passes twice and each update once, and splices every pair of them."""
    job = small_job("llama", 2, batch_size=24)
    parts = {n: rehearse_passes(small_job("llama", 2, batch_size=4 * n), setup, CUDA)
             for n, setup in ((1, setup_of("bf16")), (2, setup_of("bf16 + micro_batches(2)")))}  # fmt: skip
    for optimizer, numbers in (("adamw_fused", (1, 6)), ("adafactor", (2,))):
        update = rehearse_update(job, setup_of(optimizer), CUDA, parts[1].gradients)
        for pieces in numbers:
            setup = setup_of(f"bf16 + {optimizer}" + (f" + micro_batches({pieces})" if pieces > 1 else ""))
            same(
                spliced(parts[min(pieces, 2)], update, pieces),
                rehearse(small_job("llama", 2, batch_size=4 * pieces), setup, CUDA),
            )


@pytest.mark.parametrize("recipe", ["bf16 + adafactor"])
def test_bert_large_is_spliced(recipe: str) -> None:
    """BERT-large's widths give large and small blocks. Three layers suffice, because all its layers are
    alike."""
    found = Model.find("bert-large-uncased")
    model = Model.from_config({**found.config, "num_hidden_layers": 3}, name=found.name)
    job, setup = Job(model=model, task=Task.SEQUENCE_CLASSIFICATION, batch_size=4), setup_of(recipe)
    passes = rehearse_passes(job, setup, CUDA)
    update = rehearse_update(job, setup, CUDA, passes.gradients)
    same(spliced(passes, update, setup.micro_batches), whole(job, setup)[0])


def test_parts_that_do_not_meet_are_refused() -> None:
    job, plain, lora = small_job("bert", 1), setup_of("plain"), setup_of("lora")
    passes = rehearse_passes(job, plain, CUDA)
    other = rehearse_update(job, lora, CUDA, rehearse_passes(job, lora, CUDA).gradients)
    update = rehearse_update(job, plain, CUDA, passes.gradients)
    assert splice(passes, update) is not None
    assert splice(passes, other) is None
    assert splice(passes, Part(other.trace, passes.gradients)) is None
    fewer = passes.gradients[:-1]
    assert splice(passes, rehearse_update(job, plain, CUDA, fewer)) is None
    assert splice(passes, Part(rehearse_update(job, plain, CUDA, fewer).trace, passes.gradients)) is None
    assert splice(passes, update, micro_batches=2) is None, (
        "passes of one piece do not determine those of two"
    )


def test_pure_and_mixed_precision_do_not_meet() -> None:
    """Each gradient has two bytes, and the update was simulated with four."""
    job = small_job("gpt2", 2)
    passes = rehearse_passes(job, setup_of("bf16_pure"), CUDA)
    assert splice(passes, rehearse_update(job, setup_of("bf16"), CUDA, passes.gradients)) is None


def test_only_parameters_that_train_have_gradients() -> None:
    """LoRA adds two low-rank matrices to each of two projections per layer; the classifier also trains."""
    passes = rehearse_passes(small_job("bert", 3), setup_of("lora"), CUDA)
    assert passes.gradients == tuple(range(3 * 2 * 2 + 2))
