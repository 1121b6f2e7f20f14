"""Stochastic gradient descent with momentum: 4 bytes of state an element, none without momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart, Setting
from snugfit.techniques.setting import between
from snugfit.techniques.setup import Call, OptimizerWish
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class Sgd(Technique):
    """Stochastic gradient descent, with one momentum buffer."""

    fidelity: ClassVar = Fidelity.LEARNS
    source: ClassVar = "Sutskever et al., ICML 2013; torch.optim.SGD(foreach=True)"
    counterparts: ClassVar = (
        Counterpart(arguments={"optim": "sgd", "optim_args.momentum": Setting("momentum")}),
    )

    momentum: float = between(0.0, 1.0, default=0.9)
    """Share of the previous update that is added to the next; with 0 the optimizer keeps no state."""

    @property
    def value(self) -> OptimizerWish:
        """Return torch's SGD as the optimizer of the Setup; the HF Trainer's own has no momentum."""
        factory = Call(path="torch.optim:SGD", arguments={"momentum": self.momentum, "foreach": True})
        name = None if self.momentum else "sgd"
        return OptimizerWish(factory=factory, trainer_name=name)
