"""Forward passes of decoders' modules by snugfit's own kernels.

`forms.py` lists the modules, and `same_code.py` finds their copies in other files of transformers.

Three kernels replace the operators between the matrix products of a layer. One adds a sublayer's output to
the residual stream and norms the sum. The others are the rotation of queries and keys, and the gated
activation. Queries, keys and values are one matrix product, and so are gate and up.

Each part of a layer is replaced on its own. A layer whose attention has other code runs that code, between
norms and an MLP of snugfit. Its linear layers with adapters are single products (`operations/adapted.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from snugfit.features.kernels.attention import attend
from snugfit.features.kernels.decoders.decomposed import decomposed_linear
from snugfit.features.kernels.decoders.forms import (
    CAPPED,
    FORMS,
    SINKS,
    SLIDING,
    AttentionForm,
    LayerForm,
    MLPForm,
)
from snugfit.features.kernels.decoders.same_code import same_as
from snugfit.features.kernels.decoders.sinks import mark_whole_batches, mask_of
from snugfit.features.kernels.decoders.tiled_mlp import TOKENS, tiled_mlp
from snugfit.features.kernels.operations.adapted import (
    AdaptedForward,
    FusedForward,
    decomposed_of,
    is_adapted,
    is_packed,
    projections_of,
)
from snugfit.features.kernels.operations.attention_inputs import attention_inputs
from snugfit.features.kernels.operations.gated_mlp import RECOMPUTES, gated_mlp
from snugfit.features.kernels.operations.joint_linear import lay_side_by_side
from snugfit.features.kernels.operations.operators import activation_dtype
from snugfit.features.kernels.operations.projections import Projections, lora_linear
from snugfit.features.kernels.operations.rms_norm import add_rms_norm
from snugfit.features.kernels.operations.rotary import Heads, Norms
from snugfit.features.kernels.operations.scaling import Scaling

NAMES = {SLIDING: "sliding_window", CAPPED: "softcap", SINKS: "s_aux"}
"""Name of an attribute's value as an argument of the attention function, by attribute."""

TANH = {"SiLU": False, "SiLUActivation": False, "GELUTanh": True}
"""Supported activations of gated MLPs by their class names; True for GELU's approximation by tanh."""


def fuse(model: torch.nn.Module) -> list[str]:
    """Replace the forward passes of this model's supported decoder modules by snugfit's. Return the class
    names of the replaced modules.
    """
    changed: dict[str, None] = {}
    for module in model.modules():
        if "forward" in vars(module):  # replaced by the user, or by an earlier `fuse`
            continue
        for part, fuse_part in _PARTS.items():
            form = _form(module, part)
            if form is not None and fuse_part(module, form):
                changed[type(module).__name__] = None
        for norm in _single_norms(module):
            _replace(norm, _norm, _form(norm, "RMSNorm"))
            changed[type(norm).__name__] = None
    _fuse_adapters(model)
    _mark_whole_batches(model)
    return list(changed)


def _mark_whole_batches(model: torch.nn.Module) -> None:
    """Mark calls without padding in decoders whose attention has sinks."""
    for module in model.modules():
        layers = getattr(module, "layers", ())
        attentions = [getattr(layer, "self_attn", None) for layer in layers]
        # Code of transformers would not attend causally without a mask.
        fused = bool(attentions) and all(
            hasattr(part, SINKS) and "forward" in vars(part) for part in attentions
        )
        if fused and mark_whole_batches not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(mark_whole_batches, with_kwargs=True)


def _single_norms(module: Any) -> list[Any]:
    """Return the supported norms of a module that no other replacement computes.

    They are the norm after all layers, and those of a layer that runs its own code.
    """
    norms = [getattr(module, "norm", None)] if hasattr(module, "layers") else []
    if "forward" not in vars(module) and (hasattr(module, "self_attn") or hasattr(module, "linear_attn")):
        norms += module.children()
    return [norm for norm in norms if _form(norm, "RMSNorm") is not None and "forward" not in vars(norm)]


def _form(module: Any, part: str) -> Any:
    """Return the form of a module whose class name ends with `part`; None for every unsupported module."""
    kind: type = type(module)
    # Gemma 4 has norms without a scale.
    return _form_of(kind, part) if getattr(module, "with_scale", True) else None


@cache
def _form_of(kind: type, part: str) -> Any:
    reference = same_as(kind, part, FORMS[part])
    return None if reference is None else FORMS[part][reference]


def _fuse_adapters(model: torch.nn.Module) -> None:
    """Make linear layers with supported adapters single products, for modules that run their own code."""
    for layer in model.modules():
        if is_adapted(layer) and (decomposed_of(layer) or projections_of([layer]) is not None):
            layer.forward = AdaptedForward(partial(_either, _adapt, None), layer)


def _adapt(
    self: Any, form: None, original: Callable[..., Any], x: torch.Tensor, *others: Any, **keywords: Any
) -> Any:
    decomposed, projections = decomposed_of(self), projections_of([self])
    if others or keywords:
        return original(x, *others, **keywords)
    if decomposed is not None:
        return decomposed_linear(x, *decomposed)
    return original(x) if projections is None else lora_linear(x, projections)[0]


def _replace(module: Any, forward: Callable[..., Any], form: Any) -> None:
    """Replace the module's forward pass in training, and keep the module's own in evaluation.

    `forward` takes the module, its form and its own forward pass first.
    """
    module.forward = FusedForward(partial(_either, forward, form), module)


def _either(forward: Callable[..., Any], form: Any, module: Any, *arguments: Any, **keywords: Any) -> Any:
    # The method of the class, because this one replaces that of the instance.
    original = partial(type(module).forward, module)
    # The kernels save tensors for a backward pass, which evaluation does not have.
    if not module.training:
        return original(*arguments, **keywords)
    return forward(module, form, original, *arguments, **keywords)


# ---- norms -----------------------------------------------------------------------------------------------


def _eps(norm: Any) -> float:
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


def _add_and_norm(
    branch: torch.Tensor, stream: torch.Tensor | None, norm: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the residual stream plus a sublayer's output (B, S, H), and its RMSNorm in the dtype of the next
    matrix product.
    """
    scaling = _form(norm, "RMSNorm")
    whole = branch if stream is None else stream
    dtype = activation_dtype(whole)
    # Without autocast, transformers multiplies the scale in the wider dtype.
    if dtype == whole.dtype and scaling == Scaling.ROUNDED:
        dtype = torch.promote_types(dtype, norm.weight.dtype)
    return add_rms_norm(branch, stream, norm.weight, _eps(norm), dtype, scaling=scaling)


def _norm(
    self: Any, form: Scaling, original: Callable[..., Any], hidden_states: torch.Tensor
) -> torch.Tensor:
    return _add_and_norm(hidden_states, None, self)[1]


# ---- attention -------------------------------------------------------------------------------------------


def _fuse_attention(module: Any, form: AttentionForm) -> bool:
    projections = projections_of([getattr(module, name) for name in form.layers])
    norms = (
        [_form(norm, "RMSNorm") for norm in (module.q_norm, module.k_norm)]
        if _norms_heads(module, form)
        else []
    )
    # Pairs of a head's columns are rotated into each other, so the head size must be even.
    if projections is None or module.head_dim % 2 or {*norms} - {Scaling.ROUNDED, Scaling.FROM_ONE}:
        return False
    # Weights that are adjacent in memory form one matrix, so the three products become one.
    if not projections.states:
        lay_side_by_side(projections.weights)
    if projections.biases:
        lay_side_by_side(projections.biases)
    _replace(module, _attend, form)
    return True


def _attend(
    self: Any,
    form: AttentionForm,
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    position_embeddings: Any = None,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    **keywords: Any,
) -> tuple[torch.Tensor, Any]:
    """Compute a decoder's attention (B, S, H), with products, norms and rotation by snugfit's kernels."""
    projections = projections_of([getattr(self, name) for name in form.layers])
    heads = _heads(self, form, position_embeddings)
    # An adapter may have replaced a layer since the model was built.
    if projections is None or heads is None:
        known = {SLIDING: getattr(self, SLIDING, None), **keywords}
        attention_mask = mask_of(hidden_states, attention_mask, known)
        return original(  # type: ignore[no-any-return]
            hidden_states, position_embeddings, attention_mask, past_key_values, **keywords
        )
    query, key, value, *gates = attention_inputs(
        hidden_states, position_embeddings, heads, projections, _head_norms(self, form)
    )
    if past_key_values is not None:
        key, value = _append_to_cache(past_key_values, key, value, self.layer_idx)
    extras = {NAMES[name]: getattr(self, name, getattr(self.config, name, None)) for name in form.extras}
    options = extras | keywords
    if self.config._attn_implementation == "sdpa":
        options.pop("cu_seq_lens_q", None)  # sdpa does not read it, and encoders use it otherwise
    given, scores = attend(
        self, (query, key, value), attention_mask, self.attention_dropout, self.scaling, options
    )
    # Some kernels return a transposed result, while the product needs rows.
    given = given.contiguous()
    if gates:
        given = given * torch.sigmoid(gates[0].transpose(1, 2).reshape(given.shape))
    output = _project(self.o_proj, given)
    if form.dropout:
        output = torch.nn.functional.dropout(output, getattr(self, form.dropout), self.training)
    return output, scores


def _heads(module: Any, form: AttentionForm, angles: Any) -> Heads | None:
    """Return the heads of an attention module; None if the module does not rotate them by these angles."""
    if angles is None or not getattr(module, form.rotates or "head_dim"):
        return None
    queries, pairs = module.o_proj.in_features // module.head_dim, angles[0].size(-1)
    pairs = pairs if form.shared_angles else pairs // 2
    # A head's other columns keep their values.
    return Heads(
        queries, queries // module.num_key_value_groups, module.head_dim, pairs, form.interleaved,
        form.shared_angles, form.gated,
    )  # fmt: skip


def _norms_heads(module: Any, form: AttentionForm) -> bool:
    """Return True if an attention module norms queries and keys of each head. GLM-4.5 leaves it open."""
    return form.norms_heads and hasattr(module, "q_norm")


def _head_norms(module: Any, form: AttentionForm) -> Norms | None:
    """Return the norms of queries and keys, which Qwen3 and Gemma 3 have for each head."""
    if not _norms_heads(module, form):
        return None
    from_one = _form(module.q_norm, "RMSNorm") == Scaling.FROM_ONE
    return Norms(module.q_norm.weight, module.k_norm.weight, _eps(module.q_norm), from_one)


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


def _fuse_mlp(module: Any, form: MLPForm) -> bool:
    into, back = _mlp_projections(module, form)
    if into is None or back is None or type(getattr(module, form.activation)).__name__ not in TANH:
        return False
    if not into.states:
        lay_side_by_side(into.weights)
    _replace(module, _gate, form)
    # False marks a gated MLP. `fused(recomputed_mlps)` sets some of them to True.
    setattr(module, RECOMPUTES, False)
    setattr(module, TOKENS, None)
    return True


def _mlp_projections(module: Any, form: MLPForm) -> tuple[Projections | None, Projections | None]:
    """Return the linear layers before and after the activation of an MLP; None if the MLP must run its own
    code.
    """
    into = projections_of([getattr(module, name) for name in form.layers], biased=False)
    return into, projections_of([module.down_proj], biased=False)


def _gate(self: Any, form: MLPForm, original: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    into, back = _mlp_projections(self, form)
    if into is None or back is None:
        return original(x)  # type: ignore[no-any-return]
    keeps, tokens = not getattr(self, RECOMPUTES, False), getattr(self, TOKENS, None)
    tanh = TANH[type(getattr(self, form.activation)).__name__]
    # One tile would be the whole MLP, with its product computed twice.
    if tokens and x.numel() > tokens * x.size(-1):
        return tiled_mlp(x, into, back, tanh=tanh, tokens=tokens)
    return gated_mlp(x, into, back, tanh=tanh, keeps=keeps)


# ---- the layer -------------------------------------------------------------------------------------------


def _fuse_layer(module: Any, form: LayerForm) -> bool:
    # The layer fuses its norms, so all of them must be supported.
    if any(_form(getattr(module, name, None), "RMSNorm") is None for name in form[:4] if name):
        return False
    _replace(module, _run_layer, form)
    return True


def _run_layer(
    self: Any,
    form: LayerForm,
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    *others: Any,
    **keywords: Any,
) -> torch.Tensor:
    """Run the forward pass of a decoder layer, with each addition before a norm fused into it.

    Positional arguments differ between layers, so a call with any runs the layer's own code.
    """
    if others:
        return original(hidden_states, *others, **keywords)  # type: ignore[no-any-return]
    stream = normed = hidden_states
    if form.before_attention:
        stream, normed = _add_and_norm(hidden_states, None, getattr(self, form.before_attention))
    branch, _ = self.self_attn(hidden_states=normed, **keywords)
    branch = _close_branch(self, form, branch, form.after_attention, form.dropouts[0])
    if form.before_mlp:
        stream, normed = _add_and_norm(branch, stream, getattr(self, form.before_mlp))
    else:
        stream = normed = stream + branch
    # Under another name, so that `branch` lives as long as in the measured runs under results.
    from_mlp = _close_branch(self, form, self.mlp(normed), form.after_mlp, form.dropouts[1])
    # The next layer's first norm is in another module, so this addition is not fused.
    return stream + from_mlp


def _close_branch(
    module: Any, form: LayerForm, branch: torch.Tensor, norm: str, dropout: str
) -> torch.Tensor:
    """Return the output of attention or MLP (B, S, H) as a layer adds it to the residual stream."""
    if norm:
        _, branch = _add_and_norm(branch, None, getattr(module, norm))
    if dropout:
        branch = getattr(module, dropout)(branch)
    return branch * getattr(module, form.multiplier) if form.multiplier else branch


_PARTS: dict[str, Callable[[Any, Any], bool]] = {
    "Attention": _fuse_attention,
    "MLP": _fuse_mlp,
    "DecoderLayer": _fuse_layer,
}
