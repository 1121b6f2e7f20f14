"""How many cards of each kind train a job: the fewest that fit, and whether more of them are cheaper.

A card of one kind costs the same as the next, so the cheapest number of them is the one whose step takes the
fewest GPU seconds (GPUs x seconds a step), at whatever price. Prices compare kinds; they are the user's, and
no part of the answer (`prices.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from snugfit.documents import decode_fields, encode_fields
from snugfit.errors import UsageError
from snugfit.job.gpu import Gpu
from snugfit.job.job import Job
from snugfit.planning.fleet.prices import HOUR, SAMPLES, Prices
from snugfit.planning.plan import Exclusion, KeptSlot
from snugfit.planning.several_gpus.plan import OnGpus

SCHEMA = 1
WHAT = "plans by number of GPUs"


@dataclass(frozen=True, kw_only=True)
class CardsOfKind:
    """The answer for one kind of GPU."""

    gpu: Gpu
    """The kind that was asked about."""

    fits: bool | None
    """Whether any of the numbers of them trains the job; None where that is not known."""

    headroom_bytes: int = 0
    """How much of each GPU's memory should stay free."""

    build_on: str = "device"
    """Where the model is built: on the `host` where its weights exceed such a GPU."""

    answers: tuple[OnGpus, ...] = ()
    """The fastest recipe on the fewest that fit, then on each larger number on which a step takes fewer GPU
    seconds than on all before; where nothing fits, the nearest miss on the largest number."""

    dearer: tuple[int, ...] = ()
    """Larger numbers that were looked at, on which no recipe takes fewer GPU seconds than the last answer.
    Beyond them none was looked at."""

    measured_rates: bool | None = None
    """Whether the GPU's rates were measured; False where they were scaled from another's by data sheet, None
    where there are no seconds."""

    why: str = ""
    """Why it has no answer."""

    @property
    def key(self) -> str:
        """The GPU's, in the table."""
        return self.gpu.key

    @property
    def fewest(self) -> OnGpus | None:
        """The answer on the fewest GPUs."""
        return self.answers[0] if self.fits else None

    @property
    def cheapest(self) -> OnGpus | None:
        """The answer whose step takes the fewest GPU seconds."""
        return self.answers[-1] if self.fits else None

    @property
    def lacking_bytes(self) -> int:
        """How much memory each GPU has too little for the nearest miss, its headroom counted; 0 where
        something fits or nothing is known."""
        if self.fits or not self.answers:
            return 0
        return self.answers[0].needed_bytes - (self.gpu.memory_bytes or 0) + self.headroom_bytes


@dataclass(frozen=True, kw_only=True)
class CardPlans:
    """The answers for many kinds of GPU."""

    job: Job
    """What must be trained."""

    fidelity: str
    """The least exact that the user allows."""

    objective: str = "speed"
    """The order of the report: by the fewest GPUs and their seconds (`speed`), or by `cost`."""

    steps: int | None = None
    """The run's length; None where it was not said. Its start-up is not counted."""

    gpus: tuple[int, ...]
    """The numbers of GPUs that were allowed and share the global batch evenly."""

    uneven: tuple[int, ...] = ()
    """Those that were named and cannot share it evenly."""

    answers: tuple[CardsOfKind, ...]
    """In the order in which the kinds were asked about."""

    kept_slots: tuple[KeptSlot, ...] = ()
    """Slots that were not searched."""

    refused: tuple[Exclusion, ...] = ()
    """What was not considered, and why."""

    screened: int = 0
    """How many recipes were simulated on few layers and micro-batches, some of them for several kinds."""

    doubts: tuple[str, ...] = ()
    """Sentences on what is uncertain in the answers."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Packages that it was made with."""

    @property
    def fitting(self) -> tuple[CardsOfKind, ...]:
        """The answers for kinds of which some number trains the job."""
        return tuple(answer for answer in self.answers if answer.fits)

    @property
    def fewest(self) -> CardsOfKind | None:
        """The kind of which the fewest are needed; of several the one with the shorter step."""
        return min(
            ((one.gpus, one.step_seconds, kind.key, kind) for kind in self.fitting if (one := kind.fewest)),
            key=lambda known: known[:3],
            default=(0, 0.0, "", None),
        )[3]

    def to_json(self) -> dict[str, Any]:
        """The document that `snugfit gpus --for MODEL --gpus N --json` prints; `CardPlans.from_json` reads it
        back."""
        answers = [
            encode_fields(
                kind,
                fewest=kind.fewest.gpus if kind.fewest else None,
                cheapest=kind.cheapest.gpus if kind.cheapest else None,
            )
            for kind in self.answers
        ]
        fewest = self.fewest.key if self.fewest else None
        return {"schema": SCHEMA, "what": WHAT, **encode_fields(self, answers=answers, fewest=fewest)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The answers that `to_json` wrote. Raises `UsageError` for anything else."""
        if document.get("what") != WHAT or document.get("schema") != SCHEMA:
            raise UsageError("These are not plans by number of GPUs of this version of snugfit.")
        return decode_fields(cls, document)


# ---- what it costs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CardsCost:
    """What so many GPUs of a kind cost."""

    key: str
    """The kind's key in the table."""

    gpus: int
    """How many train together."""

    per_hour: float | None
    """USD for all of them; None where the user gave no price."""

    per_1000_samples: float | None
    """USD for a thousand samples of steady steps."""

    run_seconds: float | None
    """Seconds of the run, its start-up apart; None where its length was not said."""

    run: float | None
    """USD for the run, its start-up apart."""


def cost_of_cards(kind: CardsOfKind, one: OnGpus, prices: Prices, steps: int | None) -> CardsCost:
    """What an answer costs, for a thousand samples and for a run of so many steps."""
    price = prices.per_hour.get(kind.key)
    per_hour = None if price is None else price * one.gpus
    run_seconds = steps * one.step_seconds if steps else None
    return CardsCost(
        key=kind.key,
        gpus=one.gpus,
        per_hour=per_hour,
        per_1000_samples=None if per_hour is None else per_hour / HOUR * SAMPLES / one.samples_per_second,
        run_seconds=run_seconds,
        run=None if per_hour is None or run_seconds is None else per_hour / HOUR * run_seconds,
    )


def costs_of_cards(plans: CardPlans, prices: Prices) -> list[CardsCost]:
    """What each answer costs that fits."""
    return [cost_of_cards(kind, one, prices, plans.steps) for kind in plans.fitting for one in kind.answers]


def cheapest_cards(plans: CardPlans, prices: Prices) -> CardsCost | None:
    """The kind and number on which a sample costs least; None where no price is known for one that trains
    this."""
    priced = [one for one in costs_of_cards(plans, prices) if one.per_1000_samples is not None]
    return min(priced, key=lambda one: (one.per_1000_samples or 0.0, one.gpus, one.key), default=None)


def document_of_cards(plans: CardPlans, prices: Prices) -> dict[str, Any]:
    """What `snugfit gpus --for MODEL --gpus N --json` prints beside the plans."""
    best = cheapest_cards(plans, prices)
    return {
        "currency": "USD",
        "steps": plans.steps,
        "cheapest": {"key": best.key, "gpus": best.gpus} if best else None,
        "costs": list(map(asdict, costs_of_cards(plans, prices))),
    }
