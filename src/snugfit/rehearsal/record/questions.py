"""Return results to model code that reads tensor values in a simulation, as by `.item()`, from values tracked
on the CPU.

`.item()`, `bool()`, `.tolist()`, `.cpu()` and `torch.equal` read values. So do operators with data-dependent
shapes (`nonzero`, `unique`, `masked_select`, `bincount`, ...). Their results come from shadow values
(`shadows.py`). If a value depends on weights, the result is an assumption (`assumed.py`). Then the trace gets
a warning with the line of code that reads the value.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._device import _device_constructors

from snugfit.errors import RehearsalError
from snugfit.rehearsal.record.asker import CodeLine
from snugfit.rehearsal.record.assumed import Assumption
from snugfit.rehearsal.record.assumed_float import ASSUMED_VALUE, AssumedFloat
from snugfit.rehearsal.record.effects import DISTINCT
from snugfit.rehearsal.record.shadow import NotFollowed, tensors_in
from snugfit.rehearsal.record.shadows import Shadows

aten = torch.ops.aten

MAX_READS_PER_LINE = 1000
"""Largest number of reads of assumed tensor values by one line of code within one call of a module. It
exceeds the number of any model's experts.
"""

LARGEST = 2**27
"""Largest operand, in elements, with which a data-dependent operator runs on the CPU."""


class ValueReads:
    """Compute results for a model's reads of tensor values in one simulated run, such as `.item()`.

    `wait` is called if the host waits for the device. `doubt` is called with each sentence about an
    assumption. `call` returns the number of the active call of a module.
    """

    def __init__(
        self,
        shadows: Shadows,
        *,
        wait: Callable[[], None],
        doubt: Callable[[str], None],
        call: Callable[[], int],
        hides_masks: bool,
    ) -> None:
        self._shadows, self._wait, self._doubt, self._call = shadows, wait, doubt, call
        self._hides_masks = hides_masks
        self._by_item = False
        self._asked: Counter[Hashable] = Counter()
        self._told: set[Hashable] = set()  # functions with a warning so far, by assumption
        self.answers: list[list[Hashable]] = [[]]
        """Exact results of the model's reads of tensor values, in order; one list per micro-batch."""

    def read_value(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operator that reads a tensor's value, or NotImplemented for a copy within
        one device.
        """
        if func is aten._local_scalar_dense.default:
            return self._scalar(func, args, kwargs)
        if func is aten.equal.default:
            return self._equal(*args) if args[0].is_meta else NotImplemented
        if func is aten.copy_.default:
            if not args[1].is_meta or args[0].is_meta:
                return NotImplemented
            value = self._on_host(args[1])
            copy = func(args[0], value, *args[2:], **kwargs)
        else:
            device = kwargs.get("device")
            if device is None or device.type != "cpu" or not args[0].is_meta:
                return NotImplemented
            value = self._on_host(args[0])
            copy = func(value, *args[1:], **kwargs)
        self.host_ran(value, copy)
        return copy

    # ---- numbers and truths ------------------------------------------------------------------------------

    def _scalar(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the number in a one-element tensor on `meta`, from its shadow (the values tracked on the
        CPU).
        """
        tensor = args[0]
        if not tensor.is_meta:
            # A tensor that was copied to the host may contain an assumed number.
            if self._shadows.is_unsure(args):
                self._warn_of(Assumption.NUMBER, deferred=self._by_item)
            return func(*args, **kwargs)
        self._wait()
        value, assumption = self._value(tensor)
        answer = value.item()
        # Older transformers kept a mask of ones; the installed one drops it if `mask.all()` is true.
        if self._hides_masks and answer is True:
            return False
        if assumption is None:
            self._log(answer)
        else:
            # If a number is only logged, no warning is needed: its float reports a later decision.
            self._warn_of(assumption, deferred=self._by_item and isinstance(answer, float))
        return answer

    def _equal(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        """Return True if the tracked values of two tensors on `meta` are equal, or if any of them is
        assumed."""
        self._wait()
        (one, assumed), (other, assumed_too) = self._value(first), self._value(second)
        assumption = assumed or assumed_too
        if assumption is not None:
            # Assumed values compare as equal, since both are ones.
            self._warn_of(Assumption.MASK)
            return True
        answer = torch.equal(one, other)
        self._log(answer)
        return answer

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor with the values tracked for this tensor on `meta` (its shadow)."""
        self._wait()
        value, assumption = self._value(tensor)
        copy = value.clone()
        if assumption is None:
            self._log(tuple(copy.shape))
        # A float on the host is mostly logged, so its warning waits for a decision.
        elif copy.is_floating_point():
            self._shadows.set_unsure(copy)
        else:
            self._warn_of(assumption)
        return copy

    def item_of(self, tensor: torch.Tensor, item: Callable[[torch.Tensor], Any]) -> Any:
        """Return the result of `tensor.item()` in a simulation. An unknown number becomes a float that
        reports each decision based on it.
        """
        before, self._by_item = self._by_item, True
        self._deferred = False
        try:
            answer = item(tensor)
        finally:
            self._by_item = before
        if not self._deferred:
            return answer
        return AssumedFloat(ASSUMED_VALUE, self.decide, self._shadows.assumed_numbers)

    def decide(self) -> None:
        """Add a warning that the model's code branched on an assumed float."""
        self._warn_of(Assumption.NUMBER)

    def read(self, tensor: torch.Tensor) -> None:
        """Add a warning if this tensor has assumed numbers, which pass to plain Python or numpy, where they
        are not tracked."""
        if self._shadows.is_unsure(tensor) or (
            tensor.is_meta and tensor.is_floating_point() and self._value(tensor)[1] is not None
        ):
            self._warn_of(Assumption.NUMBER)

    # The host computes with real numbers, so the storage itself is marked as assumed.
    def host_ran(self, args: Any, out: Any) -> None:
        """Mark the outputs of an operator on host tensors as assumed if an operand's values are assumed."""
        if self._shadows.is_unsure(args):
            for tensor in tensors_in(out):
                self._shadows.set_unsure(tensor)

    # ---- shapes ------------------------------------------------------------------------------------------

    def results_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the results on `meta` of an operator with data-dependent output shapes."""
        self._wait()
        assumptions: list[Assumption] = []
        if func is aten._ctc_loss.Tensor:
            return self._ctc_loss(args, assumptions)
        if func is aten.masked_select.default:  # needs the mask's values only
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            mask = self._operand(args[1], assumptions, func).broadcast_to(shape)
            count = int(mask.sum())
            self._note_result((count,), assumptions)
            return args[0].new_empty(count)
        operands = [self._operand(argument, assumptions, func) for argument in args]
        keywords = {name: self._operand(argument, assumptions, func) for name, argument in kwargs.items()}
        results = func(*operands, **keywords)
        self._note_result(tuple(tuple(tensor.shape) for tensor in tensors_in(results)), assumptions)
        on_meta = [
            self._on_meta(
                argument, None if argument.is_floating_point() and assumptions else argument, assumptions
            )
            for argument in tensors_in(results)
        ]
        return on_meta[0] if isinstance(results, torch.Tensor) else type(results)(on_meta)

    def _ctc_loss(self, args: tuple[Any, ...], assumptions: list[Assumption]) -> Any:
        """Return CTC losses (N) and log-probabilities (N, T, 2 L + 1), with L labels in the longest target.

        The source is `native/LossCTC.cpp`.
        """
        log_probs, lengths = args[0], self._operand(args[3], assumptions, aten._ctc_loss.Tensor)
        self._operand(args[2], assumptions, aten._ctc_loss.Tensor)
        longest = int(lengths.max()) if lengths.numel() else 0
        self._note_result((longest,), assumptions)
        batch = log_probs.size(1) if log_probs.dim() == 3 else 1
        return log_probs.new_empty(batch), log_probs.new_empty(batch, log_probs.size(0), 2 * longest + 1)

    def _operand(self, operand: Any, assumptions: list[Assumption], func: Any) -> Any:
        if not isinstance(operand, torch.Tensor):
            return operand
        if operand.numel() > LARGEST:
            raise NotImplementedError(f"{func._schema.name}: {operand.numel()} elements are too many")
        value, assumption = self._value(operand)
        if assumption is not None:
            assumptions.append(assumption)
            # All elements differ, which is the upper bound for an operator that removes duplicates.
            if func in DISTINCT:
                return torch.arange(operand.numel(), device="cpu").view(operand.shape)
        return value

    def _on_meta(
        self, result: torch.Tensor, value: torch.Tensor | None, assumptions: list[Assumption]
    ) -> torch.Tensor:
        tensor = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
        nbytes = result.untyped_storage().nbytes()
        if nbytes > tensor.untyped_storage().nbytes():  # `unique_consecutive` shrinks its input's size
            whole = torch.empty(nbytes // result.element_size(), dtype=result.dtype, device="meta")
            tensor = whole.resize_(result.shape)
        if value is not None:
            self._shadows.set(tensor, value, assumptions[0] if assumptions else None)
        return tensor

    def _log(self, answer: Hashable) -> None:
        if CodeLine.of_stack() is not None:
            self.answers[-1].append(answer)

    def _note_result(self, answer: Hashable, assumptions: list[Assumption]) -> None:
        if assumptions:
            self._warn_of(assumptions[0])
        else:
            self._log(answer)

    # ---- values ------------------------------------------------------------------------------------------

    def _value(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Assumption | None]:
        """Return a tensor's values as tracked on the CPU, and the assumption behind them; all ones if they
        are unknown.
        """
        if not tensor.is_meta:
            return tensor, Assumption.NUMBER if self._shadows.is_unsure(tensor) else None
        view = self._shadows.of(tensor)
        if view is not None:
            try:
                return view.tensor(), view.shadow.assumption
            except NotFollowed:
                pass
        # The same assumptions as in `assumed.py`: conditions are true, numbers are 1.
        ones = torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")
        return ones, Assumption.MASK if tensor.dtype is torch.bool else Assumption.NUMBER

    def _warn_of(self, assumption: Assumption, *, deferred: bool = False) -> None:
        """Add the warning about an assumed value; with `deferred`, only note that the value is assumed."""
        if deferred:
            self._deferred = True
            return
        line = CodeLine.of_stack()
        # A read of the training loop (`asker.py`) changes no allocation.
        if line is None:
            return
        if (question := (assumption, line.frame.f_code)) not in self._told:
            self._told.add(question)
            self._doubt(f"{assumption}{line}.")
        site = self._call(), line.frame.f_code, line.line
        self._asked[site] += 1
        # No assumption ends a loop such as `while p < 1`.
        if self._asked[site] > MAX_READS_PER_LINE:
            raise RehearsalError(
                f"The step has a loop that depends on weights or random numbers{line}: it read such a "
                f"value {MAX_READS_PER_LINE:,} times in one call of its module. A prediction does not know "
                "these values. Measure the step instead, with snugfit measure."
            )

    # ---- steps -------------------------------------------------------------------------------------------

    def next_batch(self) -> None:
        """Start a new micro-batch. Later reads of tensor values belong to it."""
        # The limit is for one call of a module, so it starts again with each micro-batch.
        self._asked.clear()
        if self.answers[-1]:
            self.answers.append([])

    @property
    def vary(self) -> bool:
        """True if the model's code read different values in two micro-batches, so that a step may not repeat
        the previous one.
        """
        batches: Iterator[list[Hashable]] = (answers for answers in self.answers if answers)
        first = next(batches, None)
        return any(answers != first for answers in batches)


@contextlib.contextmanager
def numbers_watched(
    questions: ValueReads, shadows: Shadows, count_copy: Callable[[], None]
) -> Iterator[None]:
    """Context in which the simulation follows numbers that pass between torch and plain Python without an
    operator.

    Numbers pass from torch to Python by `.item()`, `.tolist()`, `.numpy()` and formatting. `torch.tensor` of
    numbers creates a tensor on `meta`, and the numbers are tracked on the CPU. On a GPU, torch copies them
    from the host, so `count_copy` is called. For lists in an index, see `lists_in_index` in `asker.py`.
    """
    item, tolist, numpy = torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy
    show, make = torch.Tensor.__format__, torch.tensor

    def read_and(read: Callable[..., Any]) -> Callable[..., Any]:
        def read_numbers(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
            questions.read(tensor)
            return read(tensor, *arguments, **keywords)

        return read_numbers

    def read_one(tensor: torch.Tensor) -> Any:
        plain = not tensor.is_meta and not shadows.is_unsure(tensor)  # an optimizer's step counters
        return item(tensor) if plain else questions.item_of(tensor, item)

    def make_with_shadow(data: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
        data = _numbers_of(data) if isinstance(data, (list, tuple)) else data
        tensor: torch.Tensor = make(data, *arguments, **keywords)
        # Operators read a number that stays on the host as an argument.
        if tensor.is_meta and tensor.numel() and keywords.get("device") is not None:
            count_copy()
        if any(isinstance(element, AssumedFloat) for element in (data if isinstance(data, list) else [data])):
            if not tensor.is_meta:
                shadows.set_unsure(tensor)
        elif tensor.is_meta and not isinstance(data, torch.Tensor):
            shadows.set(tensor, make(data, dtype=tensor.dtype, device="cpu"))
        return tensor

    def show_number(tensor: torch.Tensor, format_spec: str) -> str:
        if tensor.is_meta and tensor.dim() == 0:  # formatted like a tensor on a device, not on `meta`
            # On `meta`, torch prints no number; on a device it prints the value.
            return format(tensor.detach().item(), format_spec)
        text: str = show(tensor, format_spec)  # type: ignore[no-untyped-call]
        return text

    # Otherwise a later call would cache the replaced `torch.tensor`, and the real one would no longer follow
    # the device.
    _device_constructors()
    methods: Any = {"item": read_one, "tolist": read_and(tolist), "numpy": read_and(numpy)}
    with (
        patch.multiple(torch.Tensor, **methods, __format__=show_number),
        patch.object(torch, "tensor", make_with_shadow),
    ):
        yield


def _numbers_of(data: list[Any] | tuple[Any, ...]) -> list[Any]:
    """Return nested lists of numbers with scalar tensors on `meta` replaced by their values. The recorder
    would not see torch read these.
    """
    return [
        _numbers_of(element)
        if isinstance(element, (list, tuple))
        else element.item()
        if isinstance(element, torch.Tensor) and element.is_meta and not element.dim()
        else element
        for element in data
    ]
