"""The model's code runs uncompiled: one kernel for each of torch's operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class Uncompiled(Technique):
    """Runs the model's code as it is written, operator by operator."""

    fidelity: ClassVar = Fidelity.SAME
    plain: ClassVar = True
    source: ClassVar = "torch's eager mode"
    counterparts: ClassVar = (Counterpart(arguments={"torch_compile": False}),)

    def install(self, setup: Setup) -> Setup:
        """Return the Setup unchanged, since the plain loop compiles nothing."""
        return setup
