"""`snugfit gpus --for MODEL --gpus 1..64`: of each kind of GPU, how many train the job, and how many are the
cheapest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from snugfit.errors import NothingFits, UsageError

if TYPE_CHECKING:
    from snugfit.cli.request import Request
    from snugfit.job.gpu import Gpu
    from snugfit.planning.fleet.prices import Prices


def show_cards(request: Request, gpus: Sequence[Gpu], prices: Prices, asked: Mapping[str, Any]) -> int:
    """Prints the answers for these kinds of GPU, remembered or searched for."""
    from snugfit.cli.plan import read_counts
    from snugfit.cli.plan_cache import answer
    from snugfit.cli.request import steps_of
    from snugfit.planning.fleet.cards import CardPlans, document_of_cards
    from snugfit.planning.fleet.search_cards import plan_cards
    from snugfit.report.plan.cards import render
    from snugfit.report.text.page import print_as

    _refuse(request, asked)
    steps = steps_of(asked["samples"], asked["steps"], request.job.batch_size)
    question: dict[str, Any] = {
        "fidelity": asked["fidelity"],
        "keep": request.keep,
        "free": request.free,
        "headroom": request.headroom,
    }
    counts = read_counts(asked["gpus"] or str(request.gpus))
    plans = answer(
        CardPlans.from_json,
        lambda tell: plan_cards(
            request.job, gpus, counts=counts, workers=asked["workers"], tell=tell, **question
        ),
        request.job,
        *gpus,
        fresh=asked["fresh"],
        what="cards",
        gpus=counts,
        **question,
    )
    plans = replace(plans, objective=asked["objective"], steps=steps)
    document = {**plans.to_json(), "run": document_of_cards(plans, prices)}
    print_as("json" if asked["as_json"] else asked["form"], document, render(plans, prices))
    return 0 if plans.fitting else NothingFits.exit_code


def _refuse(request: Request, asked: Mapping[str, Any]) -> None:
    """Raises `UsageError` for what is asked of single GPUs only."""
    alone = {"html": asked["html"], "plot": asked["plot"], "objective memory": asked["objective"] == "memory"}
    if given_alone := [f"--{flag}" for flag, value in alone.items() if value]:
        raise UsageError(f"`gpus` with --gpus does not take {', '.join(given_alone)}. Leave it out.")
    request.refuse_recipe_and_loop()
