"""Handlers of the Setup's fields about the model: attention, weights' dtype, adapters, checkpointed layers.

A new model is built with them: attention and dtype are arguments of its constructor, since a later change
would take memory. A user's model exists already, and is changed by its own switches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from snugfit.errors import RecipeError
from snugfit.job.build import without_package_checks
from snugfit.job.dtype import cast_weights, dtype_name
from snugfit.job.own_checkpointing import stop_own_checkpointing
from snugfit.step.checkpointing import checkpoint_layers
from snugfit.step.selective import script_lines
from snugfit.step.wishes.handler import Context, Handler, LiveTraining, ScriptContext
from snugfit.step.wishes.own_attention import own_attentions, package_attentions
from snugfit.step.wishes.python_text import literal
from snugfit.techniques.feature import InstallStage
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.techniques.setup import CheckpointWish, Setup


class AttentionHandler(Handler):
    """Handler of the attention implementation, by transformers' name for it (`attn_implementation`)."""

    wish, slot, stage = "attention", Slot.ATTENTION, InstallStage.BUILD

    def import_code(self, value: str) -> None:
        """Register a feature's attention function in transformers, if `value` names one."""
        if own := own_attentions().get(value):
            own.register.run()

    def model_arguments(self, value: str) -> dict[str, Any]:
        """Return the attention implementation as a keyword argument of `instantiate`, in a dict."""
        self.import_code(value)
        return {"attention": value}

    def wrap(self, value: str, model: Any) -> None:
        """Set the attention implementation of a module from Python, if it has such a setting, and change
        modules for a feature's attention.
        """
        now = getattr(getattr(model, "config", None), "_attn_implementation", None)
        # `sdpa` is the default setting, with which a model without SDPA keeps its own attention.
        if value != "sdpa" and now not in (None, value) and hasattr(model, "set_attn_implementation"):
            with without_package_checks(value, next(model.parameters()).device):
                model.set_attn_implementation(value)
        if own := own_attentions().get(value):
            own.enter.run(model)

    def prepare_pieces(
        self, value: str, loop: Any, model: Any, pieces: Sequence[Mapping[str, Any]]
    ) -> Sequence[Mapping[str, Any]]:
        """Return the micro-batches in the form that a feature's attention takes; unchanged for other
        attentions.
        """
        own = own_attentions().get(value)
        return pieces if own is None else own.pieces.run(loop, model, pieces)

    def around_rehearsal(self, value: str, *, on_gpu: bool) -> Context | None:
        """Return the context of a simulation in which attention runs without its kernels; None if it can run
        as it is. A CPU has no such kernels, and those of a package cannot run without data.
        """
        if package := package_attentions().get(value):
            return package.on_shapes.resolve()
        own = own_attentions().get(value)
        return None if own is None or on_gpu else own.on_cpu.resolve()

    def set_process(self, value: str, device: torch.device) -> None:
        """Raise an error for a missing attention package before the model is built."""
        if package := package_attentions().get(value):
            package.refuse.run(device)

    def objections(self, value: str, live: LiveTraining) -> Iterator[str]:
        """Yield an objection if the attention implementation of a user's own model cannot be set."""
        if not live.is_plain(self.slot) and not hasattr(live.model, "set_attn_implementation"):
            name = type(live.model).__name__
            yield f"{live.technique(self.slot)}: {name} does not allow choosing its attention. Leave it out."

    def change(self, value: str, live: LiveTraining) -> Iterator[str]:
        """Set the attention implementation of a model in training. A model that does not support torch's
        attention keeps its own, as when it is built.
        """
        self.import_code(value)
        now = getattr(getattr(live.model, "config", None), "_attn_implementation", None)
        # snugfit's own attention functions have changed modules, which transformers' switch does not undo.
        if now != value and (before := own_attentions().get(now)):
            before.leave.run(live.model)
        if now == value or not hasattr(live.model, "set_attn_implementation"):
            return
        try:
            live.model.set_attn_implementation(value)
        except ValueError as refusal:
            # The architecture has no SDPA, and keeps its own attention.
            if value == "sdpa":
                return
            line = " ".join(str(refusal).split())
            raise RecipeError(
                f"{type(live.model).__name__} cannot use the attention {value!r}: {line} Try 'sdpa' or "
                "'eager'."
            ) from None
        self.wrap(value, live.model)
        yield f"attention was {now} and is now {value}"

    def script(self, value: str, context: ScriptContext) -> dict[str, Any]:
        """Return `attn_implementation` as an argument of `from_pretrained`; eager if the architecture has no
        SDPA."""
        from snugfit.job.architectures import class_of

        if own := own_attentions().get(value):
            raise context.refusal(self.slot, own.why_no_script)
        job = context.job
        if value == "sdpa" and not getattr(class_of(job.task, job.config_to_read()), "_supports_sdpa", True):
            value = "eager"
        return {"model_arguments": {"attn_implementation": literal(value)}}


class WeightsDtypeHandler(Handler):
    """Handler of the dtype of floating-point weights: it casts models and writes the dtype into scripts."""

    wish, slot, stage = "weights_dtype", Slot.PRECISION, InstallStage.BUILD

    def model_arguments(self, value: str | None) -> dict[str, Any]:
        """Return the weights' dtype as a keyword argument of `instantiate`, in a dict."""
        return {"dtype": value}

    def objections(self, value: str | None, live: LiveTraining) -> Iterator[str]:
        """Yield an objection if the live model has quantized weights, which cannot be cast."""
        if value and getattr(live.model, "is_quantized", False):
            yield (
                f"{live.technique(self.slot)}: the model's weights are quantized and cannot be changed. "
                "Leave it out."
            )

    def change(self, value: str | None, live: LiveTraining) -> Iterator[str]:
        """Cast all weights of the live model to the dtype, if one is set."""
        if value and (before := dtype_of(live.model)) != value:
            cast_weights(live.model, value)
            yield f"weights were {before} and are now {value}"

    def script(self, value: str | None, context: ScriptContext) -> dict[str, Any]:
        """Return the dtype as an argument of `from_pretrained`, and a cast of inputs if no autocast does
        it."""
        text = f"torch.{value or context.job.dtype}"
        cast = input_dtype(context.job, context.setup)
        return {"model_arguments": {"dtype": text}, "cast": f"torch.{cast}" if cast else ""}


def input_dtype(job: Job, setup: Setup) -> str | None:
    """Return the dtype to which the host casts floating-point inputs. None leaves them in fp32, for fp32
    weights and autocast. A user's own module gets its inputs unchanged.
    """
    dtype = setup.weights_dtype or job.dtype
    return None if setup.autocast or dtype == "float32" or job.model.module is not None else dtype


def dtype_of(model: Any) -> str:
    """Return the dtype of a model's floating-point weights, by torch's name; `mixed` if they have several."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return dtype_name(next(iter(dtypes))) if len(dtypes) == 1 else "mixed"


class CheckpointHandler(Handler):
    """Handler of activation checkpointing: it wraps layers so that the backward pass recomputes them."""

    wish, slot, stage = "checkpoint", Slot.CHECKPOINTING, InstallStage.RECOMPUTE

    def wrap(self, value: CheckpointWish | None, model: Any) -> None:
        """Wrap the chosen layers for activation checkpointing, after the modules inside are final."""
        if value is not None:
            checkpoint_layers(model, value)

    def undo(self, live: LiveTraining) -> None:
        """Remove the wrappers of an earlier recipe from the layers of a live model."""
        unwrap_layers(live)

    def change(self, value: CheckpointWish | None, live: LiveTraining) -> Iterator[str]:
        """Wrap the chosen layers of a live model for checkpointing."""
        stop_own_checkpointing(live.model)
        own = [(module, _own_forward(module)) for module in live.model.modules()]
        self.wrap(value, live.model)
        live.own_forwards = [(module, before) for module, before in own if _own_forward(module) != before]
        if value is not None:
            yield f"activations are those of {live.technique(self.slot)}"

    def script(self, value: CheckpointWish | None, context: ScriptContext) -> dict[str, Any]:
        """Return the call that turns on the model's own checkpointing, as text for an exported script. It
        supports single layers only.
        """
        if value is None or context.trainer:
            return {}
        if value.layers_per_span != 1:
            raise context.refusal(self.slot, "no library recomputes several layers as one")
        if value.first is not None:
            raise context.refusal(
                self.slot, f"{context.library} recomputes each n-th layer, not the first few"
            )
        options = {"every_n_layers": value.every} if value.every != 1 else {}
        if not options.keys() <= context.checkpointing_options:
            raise context.refusal(self.slot, f"{context.library} can recompute every layer or none")
        more = "".join(f", {name}={number}" for name, number in options.items())
        contexts = ', "context_fn": context_fn' if value.keep else ""
        call = f'model.{context.checkpointing_name}_enable({{"use_reentrant": False{contexts}}}{more})'
        return {"checkpointing": (*(script_lines(value.keep) if value.keep else ()), call)}


def unwrap_layers(live: LiveTraining) -> None:
    """Restore the original forward methods of layers that were wrapped for checkpointing."""
    for module, before in live.own_forwards:
        # The wrapper is an attribute of the instance, which hides the method of the class.
        module.__dict__.pop("forward", None)
        module.__dict__.update(before)
    live.own_forwards = []


def _own_forward(module: Any) -> dict[str, Any]:
    return {"forward": module.__dict__["forward"]} if "forward" in module.__dict__ else {}
