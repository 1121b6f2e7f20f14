"""`snugfit plan --gpus`: how many GPUs should train together, and with which recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from snugfit.errors import NothingFits, UsageError

if TYPE_CHECKING:
    from snugfit.cli.request import Request

WRITE = "Write a number (8), several (2,4,8), or a range of powers of two (1..64)."


def plan_gpus(
    request: Request,
    text: str,
    how: dict[str, Any],
    refused: Mapping[str, object],
    workers: int | None,
    form: str,
    objective: str,
    *,
    fresh: bool,
) -> int:
    """Prints the plan for the numbers of GPUs in `text`. Raises `UsageError` for options that are `refused`
    beside several GPUs, and for what no such plan takes."""
    from snugfit.cli.plan_cache import answer
    from snugfit.planning.several_gpus.plan import SeveralGpusPlan
    from snugfit.planning.several_gpus.search import plan_several_gpus
    from snugfit.report.plan.several_gpus import render
    from snugfit.report.text.page import print_as

    given = [flag for flag, value in refused.items() if value]
    if given:
        raise UsageError(f"A plan with --gpus does not take {', '.join(given)}. Leave it out.")
    if objective == "memory":
        raise UsageError(
            "A plan with --gpus finds the fastest, the fewest and the cheapest. Leave --objective out."
        )
    request.refuse_recipe_and_loop()
    if request.software != "installed":
        raise UsageError("A plan is for the installed software only. Leave the software profile out.")
    if request.gpu is None:
        raise UsageError("A plan compares seconds, which need a GPU. Add --gpu NAME.")
    counts, gpu = read_counts(text), request.gpu
    asked = {"gpus": counts, "memory_bytes": request.memory_bytes, **how}
    made = answer(
        SeveralGpusPlan.from_json,
        lambda tell: plan_several_gpus(request.job, gpu=gpu, workers=workers, tell=tell, **asked),
        request.job,
        request.gpu,
        fresh=fresh,
        what="several gpus",
        **asked,
    )
    print_as(form, made.to_json(), render(made))
    return 0 if made.fitting else NothingFits.exit_code


def read_counts(text: str) -> list[int]:
    """The numbers of GPUs in what was written: `8`, `2,4,8` or `1..64`. Raises `UsageError`."""
    low, dots, high = text.partition("..")
    try:
        if dots:
            first, last = int(low), int(high)
            powers = [first * 2**power for power in range(17) if first * 2**power <= last]
            if not powers or first < 1:
                raise ValueError
            return powers
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--gpus {text!r} is no number of GPUs. {WRITE}") from None
