"""Detection of the tensors of a batch that contain samples, and of their sample dimension, for every training
loop.

A prediction repeats the samples of an example until there is a batch of the job's size. A recipe and a
recovery cut a batch into micro-batches. Only tensors that contain samples may be cut or repeated. The first
dimension of some tensors is not that of samples: a graph's edges, a table, the patches of all pictures.

The rule applies to the tensors (and lists) of a batch, and to those in nested mappings by their dotted names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from snugfit.errors import JobError

BatchDims = Mapping[str, int | None]
"""Type of a map from a tensor's name to its dimension of samples. None marks a tensor that each micro-batch
gets whole.
"""


SAMPLE_TENSORS = ("labels", "input_ids")
"""Names of tensors whose first dimension is that of samples in every model of transformers."""


class SampleRows(NamedTuple):
    """Dimension along which a tensor's samples follow each other, and number of rows of each sample."""

    dimension: int
    """Index of the dimension along which samples follow each other."""
    per_sample: int
    """Number of consecutive indices of that dimension that belong to one sample."""


def leaves(batch: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each tensor or other value of a nested batch, with its dotted name."""
    for name, value in batch.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + str(name), value


def map_leaves(
    batch: Mapping[str, Any], change: Callable[[str, Any], Any], prefix: str = ""
) -> dict[str, Any]:
    """Return a nested batch in which `change(dotted name, value)` replaces each tensor or other value."""
    return {
        name: map_leaves(value, change, f"{prefix}{name}.")
        if isinstance(value, Mapping)
        else change(prefix + str(name), value)
        for name, value in batch.items()
    }


@dataclass(frozen=True)
class BatchLayout:
    """Sample dimension of each tensor, for all batches with the same tensors as one example batch."""

    samples: int
    """Number of samples in the example batch; 1 if no tensor has a dimension of samples."""

    rows: Mapping[str, SampleRows]
    """Dimension of samples of each tensor that has one, by the tensor's name."""

    unclear: Mapping[str, int]
    """Length of each tensor for which it is unclear if it contains samples, by name."""

    @classmethod
    def of(
        cls, example: Mapping[str, Any], named: BatchDims | None = None, *, samples: int | None = None
    ) -> Self:
        """Return the layout of batches like `example`: the sample dimension of each tensor. `named` are
        dimensions that the user gave, `samples` is the job's batch size, if known.

        Raises `JobError` for a name or a dimension that the example does not have.
        """
        # Other values have no rows, so each micro-batch gets them whole.
        named, tensors = named or {}, {name: value for name, value in leaves(example) if _has_rows(value)}
        # An entry of `batch_dims` determines the dimension of its tensor; None means that it is never split.
        dimensions = {name: _dimension(tensors, name, at) for name, at in named.items() if at is not None}
        sizes = {name: _length(value, 0) for name, value in tensors.items() if name not in named}
        named_sizes = {name: _length(tensors[name], at) for name, at in dimensions.items()}
        count = _count(sizes, named_sizes, samples)
        for name, size in named_sizes.items():
            # A tensor whose length is a multiple of the samples has several rows for each (the patches of an
            # image).
            if size % count:
                raise JobError(
                    f"batch_dims names dimension {named[name]} of {name!r}, which has {size} rows "
                    f"there, which is not a multiple of the {count} samples of the example batch. Name "
                    "another dimension, or None for a tensor that is never cut."
                )
        rows = {name: SampleRows(at, named_sizes[name] // count) for name, at in dimensions.items()}
        holds = {name for name, size in sizes.items() if size == count}
        return cls(
            samples=count,
            rows=rows | {name: SampleRows(0, 1) for name in holds},
            # Unclear tensors are passed whole. If the batch must be split or repeated, they are refused.
            unclear={name: size for name, size in sizes.items() if name not in holds},
        )

    def count(self, batch: Mapping[str, Any]) -> int:
        """Return the number of samples in this batch, from the size of its sample dimension."""
        lengths = [
            _length(value, self.rows[name].dimension) // self.rows[name].per_sample
            for name, value in leaves(batch)
            if name in self.rows and _has_rows(value)
        ]
        return max(lengths, default=1)

    def part(self, batch: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
        """Return a batch with the samples from `start` up to, not including, `stop`. Tensors without samples
        are passed whole.
        """

        def cut(name: str, value: Any) -> Any:
            if name not in self.rows or not _has_rows(value):
                return value
            dimension, rows = self.rows[name]
            window = slice(start * rows, stop * rows)
            return value[(slice(None),) * dimension + (window,)] if dimension else value[window]

        return map_leaves(batch, cut)

    def join(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Join these micro-batches into one batch. Tensors without samples are taken from the first one."""
        import torch

        parts = [dict(leaves(sample)) for sample in samples]

        def concatenate(name: str, value: Any) -> Any:
            if name in self.rows and isinstance(value, list):
                return [item for part in parts for item in part[name]]
            if name not in self.rows or not torch.is_tensor(value):
                return value
            return torch.cat([part[name] for part in parts], dim=self.rows[name].dimension)

        return map_leaves(samples[0], concatenate)

    def refuse_unclear(self, purpose: str, cure: str = "") -> None:
        """Raise `JobError` for an example batch whose tensors with samples are unclear. The message shows the
        argument that names them.
        """
        if not self.unclear:
            return
        known = {name: self.samples * rows.per_sample for name, rows in self.rows.items()}
        lengths = ", ".join(f"{name} {length}" for name, length in {**known, **self.unclear}.items())
        dims = ", ".join(f"{name!r}: None" for name in self.unclear)
        by_name = (
            f"Name them: Model.from_module(module, example, batch_dims={{{dims}}}), with None for a tensor "
            "that is never cut, and a number for the dimension of its samples."
        )
        raise JobError(
            f"{purpose}, but it is not clear which tensors of the batch contain its samples: their lengths "
            f"are {lengths}. {cure or by_name}"
        )


def _count(sizes: Mapping[str, int], named: Mapping[str, int], samples: int | None) -> int:
    """Return the number of samples in an example batch: from named dimensions, a size common to all tensors,
    or labels and token ids.
    """
    lengths = set(named.values()) or set(sizes.values())
    # The number of samples is the shortest named dimension, or the only length.
    if named or len(lengths) == 1:
        return max(1, min(lengths))
    # Labels or token ids determine the number of samples. Otherwise the job does, if a tensor is as long as
    # its batch.
    known = next((sizes[name] for name in SAMPLE_TENSORS if name in sizes), samples)
    return known if known and known in lengths else 1


def _dimension(tensors: Mapping[str, Any], name: str, dimension: int) -> int:
    """Return the dimension of a tensor that a user named, as an index of at least 0. Raises `JobError` if
    there is none."""
    if name not in tensors:
        raise JobError(
            f"batch_dims names {name!r}, which is not a tensor with dimensions in the example batch. It "
            f"has: {', '.join(tensors) or 'none'}. Name one of these."
        )
    ndim = getattr(tensors[name], "ndim", 1)
    if not isinstance(dimension, int) or isinstance(dimension, bool) or not -ndim <= dimension < ndim:
        raise JobError(
            f"batch_dims gives {dimension!r} for {name!r}; allowed are a dimension from 0 to {ndim - 1}, "
            "and None for a tensor that is never cut."
        )
    return dimension % ndim


def _has_rows(value: Any) -> bool:
    return getattr(value, "ndim", 0) > 0 or isinstance(value, list)


def _length(value: Any, dimension: int) -> int:
    return len(value) if isinstance(value, list) else int(value.shape[dimension])
