"""The applier: every wish has one handler, and every front-end honours each wish or refuses it by name."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from snugfit.errors import RecipeError, UsageError
from snugfit.step import applier
from snugfit.step.applier import CORE_HANDLERS, FRONT_ENDS, HANDLERS, REFUSED
from snugfit.step.step import LOOPS
from snugfit.step.wishes.batching import ALLOCATOR_VARIABLES, ExpandableSegmentsHandler
from snugfit.step.wishes.handler import Handler, LiveTraining
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup

WISHES = [field.name for field in fields(Setup)]
BUILT = {
    "import_code", "model_arguments", "replace_model", "wrap", "make_scaler", "loader_arguments",
    "around_forward", "around_run", "around_rehearsal", "set_process",
}  # fmt: skip
LIVE = {
    "change",
    "change_words",
    "make_scaler",
    "loader_arguments",
    "around_forward",
    "around_run",
    "set_process",
}
ENDS = {
    "plain": BUILT | {"prepare_pieces", "step_runner", "evaluated_model"},
    "accelerate": BUILT | {"accelerate_does_it", "accelerator_arguments"},
    "trainer": BUILT | {"accelerate_does_it", "training_arguments"},
    "fit": LIVE - {"make_scaler"} | {"accelerate_does_it", "training_arguments"},
    "custom_loop": LIVE,
    "script": {"script"},
}
"""The ends of a wish that each front-end offers."""

BY_COUNTERPART = {("script", "expandable_segments")}
"""Wishes that the technique's own counterparts export, in the script's environment."""


def test_each_wish_has_one_handler() -> None:
    """Without `chunked_loss`, the field `logits` has no handler, and no technique sets it."""
    assert sorted(handler.wish for handler in HANDLERS) == sorted(WISHES)
    several = {*roster.slots_of_several_gpus()}  # they share one wish
    with_choice = {technique.slot for technique in roster.techniques() if not technique.plain}
    assert {handler.slot for handler in HANDLERS} | several >= with_choice


def test_handlers_stand_in_the_order_of_installing() -> None:
    assert [handler.stage for handler in CORE_HANDLERS] == sorted(handler.stage for handler in CORE_HANDLERS)
    assert [handler.stage for handler in HANDLERS] == sorted(handler.stage for handler in HANDLERS)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("handler", HANDLERS, ids=lambda handler: handler.wish)
def test_a_front_end_honours_a_wish_or_refuses_it(front_end: str, handler: Handler) -> None:
    """Honoured means: the handler overrides one of this front-end's ends, or every loop reads the wish."""
    overridden = {name for name in ENDS[front_end] if getattr(type(handler), name) != getattr(Handler, name)}
    in_loop = handler.read_by_loops and front_end != "script"
    honoured = bool(overridden) or in_loop or (front_end, handler.wish) in BY_COUNTERPART
    refused = bool(REFUSED.get((front_end, handler.wish)))
    assert honoured or refused, f"{front_end} neither honours nor refuses {handler.wish}"


def test_what_is_refused_is_a_wish_of_a_front_end() -> None:
    assert {front_end for front_end, _ in REFUSED} <= set(FRONT_ENDS)
    assert {wish for _, wish in REFUSED} <= set(WISHES)
    assert set(LOOPS) <= set(FRONT_ENDS)


def test_a_wish_in_the_table_is_refused_by_name_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {(front_end, "matmul"): "it has no such switch" for front_end in FRONT_ENDS}
    monkeypatch.setattr(applier, "REFUSED", reasons)
    recipe = Recipe.parse("tf32")
    with pytest.raises(
        UsageError,
        match=r"accelerate loop does not support this part of the "
        r"recipe:\nmatmul = 'tf32': it has no such",
    ):
        applier.refuse_unsupported("accelerate", recipe.setup())
    applier.refuse_unsupported("accelerate", replace(recipe.setup(), matmul="ieee"))
    live = LiveTraining(
        front_end="fit", recipe=recipe, model=torch.nn.Linear(1, 1), device=torch.device("cpu")
    )
    assert list(applier.objections(live, recipe.setup())) == ["tf32: it has no such switch"]
    assert not list(applier.objections(live, recipe.setup(), {roster.Slot.MATMUL}))
    with pytest.raises(RecipeError, match="cannot be given to this trainer"):
        applier.refuse(live, "trainer", ["tf32: it has no such switch"])


def test_contexts_are_entered_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []

    def around(name: str) -> Any:
        from contextlib import contextmanager

        @contextmanager
        def context() -> Any:
            heard.append(f"{name} begins")
            yield
            heard.append(f"{name} ends")

        return context

    class First(Handler):
        wish, slot = "matmul", roster.Slot.MATMUL

        def around_forward(self, value: Any, device: torch.device) -> Any:
            return around("first")

    class Second(First):
        accelerate_does_it = True

        def around_forward(self, value: Any, device: torch.device) -> Any:
            return around("second")

    monkeypatch.setattr(applier, "HANDLERS", (First(), Second()))
    cpu, tf32 = torch.device("cpu"), Setup(matmul="tf32")
    with applier.forward_context(Setup(), cpu):
        pass
    assert not heard, "a handler outside the core is called only where its field is used"
    with applier.forward_context(tf32, cpu):
        heard.append("forward")
    assert heard == ["first begins", "second begins", "forward", "second ends", "first ends"]
    heard.clear()
    with applier.forward_context(tf32, cpu, in_accelerate=True):
        pass
    assert heard == ["first begins", "first ends"]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_allocator_options_beside_the_recipe_are_a_warning(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(other, raising=False)
    warned: list[str] = []
    monkeypatch.setattr(logging.getLogger("snugfit"), "warning", lambda text, *of: warned.append(text % of))
    handler, cuda = ExpandableSegmentsHandler(), torch.device("cuda")
    handler.set_process(False, cuda)
    assert not warned
    monkeypatch.setenv(name, "expandable_segments:True")
    handler.set_process(False, torch.device("cpu"))
    handler.set_process(False, cuda)
    assert len(warned) == 1
    assert name in warned[0]
    assert "no expandable" in warned[0]
    assert "add expandable to the recipe" in warned[0]
