"""A small data set that ships with snugfit: handwritten digits, 1,797 pictures of 8 x 8 grey levels.

It shows that training reduces the loss under a recipe. Tests train every recipe on it, and a first try needs
no other data.

`digits.csv.gz` has the test set of the "Optical Recognition of Handwritten Digits" data, one picture per
line. A line has 64 grey levels from 0 to 16, row after row, then the digit. Source: E. Alpaydin and C. Kaynak
(1998), UCI Machine Learning Repository, https://doi.org/10.24432/C50P49, licensed CC BY 4.0. The file is the
one of scikit-learn 1.9.1 (sklearn/datasets/data/digits.csv.gz), unchanged.
"""

from __future__ import annotations

import gzip
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snugfit.job.job import Job

EVALUATED = 3
"""Interval of the pictures for evaluation: every third one, so that each writer is in both parts of the
dataset. These are 599 pictures; one in a hundred is six of them."""

BRIGHTEST = 16

Pictures = list[dict[str, Any]]
"""The type of the pictures: dicts with `pixel_values` (1, 8, 8) in fp32 from 0 to 1, and `labels`, the digit.
"""


def digits() -> tuple[Pictures, Pictures]:
    """Return 1,198 pictures for training and 599 for evaluation."""
    import numpy as np
    import torch

    with gzip.open(files(__name__).joinpath("digits.csv.gz").open("rb"), "rt", encoding="ascii") as lines:
        table = np.loadtxt(lines, delimiter=",", dtype=np.float32)
    pictures = torch.from_numpy(table[:, :64]).reshape(-1, 1, 8, 8) / BRIGHTEST
    samples = [
        {"pixel_values": picture, "labels": torch.tensor(int(digit))}
        for picture, digit in zip(pictures, table[:, 64], strict=True)
    ]
    evaluated = samples[EVALUATED - 1 :: EVALUATED]
    return [sample for number, sample in enumerate(samples, start=1) if number % EVALUATED], evaluated


def digits_job(**more: Any) -> Job:
    """Return a job that trains a ViT of two layers, with a picture as four patches.

    It classifies 96 of 100 pictures correctly after 100 steps, in two seconds on a CPU. It is small because
    half precision is slow on a CPU. Every matrix of its layers has 4,096 values, the fewest that an 8-bit
    optimizer packs. Gradients are not clipped. Clipping by a common norm makes runs with different rounding
    diverge faster, as far as two seeds.
    """
    from snugfit.job.job import Job, Task
    from snugfit.job.model import Model

    facts = {
        "model_type": "vit",
        "image_size": 8,
        "patch_size": 4,
        "num_channels": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": 0.14,
    }
    model = Model.from_config(facts, name="digits-vit")
    settings = {"batch_size": 128, "labels": 10, "learning_rate": 5e-3, **more}
    return Job(model=model, task=Task("image-classification"), **settings)


def digits_model() -> Any:
    """Return the model of `digits_job` with random weights, for a Trainer or a loop of your own."""
    from snugfit.job.build import instantiate

    job = digits_job()
    return instantiate(job, dtype="float32", attention="sdpa").train()
