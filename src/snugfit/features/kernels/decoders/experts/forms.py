"""Modules of experts that snugfit's kernels can compute, each with the properties of its copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from snugfit.features.kernels.decoders.same_code import has_copy


class ExpertsForm(NamedTuple):
    """Properties in which modules of experts differ."""

    is_turned: bool = False
    """True if weights are (experts, inputs, outputs)."""
    has_bias: bool = False
    is_clamped: bool = False
    """True if gate and up are clamped, and their columns alternate."""


FORMS: Mapping[str, ExpertsForm] = {
    "mixtral.MixtralExperts": ExpertsForm(),
    "gpt_oss.GptOssExperts": ExpertsForm(is_turned=True, has_bias=True, is_clamped=True),
}
"""Supported modules of experts by file and class; copies under other names have the same form."""


def has_experts(model_type: str) -> bool:
    """Return True if a model type's file has experts of a supported form."""
    return has_copy(model_type, "Experts", FORMS)
