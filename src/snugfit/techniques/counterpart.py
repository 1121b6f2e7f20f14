"""What a technique is called in transformers: one statement, which `translate.py` reads in both directions.

A `Counterpart` lists the arguments that switch a technique on, as they would be set elsewhere. Exporting a
recipe writes them; reading somebody's arguments looks for the technique whose list they match. Names are
dotted and say where they are set:

    bf16                        a field of `TrainingArguments`
    optim_args.momentum         a part of such a field
    model.attn_implementation   an argument of `from_pretrained`
    model.quantization_config.* an argument of transformers' `BitsAndBytesConfig`
    lora.r                      an argument of peft's `LoraConfig`
    layers.compile              `compile()` of the model's repeated layers, in a script
    forward.compile             `torch.compile` of the model's own forward pass, in a script
    functorch.*                 `torch._functorch.config`, in a script
    layers.float8               torchao's recipe for the products of their linear layers, in a script
    environment.PYTORCH_...     a variable of the process
    parallel.*                  how several processes train together, in words of our own: other libraries say
                                it partly in their launchers' files

A value is what it must be, or `Setting("n")`: whatever it is there becomes the technique's setting `n`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Setting:
    """Stands for the value of a technique's setting."""

    name: str
    """The name of the technique's field."""


@dataclass(frozen=True, kw_only=True)
class Counterpart:
    """The arguments that mean the same elsewhere."""

    arguments: Mapping[str, Any]
    """By dotted name: a value, or the `Setting` that has it."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the technique that these arguments imply, where they are not among the values."""

    note: str = ""
    """What is not quite the same, for whoever reads a translation; such a counterpart is never written."""

    used: Literal["both ways", "to read", "to write"] = "both ways"
    """Whether arguments are read by it, written, or both."""
