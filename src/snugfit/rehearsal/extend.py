"""The tape of a deep model from rehearsals of shallow ones: law 5, for layers.

Three models are rehearsed whole: three periods of layers, four and five. The score of five proves what was
read off the other two, and then the score of any number follows (`grow.py`). That pays for deep models, and
for the planner, which asks about one job under many recipes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from snugfit.errors import SnugfitError
from snugfit.rehearsal.depth import Depth, depth_of, span_period
from snugfit.rehearsal.grow import grown
from snugfit.rehearsal.rehearse import STEPS, rehearsed
from snugfit.rehearsal.repeat import fewer, repeated
from snugfit.rehearsal.score import Score
from snugfit.step.step import open_step

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.rehearsal.policy import Policy
    from snugfit.rehearsal.tape import Tape
    from snugfit.techniques.setup import Setup

PERIODS = 3
"""Periods of layers in the shallowest model: the first and the last may differ from those between."""


def extended(
    job: Job,
    setup: Setup,
    policy: Policy,
    *,
    loop: str = "plain",
    steps: int = STEPS,
    depth: Depth | None = None,
) -> Tape | None:
    """The tape that `rehearse` would write, from shallower models; None when the model's layers are not that
    regular, or not many enough to gain by it. `depth` is `depth_of(job, setup)`, if known already."""
    import torch

    depth = depth or depth_of(job, setup)
    if depth is None:
        return None
    checkpoint, spans = span_period(setup.checkpoint, depth.layers)
    setup = replace(setup, checkpoint=checkpoint)
    period = math.lcm(depth.period, spans)
    least = PERIODS * period + (depth.layers - PERIODS * period) % period
    periods = (depth.layers - least) // period
    if periods <= 2:
        return None
    short = fewer(job, setup, steps) if loop == "plain" else (job, setup, steps)
    scores = []
    for added in range(3):
        shallow = depth.shallower(short[0], least + added * period)
        step = open_step(shallow, short[1], loop, torch.device("meta"))
        try:
            scores.append(Score.of(*rehearsed(step, policy, short[2])))
        except SnugfitError:
            return None  # whatever it is, the whole rehearsal says it about the model that was asked about
    score = grown(scores, periods)
    if score is not None and short[1:] != (setup, steps):
        score = repeated(score, steps=steps, micro_batches=setup.micro_batches)
    return score.tape() if score is not None else None
