"""A batch without its padding: its sequences one after the other in one row.

A model of transformers with (B, S) tokens and a mask gets (1, N) instead. These are the N tokens without
padding, with their positions, and the ends of the sequences (`cu_seq_lens_q`, as in transformers' own
`DataCollatorWithFlattening`).

snugfit's own loop makes rows on the host, where the mask is, so no copy waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from snugfit.errors import RecipeError
from snugfit.features.kernels.attentions import PADDING_FREE
from snugfit.job.batch import FILL, IGNORED, REAL_VALUES
from snugfit.job.limits import OFFSET_BY_PADDING
from snugfit.step.applier import fill_multiple

if TYPE_CHECKING:
    import torch

UNSHIFTED_LABEL_SUFFIXES = ("ForMaskedLM", "ForTokenClassification")
"""Endings of transformers' class names of models that compare logits with the label of the same token."""

POOLED_HEAD_SUFFIX = "ForSequenceClassification"
"""Ending of transformers' class names of encoders whose head reads only a sequence's first token."""

COUNT = "sequence_count"
"""Argument for the number of a row's sequences that belong to the batch, without the filling."""

LENGTHS = 16
"""Largest number of distinct row lengths for which steps are captured as CUDA graphs (chosen). More take
longer to capture, and fewer need more filling. On average, filling is half of the distance between lengths, 3
% of the longest.
"""


@dataclass(frozen=True)
class RowRules:
    """A model's requirements for batches without padding, such as its position ids and labels."""

    shifts: bool = False
    """True if logits are compared with the label of the next token, as in causal language models."""
    pools_first: bool = False
    """True if the head reads only each sequence's first token, and each sequence has one label."""
    padding_token: int | None = None
    """Id of the padding token, for models that count positions from this id; None for others."""

    @classmethod
    def of(cls, model: Any) -> RowRules:
        """Return the requirements of a transformers model, also inside of adapters."""
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        name, config = type(base).__name__, getattr(base, "config", None)
        offset = getattr(config, "model_type", None) in OFFSET_BY_PADDING
        pools_first = name.endswith(POOLED_HEAD_SUFFIX)
        return cls(
            shifts=not name.endswith(UNSHIFTED_LABEL_SUFFIXES) and not pools_first,
            pools_first=pools_first,
            padding_token=config.pad_token_id if config is not None and offset else None,
        )


@dataclass(frozen=True)
class PaddedLengths:
    """The few lengths to which rows of concatenated sequences are padded, so that few tensor shapes occur."""

    multiple: int
    """Each row's length is a multiple of this number of tokens."""
    longest: int
    """Number of tokens in the longest possible sequence. If that is unknown, a batch may have longer ones."""

    def step(self, samples: int) -> int:
        """Return the number of tokens between two adjacent allowed row lengths for `samples` samples."""
        return -(-samples * self.longest // (LENGTHS * self.multiple)) * self.multiple


# ---- of the loop's own batches -----------------------------------------------------------------------------


def rows_of_step(loop: Any, model: Any, pieces: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a step's micro-batches as rows without padding, padded at the end if only few lengths are
    allowed.
    """
    # Sequences of a user's own model may have any length.
    longest = loop.job.sequence_length if loop.job.model.module is None else 1
    multiple = fill_multiple(loop)
    # A captured step (CUDA graph) needs few distinct lengths, so rows are filled up.
    return as_rows(pieces, RowRules.of(model), PaddedLengths(multiple, longest) if multiple else None)


def as_rows(
    pieces: Sequence[Mapping[str, Any]], rules: RowRules, filling: PaddedLengths | None = None
) -> list[dict[str, Any]]:
    """Return host micro-batches (B, S) as rows (1, N), with `filling` padded to one length. Batches that are
    rows already, or have no tokens, stay unchanged.
    """
    if not all("input_ids" in piece and "cu_seq_lens_q" not in piece for piece in pieces):
        return [dict(piece) for piece in pieces]
    if filling is None:
        return [without_padding(piece, rules)[0] for piece in pieces]
    # A batch may have longer sequences than the job.
    widest = max(piece["input_ids"].shape[1] for piece in pieces)
    filling = replace(filling, longest=max(filling.longest, widest))
    # Micro-batches with the same number of samples must have rows of equal length.
    most: dict[int, int] = {}  # tokens, by samples
    for piece in pieces:
        samples = len(piece["input_ids"])
        most[samples] = max(most.get(samples, 0), _token_count(piece))
    is_alone = len(pieces) == 1
    return [_filled_up(piece, rules, filling, most[len(piece["input_ids"])], is_alone) for piece in pieces]


def _token_count(piece: Mapping[str, Any]) -> int:
    mask = piece.get("attention_mask")
    return int(piece["input_ids"].numel() if mask is None else mask.ne(0).sum())


def _filled_up(
    piece: Mapping[str, Any], rules: RowRules, filling: PaddedLengths, most: int, is_alone: bool
) -> dict[str, Any]:
    """Return a micro-batch as a row padded to `most` tokens. The added tokens form sequences too, as many for
    each row of its length, and some of them empty. If the row `is_alone`, fewer tokens are added than the
    distance between two lengths.
    """
    import torch

    row, _ = without_padding(piece, rules)
    count, longest = row["input_ids"].shape[1], filling.longest
    step = filling.step(len(piece["input_ids"]))
    # Lengths are multiples of a step, so that few of them are captured.
    length = -(-most // step) * step
    more = -(-(step if is_alone else length) // longest)
    added = torch.arange(1, more + 1, dtype=torch.int32).mul_(longest).add_(count).clamp_(max=length)
    ends = torch.cat([row["cu_seq_lens_q"], added])
    row = {
        name: _change(value, partial(_lengthen, length=length, fill=FILL.get(name, 0)))
        if torch.is_tensor(value) and value.shape[:2] == (1, count)
        else value
        for name, value in row.items()
    }
    # The longest length is the same for all batches, because a captured step cannot change it.
    return {
        **row, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest
    }  # fmt: skip


def _lengthen(value: torch.Tensor, *, length: int, fill: int) -> torch.Tensor:
    """Return the tensor (1, N, ...) padded to (1, length, ...)."""
    import torch

    sides = [0, 0] * (value.dim() - 2) + [0, length - value.shape[1]]
    longer: torch.Tensor = torch.nn.functional.pad(value, sides, value=fill)
    return longer.pin_memory() if value.is_pinned() else longer


# ---- of any batch ------------------------------------------------------------------------------------------


def without_padding(batch: Mapping[str, Any], rules: RowRules) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Return a padded batch (B, S) as one row (1, N), with attention's arguments. The second result is the
    positions of its tokens among B * S, None without padding. Raises `RecipeError` for a mask that is not (B,
    S). It is also raised for a sequence without a token at its first position, which the head would read.
    """
    import torch

    shape = batch["input_ids"].shape
    mask = batch.get("attention_mask")
    _refuse_mask(mask, shape, rules)
    tokens = {
        name: value
        for name, value in batch.items()
        # Only tensors with one value per token are shortened. Sequence boundaries replace the mask.
        if name != "attention_mask" and torch.is_tensor(value) and value.shape[:2] == shape
    }
    # Otherwise a decoder would predict a sequence's first token from the previous sequence's last one.
    if rules.shifts and "labels" in tokens:
        tokens["labels"] = _change(tokens["labels"], partial(_unlabel_first, mask=mask))
    # On a device, the host waits here for the number of tokens.
    places = None if mask is None else mask.flatten().nonzero().flatten()  # (N,)
    rows = {name: _change(value, partial(_row, places=places)) for name, value in tokens.items()}
    ends, longest = _ends(shape, mask, batch["input_ids"].device)
    if "position_ids" not in rows:
        rows["position_ids"] = _positions(batch["input_ids"], places, rules)
    extra = {name: value for name, value in batch.items() if name not in tokens and name != "attention_mask"}
    bounds = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    # The head needs the number of sequences without the filling.
    counted = {COUNT: shape[0]} if rules.pools_first else {}
    return {**extra, **rows, **bounds, **counted}, places


def _refuse_mask(mask: torch.Tensor | None, shape: torch.Size, rules: RowRules) -> None:
    if mask is None:
        return
    if mask.shape != shape:
        raise RecipeError(
            f"{PADDING_FREE} takes a mask of the shape of input_ids, {tuple(shape)}, and was given "
            f"{tuple(mask.shape)}. Take 'sdpa' for such masks."
        )
    if rules.pools_first and not bool(mask[:, 0].all()):
        raise RecipeError(
            f"{PADDING_FREE}: the model reads the first token of each sequence, and of one of them that is "
            "padding. Pad on the right, or take 'sdpa'."
        )


def _change(value: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply the function `change` to a tensor, and in a simulation to the host's copy of its values."""
    result = change(value)
    if (real := getattr(value, REAL_VALUES, None)) is not None:
        setattr(result, REAL_VALUES, lambda: change(real()))
    return result


def _row(value: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    """Return the tokens at the positions `places` of (B, S, ...) as a row (1, N, ...); all of them for
    None.
    """
    flat = value.flatten(0, 1)
    row = (flat if places is None else flat[places]).unsqueeze(0)
    # A row of a page-locked batch must be page-locked too, or the host would wait for its copy.
    return row.pin_memory() if value.is_pinned() else row


def _unlabel_first(labels: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return labels (B, S) without the label of each sequence's first token, which no token predicts."""
    import torch

    if mask is None:
        first = torch.zeros_like(labels, dtype=torch.bool)
        first[:, :1].fill_(True)
    else:
        # The first unmasked token of each row, also with padding on the left.
        first = (mask.cumsum(1) == 1) & mask.bool()
    return labels.masked_fill(first, IGNORED)


def _ends(shape: torch.Size, mask: torch.Tensor | None, device: torch.device) -> tuple[torch.Tensor, int]:
    """Return offsets (B + 1,), int32, of the sequences in a row, and the largest number of tokens of one."""
    import torch

    batch, length = shape
    if mask is None:
        steps = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)
        return steps, length
    lengths = mask.sum(1, dtype=torch.int32)  # (B,)
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), int(lengths.max())


def _positions(ids: torch.Tensor, places: torch.Tensor | None, rules: RowRules) -> torch.Tensor:
    """Return the positions (1, N) that tokens had in their sequences (B, S), as the model counts them."""
    import torch

    batch, length = ids.shape
    if rules.padding_token is not None:
        counted = ids.ne(rules.padding_token).long()
        # These models count positions from the padding token's id, and skip padding.
        return _row(counted.cumsum(1) * counted + rules.padding_token, places)
    if places is not None:
        return places.remainder(length).unsqueeze(0)
    return torch.arange(length, device=ids.device).repeat(batch).unsqueeze(0)
