"""Implementations of attention that skip padding: snugfit's own, and that of the package flash-attn."""

from __future__ import annotations

from snugfit.step.wishes.own_attention import OwnAttention, PackageAttention
from snugfit.techniques.wish import Call

PADDING_FREE = "padding_free"
"""Name under which transformers finds snugfit's own attention, which drops the padding of a model's
inputs."""

_FOLDER = "snugfit.features.kernels.without_padding"

ATTENTION = OwnAttention(
    name=PADDING_FREE,
    why_no_script="snugfit does it with its own code, which a script without snugfit does not have",
    register=Call(path=f"{_FOLDER}.attention:register"),
    enter=Call(path=f"{_FOLDER}.hooks:drop_padding"),
    leave=Call(path=f"{_FOLDER}.hooks:keep_padding"),
    pieces=Call(path=f"{_FOLDER}.rows:rows_of_step"),
    on_cpu=Call(path="snugfit.features.kernels.operations.shapes_on_cpu:shapes_on_cpu"),
)
"""snugfit's attention function. All sequences of a batch form one row, and each token attends within its
sequence.
"""

FLASH_ATTENTION = PackageAttention(
    name="flash_attention_2",
    refuse=Call(path=f"{_FOLDER}.flash_attn:refuse_without_package"),
    on_shapes=Call(path=f"{_FOLDER}.flash_attn:on_shapes"),
)
"""FlashAttention-2 of the package flash-attn, under its name in transformers."""
