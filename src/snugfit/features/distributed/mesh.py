"""Device meshes in text form: `fsdp=4, tensor=2` is a recipe's techniques for several GPUs, with their
numbers of GPUs.

Each word is a technique for several GPUs. Its number is the GPUs along that axis; the numbers multiply.
`replicate` is the number of copies of sharded weights. Techniques of the data axis (`ddp`, `fsdp`) have no
number in a recipe, because `--gpus` sets it; the others have.
"""

from __future__ import annotations

import contextlib
from dataclasses import fields, replace
from typing import Any

from snugfit.errors import RecipeError, UsageError
from snugfit.features.distributed.fields import PARALLEL
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import MOST_GPUS
from snugfit.techniques.technique import Slot, Technique

REPLICATE = "replicate"
"""Name in `--mesh` for the number of copies of weights that are sharded over GPUs."""

COUNT = "n"
"""Name of a technique's setting for its number of GPUs."""

EXAMPLE = "Write for example 'fsdp=4, tensor=2'."


def on_mesh(recipe: Recipe, text: str) -> tuple[Recipe, int]:
    """Return the recipe with the techniques of a text such as `fsdp=4, tensor=2`, and its number of GPUs.
    Raises `UsageError` for a text that is no mesh or contradicts the recipe.
    """
    counts = _read(text)
    copies = counts.pop(REPLICATE, 1)
    kinds = {word: _kind(word, text) for word in counts}
    for word, kind in kinds.items():
        recipe = recipe.with_(_technique(recipe, kind, word, counts[word], text))
    data = [counts[word] for word, kind in kinds.items() if kind.slot is Slot.SHARDING]
    if copies > 1:
        recipe = recipe.with_(_in_copies(recipe[Slot.SHARDING], data, copies, text))
    wish = PARALLEL.of(recipe.setup())
    if wish is None:
        raise UsageError(f"--mesh {text!r} has no axis along which GPUs share the work. {EXAMPLE}")
    if wish.weights != "alone" and not data:
        raise UsageError(
            f"--mesh {text!r}: the recipe has {recipe[Slot.SHARDING]}, and the mesh has no number of "
            f"GPUs for it. Add '{recipe[Slot.SHARDING].name}=2' or another number."
        )
    return recipe, (data[0] if data else 1) * copies * wish.ranks_of_one_part


def _read(text: str) -> dict[str, int]:
    """Return the number of GPUs along each mesh axis of a text: `fsdp=4, tensor=2` gives 4 and 2."""
    counts: dict[str, int] = {}
    for part in text.split(","):
        word, equals, number = (piece.strip() for piece in part.partition("="))
        if not (word and equals and number.isdecimal() and 1 <= int(number) <= MOST_GPUS):
            raise UsageError(
                f"--mesh {text!r}: {part.strip()!r} is not an axis with a number of GPUs. {EXAMPLE}"
            )
        if word in counts:
            raise UsageError(f"--mesh {text!r}: {word} is there twice. Keep one.")
        counts[word] = int(number)
    return counts


def _kind(word: str, text: str) -> type[Technique]:
    with contextlib.suppress(RecipeError):  # an unknown technique
        kind = roster.find(word)
        if kind.needs_several_gpus:
            return kind
    names = sorted(one.name for one in roster.techniques() if one.needs_several_gpus)
    raise UsageError(
        f"--mesh {text!r}: {word} is not an axis along which GPUs share the work. Those are "
        f"{', '.join(names)} and {REPLICATE}."
    )


def _technique(recipe: Recipe, kind: type[Technique], word: str, count: int, text: str) -> Technique:
    """Return the technique of one mesh axis for `count` GPUs, with the settings from the recipe."""
    before = recipe[kind.slot]
    if not before.plain and not isinstance(before, kind):
        raise UsageError(f"--mesh {text!r} and the recipe's {before} contradict each other. Leave one out.")
    # A technique of the data axis gets its size from `--gpus`.
    if COUNT not in {declared.name for declared in fields(kind)}:
        return before if isinstance(before, kind) else kind()
    if isinstance(before, kind):
        named = getattr(before, COUNT)
        if named != count:
            raise UsageError(
                f"--mesh {text!r}: {word} is {count} there and {named} in the recipe. Leave one of them out."
            )
        return before
    number: dict[str, Any] = {COUNT: count}
    return kind(**number)


def _in_copies(sharing: Technique, data: list[int], copies: int, text: str) -> Technique:
    """Return hybrid sharding (`hsdp`) with `copies` sharded copies of the weights, in place of `fsdp`, which
    has one copy.
    """
    spread = next(
        kind
        for kind in roster.techniques()
        if kind.slot is Slot.SHARDING and COUNT in {declared.name for declared in fields(kind)}
    )
    if isinstance(sharing, spread):
        return sharing
    wish = PARALLEL.of(sharing.install(Recipe().setup()))
    if not data or wish is None or wish.weights != "sharded":
        raise UsageError(
            f"--mesh {text!r}: {REPLICATE}={copies} makes copies of weights that are spread over GPUs. Write "
            f"'{REPLICATE}={copies}, fsdp=4', or 'ddp={copies}' where each GPU has all weights."
        )
    settings = {declared.name: getattr(sharing, declared.name) for declared in fields(sharing)}
    number: dict[str, Any] = {COUNT: data[0]}
    return replace(spread(**number), **settings)
