"""Software profiles: a prediction is for the installed packages, or for those of an earlier time.

A profile lists the differences of that software. They are the CUDA context's bytes, gradients kept between
steps, tensors saved by softmax, and available techniques. It never depends on a GPU's name. The same profile
serves any GPU of the time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from snugfit.errors import UsageError, did_you_mean
from snugfit.feature_folders import feature_files, plugin_versions
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Call, Setup
from snugfit.versions import __version__, version_of

INSTALLED = "installed"

REHEARSED_ON = (
    "torch", "transformers", "accelerate", "peft", "bitsandbytes", "triton", "liger-kernel", "deepspeed",
    "torchao",
)  # fmt: skip
"""Packages whose installation, version or removal changes a prediction. Stored plans are valid only for the
same ones.
"""


@dataclass(frozen=True, kw_only=True)
class Software:
    """A software profile: differences between the software of an earlier time and the installed packages."""

    name: str = INSTALLED
    """Name of the software profile, as the option `--software` takes it."""

    context_bytes: int | None = None
    """GPU bytes (as NVML counts) of CUDA context and libraries with this software. None takes those of the
    GPU's table entry.
    """

    recipe: str = "plain"
    """Recipe of this software's default techniques. They replace today's defaults in a user's recipe."""

    optimizers: Mapping[str, str] = field(default_factory=dict)
    """Import paths of that time's optimizers, by import path of the present optimizer that each replaces."""

    keep_gradients: bool = False
    """True if gradients were zeroed in place between steps, as with `zero_grad(set_to_none=False)`."""

    softmax_saves_input: bool = False
    """True if softmax saved its input for backward in addition to its output."""

    always_mask: bool = False
    """True if an attention mask was built and added to the scores even without padding."""

    def with_defaults(self, recipe: Recipe) -> Recipe:
        """Return the recipe with this software's default techniques for slots (such as attention) in which
        the user named none.
        """
        plain = Recipe()
        for technique in Recipe.parse(self.recipe):
            # A technique that the user named is not replaced.
            if recipe[technique.slot] == plain[technique.slot]:
                recipe = recipe.with_(technique)
        return recipe

    def setup(self, recipe: Recipe) -> Setup:
        """Return the recipe's settings as a `Setup`, with the optimizers of this software."""
        setup = recipe.setup()
        path = self.optimizers.get(setup.optimizer_path)
        if path is None:
            return setup
        # The Trainer's name would select today's optimizer.
        return replace(setup, optimizer=replace(setup.optimizer, factory=Call(path=path), trainer_name=None))


def find_software(name: str) -> Software:
    """Return the profile called `name`. Raises `UsageError` with the known names."""
    known = {file.name.removesuffix(".json"): file for file in feature_files("software")}
    if name == INSTALLED:
        return Software()
    if name not in known:
        legal = [INSTALLED, *sorted(known)]
        raise UsageError(f"Unknown software {name!r}.{did_you_mean(name, legal)} Known: {', '.join(legal)}.")
    facts = json.loads(known[name].read_text())
    # These two keys are only for people who read the file.
    fields = {key: value for key, value in facts.items() if key not in ("about", "sources")}
    return Software(name=name, **fields)


def installed_versions() -> dict[str, str]:
    """Return the versions of the installed packages of `REHEARSED_ON`, of snugfit and of plugins."""
    installed = {package: version for package in REHEARSED_ON if (version := version_of(package))}
    return {"snugfit": __version__, **installed, **plugin_versions()}
