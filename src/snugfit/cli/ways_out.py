"""Changes with which a step fits, after an answer that it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from snugfit.cli.request import Request
from snugfit.results.ways_out import WaysOut

if TYPE_CHECKING:
    from collections.abc import Callable

    from snugfit.planning.plan import Plan
    from snugfit.results.prediction import Prediction
    from snugfit.techniques.technique import Fidelity, Slot, Technique


def with_ways_out(
    request: Request, predictions: Sequence[Prediction], *, fresh: bool = False
) -> list[Prediction]:
    """Return the predictions; if none of them fits, the first one has the changes with which the step would
    fit.

    For several GPUs there are none, and the report names the command of a plan instead.
    """
    first, *further = predictions
    # A search compares training steps, so it has no answer for a feature's phase.
    if any(one.fits is not False for one in predictions) or first.job.added_phase is not None:
        return [*predictions]
    if first.gpus > 1:
        return [replace(first, ways_out=WaysOut()), *further]
    named = {**{one.slot: one for one in first.recipe if not one.plain}, **request.named}
    return [replace(first, ways_out=_ways_out(first, named, fresh=fresh)), *further]


def with_ways_out_of_plan(plan: Plan, *, fresh: bool = False) -> Plan:
    """Return the plan; if nothing fits, it has the changes with which its nearest miss would fit."""
    if plan.fits or plan.gpu is None:
        return plan
    from snugfit.prediction.predict import predict
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.technique import Fidelity

    nearest = predict(plan.job, Recipe.parse(plan.nearest.recipe), gpu=plan.gpu)
    limited = replace(nearest, memory_bytes=plan.memory_bytes, headroom_bytes=plan.headroom_bytes)
    fixed = {slot.slot for slot in plan.kept}
    named = {one.slot: one for one in limited.recipe if one.slot in fixed}
    return replace(plan, ways_out=_ways_out(limited, named, beyond=Fidelity(plan.fidelity), fresh=fresh))


def _ways_out(
    prediction: Prediction,
    named: Mapping[Slot, Technique],
    *,
    beyond: Fidelity | None = None,
    fresh: bool,
) -> WaysOut:
    """Return the changes with which a step would fit, stored or computed."""
    from snugfit.cli.plan_cache import answer

    def compute(tell: Callable[[str], None]) -> WaysOut:
        from snugfit.planning.request import workers_of
        from snugfit.planning.search.ways_out import ways_out

        # With two workers, the changes for an 8B model are found within 20 seconds on two cores.
        return ways_out(prediction, keep=named, beyond=beyond, workers=workers_of(None), tell=tell)

    asked: dict[str, Any] = {
        "memory_bytes": prediction.memory_bytes,
        "headroom_bytes": prediction.headroom_bytes,
        "loop": prediction.loop,
        "software": prediction.software,
    }
    return answer(
        WaysOut.from_json,
        compute,
        prediction.job,
        prediction.gpu,
        fresh=fresh,
        first=f"looking for changes of '{prediction.recipe}' that fit",
        what="ways out",
        recipe=str(prediction.recipe),
        named=sorted(map(str, named)),
        beyond=beyond,
        gpus=[prediction.gpus],
        **asked,
    )
