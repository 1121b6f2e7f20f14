"""Classes of results of plans for several GPUs: the fastest recipe for each number of GPUs, of one GPU model
or of many.

All GPUs of one model cost the same. At any price, the cheapest number of them has the step with the fewest
GPU seconds (GPUs x seconds a step). Prices compare GPU models. They come from the user and are not part of
the result (`prices.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from snugfit.documents import JsonDocument, encode_fields
from snugfit.job.gpu import Gpu
from snugfit.job.job import Job
from snugfit.planning.fleet.prices import HOUR, SAMPLES, Prices
from snugfit.planning.plan import Exclusion, KeptSlot
from snugfit.results.frame import Tabular


@dataclass(frozen=True, kw_only=True)
class OnGpus:
    """A recipe on a number of GPUs, with its predicted bytes and seconds."""

    gpus: int
    """Number of GPUs that train together."""

    recipe: str
    """Recipe in the notation of recipes."""

    needed_bytes: int
    """Bytes that must be free on each GPU."""

    step_seconds: float
    """Seconds of the steady step (equal to all later ones)."""

    samples_per_second: float
    """Samples of the global batch per second."""

    scaling_efficiency: float | None = None
    """Share of the step's seconds that would remain without exchanges between the GPUs; None on one GPU."""

    bound: str = ""
    """Resource that bounds the step (`StepSeconds.bound`)."""

    fits: bool = True
    """True if the recipe fits. Otherwise it is the recipe that exceeds the memory least."""

    why: str = ""
    """Reason for the recipe; empty if it needs none.

    It explains groups of GPUs with the same samples, the sharding of their weights, and partial
    recomputation. It also explains a choice that is predicted to be slightly slower than another recipe.
    """

    host_share: float | None = None
    """Share of the step's seconds in which the host works (`StepSeconds.host_seconds`)."""

    @property
    def gpu_seconds(self) -> float:
        """Seconds of a step times GPUs: proportional to the cost of a step at any price per GPU."""
        return self.gpus * self.step_seconds


@dataclass(frozen=True, kw_only=True)
class SeveralGpusPlan(JsonDocument, Tabular):
    """A plan for several GPUs: the fastest recipe for each number of them."""

    what: ClassVar = "plan for several GPUs"

    added_keys: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "fewest": (int | None, "The fewest GPUs that fit; null where none do."),
        "fastest": (int | None, "The number of GPUs with the shortest step."),
        "cheapest": (int | None, "The number of GPUs with the fewest GPU seconds a step."),
    }
    """JSON keys that `to_json` adds, with their types and descriptions."""

    job: Job
    gpu: Gpu
    """The kind of all GPUs."""
    memory_bytes: int
    """Usable bytes of each GPU."""
    headroom_bytes: int
    """Bytes of `memory_bytes` that the plan keeps free."""
    fidelity: str
    """Lowest allowed fidelity (agreement with the unchanged training)."""
    answers: tuple[OnGpus, ...]
    """For each number of GPUs in order: the fastest recipe that fits, or the one that exceeds the memory
    least.
    """
    alternatives: tuple[OnGpus, ...] = ()
    """Other fully simulated recipes on as many GPUs as the fastest answer, the fastest first.

    The first may be slightly faster than the answer, whose `why` then gives the reason.
    """
    kept_slots: tuple[KeptSlot, ...] = ()
    """Slots (choices of a recipe) that the search left unchanged, with the reasons."""
    refused: tuple[Exclusion, ...] = ()
    """Techniques that the search excluded, with the reasons."""
    screened: int = 0
    """Number of recipes simulated with few layers, or in full if the model's layers cannot be reduced."""
    doubts: tuple[str, ...] = ()
    """Warnings about uncertain parts of the answers."""
    price_per_hour: float | None = None
    """Price of one GPU in USD per hour; None if the user gave none."""
    versions: Mapping[str, str]
    """Versions of the packages that the search ran with, by package name."""

    @property
    def fitting(self) -> tuple[OnGpus, ...]:
        """The answers whose recipe fits into each GPU's memory."""
        return tuple(answer for answer in self.answers if answer.fits)

    @property
    def fastest(self) -> OnGpus | None:
        """The answer with the shortest step; None if nothing fits."""
        return min(self.fitting, key=lambda one: (one.step_seconds, one.gpus), default=None)

    @property
    def fewest(self) -> OnGpus | None:
        """The answer that needs the fewest GPUs."""
        return min(self.fitting, key=lambda one: one.gpus, default=None)

    def usd_per_1000_samples(self, one: OnGpus) -> float | None:
        """Return the cost of 1,000 samples on the GPUs of an answer in USD; None if the user gave no
        price."""
        if self.price_per_hour is None or not one.samples_per_second:
            return None
        return self.price_per_hour / 3600 * one.gpus * 1000 / one.samples_per_second

    @property
    def cheapest(self) -> OnGpus | None:
        """The answer with the cheapest steps, if all GPUs cost the same."""
        return min(self.fitting, key=lambda one: (one.gpu_seconds, one.gpus), default=None)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one dict per number of GPUs, as rows of a table or a data frame."""
        return [asdict(answer) for answer in self.answers]

    def derived_keys(self) -> dict[str, Any]:
        """Return the numbers of GPUs of the fastest, the fewest and the cheapest answer."""
        named = {"fastest": self.fastest, "fewest": self.fewest, "cheapest": self.cheapest}
        return {name: one and one.gpus for name, one in named.items()}


@dataclass(frozen=True, kw_only=True)
class CardsCost:
    """Predicted cost of training on a number of GPUs of one model, in USD."""

    key: str
    """The GPU's key in snugfit's table of GPUs."""

    gpus: int
    """Number of GPUs that train together."""

    per_hour: float | None
    """USD per hour for all of these GPUs; None if the user gave no price."""

    per_1000_samples: float | None
    """USD for a thousand samples in steady steps, without start-up; None without a price."""

    run_seconds: float | None
    """Seconds of the whole run without its start-up; None if its number of steps was not given."""

    run: float | None
    """USD for the whole run without its start-up; None without a price or a number of steps."""


@dataclass(frozen=True, kw_only=True)
class CheapestCards:
    """The GPU model and number of GPUs on which a sample costs least."""

    key: str
    """The GPU's key in snugfit's table of GPUs."""

    gpus: int
    """Number of GPUs that train together."""


@dataclass(frozen=True, kw_only=True)
class CardsRun:
    """Costs of a training run on several GPUs at the given prices, in USD."""

    currency: str = "USD"
    """Currency of all prices: `USD`."""

    steps: int | None
    """Optimizer steps of the run; null if their number was not given."""

    cheapest: CheapestCards | None
    """The kind and number of GPUs with the lowest cost; null without prices."""

    costs: tuple[CardsCost, ...]
    """Cost of each recipe that fits."""


@dataclass(frozen=True, kw_only=True)
class CardsOfKind:
    """The numbers of GPUs of one model that train a job, each with its fastest recipe."""

    added_keys: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "fewest": (int | None, "The fewest GPUs that fit; null where none do."),
        "cheapest": (int | None, "The number of GPUs with the fewest GPU seconds a step."),
    }
    """JSON keys that `to_json` adds, with their types and descriptions."""

    gpu: Gpu
    """The kind of GPU that the user requested."""

    fits: bool | None
    """True if the job fits on some number of these GPUs; None if unknown."""

    headroom_bytes: int = 0
    """Bytes of each GPU's memory that should stay free."""

    build_on: str = "device"
    """Place where the model is built: `device`, or `host` if its weights exceed such a GPU."""

    answers: tuple[OnGpus, ...] = ()
    """Fastest recipe on the fewest GPUs that fit, then on each larger number that takes fewer GPU seconds a
    step.

    If nothing fits, the recipe on the largest number that exceeds the memory least.
    """

    dearer: tuple[int, ...] = ()
    """Larger numbers of GPUs on which no recipe takes fewer GPU seconds than the last answer. No numbers
    beyond them were tried.
    """

    measured_rates: bool | None = None
    """True if the GPU's kernel rates were measured, False if a data sheet scaled them from another GPU's,
    None without predicted seconds.
    """

    why: str = ""
    """Reason for missing answers."""

    @property
    def key(self) -> str:
        """Key of the GPU model in the table of known GPUs."""
        return self.gpu.key

    @property
    def fewest(self) -> OnGpus | None:
        """The recipe on the fewest GPUs that fits; None if no number of this GPU model fits."""
        return self.answers[0] if self.fits else None

    @property
    def cheapest(self) -> OnGpus | None:
        """The recipe whose step takes the fewest GPU seconds (GPUs x seconds); None if nothing fits."""
        return self.answers[-1] if self.fits else None

    @property
    def lacking_bytes(self) -> int:
        """Bytes that each GPU lacks for the smallest recipe and its headroom; 0 if a recipe fits or none is
        known.
        """
        if self.fits or not self.answers:
            return 0
        return self.answers[0].needed_bytes - (self.gpu.memory_bytes or 0) + self.headroom_bytes


@dataclass(frozen=True, kw_only=True)
class CardPlans(JsonDocument):
    """The plans for many GPU models, with several GPUs of each."""

    what: ClassVar = "plans by number of GPUs"

    added_keys: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "fewest": (str | None, "Key of the GPU that needs the smallest number."),
        "run": (CardsRun, "Costs of a run; with prices or a run length only."),
    }
    """JSON keys that the command's output adds, with their types and descriptions."""
    optional_keys: ClassVar[tuple[str, ...]] = ("run",)
    """JSON keys that only the command's output has."""

    job: Job
    """The training job of the plans."""

    fidelity: str
    """Lowest allowed fidelity (agreement with the unchanged training)."""

    objective: str = "speed"
    """Order of the report: `speed` sorts by the fewest GPUs and their seconds, `cost` by USD."""

    steps: int | None = None
    """Optimizer steps of the run, without its start-up; None if their number was not given."""

    gpus: tuple[int, ...]
    """Allowed numbers of GPUs that divide the global batch evenly."""

    uneven: tuple[int, ...] = ()
    """Requested numbers of GPUs that do not divide the global batch evenly."""

    answers: tuple[CardsOfKind, ...]
    """Answers for the requested kinds of GPU, in their order."""

    kept_slots: tuple[KeptSlot, ...] = ()
    """Slots (choices of a recipe) that the search left unchanged, with the reasons."""

    refused: tuple[Exclusion, ...] = ()
    """Techniques that the search excluded, with the reasons."""

    screened: int = 0
    """Number of recipes simulated with few layers and micro-batches. One simulation may serve several kinds
    of GPU.
    """

    doubts: tuple[str, ...] = ()
    """Warnings about uncertain parts of the answers."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the packages that computed the plans, by package name."""

    @property
    def fitting(self) -> tuple[CardsOfKind, ...]:
        """The answers for GPU models of which some number trains the job."""
        return tuple(answer for answer in self.answers if answer.fits)

    @property
    def fewest(self) -> CardsOfKind | None:
        """The GPU model that needs the fewest GPUs; among equals, the one with the shorter step."""
        return min(
            ((one.gpus, one.step_seconds, kind.key, kind) for kind in self.fitting if (one := kind.fewest)),
            key=lambda known: known[:3],
            default=(0, 0.0, "", None),
        )[3]

    def derived_keys(self) -> dict[str, Any]:
        """Return computed JSON keys: each GPU model's fewest and cheapest number of GPUs, and the model that
        needs the fewest.
        """
        answers = [
            encode_fields(
                kind,
                fewest=kind.fewest.gpus if kind.fewest else None,
                cheapest=kind.cheapest.gpus if kind.cheapest else None,
            )
            for kind in self.answers
        ]
        return {"answers": answers, "fewest": self.fewest.key if self.fewest else None}


# ---- the cost ----------------------------------------------------------------------------------------------


def cost_of_cards(kind: CardsOfKind, one: OnGpus, prices: Prices, steps: int | None) -> CardsCost:
    """Return the cost in USD of an answer, for a thousand samples and for a run of `steps` steps."""
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
    """Return the cost in USD of each recipe that fits, for each GPU model and number of GPUs."""
    return [cost_of_cards(kind, one, prices, plans.steps) for kind in plans.fitting for one in kind.answers]


def cheapest_cards(plans: CardPlans, prices: Prices) -> CardsCost | None:
    """Return the GPU model and number of GPUs with the lowest cost per sample. Return None if no suitable GPU
    has a price.
    """
    priced = [one for one in costs_of_cards(plans, prices) if one.per_1000_samples is not None]
    return min(priced, key=lambda one: (one.per_1000_samples or 0.0, one.gpus, one.key), default=None)


def document_of_cards(plans: CardPlans, prices: Prices) -> dict[str, Any]:
    """Return the costs that `snugfit gpus --for MODEL --gpus N --json` prints next to the plans."""
    best = cheapest_cards(plans, prices)
    cheapest = CheapestCards(key=best.key, gpus=best.gpus) if best else None
    costs = tuple(costs_of_cards(plans, prices))
    return asdict(CardsRun(steps=plans.steps, cheapest=cheapest, costs=costs))
