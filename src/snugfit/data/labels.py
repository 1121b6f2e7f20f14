"""Conversion of class labels to numbers, given as numbers, names, or numbers written as text.

Names are numbered in alphabetical order, which is the same on every machine and at every start. The dataset's
own order (a `ClassLabel`) goes first, and so does the order of a split that was read before. A label beyond
the job's classes would raise an index error on the device. It is refused here, with its row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from snugfit.errors import UsageError, did_you_mean
from snugfit.job.batch import IGNORED

if TYPE_CHECKING:
    import numpy as np

Where = Callable[[int], str]
"""The type of a function that returns the location of the n-th label in the dataset, for an error message."""

_WHOLE = re.compile(r"[+-]?[0-9]{1,9}")
_KINDS = {int: "a number", str: "text"}


def class_numbers(
    values: Sequence[Any], location: Where, *, labels: int, names: Sequence[str] = (), ignored: bool = False
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the class number of each of N values, (N) of int64, and the names of the classes.

    With `ignored`, -100 is allowed and means no label. Raises `UsageError` for a value that is no class of
    the job.
    """
    import numpy as np

    known = [_number_or_name(_scalar(value), location, index) for index, value in enumerate(values)]
    names = _names(known, location, tuple(names), labels)
    number_of = {name: number for number, name in enumerate(names)}
    if any(type(value) is str for value in known) and not names:  # these are numbers as text
        known = [int(value) for value in known]
    for index, value in enumerate(known):
        if type(value) is str and value not in number_of:
            raise UsageError(
                f"{location(index)}: label {value!r} is not one of "
                f"{', '.join(names[:12])}{', ...' if len(names) > 12 else ''}.{did_you_mean(value, names)} "
                "These are the classes of the training data. Correct the label, or add a sample of it there."
            )
    classes = [number_of[value] if isinstance(value, str) else value for value in known]
    most = np.iinfo(np.int64).max
    for index, value in enumerate(classes):
        if abs(value) > most:
            raise UsageError(
                f"{location(index)}: label {_bit_count(value)}; {_class_range(labels)} Correct the label."
            )
    numbers = np.array(classes, dtype=np.int64)
    _refuse_out_of_range(numbers, location, labels, ignored)
    return numbers, names or tuple(str(number) for number in range(labels))


def one_order(named: Sequence[str], in_dataset: Sequence[str], source: str) -> tuple[str, ...]:
    """Return the names of the classes in the order of their numbers, from `named`, or `in_dataset` of the
    dataset. Raises `UsageError` if the two disagree: the dataset's numbers would mean other classes.
    """
    # Class names of a training split may be the numbers themselves. They contradict no order.
    numbers = tuple(str(number) for number in range(len(named)))
    if named and in_dataset and tuple(named) not in (tuple(in_dataset), numbers):
        raise UsageError(
            f"{source}: its classes are {', '.join(in_dataset[:8])}, in this order, but the training data "
            f"has {', '.join(named[:8])}. Use the same order in both splits (datasets: cast_column)."
        )
    return tuple(named) or tuple(in_dataset)


def regression_values(values: Sequence[Any], location: Where) -> np.ndarray:
    """Return the targets of a regression, (N) of fp32. Raises `UsageError` for a value that is no finite
    number.
    """
    import numpy as np

    return np.array(
        [_finite(_scalar(value), location, index) for index, value in enumerate(values)], dtype=np.float32
    )


def _scalar(value: Any) -> Any:
    """Return the number in an array or tensor without dimensions, and any other value unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _finite(value: Any, location: Where, index: int) -> float:
    try:
        number = float(value) if isinstance(value, Real | str) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(
            f"{location(index)}: label {value!r:.40} is not a finite number. A job with one label is a "
            "regression; for classes set labels to 2 or more."
        )
    return number


def _number_or_name(value: Any, location: Where, index: int) -> int | str:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real) and float(value).is_integer():
        return int(float(value))
    hint = ""
    if isinstance(value, Real):
        hint = " For a regression set labels: 1."
    elif isinstance(value, list):
        hint = " Several labels per sample are not supported."
    raise UsageError(
        f"{location(index)}: label {value!r:.40} is neither the number nor the name of a class.{hint}"
    )


def _names(known: list[int | str], location: Where, named: tuple[str, ...], labels: int) -> tuple[str, ...]:
    """Return the class names in the order of their numbers: given ones, or the labels' names in alphabetical
    order. Empty if all labels are numbers.
    """
    # In reverse order, so that the dict keeps the first index of each type.
    kinds = {type(value): index for index, value in reversed(list(enumerate(known)))}
    if len(kinds) > 1:
        (one, first), (last, second) = sorted(kinds.items(), key=lambda kind: kind[1])
        raise UsageError(
            f"{location(first)}: its label is {_KINDS[one]}, and that of {location(second)} is "
            f"{_KINDS[last]}. "
            "Labels must be all numbers or all names."
        )
    if len(named) > labels:
        raise UsageError(
            f"The dataset has {len(named)} classes "
            f"({', '.join(named[:8])}{', ...' if len(named) > 8 else ''}), but the job has {labels} "
            f"labels. Set labels: {len(named)}."
        )
    if named or str not in kinds:
        return named
    words = [str(value) for value in known]
    if all(_WHOLE.fullmatch(word) for word in words):
        return ()
    names = sorted(set(words))
    if len(names) > labels:
        raise UsageError(
            f"{location(words.index(names[labels]))}: there are {len(names)} different labels "
            f"({', '.join(names[:8])}{', ...' if len(names) > 8 else ''}), but the job has {labels}. Set "
            f"labels: {len(names)}."
        )
    return tuple(names)


def _refuse_out_of_range(numbers: np.ndarray, location: Where, labels: int, ignored: bool) -> None:
    import numpy as np

    wrong = (numbers < 0) | (numbers >= labels)
    if ignored:
        wrong &= numbers != IGNORED
    if not wrong.any():
        return
    index = int(np.flatnonzero(wrong)[0])
    number, most = int(numbers[index]), int(numbers.max())
    hint = f" Set labels: {most + 1}."
    if number < 0:
        hint = " A test set with secret labels has -1 for each." if number == -1 else ""
    # These labels are numbered from 1, not from 0.
    elif most == labels and int(numbers[~wrong].min(initial=most)) > 0:
        hint = f" Classes count from 0. Subtract 1 from each label, or set labels: {most + 1}."
    raise UsageError(f"{location(index)}: label {number}; {_class_range(labels)}{hint}")


def _class_range(labels: int) -> str:
    return f"the job has {labels} labels, 0 to {labels - 1}."


def _bit_count(number: int) -> str:
    """Describe a number of more than 64 bits by its bit count: Python refuses to print 5,000 digits."""
    return f"a number of {number.bit_length():,} bits"
