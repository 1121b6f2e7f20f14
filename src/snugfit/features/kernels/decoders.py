"""Decoders whose modules snugfit's own kernels can compute: Llama, Qwen2, Qwen3, Mistral, and three Gemma
models.

Three kernels replace the operators between the matrix products of a layer. One adds a sublayer's output to
the residual stream and norms the sum. The others are the rotation of queries and keys, and the gated
activation. Queries, keys and values are one matrix product, and so are gate and up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from snugfit.features.kernels.attention import attend
from snugfit.features.kernels.operations.adapted import is_adapted, is_packed, projections_of
from snugfit.features.kernels.operations.attention_inputs import attention_inputs
from snugfit.features.kernels.operations.gated_mlp import RECOMPUTES, gated_mlp
from snugfit.features.kernels.operations.joint_linear import lay_side_by_side
from snugfit.features.kernels.operations.operators import activation_dtype
from snugfit.features.kernels.operations.projections import Projections, lora_linear
from snugfit.features.kernels.operations.rms_norm import add_rms_norm
from snugfit.features.kernels.operations.rotary import Heads, Norms
from snugfit.step.own_forward import OwnForward

SLIDING, CAPPED = "sliding_window", "attn_logit_softcapping"


class DecoderFamily(NamedTuple):
    """Properties in which the decoders of one modeling file of transformers differ from Llama's."""

    prefix: str
    """Prefix of the family's class names in transformers."""
    extras: tuple[str, ...] = ()
    """Attributes of the attention module, or of its config, that it passes to the attention function."""
    from_one: bool = False
    """True if norms multiply by one plus the learned scale, as in Gemma."""
    norms_branches: bool = False
    """True if the output of attention or the MLP is normed before it is added to the residual stream."""


FAMILIES = {
    "llama": DecoderFamily("Llama"),
    "qwen2": DecoderFamily("Qwen2", (SLIDING,)),
    "qwen3": DecoderFamily("Qwen3", (SLIDING,)),
    "mistral": DecoderFamily("Mistral", (SLIDING,)),
    "gemma": DecoderFamily("Gemma", from_one=True),
    "gemma2": DecoderFamily("Gemma2", (SLIDING, CAPPED), from_one=True, norms_branches=True),
    "gemma3": DecoderFamily("Gemma3", (SLIDING,), from_one=True, norms_branches=True),
}
"""Decoder families by the name of their file in transformers, `modeling_NAME.py`."""

NAMES = {SLIDING: "sliding_window", CAPPED: "softcap"}
"""Name of an attribute's value as an argument of the attention function, by attribute."""

TANH = {"silu": False, "swish": False, "gelu_pytorch_tanh": True}
"""Supported activations of gated MLPs by their name in transformers; True for GELU's approximation by tanh.
"""


def fuse(model: torch.nn.Module) -> list[str]:
    """Replace the forward passes of this model's supported decoder modules by snugfit's. Return the class
    names of the replaced modules.
    """
    changed: dict[str, None] = {}
    for module in model.modules():
        if "forward" in vars(module):  # replaced by the user, or by an earlier `fuse`
            continue
        for part, fuse_part in _PARTS.items():
            family = _family(module, part)
            if family is not None and fuse_part(module, family):
                changed[type(module).__name__] = None
        # After the last norm there is no layer that could fuse it.
        norm = getattr(module, "norm", None)
        family = _family(norm, "RMSNorm")
        if family is not None and "forward" not in vars(norm):
            _replace(norm, _norm, family)
            changed[type(norm).__name__] = None
    return list(changed)


def _family(module: Any, part: str) -> DecoderFamily | None:
    """Return the decoder family to which this module belongs; None for every other module."""
    name = type(module).__module__.rpartition(".modeling_")[2]
    family = FAMILIES.get(name)
    # A subclass in another file may compute a different result.
    known = family is not None and type(module).__module__ == f"transformers.models.{name}.modeling_{name}"
    return family if known and family and type(module).__name__ == family.prefix + part else None


def _replace(module: Any, forward: Callable[..., Any], family: DecoderFamily) -> None:
    """Replace the module's forward pass in training, and keep the module's own in evaluation.

    `forward` takes the module, its family and its own forward pass first.
    """
    module.forward = OwnForward(partial(_either, forward, family), module)


def _either(
    forward: Callable[..., Any], family: DecoderFamily, module: Any, *arguments: Any, **keywords: Any
) -> Any:
    # The method of the class, because this one replaces that of the instance.
    original = partial(type(module).forward, module)
    # The kernels save tensors for a backward pass, which evaluation does not have.
    if not module.training:
        return original(*arguments, **keywords)
    return forward(module, family, original, *arguments, **keywords)


# ---- norms -----------------------------------------------------------------------------------------------


def _eps(norm: Any) -> float:
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


def _add_and_norm(
    branch: torch.Tensor, stream: torch.Tensor | None, norm: Any, family: DecoderFamily
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the residual stream plus a sublayer's output (B, S, H), and its RMSNorm in the dtype of the next
    matrix product.
    """
    whole = branch if stream is None else stream
    dtype = activation_dtype(whole)
    # Without autocast, transformers multiplies the scale in the wider dtype.
    if dtype == whole.dtype and not family.from_one:
        dtype = torch.promote_types(dtype, norm.weight.dtype)
    return add_rms_norm(branch, stream, norm.weight, _eps(norm), dtype, from_one=family.from_one)


def _norm(
    self: Any, family: DecoderFamily, original: Callable[..., Any], hidden_states: torch.Tensor
) -> torch.Tensor:
    return _add_and_norm(hidden_states, None, self, family)[1]


# ---- attention -------------------------------------------------------------------------------------------


def _fuse_attention(module: Any, family: DecoderFamily) -> bool:
    projections = projections_of((module.q_proj, module.k_proj, module.v_proj))
    # The two halves of a head are rotated into each other, so the head size must be even.
    if projections is None or module.head_dim % 2:
        return False
    # Weights that are adjacent in memory form one matrix, so the three products become one.
    if not projections.states:
        lay_side_by_side(projections.weights)
    if projections.biases:
        lay_side_by_side(projections.biases)
    _replace(module, _attend, family)
    return True


def _attend(
    self: Any,
    family: DecoderFamily,
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    position_embeddings: Any = None,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    **keywords: Any,
) -> tuple[torch.Tensor, Any]:
    """Compute a decoder's attention (B, S, H), with products, norms and rotation by snugfit's kernels."""
    projections = projections_of((self.q_proj, self.k_proj, self.v_proj))
    # An adapter may have replaced a layer since the model was built.
    if projections is None:
        return original(  # type: ignore[no-any-return]
            hidden_states, position_embeddings, attention_mask, past_key_values, **keywords
        )
    width = self.head_dim
    heads = Heads(self.q_proj.out_features // width, self.k_proj.out_features // width, width)
    norms = None
    # Qwen3 and Gemma 3 norm the queries and keys of each head.
    if hasattr(self, "q_norm"):
        norms = Norms(self.q_norm.weight, self.k_norm.weight, _eps(self.q_norm), family.from_one)
    query, key, value = attention_inputs(hidden_states, position_embeddings, heads, projections, norms)
    if past_key_values is not None:
        key, value = _append_to_cache(past_key_values, key, value, self.layer_idx)
    extras = {NAMES[name]: getattr(self, name, getattr(self.config, name, None)) for name in family.extras}
    options = extras | keywords
    if self.config._attn_implementation == "sdpa":
        options.pop("cu_seq_lens_q", None)  # sdpa does not read it, and encoders use it otherwise
    given, scores = attend(
        self, (query, key, value), attention_mask, self.attention_dropout, self.scaling, options
    )
    # Some kernels return a transposed result, while the product needs rows.
    return _project(self.o_proj, given.contiguous()), scores


def _project(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the result (..., N) of a linear layer, with its adapter's update if it has one."""
    projections = projections_of([layer]) if is_adapted(layer) or is_packed(layer) else None
    if projections is None:
        return layer(x)  # type: ignore[no-any-return]
    return lora_linear(x, projections)[0]


def _append_to_cache(
    cache: Any, key: torch.Tensor, value: torch.Tensor, index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append keys and values to the cache of layer `index`, and return all cached ones of that layer.
    transformers' models create a cache in training too, and an empty one copies its inputs. This function
    stores them without a copy.
    """
    layers = getattr(cache, "layers", ())
    layer = layers[index] if index < len(layers) else None
    is_simple = type(cache).__name__ == "DynamicCache" and type(layer).__name__ == "DynamicLayer"
    # Other caches move, quantize or truncate their contents.
    if layer is None or not is_simple or layer.is_initialized or cache.offloading:
        return cache.update(key, value, index)  # type: ignore[no-any-return]
    layer.dtype, layer.device, layer.is_initialized = key.dtype, key.device, True
    layer.keys, layer.values = key, value
    return key, value


# ---- the MLP ---------------------------------------------------------------------------------------------


def _fuse_mlp(module: Any, family: DecoderFamily) -> bool:
    into, back = _mlp_projections(module)
    if into is None or back is None or _activation(module) not in TANH:
        return False
    if not into.states:
        lay_side_by_side(into.weights)
    _replace(module, _gate, family)
    # False marks a gated MLP. `fused(recomputed_mlps)` sets some of them to True.
    setattr(module, RECOMPUTES, False)
    return True


def _mlp_projections(module: Any) -> tuple[Projections | None, Projections | None]:
    """Return the linear layers before and after the activation of an MLP; None if the MLP must run its own
    code.
    """
    into = projections_of((module.gate_proj, module.up_proj), biased=False)
    return into, projections_of([module.down_proj], biased=False)


def _activation(module: Any) -> str:
    return str(
        getattr(module.config, "hidden_activation", None) or getattr(module.config, "hidden_act", None)
    )


def _gate(self: Any, family: DecoderFamily, original: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    into, back = _mlp_projections(self)
    if into is None or back is None:
        return original(x)  # type: ignore[no-any-return]
    keeps = not getattr(self, RECOMPUTES, False)
    return gated_mlp(x, into, back, tanh=TANH[_activation(self)], keeps=keeps)


# ---- the layer -------------------------------------------------------------------------------------------


def _fuse_layer(module: Any, family: DecoderFamily) -> bool:
    names = ["input_layernorm", "post_attention_layernorm"]
    if family.norms_branches:
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    # The layer fuses its norms, so all of them must belong to this family.
    if not all(_family(getattr(module, name, None), "RMSNorm") == family for name in names):
        return False
    _replace(module, _run_layer, family)
    return True


def _run_layer(
    self: Any,
    family: DecoderFamily,
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    *others: Any,
    **keywords: Any,
) -> torch.Tensor:
    """Run the forward pass of the family's layer, with each addition but the last fused into a norm.

    Positional arguments differ between families, so a call with any runs the layer's own code.
    """
    if others:
        return original(hidden_states, *others, **keywords)  # type: ignore[no-any-return]
    stream, normed = _add_and_norm(hidden_states, None, self.input_layernorm, family)
    branch, _ = self.self_attn(hidden_states=normed, **keywords)
    before_mlp = self.post_attention_layernorm
    # Gemma norms the attention's output before it is added, and then the stream before the MLP.
    if family.norms_branches:
        _, branch = _add_and_norm(branch, None, self.post_attention_layernorm, family)
        before_mlp = self.pre_feedforward_layernorm
    stream, normed = _add_and_norm(branch, stream, before_mlp, family)
    from_mlp: torch.Tensor = self.mlp(normed)
    if family.norms_branches:
        _, from_mlp = _add_and_norm(from_mlp, None, self.post_feedforward_layernorm, family)
    # The next layer's first norm is in another module, so this addition is not fused.
    return stream + from_mlp


_PARTS: dict[str, Callable[[Any, DecoderFamily], bool]] = {
    "Attention": _fuse_attention,
    "MLP": _fuse_mlp,
    "DecoderLayer": _fuse_layer,
}
