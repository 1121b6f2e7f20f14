"""Draw random techniques and recipes over the whole roster from a seed. The laws are tested on them."""

from __future__ import annotations

import contextlib
import random
import types
import typing
from dataclasses import MISSING, fields
from typing import Any, Literal

from snugfit.errors import RecipeError
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setting import setting_types
from snugfit.techniques.technique import Slot, Technique

WORDS = ("q_proj", "all-linear", "attention.self.query", "v", "w_1", "layer.*.fc")


def any_technique(technique: type[Technique], rng: random.Random) -> Technique:
    """Return this technique with random valid settings; each default stays in half of the draws. Settings
    that exclude each other are drawn again."""
    kinds = setting_types(technique)
    while True:
        given = {
            declared.name: any_value(kinds[declared.name], declared.metadata, rng)
            for declared in fields(technique)
            if declared.default is MISSING or rng.random() < 0.5
        }
        with contextlib.suppress(RecipeError):
            return technique(**given)


def any_recipe(rng: random.Random) -> Recipe:
    """Return a recipe with a random technique in each slot."""
    by_slot = {slot: [found for found in roster.techniques() if found.slot is slot] for slot in Slot}
    return Recipe(tuple(any_technique(rng.choice(found), rng) for found in by_slot.values()))


def any_value(kind: Any, limits: typing.Mapping[str, float], rng: random.Random) -> Any:
    """Return a random value of a setting's type, inside its range."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return any_value(rng.choice(typing.get_args(kind)), limits, rng)
    if kind is bool or typing.get_origin(kind) is Literal:
        return rng.choice(typing.get_args(kind) or (False, True))
    if typing.get_origin(kind) is tuple:
        some = range(100) if typing.get_args(kind)[0] is int else WORDS
        return tuple(rng.sample(some, rng.randint(1, len(WORDS))))
    if kind in (str, type(None)):
        return rng.choice(WORDS) if kind is str else None
    low, high = limits["low"], limits["high"]
    if kind is int:
        return rng.choice([int(low), int(high), rng.randint(int(low), int(high))])
    assert kind is float, f"no random value of {kind}: extend any_value"
    return rng.choice([low, high, rng.uniform(low, high), 10 ** rng.uniform(-12, 0) * high])
