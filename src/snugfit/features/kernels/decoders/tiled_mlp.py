"""The MLP of a decoder in tiles of tokens, so that its wide tensors never exist for all tokens.

For 131,072 tokens the product of gate and up of Llama-3.1-8B has 7 GiB in bfloat16, and the activation half
of that. A tile of 8,192 tokens has a sixteenth. The backward pass computes each tile's product again. It adds
the tiles' gradients of weights and adapters in 32 bits, and rounds the sums once. Arctic Long Sequence
Training tiles MLPs too (Bekman et al., arXiv 2506.13996).

Two autograd functions compute one MLP. `MLPInputs` saves tensors before the first product, and `TiledMLP`
saves none. A checkpoint recomputes a layer only until its last saved tensor exists. So in Llama's layers the
recomputation ends before the MLP, whose products are computed again by the backward pass alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from snugfit.features.kernels.operations.gated_mlp import activate, activate_backward
from snugfit.features.kernels.operations.operators import activation_dtype, autocast_device
from snugfit.features.kernels.operations.projections import JointProduct, Layout, Projections
from snugfit.features.kernels.operations.rms_norm import rows_again, rows_to_keep

TOKENS = "mlp_tokens"
"""Name of a module's attribute: the number of tokens that its MLP computes at a time; None for all."""


class TileSettings(NamedTuple):
    """Settings of an MLP: its layers before (`into`) and after (`back`) the activation, and its tiles."""

    into: Layout
    back: Layout
    tanh: bool
    tokens: int

    def separate(self, entries: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the entries of both layouts, from a sequence with one entry for each tensor."""
        return entries[: self.into.tensor_count], entries[self.into.tensor_count :]

    def tiles(self, rows: int) -> list[slice]:
        """Return the rows of each tile."""
        return [slice(begin, begin + self.tokens) for begin in range(0, rows, self.tokens)]


class MLPState(NamedTuple):
    """Both joint products without rows, and the factors of their adapters."""

    wide: JointProduct
    narrow: JointProduct
    factors: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
    autocast: bool

    def wide_of(self, rows: torch.Tensor) -> JointProduct:
        """Return the joint product of gate and up for these rows (T, H)."""
        return self.wide.with_rows(rows, self.factors[0], autocast=self.autocast)

    def narrow_of(self, rows: torch.Tensor) -> JointProduct:
        """Return the product of the down projection for these rows (T, I)."""
        return self.narrow.with_rows(rows, self.factors[1], autocast=self.autocast)


def tiled_mlp(
    hidden: torch.Tensor, into: Projections, back: Projections, *, tanh: bool, tokens: int
) -> torch.Tensor:
    """Return the MLP's output (..., H) for hidden states (..., H), computed for `tokens` tokens at a time.

    The other arguments are those of `gated_mlp`. Adapters must not have dropout.
    """
    parts, tensors = TileSettings(into.layout, back.layout, tanh, tokens), [*into.tensors, *back.tensors]
    states: list[Any] = []
    inputs = MLPInputs.apply(hidden, states, parts, *tensors)  # type: ignore[no-untyped-call]
    output: torch.Tensor = TiledMLP.apply(inputs, states, parts, *tensors)  # type: ignore[no-untyped-call]
    return output


class MLPInputs(torch.autograd.Function):
    """Autograd function that returns hidden states unchanged, and saves the tensors of `TiledMLP`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, states: list[Any], parts: TileSettings, *tensors: torch.Tensor
    ) -> torch.Tensor:
        """Return the hidden states. Save their source or rows, the joint weights and the adapters.

        Append the context and the `MLPState` to `states`.
        """
        ctx.dtype, ctx.count, ctx.width = activation_dtype(hidden), len(tensors), hidden.size(-1)
        of_layouts = list(zip(parts[:2], parts.separate(tensors), strict=True))
        wide, narrow = (JointProduct.without_rows(ctx.dtype, *pair) for pair in of_layouts)
        factors = [layout.separate(some)[2] for layout, some in of_layouts]
        rows = hidden.reshape(-1, hidden.size(-1)).to(ctx.dtype)
        *source, ctx.scaling = rows_to_keep(hidden, rows, needs_it=True)
        ctx.save_for_backward(*source, *wide.weights, *narrow.weights, *factors[0], *factors[1])
        # Sums of tiles have 32 bits or more, and are rounded at the end.
        ctx.layouts = [
            (
                one.layout,
                [torch.promote_types(dtype, torch.float32) for dtype in one.dtypes],
                len(one.weights),
                0,
            )
            for one in (wide, narrow)
        ]
        ctx.autocast = torch.is_autocast_enabled(autocast_device(hidden))
        states += [ctx, MLPState(wide, narrow, (factors[0], factors[1]), ctx.autocast)]
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradient of the hidden states unchanged."""
        return gradient, None, None, *[None] * ctx.count


class TiledMLP(torch.autograd.Function):
    """Autograd function of `tiled_mlp` for hidden states that passed through `MLPInputs`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, states: list[Any], parts: TileSettings, *tensors: torch.Tensor
    ) -> torch.Tensor:
        """Return the output, tile by tile. Save nothing but the context of `MLPInputs`."""
        ctx.inputs, state = states
        ctx.parts, ctx.hidden_dtype, ctx.dtypes = parts, hidden.dtype, [tensor.dtype for tensor in tensors]
        rows = hidden.reshape(-1, hidden.size(-1))
        output = rows.new_empty((len(rows), sum(parts.back.sizes)), dtype=ctx.inputs.dtype)
        for tile in parts.tiles(len(rows)):
            some = rows[tile].to(output.dtype)
            between = activate(state.wide_of(some).multiply(some), parts.tanh)
            output[tile] = state.narrow_of(between).multiply(between)
            # Otherwise it would live until the next tile has one.
            del between
        return output.view(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradients of input, weights and adapters. Each tile's products are computed again."""
        parts, inputs = ctx.parts, ctx.inputs
        source, state = _restore(inputs)
        output_grad = gradient.reshape(-1, gradient.size(-1))
        of_hidden = output_grad.new_empty((len(output_grad), inputs.width), dtype=ctx.hidden_dtype)
        needs = parts.separate(ctx.needs_input_grad[3:])
        sums: list[torch.Tensor | None] = []
        for tile in parts.tiles(len(output_grad)):
            rows = _tile_rows(source, inputs, tile)
            of_rows, gradients = _gradients(
                rows, output_grad[tile].to(inputs.dtype), state, parts.tanh, needs
            )
            of_hidden[tile] = of_rows
            del rows, of_rows
            sums = _add(sums, gradients)
            del gradients
        rounded = [
            None if total is None else total.to(dtype) for total, dtype in zip(sums, ctx.dtypes, strict=True)
        ]
        return of_hidden.view(*gradient.shape[:-1], -1), None, None, *rounded


def _restore(inputs: Any) -> tuple[Sequence[torch.Tensor], MLPState]:
    """Return the source of the hidden states and the `MLPState` from the context of `MLPInputs`."""
    # Under a checkpoint, saved tensors can be read only once.
    saved = inputs.saved_tensors
    source, rest = saved[:3], list(saved[3:])
    products = []
    for settings in inputs.layouts:
        products.append(JointProduct.restore(settings, rest[: settings[2]]))
        rest = rest[settings[2] :]
    count = 2 * len(products[0].layout.spans)
    return source, MLPState(products[0], products[1], (rest[:count], rest[count:]), inputs.autocast)


def _tile_rows(source: Sequence[torch.Tensor], inputs: Any, tile: slice) -> torch.Tensor:
    """Return the rows (tokens, H) of a tile from the saved source of all rows."""
    if inputs.scaling is None:
        return source[0][tile]
    stream, scale, roots = source
    rows = stream.reshape(-1, stream.size(-1))[tile]
    return rows_again((rows, scale, roots[tile]), inputs.scaling, inputs.dtype)


def _gradients(
    rows: torch.Tensor,
    output_grad: torch.Tensor,
    state: MLPState,
    tanh: bool,
    needs: tuple[Sequence[bool], Sequence[bool]],
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Return the gradient of a tile's rows (tokens, H), and its share of the gradients of all tensors."""
    wide = state.wide_of(rows)
    product = wide.multiply(rows)
    # Only adapters need the activation here.
    narrow = state.narrow_of(activate(product, tanh)) if state.factors[1] else state.narrow
    slopes = narrow.slopes(output_grad)
    between = narrow.input_gradient(output_grad, slopes)
    # The kernel overwrites the product with the gradients of gate and up, and `between` with their output.
    activate_backward(product, between, tanh, again=narrow.needs_rows(needs[1]))
    of_narrow = narrow.gradients(output_grad, slopes, [between].pop, needs[1])
    # It is large, and the gradients of gate and up do not need it.
    del between
    slopes = wide.slopes(product)
    of_wide = wide.gradients(product, slopes, lambda: rows, needs[0])
    return wide.input_gradient(product, slopes), [*of_wide, *of_narrow]


def _add(sums: list[torch.Tensor | None], gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return the sums of all tiles up to this one; the first tile's gradients become the sums."""
    for total, gradient in zip(sums, gradients, strict=False):
        if total is not None and gradient is not None:
            total.add_(gradient)
    return sums or gradients
