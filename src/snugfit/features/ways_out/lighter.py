"""Search for recipes that need less memory than a given one, in the order of their cost, with few
simulations.

A recipe is first screened for its lower bounds. These take a tenth of a second, and less for recipes that
share their forward and backward passes. The rest is evaluated exactly, the fastest bound first, until it
fits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.errors import GpuError, SnugfitError
from snugfit.planning.cost.figures import Bound, Figures
from snugfit.planning.cost.timer import GpuTimers, SingleGpuTimer, Timer
from snugfit.planning.keep import Kept
from snugfit.planning.search.mixture import grades_of, guess_between
from snugfit.planning.search.simpler import AS_FAST
from snugfit.planning.search.space import space_of
from snugfit.planning.search.state import MEMORY_RESOLUTION
from snugfit.planning.step_key import passes_key
from snugfit.prediction.worker_pool import Question
from snugfit.step.applier import refuse_unsupported
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity, Slot

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.planning.search.space import Candidate
    from snugfit.prediction.worker_pool import WorkerPool
    from snugfit.rehearsal.trace.trace import Trace
    from snugfit.results.prediction import Prediction
    from snugfit.techniques.technique import Technique

LEAST_SAVING = 0.002
"""Smallest share of a recipe's memory that a technique must save to be tried (chosen)."""

PER_SLOT = 3
"""Number of techniques of each slot that are tried in pairs: the fastest, the smallest, and one between."""

PAIRS = 24
"""Number of pairs of techniques that are screened, those with the least estimated seconds first."""

EVALUATED = 8
"""Number of recipes that each stage of the search simulates exactly."""

SLACK = 0.15
"""Share by which the estimated memory of a pair may exceed the limit. The savings of two techniques do not
add up exactly.
"""

GUESSES = 3
"""Number of settings of one technique that are simulated to find the mildest one that fits."""

FRAGMENTATION_RATIO = 0.3
"""Assumed ratio of a recipe's fragmentation to the largest one of similar recipes (chosen).

Similar recipes were simulated and share one of its techniques.
"""

SLOW_RECOMPUTATION = 0.1
"""Share of a step's seconds that recomputation may take (chosen). Above it, only as many layers are
recomputed as needed to fit.
"""

MIN_SAVED_SHARE = 0.01
"""Smallest share of a step's seconds that recomputing fewer layers must save to be tried (chosen)."""


class RecipeCost(NamedTuple):
    """Bytes and seconds of a recipe: exact, or estimated by scaling its lower bound as for the given
    recipe."""

    needed_bytes: float
    seconds: float


class RecipeCosts:
    """Cache of bytes and seconds of one job's recipes on one GPU, lower bounds or exact, which workers
    compute.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self.bounds: dict[Recipe, Bound | None] = {}
        self.figures: dict[Recipe, Figures | None] = {}

    @property
    def workers(self) -> int:
        """Number of worker processes that evaluate recipes concurrently."""
        return len(self._pool.workers)

    def screen(self, recipes: Iterable[Recipe]) -> None:
        """Compute the lower bounds of these recipes. Those with the same forward and backward passes are
        simulated together.
        """
        groups: dict[Hashable, list[Recipe]] = defaultdict(list)
        for recipe in dict.fromkeys(recipes):
            if recipe not in self.bounds:
                # Recipes with the same passes (forward and backward) share a simulation, which takes most of
                # a bound's time.
                groups[passes_key(recipe.setup())].append(recipe)
        for group, answer in self._answers("screen", [*groups.values()]):
            for recipe, bound in zip(group, answer, strict=True):
                self.bounds[recipe] = None if isinstance(bound, SnugfitError) else bound[0]

    def evaluate(self, groups: Iterable[Sequence[Recipe]]) -> None:
        """Compute the exact bytes and seconds of recipes, given in groups that differ only in the allocator's
        settings.
        """
        unknown = [[recipe for recipe in group if recipe not in self.figures] for group in groups]
        for group, answer in self._answers("evaluate", [group for group in unknown if group]):
            for recipe, figures in zip(group, answer, strict=True):
                self.figures[recipe] = None if isinstance(figures, SnugfitError) else figures[0]

    def predict(self, recipes: Sequence[Recipe], **options: Any) -> Iterator[Prediction | None]:
        """Yield the whole prediction under each of these recipes, in order; None if it cannot be run.

        `options` has further arguments of `predict`.
        """
        questions = [Question(number, "predict", (recipe, options)) for number, recipe in enumerate(recipes)]
        for _, value in sorted(self._pool.answers_to(questions)):
            yield None if isinstance(value, SnugfitError) else value

    def _answers(
        self, method: str, groups: Sequence[list[Recipe]]
    ) -> Iterator[tuple[list[Recipe], list[Any]]]:
        """Call a method of the worker processes for each group of recipes. Yield each group with its results.
        If the call fails, the error is the result of each recipe.
        """
        questions = [
            # Setups are sent to workers, which need nothing else of a recipe.
            Question(number, method, ([recipe.setup() for recipe in group],))
            for number, group in enumerate(groups)
        ]
        for number, value in self._pool.answers_to(questions):
            group = groups[number]
            yield group, [value] * len(group) if isinstance(value, SnugfitError) else value


class LighterRecipes:
    """Search for recipes that fit into a memory in which the given one does not, from small changes to large
    ones.
    """

    def __init__(
        self,
        job: Job,
        base: Recipe,
        *,
        gpu: Gpu | None,
        loop: str,
        memory_bytes: int,
        headroom_bytes: int,
        free: Collection[Slot],
        pool: WorkerPool,
    ) -> None:
        self.job, self.base, self.memory_bytes = job, base, memory_bytes
        self._comfortable = memory_bytes - headroom_bytes
        self._capability = gpu.compute_capability if gpu else None
        self._loop, self._free = loop, free
        self._techniques: dict[Fidelity, list[Technique]] = {}
        self.costs = RecipeCosts(pool)
        allocators = self._candidates(Slot.ALLOCATOR, Fidelity.SAME) if Slot.ALLOCATOR in free else ()
        # Another allocator may suffice, and recipes with it share the base's simulation.
        self.costs.evaluate(
            [[base, *(allocator.recipe for allocator in allocators if allocator.recipe != base)]]
        )
        self._solved: set[Slot] = set()
        """Slots (choices of a recipe) in which one changed technique alone makes the step fit."""

    def slots(self, recipe: Recipe) -> tuple[Slot, ...]:
        """Return the slots (choices of the recipe, such as the optimizer) in which a recipe differs from the
        given one.
        """
        return tuple(slot for slot in Slot if recipe[slot] != self.base[slot])

    @property
    def evaluations(self) -> int:
        """Number of recipes that were evaluated exactly."""
        return len(self.costs.figures)

    @property
    def smallest(self) -> Recipe:
        """Evaluated recipe that needs the fewest bytes."""
        figures = {recipe: cost for recipe, cost in self.costs.figures.items() if cost is not None}
        return min(figures, key=lambda recipe: figures[recipe].needed_bytes, default=self.base)

    def may_fit_together(self, fidelity: Fidelity) -> bool:
        """Return False if even the techniques of this fidelity that save most in each slot cannot make the
        step fit.

        Weights, optimizer states and gradients are separate tensors, so savings of different slots add up at
        most. Their bytes at the update are the lower bound `resting_bytes`.
        """
        rest = self._resting_bytes(self.base)
        saved: dict[Slot, float] = defaultdict(float)
        for technique in self._lighter_techniques(fidelity):
            saving = rest - self._resting_bytes(self.base.with_(technique))
            saved[technique.slot] = max(saved[technique.slot], saving)
        return rest - sum(saved.values()) <= self.memory_bytes

    def singles(self, fidelity: Fidelity) -> Iterator[Recipe]:
        """Yield recipes that fit with one changed technique whose results differ at most by this fidelity:
        the fastest for each slot of the recipe.
        """
        recipes = [self.base.with_(technique) for technique in self._lighter_techniques(fidelity)]
        # `cost` extrapolates from the bound, because no exact figures exist yet.
        waiting = [
            (self.cost(technique).seconds, [technique]) for technique in recipes if self._may_fit(technique)
        ]
        waiting += self._grades_that_fit({self._slot(technique) for _, (technique,) in waiting})
        waiting.sort(key=lambda technique: technique[0])
        evaluated = 0
        for start in range(0, len(waiting), self.costs.workers):
            chunk = [technique for _, technique in waiting[start:][: self.costs.workers]]
            chunk = [technique for technique in chunk if self._slot(technique[0]) not in self._solved]
            # Lists with several grades are evaluated by `_least_that_fits`, grade by grade.
            self.costs.evaluate(technique for technique in chunk if len(technique) == 1)
            evaluated += len(chunk)
            for settings in chunk:
                graded = len(settings) > 1
                recipe = self._least_that_fits(self.base, settings) if graded else settings[0]
                if self._slot(recipe) not in self._solved and self._fits(recipe):
                    self._solved.add(self._slot(recipe))
                    yield recipe
            if evaluated >= EVALUATED:
                return

    def pairs(self, fidelity: Fidelity) -> Iterator[Recipe]:
        """Yield recipes that fit with two changed techniques, neither of which is enough alone: the fastest
        for two slots.
        """
        by_slot: dict[Slot, list[Recipe]] = defaultdict(list)
        for technique in self._lighter_techniques(fidelity):
            if technique.slot not in self._solved:
                by_slot[technique.slot].append(self.base.with_(technique))
        few = [_few(recipes, self.cost) for recipes in by_slot.values()]
        estimates: dict[Recipe, float] = {}
        # A recipe has one technique per slot, so pairs come from two slots.
        for first, second in combinations(few, 2):
            for one in first:
                for other in second:
                    # A pair is estimated first, because screening it may need a separate simulation.
                    cost = self._estimate(one, other)
                    both = self._with_both(one, other)
                    if cost.needed_bytes <= self.memory_bytes * (1 + SLACK) and self._is_valid(both):
                        estimates[both] = cost.seconds
        waiting = sorted(estimates, key=lambda one: estimates[one])[:PAIRS]
        most: dict[tuple[Slot, ...], float] = {}  # bytes from which recipes of these slots are skipped
        evaluated = 0
        for start in range(0, len(waiting), self.costs.workers):
            chunk = [one for one in waiting[start:][: self.costs.workers] if most.get(self.slots(one)) != 0]
            # All pairs with the same passes are screened together, at no additional cost.
            self.costs.screen(one for one in waiting if any(_shares_passes(one, new) for new in chunk))
            chunk = [one for one in chunk if self._may_fit(one)]
            chunk = [one for one in chunk if self._bound_bytes(one) < most.get(self.slots(one), math.inf)]
            self.costs.evaluate([one] for one in chunk)
            evaluated += len(chunk)
            for recipe in chunk:
                slots = self.slots(recipe)
                if most.get(slots) == 0:
                    continue
                # After a recipe did not fit, the next one in these slots must be clearly smaller to be tried.
                most[slots] = self._bound_bytes(recipe) * (1 - MEMORY_RESOLUTION)
                if self._fits(recipe):
                    most[slots] = 0
                    yield self._with_least_grades(recipe)
            if evaluated >= EVALUATED:
                return

    def many_at_once(self, fidelity: Fidelity, *, without: Slot | None = None) -> Iterator[Recipe]:
        """Yield a recipe that fits with several changed techniques, as few as possible.

        The slot `without` stays as in the given recipe.
        """
        recipe = self.base
        smallest: dict[Slot, Technique] = {}
        for technique in self._lighter_techniques(fidelity):
            if technique.slot is without:
                continue
            best = smallest.get(technique.slot)
            if best is None or self._bytes_with(technique) < self._bytes_with(best):
                smallest[technique.slot] = technique
        for technique in sorted(smallest.values(), key=self._bytes_with):
            more = recipe.with_(technique)
            if not self._is_valid(more):
                continue
            self.costs.screen([recipe, more])
            if self._changes_allocator(technique) or self._bound_bytes(more) < self._bound_bytes(recipe):
                recipe = more
            if self._may_fit(recipe) and self._fits(recipe):
                yield self._with_least_grades(self._without_unnecessary(recipe))
                return

    # ---- techniques --------------------------------------------------------------------------------------

    def _lighter_techniques(self, fidelity: Fidelity) -> list[Technique]:
        """Return the techniques of free slots that save memory alone, and change results at most as far as
        this fidelity allows.
        """
        if fidelity not in self._techniques:
            recipes = [
                candidate.recipe
                for slot in self._free
                for candidate in self._candidates(slot, fidelity)
                if candidate.recipe != self.base and not self._is_lowered(candidate.recipe)
            ]
            self.costs.screen([self.base, *recipes])
            most = self._bound_bytes(self.base) * (1 - LEAST_SAVING)
            self._techniques[fidelity] = [
                recipe[slot]
                for recipe in recipes
                for slot in self.slots(recipe)
                if self._bound_bytes(recipe) < most
                or (self._changes_allocator(recipe[slot]) and self._saves_exactly(recipe))
            ]
        return self._techniques[fidelity]

    def _candidates(self, slot: Slot, fidelity: Fidelity) -> Sequence[Candidate]:
        # All other slots are fixed, so that the space contains only this slot's techniques.
        fixed = Kept(
            slots={other_slot: (self.base[other_slot],) for other_slot in Slot if other_slot is not slot},
            start=self.base,
        )
        try:
            space = space_of(
                self.job, fidelity=fidelity, capability=self._capability, fixed=fixed, front_end=self._loop
            )
        except SnugfitError:  # no other technique is valid with the rest of the recipe
            return ()
        return space.candidates

    def _grades_that_fit(self, slots: Collection[Slot]) -> Iterator[tuple[float, list[Recipe]]]:
        """Yield, for each of these slots, the settings of a technique from few layers to all, if the last one
        fits, with estimated seconds.

        The seconds are those of the mildest setting that fits, interpolated between both ends.
        """
        base = self.cost(self.base)
        recipes = [
            [
                candidate
                for candidate in map(self.base.with_, grades_of(slot, self.job))
                if self._is_valid(candidate)
            ]
            # Only these slots have techniques with grades: numbers of recomputed or offloaded layers.
            for slot in (Slot.CHECKPOINTING, Slot.ACTIVATION_OFFLOAD)
            if slot in slots
        ]
        # If the last grade does not fit, no smaller one does, so it is evaluated first.
        self.costs.evaluate([settings[-1]] for settings in recipes if settings)
        for settings in recipes:
            if not settings or not self._fits(settings[-1]):
                continue
            last = self.cost(settings[-1])
            share = (base.needed_bytes - self.memory_bytes) / max(1, base.needed_bytes - last.needed_bytes)
            yield base.seconds + share * (last.seconds - base.seconds), settings

    def _is_lowered(self, recipe: Recipe) -> bool:
        """Return True if a recipe compiles layers and the given one does not, since compilation takes minutes
        in a simulation.
        """
        return recipe.setup().lowering is not None and self.base.setup().lowering is None

    def _is_valid(self, recipe: Recipe) -> bool:
        """Return True if this job, GPU and loop can run a recipe that plans may choose."""
        try:
            recipe.check(self.job, self._capability)
            refuse_unsupported(self._loop, recipe.setup())
        except SnugfitError:
            return False
        changed = (recipe[slot] for slot in self.slots(recipe))
        return not any(technique.planned_without(self.job, recipe) for technique in changed)

    # ---- figures -----------------------------------------------------------------------------------------

    def cost(self, recipe: Recipe) -> RecipeCost:
        """Return the exact bytes and seconds of a recipe, or an estimate from its lower bound."""
        if figures := self.costs.figures.get(recipe):
            return RecipeCost(figures.needed_bytes, figures.seconds)
        bound, base = self.costs.bounds.get(recipe), self.costs.bounds.get(self.base)
        exact = self.costs.figures.get(self.base)
        if bound is None:
            return RecipeCost(math.inf, math.inf)
        if base is None or exact is None:
            return RecipeCost(bound.needed_bytes, bound.seconds)
        # The base is known exactly, so its fragmentation serves as an estimate for other recipes.
        loss = exact.needed_bytes / max(1, base.needed_bytes)
        return RecipeCost(bound.needed_bytes * loss, bound.seconds * exact.seconds / max(base.seconds, 1e-12))

    def _estimate(self, first: Recipe, second: Recipe) -> RecipeCost:
        """Return the estimated bytes and seconds of a recipe that combines the changes of two others.

        Savings of different tensors add up. Two savings of the same activations multiply. The estimate is the
        mean of both.
        """
        base, one, other = self.cost(self.base), self.cost(first), self.cost(second)
        bounds = self.costs.bounds
        resting, *changed = (
            known.resting_bytes if (known := bounds[recipe]) else 0 for recipe in (self.base, first, second)
        )
        total = one.needed_bytes + other.needed_bytes - base.needed_bytes
        activations = base.needed_bytes - resting
        # Without activations, two techniques cannot save the same bytes.
        if activations > 0:
            share = math.prod(
                max(0.0, cost.needed_bytes - rest) / activations
                for cost, rest in zip((one, other), changed, strict=True)
            )
            total = (total + sum(changed) - resting + share * activations) / 2
        return RecipeCost(total, one.seconds * other.seconds / max(base.seconds, 1e-12))

    def _bound_bytes(self, recipe: Recipe) -> float:
        bound = self.costs.bounds.get(recipe)
        return math.inf if bound is None else bound.needed_bytes

    def _resting_bytes(self, recipe: Recipe) -> float:
        bound = self.costs.bounds.get(recipe)
        return 0 if bound is None else bound.resting_bytes

    def _bytes_with(self, technique: Technique) -> float:
        return self.cost(self.base.with_(technique)).needed_bytes

    def _may_fit(self, recipe: Recipe) -> bool:
        """Return True if a recipe may fit, by its lower bound and the fragmentation of simulated recipes like
        it.
        """
        changed = {recipe[slot] for slot in self.slots(recipe)}
        losses = [
            figures.needed_bytes - self._bound_bytes(known)
            for known, figures in self.costs.figures.items()
            # Allocators differ in fragmentation, so only recipes with the same allocator are compared.
            if figures and self.costs.bounds.get(known) and known[Slot.ALLOCATOR] == recipe[Slot.ALLOCATOR]
            if known == self.base or not changed.isdisjoint(known[slot] for slot in self.slots(known))
        ]
        return self._bound_bytes(recipe) + FRAGMENTATION_RATIO * max(losses, default=0) <= self.memory_bytes

    def _fits(self, recipe: Recipe) -> bool:
        figures = self._evaluate(recipe)
        return figures is not None and figures.needed_bytes <= self.memory_bytes

    def _saves_exactly(self, recipe: Recipe) -> bool:
        figures, base = self._evaluate(recipe), self.costs.figures.get(self.base)
        return bool(figures and base and figures.needed_bytes < base.needed_bytes)

    def _evaluate(self, recipe: Recipe) -> Figures | None:
        """Return the exact bytes and seconds of a recipe; None if it cannot be simulated."""
        self.costs.evaluate([[recipe]])
        return self.costs.figures[recipe]

    # ---- smaller changes ---------------------------------------------------------------------------------

    def _least_that_fits(self, base: Recipe, grades: Sequence[Recipe]) -> Recipe:
        """Return the first of these settings, each with less memory than the one before, that leaves the
        headroom. If the last leaves none, return the first that fits. The last one fits, and `base` does not.
        """
        few, last = self.cost(base), self.cost(grades[-1])
        limit = self._comfortable if last.needed_bytes <= self._comfortable else self.memory_bytes
        low, high = 0, len(grades)  # numbers of grades: the largest that does not fit, the smallest that fits
        # Memory is interpolated linearly, so that two or three evaluations replace a search over all grades.
        low_bytes, high_bytes = few.needed_bytes, last.needed_bytes
        a_grade = abs(last.seconds - few.seconds) / len(grades)
        is_bent = False
        for _ in range(GUESSES):
            no_room = (limit - high_bytes) * (high - low) < low_bytes - high_bytes  # one grade less misses
            if no_room or (high - low - 1) * a_grade <= MIN_SAVED_SHARE * few.seconds:
                break
            guess = guess_between(low, high, low_bytes, high_bytes, limit)
            # If memory is far from linear, the first guess may be near one end. The second one is then the
            # middle.
            guess = (low + high + 1) // 2 if is_bent else guess
            figures = self._evaluate(grades[guess - 1])
            if figures is None:
                break
            slope = (high_bytes - low_bytes) / (high - low)
            off_line = abs(low_bytes + (guess - low) * slope - figures.needed_bytes)
            is_bent = not is_bent and off_line > abs(slope)
            if figures.needed_bytes <= limit:
                high, high_bytes = guess, figures.needed_bytes
            else:
                low, low_bytes = guess, figures.needed_bytes
        return grades[high - 1]

    def _with_least_grades(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the fewest recomputed layers that fit, if its own recomputation is slow."""
        slot = Slot.CHECKPOINTING
        if slot not in self.slots(recipe):
            return recipe
        plain = recipe.with_(self.base[slot])
        self.costs.screen([plain])
        if self.cost(recipe).seconds < self.cost(plain).seconds * (1 + SLOW_RECOMPUTATION):
            return recipe
        grades = [
            candidate
            for candidate in map(recipe.with_, grades_of(slot, self.job))
            if self._is_valid(candidate)
        ]
        least = self._least_that_fits(plain, [*grades, recipe])
        # Grades recompute whole layers, while the recipe may recompute only parts of each. Both are compared.
        return min(recipe, least, key=lambda candidate: self.cost(candidate).seconds)

    def _without_unnecessary(self, recipe: Recipe) -> Recipe:
        """Return the recipe without changes that it does not need to fit. The slowest change is undone first,
        as long as the recipe gets no slower.
        """
        # Each round reverts one change, because savings depend on each other.
        while True:
            most = self.cost(recipe).seconds * (1 + AS_FAST)
            simpler = [recipe.with_(self.base[slot]) for slot in self.slots(recipe)]
            simpler = [candidate for candidate in simpler if self._is_valid(candidate)]
            self.costs.screen(simpler)
            fast = [
                candidate
                for candidate in simpler
                if self._may_fit(candidate) and self.cost(candidate).seconds <= most
            ]
            fitting = (
                candidate
                for candidate in sorted(fast, key=lambda candidate: self.cost(candidate).seconds)
                if self._fits(candidate)
            )
            first = next(fitting, None)
            if first is None:
                return recipe
            recipe = first

    # ---- recipes -----------------------------------------------------------------------------------------

    def _slot(self, recipe: Recipe) -> Slot:
        """Return the only slot (a choice of the recipe, such as the optimizer) in which a recipe differs from
        the given one.
        """
        return self.slots(recipe)[0]

    def _with_both(self, first: Recipe, second: Recipe) -> Recipe:
        for slot in self.slots(second):
            first = first.with_(second[slot])
        return first

    def _changes_allocator(self, technique: Technique) -> bool:
        return technique.slot is Slot.ALLOCATOR


def _few(recipes: Sequence[Recipe], cost: Callable[[Recipe], RecipeCost]) -> list[Recipe]:
    """Return a few recipes from the fastest to the smallest, none of which is slower and larger than
    another.
    """
    front: list[Recipe] = []
    for recipe in sorted(recipes, key=cost):
        if not front or cost(recipe).seconds < cost(front[-1]).seconds:
            front.append(recipe)
    # The front (fastest recipe for each size) was built from the smallest recipe on.
    front.reverse()
    return front if len(front) <= PER_SLOT else [front[0], front[len(front) // 2], front[-1]]


def _shares_passes(first: Recipe, second: Recipe) -> bool:
    return passes_key(first.setup()) == passes_key(second.setup())


def timer_of(gpu: Gpu | None) -> Timer:
    """Return an object that predicts the seconds of steps on this GPU. Without the GPU's rates, the seconds
    only rank recipes.
    """
    try:
        return SingleGpuTimer(_rough_seconds) if gpu is None else GpuTimers([gpu])
    except GpuError:
        return SingleGpuTimer(_rough_seconds)


def _rough_seconds(trace: Trace) -> float:
    """Return rough seconds of a trace, for a GPU of 1e14 FLOP/s and 1e12 bytes/s."""
    return sum(max(kernel.flops / 1e14, kernel.nbytes / 1e12) for kernel in trace.kernels)
