"""Batches drawn from lengths: transformers' own grouping, and invariants of every draw."""

from __future__ import annotations

import numpy as np
import pytest

from snugfit.errors import JobError
from snugfit.features.lengths.dataset import Lengths
from snugfit.features.lengths.padding import MULTIPLES, ORDERS, draw, group_by_length

LONG_TAIL = Lengths.of(
    np.clip(np.random.default_rng(3).lognormal(4.2, 0.8, 1500).astype(int), 3, 500).tolist()
)


@pytest.mark.parametrize(("samples", "batch"), [(10, 4), (37, 4), (200, 8), (1003, 5), (64, 64)])
def test_grouping_is_that_of_transformers(samples: int, batch: int) -> None:
    """Compare the order with `get_length_grouped_indices` on the same random order, sample by sample.

    All lengths differ, because transformers orders equal lengths by their indices.
    """
    import torch
    from transformers.trainer_pt_utils import get_length_grouped_indices

    lengths = np.random.default_rng(samples).permutation(np.arange(1, samples + 1))
    together = min(samples // (batch * 4), 50) or 1
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(7))
    theirs = get_length_grouped_indices(lengths.tolist(), batch, generator=torch.Generator().manual_seed(7))
    ours = group_by_length(lengths[order.numpy()], batch, together)
    assert ours.tolist() == lengths[theirs].tolist()


@pytest.mark.parametrize("order", ORDERS)
def test_one_length_is_one_batch_whatever_the_order(order: str) -> None:
    drawn = draw(Lengths.of({64: 100}), batch_size=8, micro_batches=2, order=order)
    assert set(drawn.padded_to(1).ravel()) == set(drawn.padded_to(64).ravel()) == {64}
    assert [drawn.padding(multiple) for multiple in MULTIPLES] == [0, 0, 0]
    assert (drawn.shortest == 64).all()


@pytest.mark.parametrize("pieces", [1, 4])
def test_rounding_up_never_takes_tokens_away_and_grouping_never_adds_any(pieces: int) -> None:
    drawn = {order: draw(LONG_TAIL, batch_size=16, micro_batches=pieces, order=order) for order in ORDERS}
    for each in drawn.values():
        padded = [each.padded_to(multiple) for multiple in MULTIPLES]
        assert (padded[0] >= each.longest).all()
        assert (padded[1] >= padded[0]).all()
        assert (padded[2] >= padded[1]).all()
    for multiple in MULTIPLES:
        tokens = [drawn[order].padded_to(multiple).mean() for order in ("grouped", "random", "fixed")]
        assert tokens[0] < tokens[1] < tokens[2]


def test_a_batch_is_as_long_as_its_longest_sample() -> None:
    """Compare with padding counted by hand, in a draw of micro-batches of two."""
    drawn = draw(Lengths.of([2, 2, 2, 9]), batch_size=4, micro_batches=2, order="random")
    assert drawn.samples == 2
    assert sorted(drawn.longest[0].tolist()) == [2, 9]
    assert sorted(drawn.tokens[0].tolist()) == [4, 11]
    assert drawn.padding(1) == pytest.approx(7 / 22)
    assert drawn.padding(8) == pytest.approx(1 - 15 / (2 * 8 + 2 * 16))


def test_smaller_micro_batches_pad_less() -> None:
    whole, cut = (draw(LONG_TAIL, batch_size=16, micro_batches=m, order="random") for m in (1, 8))
    assert cut.padding(1) < whole.padding(1)


def test_the_longest_sample_is_met_and_the_first_to_be_when_grouped() -> None:
    drawn = draw(LONG_TAIL, batch_size=16, micro_batches=1, order="grouped")
    assert drawn.longest[0, 0] == LONG_TAIL.longest
    assert draw(LONG_TAIL, batch_size=16, micro_batches=1, order="random").longest.max() == LONG_TAIL.longest


def test_a_draw_can_be_had_again() -> None:
    once, again = (draw(LONG_TAIL, batch_size=8, micro_batches=2, order="random") for _ in range(2))
    other = draw(LONG_TAIL, batch_size=8, micro_batches=2, order="random", seed=1)
    assert (once.longest == again.longest).all()
    assert (once.longest != other.longest).any()


def test_a_dataset_of_a_billion_is_drawn_from() -> None:
    """A histogram gives the same shares, and a draw includes the longest length, although it is rare."""
    drawn = draw(Lengths.of({10: 10**9, 20: 10**9, 99: 1}), batch_size=64, micro_batches=1, order="random")
    assert drawn.longest.max() == 99
    assert drawn.tokens.sum() / (drawn.tokens.size * 64) == pytest.approx(15, rel=0.01)


def test_fewer_samples_than_a_batch_are_refused() -> None:
    with pytest.raises(JobError, match=r"3 lengths, but a global batch has 4 samples"):
        draw(Lengths.of([1, 2, 3]), batch_size=4, micro_batches=1, order="random")
