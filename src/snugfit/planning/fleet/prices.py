"""Compute the price of a training run on each GPU, from the user's own prices per hour.

Prices differ by a factor of five between vendors, change weekly, and include different things (the host, the
disk, an hour begun). snugfit therefore contains no prices. The formula is

cost of a run = price of an hour x (seconds of start-up + steps x seconds of a step) / 3600

This omits the time to rent the machine, downloads of weights and data, and the vendor's rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from snugfit.errors import UsageError
from snugfit.job.gpu import find_gpu

if TYPE_CHECKING:
    from snugfit.planning.fleet.gpu_plans import GpuPlans, OnGpu

HOUR = 3600
SAMPLES = 1000
"""Number of samples to which a cost in USD refers."""

MAX_PRICE = 1e6
"""Largest accepted price of a GPU, in USD an hour."""


@dataclass(frozen=True)
class Prices:
    """The user's prices of GPUs: USD an hour, by the GPU's key."""

    per_hour: Mapping[str, float] = field(default_factory=dict)
    """Prices in USD an hour by key of the GPU, for the GPUs with a price from the user."""

    @classmethod
    def of(cls, given: Iterable[tuple[object, object]], location: str) -> Self:
        """Return the prices from pairs of a GPU's name and its price.

        Raises `UsageError`, whose message begins with `location`, for invalid prices. Raises `GpuError` for
        an unknown or ambiguous GPU name.
        """
        per_hour: dict[str, float] = {}
        for name, price in given:
            key = find_gpu(str(name), exact=True).key
            if key in per_hour:
                raise UsageError(
                    f"{location}: {key} has two prices, {per_hour[key]:g} and {price}. Keep one."
                )
            per_hour[key] = _price(price, f"{location}: {name}")
        return cls(per_hour)

    def with_(self, stronger: Prices) -> Prices:
        """Return these prices, but with the prices in `stronger` for GPUs that both contain."""
        return Prices({**self.per_hour, **stronger.per_hour})


def _price(value: object, gpu_name: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_PRICE:
        return float(value)
    raise UsageError(
        f"{gpu_name} costs {value!r}. A price must be a number above 0: USD per hour, such as 2.5."
    )


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Price of a training run on one GPU, in USD."""

    key: str
    """Key of the GPU in the table of GPUs, such as `H100-SXM`."""

    per_hour: float | None
    """Price of the GPU in USD an hour; None if the user gave none."""

    per_1000_samples: float | None
    """Price of a thousand training samples in USD. It includes a share of the start-up if the run's length
    was given.
    """

    run_seconds: float | None
    """Seconds of the run with its start-up; None if its length was not given."""

    run: float | None
    """Price of the whole run in USD; None without its length or the GPU's price."""


def cost(answer: OnGpu, prices: Prices, steps: int | None) -> Cost:
    """Return the price in USD on this GPU, for a thousand samples and for a run of `steps` steps."""
    price, pace = prices.per_hour.get(answer.key), answer.pace(steps)
    per_second = None if price is None else price / HOUR
    seconds = None
    if (choice := answer.choice) and pace:
        seconds = SAMPLES / choice.samples_per_second * pace / choice.step_seconds
    run = steps * pace if steps and pace else None
    return Cost(
        key=answer.key,
        per_hour=price,
        per_1000_samples=None if per_second is None or seconds is None else per_second * seconds,
        run_seconds=run,
        run=None if per_second is None or run is None else per_second * run,
    )


def cheapest(plans: GpuPlans, prices: Prices) -> OnGpu | None:
    """Return the GPU with the lowest price per sample; None if no GPU on which a recipe fits has a price per
    hour."""
    costs = {answer.key: cost(answer, prices, plans.steps).per_1000_samples for answer in plans.fitting}
    priced = [answer for answer in plans.fitting if costs[answer.key] is not None]
    return min(priced, key=lambda answer: (costs[answer.key] or 0.0, answer.key), default=None)


def document(plans: GpuPlans, prices: Prices) -> dict[str, Any]:
    """Return the prices of the run that `snugfit gpus --for MODEL --json` prints next to the plans, as a JSON
    object."""
    costs = [cost(answer, prices, plans.steps) for answer in plans.fitting]
    best = cheapest(plans, prices)
    return {
        "currency": "USD",
        "steps": plans.steps,
        "cheapest": best.key if best else None,
        "costs": list(map(asdict, costs)),
    }
