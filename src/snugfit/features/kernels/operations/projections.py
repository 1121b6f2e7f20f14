"""Linear layers of one input as one product: weights, biases, and the adapters that some of them have.

A forward pass saves x, or tensors from which a norm computes it again. It saves S = x A^T too, with r columns
for each adapter. Frozen weights get no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch

from snugfit.features.kernels.operations.four_bits import unpack
from snugfit.features.kernels.operations.joint_linear import join_weights, weights_to_keep
from snugfit.features.kernels.operations.low_rank import Adapter, AdapterSpan, LowRankUpdate
from snugfit.features.kernels.operations.operators import activation_dtype
from snugfit.features.kernels.operations.products import results_are_kept, weight_gradient
from snugfit.features.kernels.operations.rms_norm import rows_again, rows_to_keep


class Layout(NamedTuple):
    """Sizes and numbers of the parts of `Projections.tensors`."""

    sizes: tuple[int, ...]
    """Number of columns of each layer's result in the joint product."""
    has_biases: bool
    spans: tuple[AdapterSpan, ...]
    """Columns of the joint product that each LoRA adapter adds to, and the adapter's settings."""
    states: tuple[Any, ...] = ()
    """bitsandbytes' `QuantState` of each weight if all weights have 4 bits; empty otherwise."""

    def separate(self, entries: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Return the entries for weights, for biases and for adapters, from a sequence with one entry for
        each tensor.
        """
        count = len(self.sizes)
        end = count * (1 + self.has_biases)
        return entries[:count], entries[count:end], entries[end : end + 2 * len(self.spans)]

    @property
    def tensor_count(self) -> int:
        """Return the number of tensors."""
        return len(self.sizes) * (1 + self.has_biases) + 2 * len(self.spans)


class Projections(NamedTuple):
    """Linear layers of one input, such as queries, keys and values, in the order of their results."""

    weights: Sequence[torch.Tensor]  # (N, H) each, or (N * H / 2, 1) with two numbers to a byte
    biases: Sequence[torch.Tensor] = ()  # (N,) each; empty, or one for each layer
    adapters: Sequence[Adapter | None] = ()  # empty, or one or None for each layer
    states: Sequence[Any] = ()  # bitsandbytes' `QuantState` of each layer, if all weights have 4 bits

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors, as an autograd function takes them: weights, biases, A and B of each adapter
        in turn.
        """
        factors = [factor for adapter in self.adapters if adapter is not None for factor in adapter[:2]]
        return [*self.weights, *self.biases, *factors]

    @property
    def layout(self) -> Layout:
        """Return the sizes and numbers of the tensors, from which a backward pass finds them."""
        shapes = [tensor.shape for tensor in self.states or self.weights]
        sizes = tuple(int(shape[0]) for shape in shapes)
        spans, start = [], 0
        for size, adapter in zip(sizes, self.adapters or [None] * len(sizes), strict=True):
            if adapter is not None:
                spans.append(AdapterSpan(start, start + size, len(adapter.down), *adapter[2:]))
            start += size
        return Layout(sizes, bool(self.biases), tuple(spans), tuple(self.states))


Settings = tuple[Layout, Sequence[torch.dtype], int, int]
"""The type of a joint product's settings: its layout, the dtypes of its tensors, the number of its weights,
and the parts of its adapters.
"""


class JointProduct(NamedTuple):
    """A product of rows (T, H) with the weights of all layers, as its backward pass needs it."""

    layout: Layout
    dtypes: Sequence[torch.dtype]  # dtypes of `Projections.tensors`
    weights: Sequence[torch.Tensor]  # (N, H) all or each in the dtype of the product, or each in 4 bits
    update: LowRankUpdate | None

    @classmethod
    def start(
        cls, rows: torch.Tensor, layout: Layout, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Self]:
        """Return the product (T, N) in the dtype of the rows, and its backward pass."""
        _, biases, factors = layout.separate(tensors)
        joint = cls.without_rows(rows.dtype, layout, tensors).with_rows(rows, factors)
        return joint.multiply(rows, join_weights(biases, rows.dtype) if biases else None), joint

    @classmethod
    def without_rows(cls, dtype: torch.dtype, layout: Layout, tensors: Sequence[torch.Tensor]) -> Self:
        """Return the joint weights for products in this dtype, without the adapters' updates of any rows."""
        weights, _, _ = layout.separate(tensors)
        matrices = weights if layout.states else weights_to_keep(weights, dtype)
        return cls(layout, [tensor.dtype for tensor in tensors], matrices, None)

    def with_rows(
        self, rows: torch.Tensor, factors: Sequence[torch.Tensor], *, autocast: bool | None = None
    ) -> Self:
        """Return the same product with the updates of these rows (T, H) by its adapters, A and B of each in
        turn. `autocast` is that of the forward pass; None reads it now.
        """
        if not self.layout.spans:
            return self
        return self._replace(update=LowRankUpdate.start(rows, factors, self.layout.spans, autocast))

    @classmethod
    def restore(cls, settings: Settings, tensors: Sequence[torch.Tensor]) -> Self:
        """Return the joint product with these settings and saved tensors."""
        layout, dtypes, count, parts = settings
        update = LowRankUpdate.restore(tensors[count:], layout.spans, parts) if parts else None
        return cls(layout, dtypes, tensors[:count], update)

    @property
    def settings(self) -> Settings:
        """Return the attributes of the product that are no tensors."""
        return self.layout, self.dtypes, len(self.weights), self.update.parts if self.update else 0

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors to save for the backward pass."""
        return [*self.weights, *(self.update.tensors if self.update else ())]

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        """Return all weights (N, H) in the dtype of the product. Those of 4 bits are unpacked each time, and
        separate ones are joined each time.
        """
        states = self.layout.states
        return unpack(self.weights, states, dtype) if states else join_weights(self.weights, dtype)

    def multiply(self, rows: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product (T, N) with a joint bias (N,), and with the updates of these same rows."""
        turned = self.matrix(rows.dtype).t()
        update, keeps = self.update, results_are_kept()
        if update is not None and not keeps and update.covers(turned.size(1)):
            # A product that adds reads the updates while it multiplies. An update that is added afterwards
            # reads and writes the whole product once more.
            return update.product(bias).addmm_(rows, turned)
        product = torch.mm(rows, turned) if bias is None else torch.addmm(bias, rows, turned)
        # An unpacked matrix is large, and the adapters do not need it.
        del turned
        if update is not None:
            # Selective checkpointing reuses the product, so it must not change.
            product = product.clone() if keeps else product
            update.add_to(product)
        return product

    def needs_rows(self, needed: Sequence[bool]) -> bool:
        """Return True if a weight or an adapter's A needs a gradient. `needed` has one entry for each
        tensor.
        """
        weights, _, factors = self.layout.separate(needed)
        return any(weights) or any(factors[::2])

    def slopes(self, of_product: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of S = x A^T from that of the product (T, N); None without adapters."""
        return self.update.slopes(of_product) if self.update else None

    def input_gradient(self, of_product: torch.Tensor, slopes: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient (T, H) of the rows."""
        matrix, update = self.matrix(of_product.dtype), self.update
        if update is None or slopes is None:
            return torch.mm(of_product, matrix)
        if update.seed is None:
            return torch.mm(slopes, update.down).addmm_(of_product, matrix)
        of_rows = torch.mm(of_product, matrix)
        update.add_input_gradient(of_rows, slopes, update.seed)
        return of_rows

    def backward(
        self,
        of_product: torch.Tensor,
        source: Sequence[torch.Tensor],
        scaling: int | None,
        needs_input: bool,
        needed: Sequence[bool],
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """Return the gradient (T, H) of the rows, None unless `needs_input`, and those of all tensors.

        `rows_again` recomputes the rows from `source` and `scaling`, once if at all.
        """
        slopes = self.slopes(of_product)
        of_tensors = self.gradients(
            of_product, slopes, lambda: rows_again(source, scaling, of_product.dtype), needed
        )
        return self.input_gradient(of_product, slopes) if needs_input else None, of_tensors

    def gradients(
        self,
        of_product: torch.Tensor,
        slopes: torch.Tensor | None,
        rows: Callable[[], torch.Tensor],
        needed: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        """Return the gradients of all tensors. Those of weights are slices of one tensor, as are those of
        biases.

        `rows` returns the rows (T, H), and is called once if at all.
        """
        for_weights, for_biases, for_factors = self.layout.separate(needed)
        weights, biases, factors = self.layout.separate(self.dtypes)
        rows_once = functools.cache(rows)
        gradients: list[torch.Tensor | None] = [None] * (len(for_weights) + len(for_biases))
        # A single product gives the gradients of all weights as slices.
        if any(for_weights):
            of_weights = weight_gradient(of_product, rows_once(), weights[0])
            gradients[: len(weights)] = of_weights.split(self.layout.sizes)
        if any(for_biases):
            gradients[len(weights) :] = of_product.sum(0).to(biases[0]).split(self.layout.sizes)
        if self.update is not None and slopes is not None:
            gradients += self.update.gradients(of_product, slopes, rows_once, for_factors, factors)
        return [
            gradient if is_needed else None for gradient, is_needed in zip(gradients, needed, strict=True)
        ]


def lora_linear(x: torch.Tensor, projections: Projections) -> tuple[torch.Tensor, ...]:
    """Return the results (..., N) of linear layers for one `x` (..., H), in autocast's dtype where that is
    on.

    They are views of one tensor, so the rows of several results are strided.
    """
    results: tuple[torch.Tensor, ...] = LoraLinear.apply(  # type: ignore[no-untyped-call]
        x, projections.layout, *projections.tensors
    )
    return results


class LoraLinear(torch.autograd.Function):
    """Autograd function of `lora_linear`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: Layout, *tensors: torch.Tensor) -> Any:
        """Return the results; save the input's rows or their source, and the adapters' S."""
        rows = x.reshape(-1, x.size(-1)).to(activation_dtype(x))
        product, joint = JointProduct.start(rows, layout, tensors)
        *source, ctx.scaling = rows_to_keep(x, rows, needs_it=joint.needs_rows(ctx.needs_input_grad[2:]))
        ctx.save_for_backward(*source, *joint.tensors)
        ctx.x_dtype, ctx.joint = x.dtype, joint.settings
        return product.view(*x.shape[:-1], -1).split(layout.sizes, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradients of `x`, weights, biases and adapters."""
        # Under a checkpoint, saved tensors can be read only once.
        saved = ctx.saved_tensors
        source, joint = saved[:3], JointProduct.restore(ctx.joint, saved[3:])
        joined = gradients[0] if len(gradients) == 1 else torch.cat(gradients, -1)
        of_product = joined.reshape(-1, joined.size(-1))
        needs_x, _, *needed = ctx.needs_input_grad
        of_x, of_tensors = joint.backward(of_product, source, ctx.scaling, needs_x, needed)
        if of_x is not None:
            of_x = of_x.view(*joined.shape[:-1], -1).to(ctx.x_dtype)
        return of_x, None, *of_tensors
