"""Logits that are computed on demand; for a cross-entropy they are never all computed at once.

Each model of transformers has its own code between logits and loss. Logits may be shifted, capped (Gemma),
scaled (Granite, Cohere), moved or reshaped. So this code is not rewritten. In training, the head returns a
`DeferredLogits`: a tensor of the right shape, dtype and device without data. It holds the hidden states of
its computation, and

- operations that only choose or arrange tokens are applied to the hidden states;
- elementwise operations are recorded, and applied to each chunk;
- `cross_entropy` is computed in chunks (`chunked_loss.py`);
- any other operation gets the whole logits, which are then computed once, with their gradients.

In the last case the step is correct, but takes as much memory as without chunks. A warning names the
operation.

Without gradients, or in evaluation mode, the head returns plain logits: metrics need them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map

from snugfit.errors import RecipeError
from snugfit.features.kernels.head.chunked_loss import LOSS_KERNEL, ChunkedCrossEntropy, Loss, LossKernel
from snugfit.step.own_forward import OwnForward
from snugfit.techniques import roster
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.techniques.setup import LogitsWish

METADATA = frozenset({
    "shape", "dtype", "device", "requires_grad", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "is_leaf",
    "is_sparse", "is_nested", "is_quantized", "grad_fn", "size", "dim", "numel", "nelement", "stride",
    "is_floating_point", "is_complex", "is_contiguous", "element_size", "itemsize", "nbytes", "get_device",
    "__len__", "_base", "register_hook",
})  # fmt: skip
"""Names of tensor attributes and methods that work on a tensor without data. FSDP2 registers a hook on each
output of a model. The loss is one too, so a hook on logits is not needed.
"""

CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
ELEMENTWISE = frozenset({
    *CASTS, "to", "tanh", "contiguous", "neg", "mul", "div", "true_divide", "add", "sub",
    "__mul__", "__rmul__", "__truediv__", "__add__", "__radd__", "__sub__",
})  # fmt: skip
"""Names of elementwise operations that are recorded on deferred logits, as torch's functions and operators.
"""

RESHAPES = frozenset({"view", "reshape"})

DTYPE_CHANGES = frozenset({*CASTS, "to", "contiguous"})
"""Names of operations on logits that change only their dtype, or nothing."""


class LogitsComputedWhole(UserWarning):
    """Warning that a model reads all its logits at once, so that chunks save no memory."""


class Head(NamedTuple):
    """A linear head with its settings for logits in chunks."""

    weight: torch.Tensor  # (V, H)
    bias: torch.Tensor | None  # (V,)
    tokens: int
    """Number of tokens whose logits exist at a time."""
    dtype: torch.dtype
    """Dtype of the head's matrix product."""
    kernel: LossKernel | None = None
    """Kernel for a chunk's loss and gradient on a GPU; None for plain torch."""


class DeferredLogits(torch.Tensor):
    """Tensor without data that represents logits: hidden states (..., H), the head, and functions of its
    output."""

    hidden: torch.Tensor
    head: Head
    functions: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    whole: torch.Tensor | None
    only_cast: bool
    """True if the recorded functions change only the dtype of logits, or nothing."""

    @staticmethod
    def __new__(
        cls,
        hidden: torch.Tensor,
        head: Head,
        functions: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (),
        dtype: torch.dtype | None = None,
        only_cast: bool = True,
    ) -> DeferredLogits:
        """Create the tensor from hidden states (..., H). `dtype` is the dtype of the logits after the
        recorded functions.
        """
        shape = (*hidden.shape[:-1], len(head.weight))
        make: Any = torch.Tensor._make_wrapper_subclass
        new: DeferredLogits = make(
            cls, shape, dtype=dtype or head.dtype, device=hidden.device, requires_grad=True
        )
        new.hidden, new.head, new.functions, new.whole = hidden, head, functions, None
        new.only_cast = only_cast
        return new

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Run a torch function on deferred logits: record it, or compute the whole logits for it."""
        keywords, name = keywords or {}, function.__name__
        if name == "__get__":
            name = function.__self__.__name__
        if name in METADATA:
            plain: Any = super().__torch_function__
            return plain(function, types, arguments, keywords)
        result = None
        if function is functional.cross_entropy:
            result = _cross_entropy(*arguments, **keywords)
        elif isinstance(arguments[0] if arguments else None, cls) and arguments[0].whole is None:
            result = arguments[0]._after(function, name, arguments[1:], keywords)
        return _of_whole(name, function, arguments, keywords) if result is None else result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        """Run an operator of torch's dispatcher on the whole logits, which are computed for it."""
        return _of_whole(str(function), function, arguments, keywords or {})

    def _after(
        self, function: Any, name: str, operands: Sequence[Any], keywords: dict[str, Any]
    ) -> DeferredLogits | None:
        """Return the result of a torch function on deferred logits as new deferred logits; None if it needs
        all logits.
        """
        more = [*operands, *keywords.values()]
        if name in RESHAPES and (shape := _shape(operands)) and shape[-1] == self.shape[-1]:
            return self._with(self.hidden.reshape(*shape[:-1], self.hidden.shape[-1]))
        if name == "__getitem__" and _chooses_tokens(operands[0], self.dim()):
            return self._with(self.hidden[operands[0]])
        if name in ELEMENTWISE and all(_goes_with_each_token(value, len(self.head.weight)) for value in more):
            dtypes = [value for value in more if isinstance(value, torch.dtype)]
            operand_dtypes = [
                value.dtype for value in more if isinstance(value, torch.Tensor) and value.dim()
            ]
            dtype = CASTS.get(name) or functools.reduce(torch.promote_types, operand_dtypes, self.dtype)
            after = functools.partial(_call, function, tuple(operands), keywords)
            only_cast = self.only_cast and name in DTYPE_CHANGES
            dtype = (dtypes or [dtype])[0]
            return DeferredLogits(self.hidden, self.head, (*self.functions, after), dtype, only_cast)
        return None

    def _with(self, hidden: torch.Tensor) -> DeferredLogits:
        return DeferredLogits(hidden, self.head, self.functions, self.dtype, self.only_cast)

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the recorded functions (scale, soft cap) to raw logits of the head, and return the result."""
        return functools.reduce(lambda value, function: function(value), self.functions, logits)

    def compute(self) -> torch.Tensor:
        """Compute and store the logits of all tokens, and return them."""
        if self.whole is None:
            (weight, bias), dtype = self.head[:2], self.head.dtype
            offset = None if bias is None else bias.to(dtype)
            self.whole = self.scores(functional.linear(self.hidden.to(dtype), weight.to(dtype), offset))
        return self.whole


def _call(function: Any, operands: tuple[Any, ...], keywords: dict[str, Any], logits: torch.Tensor) -> Any:
    return function(logits, *operands, **keywords)


def _of_whole(name: str, function: Any, arguments: Any, keywords: Any) -> Any:
    """Run a torch function on the full logits of all tokens, with a warning that names the function."""
    warnings.warn(
        f"The model's code reads all logits at once ({name}), so the loss in chunks saves nothing. "
        "Leave 'chunked_loss' out.",
        LogitsComputedWhole,
        stacklevel=4,
    )
    arguments, keywords = tree_map(
        lambda value: value.compute() if isinstance(value, DeferredLogits) else value, (arguments, keywords)
    )
    return function(*arguments, **keywords)


def _shape(arguments: Sequence[Any]) -> Sequence[int]:
    """Return the shape that the arguments of `view` or `reshape` request; empty for `view(dtype)`."""
    given = arguments[0] if len(arguments) == 1 and isinstance(arguments[0], (tuple, list)) else arguments
    return given if all(isinstance(size, int) for size in given) else ()


def _chooses_tokens(index: Any, dimensions: int) -> bool:
    """Return True if an index selects tokens and leaves the last dimension, the vocabulary, unchanged."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(part is ... or isinstance(part, slice) for part in parts):
        return False
    reaches_last = ... in parts or len(parts) == dimensions
    return not reaches_last or parts[-1] in (slice(None), ...)


def _goes_with_each_token(value: Any, vocabulary: int) -> bool:
    """Return True if an operand broadcasts over tokens, such as a scalar or a vector over the vocabulary, and
    needs no gradient.
    """
    if not isinstance(value, torch.Tensor):
        return True
    return (
        not value.requires_grad
        and value.numel() in (1, vocabulary)
        and value.shape[-1:] in ((), (1,), (vocabulary,))
    )


def _cross_entropy(
    input: Any,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """Return torch's `cross_entropy` of deferred logits, computed in chunks. The result is None for weighted
    classes, a loss for each token, or probabilities instead of labels.
    """
    known = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum")
    if not isinstance(input, DeferredLogits) or not known or input.whole is not None:
        return None
    if input.dim() != 2 or target.dim() != 1:
        return None
    head = input.head
    kernel = head.kernel if input.only_cast and not label_smoothing else None
    loss = Loss(reduction == "mean", ignore_index, label_smoothing, input.scores, kernel)
    value: torch.Tensor = ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        input.hidden, head.weight, head.bias, target, loss, head.tokens, head.dtype
    )
    return value


# ---- a model ---------------------------------------------------------------------------------------------


def defer_logits(model: Any, wish: LogitsWish | None) -> None:
    """Make the model's head return deferred logits in training, or plain logits if `wish` is None. Raises
    `RecipeError` for a model whose head is not a single linear layer."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if isinstance(getattr(head, "__dict__", {}).get("forward"), HeadForward):
        head.__dict__.pop("forward")
    if wish is None:
        return
    if type(head) is not torch.nn.Linear:
        kind = "no output embeddings" if head is None else f"a {type(head).__name__} there"
        raise RecipeError(
            f"The logits of {type(model).__name__} cannot be computed in chunks: its head must be one "
            f"torch.nn.Linear that no adapter changes, and it has {kind}. Choose "
            f"{roster.plain(Slot.HEAD).name!r}."
        )
    head.__dict__["forward"] = HeadForward(partial(_plain_or_deferred, wish, vars(head).get("forward")), head)


class HeadForward(OwnForward):
    """Replacement forward pass of a head with deferred logits."""


def _plain_or_deferred(
    wish: LogitsWish,
    before: Callable[..., torch.Tensor] | None,
    head: torch.nn.Linear,
    input: torch.Tensor,
) -> torch.Tensor:
    """Return a head's logits, deferred in training; `before` is an earlier replacement of the forward
    pass."""
    if not head.training or not torch.is_grad_enabled():
        return torch.nn.Linear.forward(head, input) if before is None else before(input)
    dtype, kernel = _product_dtype(input), getattr(head, LOSS_KERNEL, None)
    tokens = wish.tokens_at_once(head.out_features, dtype.itemsize if kernel else 4)
    return DeferredLogits(input, Head(head.weight, head.bias, tokens, dtype, kernel))


def _product_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Return the dtype of the head's matrix product: autocast's, if it is on. A simulation's autocast uses
    the CPU's switch.
    """
    switch = "cpu" if hidden.device.type == "meta" else hidden.device.type
    return torch.get_autocast_dtype(switch) if torch.is_autocast_enabled(switch) else hidden.dtype
