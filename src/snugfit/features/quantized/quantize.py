"""Handler that applies the field `quantize`: bitsandbytes quantizes frozen weights to 4 or 8 bits while the
model is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.features.quantized.fields import QUANTIZE
from snugfit.features.quantized.quantized_weights import HEADS, QuantizedConstruction
from snugfit.job.inputs import has_classes
from snugfit.step.wishes.handler import Context, Handler, ScriptContext
from snugfit.step.wishes.python_text import literal
from snugfit.techniques.feature import InstallStage
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.features.quantized.fields import QuantizeWish

_LIVE = (
    "weights are quantized while transformers loads a model, and this one is loaded already. Load it with "
    "quantization_config=BitsAndBytesConfig(load_in_4bit=True), add the adapters (peft.get_peft_model), and "
    "leave adapters out of the recipe"
)


class QuantizeHandler(Handler):
    """Handler of the field `quantize`: bitsandbytes stores the frozen weights of linear layers in 4 or 8
    bits.
    """

    wish, slot, stage = QUANTIZE.name, Slot.ADAPTERS, InstallStage.BUILD
    refused: ClassVar[Mapping[str, str]] = {"fit": _LIVE, "custom_loop": _LIVE}

    def import_code(self, value: QuantizeWish) -> None:
        """Import bitsandbytes before a simulation or a measurement starts."""
        from snugfit.hub_kernels import import_bitsandbytes

        import_bitsandbytes()

    def model_arguments(self, value: QuantizeWish) -> dict[str, Any]:
        """Return the keyword argument of `instantiate` with which the model is built quantized, in a dict."""
        return {"construct": partial(QuantizedConstruction, **vars(value))}

    def around_run(self, value: QuantizeWish) -> Context | None:
        """Return a context in which weights are quantized in the order of the current stream's work."""
        import torch

        if not torch.cuda.is_available():
            return None
        from snugfit.features.quantized.default_stream import quantize_in_order

        return quantize_in_order

    def script(self, value: QuantizeWish, context: ScriptContext) -> dict[str, Any]:
        """Return the `quantization_config` argument of `from_pretrained` for an exported script.

        Unquantized weights are loaded in the dtype of the products. With autocast they are cast to fp32
        afterwards.
        """
        if value.experts:
            raise context.refusal(self.slot, "transformers has no argument for experts in 4 bits")
        setup = context.setup
        weights = setup.created_dtype(context.job)
        computed = setup.product_dtype(context.job)
        # Weights whose dtype is wider than that of the computation are cast after loading.
        widens = weights == "float32" != computed
        if not widens and weights != computed:
            raise context.refusal(
                self.slot, f"peft casts unquantized weights to float32, and not to {weights}"
            )
        options = {
            "load_in_4bit": "True", "bnb_4bit_quant_type": '"nf4"',
            "bnb_4bit_use_double_quant": str(value.double),
        }  # fmt: skip
        if value.bits == 8:
            options = {"load_in_8bit": "True"}
        elif computed != "float32":  # float32 is the default
            options["bnb_4bit_compute_dtype"] = f"torch.{computed}"
        # peft trains the classifier's weights, so they stay unquantized.
        if has_classes(context.job.task):
            options["llm_int8_skip_modules"] = literal(list(HEADS))
        config = (
            "from transformers import BitsAndBytesConfig",
            "",
            "quantization_config = BitsAndBytesConfig(",
        )
        return {
            "quantizing": (*config, *(f"    {name}={option}," for name, option in options.items()), ")"),
            "model_arguments": {"dtype": f"torch.{computed}", "quantization_config": "quantization_config"},
            "widening": (
                "from peft import prepare_model_for_kbit_training",
                "",
                "model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)",
            )
            if widens
            else (),
        }
