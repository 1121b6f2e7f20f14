"""Comparison of an evaluation's outputs with those of the plain model in fp32, after its bytes and seconds
were read.

The plain model has the same random weights, since it is built after the same seed. Weights of 16 bits are
copied to fp32, so that the error is that of the recipe and of the dtype together.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from snugfit.errors import one_line

if TYPE_CHECKING:
    from snugfit.step.step import Outputs, Step


def results_of(step: Step, seed: int) -> dict[str, Any]:
    """Return the results of an evaluation by name, with its largest error and whether its token ids are
    equal.

    A training step has no results, and an evaluation with the plain recipe is not compared.
    """
    from snugfit.step.plain_loop import PlainStep
    from snugfit.techniques.setup import Setup

    if step.job.trains or not isinstance(step, PlainStep) or step.setup == Setup():
        return step.results
    return {**step.results, **_comparison(step, seed)}


def _comparison(step: Any, seed: int) -> dict[str, Any]:
    """Return the differences of a step's outputs to the plain model's, or the reason why they could not be
    compared.

    The model of the step is deleted, because the plain one needs its memory.
    """
    try:
        own = _outputs(step, seed)
        step.model = None
        gc.collect()
        plain = _outputs(_plain_step(step, seed), seed)
    # An output may have another shape, and two models may not fit.
    except Exception as error:
        return {"not_compared": f"{type(error).__name__}: {one_line(error, 300)}"}
    if own.values.shape != plain.values.shape:
        return {"not_compared": f"outputs {list(own.values.shape)}, plain {list(plain.values.shape)}"}
    return {
        "largest_error": float((own.values - plain.values).abs().max()),
        "ids_equal": own.ids.shape == plain.ids.shape and bool((own.ids == plain.ids).all()),
    }


def _plain_step(step: Any, seed: int) -> Any:
    """Return a step of the plain recipe for the same job, with the model built and its weights in fp32."""
    import torch

    from snugfit.step.open_step import open_step
    from snugfit.step.step import Observer
    from snugfit.techniques.setup import Setup

    torch.manual_seed(seed)
    plain: Any = open_step(step.job, Setup(), "plain", step.device)
    plain.run(0, Observer())
    plain.model.float()
    return plain


def _outputs(step: Any, seed: int) -> Outputs:
    """Return the outputs of a step, whose model is built, for its first batch, on the host and in fp32."""
    import torch

    torch.manual_seed(seed)
    own: Outputs = step.outputs()
    return own._replace(values=own.values.float().cpu(), ids=own.ids.cpu())
