"""A technique's arguments in transformers: one declaration, which `translate.py` reads in both directions.

A `Counterpart` lists the arguments that switch a technique on in another library. Exporting a recipe writes
them. Reading a user's arguments finds the technique with a matching list. A dotted name gives the place of
its argument:

- `bf16`: a field of `TrainingArguments`
- `optim_args.momentum`: a part of such a field
- `model.attn_implementation`: an argument of `from_pretrained`
- `model.quantization_config.*`: an argument of transformers' `BitsAndBytesConfig`
- `lora.r`: an argument of peft's `LoraConfig`
- `layers.compile`: `compile()` of the model's repeated layers, in a script
- `forward.compile`: `torch.compile` of the model's own forward pass, in a script
- `functorch.*`: `torch._functorch.config`, in a script
- `layers.float8`: torchao's recipe for the products of their linear layers, in a script
- `environment.PYTORCH_...`: a variable of the process
- `parallel.*`: parallel training, in words of our own: other libraries set it
  partly in their launchers' files

A value is the required value, or `Setting("n")`: any value there becomes the technique's setting `n`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Setting:
    """Placeholder, in another library's arguments, for the value of a technique's setting."""

    name: str
    """Name of the technique's field that gets the value."""


@dataclass(frozen=True, kw_only=True)
class Counterpart:
    """Arguments of another library that switch a technique on there."""

    arguments: Mapping[str, Any]
    """Argument values of the other library by dotted name. A `Setting` takes the place of a value that the
    user chooses.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the technique that these arguments imply, if `arguments` has no `Setting` for them."""

    note: str = ""
    """Difference in behaviour between both libraries, for a message. An export never writes a counterpart
    with a note.
    """

    used: Literal["both ways", "to read", "to write"] = "both ways"
    """Direction of a translation: to read another library's arguments, to write them, or both."""
