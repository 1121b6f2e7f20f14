"""Handler that adds adapters to a built model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.features.adapters.fields import ADAPT
from snugfit.hub_kernels import import_peft
from snugfit.step.wishes.handler import Handler, LiveTraining, ScriptContext
from snugfit.step.wishes.python_text import call_text
from snugfit.techniques.feature import InstallStage
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.techniques.wish import Call


class AdaptHandler(Handler):
    """Handler of the field `adapt`: it freezes a model and adds adapters."""

    wish, slot, stage = ADAPT.name, Slot.ADAPTERS, InstallStage.ADAPT
    refused: ClassVar[Mapping[str, str]] = {
        "custom_loop": "the optimizer was created for all parameters. Add the adapters first "
        "(peft.get_peft_model), create the optimizer from the trainable parameters, and leave "
        "adapters out of the recipe."
    }

    def import_code(self, value: Call) -> None:
        """Import peft once, before a simulation or a measurement starts."""
        import_peft()

    def replace_model(self, value: Call, model: Any) -> Any:
        """Return the model with adapters, which the field's function adds."""
        return value.run(model)

    def change(self, value: Call, live: LiveTraining) -> Iterator[str]:
        """Add adapters to the user's model, and yield a line of text about it."""
        live.model = self.replace_model(value, live.model)
        return iter(())

    def script(self, value: Call, context: ScriptContext) -> dict[str, Any]:
        """Return an exported script's lines that add adapters: a call, or the technique's own lines."""
        if text := call_text(value, "model"):
            # An adapting function may change the model in place and return None.
            return {"adapting": (text.imported, "", f"model = {text.called} or model")}
        lines = context.recipe[self.slot].code(context.job)
        if not lines:
            why = "snugfit does it with its own code, which a script without snugfit does not have"
            raise context.refusal(self.slot, why)
        return {"adapting": lines}
