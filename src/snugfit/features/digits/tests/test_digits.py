"""The pictures that ship with the package, and the job that learns them."""

from __future__ import annotations

from collections import Counter

from in_roster import needs_task
from snugfit.features.digits import digits, digits_job, digits_model

needs_task("image-classification")


def test_every_digit_is_in_both_parts() -> None:
    train, test = digits()
    assert (len(train), len(test)) == (1198, 599)
    for part in (train, test):
        counts = Counter(int(sample["labels"]) for sample in part)
        assert set(counts) == set(range(10))
        assert min(counts.values()) > 0.08 * len(part)
    picture = train[0]["pixel_values"]
    assert (tuple(picture.shape), float(picture.min())) == ((1, 8, 8), 0.0)
    assert max(float(sample["pixel_values"].max()) for sample in train) == 1.0


def test_the_model_takes_a_picture() -> None:
    (sample, *_), _ = digits()
    found = digits_model()(pixel_values=sample["pixel_values"][None])
    assert found.logits.shape == (1, digits_job().labels)
