"""How good predictions are on jobs that nobody chose: drawn, predicted, measured, and laid side by side.

Predictions are made in worker processes and measurements one after the other in processes of their own, so
a run is measured while later ones are still being predicted. Nothing drawn is left out of the result: a draw
that could not be predicted, or whose run died, keeps its place and says why. The document is written again
after every run, whole each time, so that an interrupted session leaves what it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from snugfit.comparison.ask import side_by_side
from snugfit.comparison.draw import Drawn, proposals
from snugfit.comparison.runs import SCHEMA, Accuracy, Run
from snugfit.errors import RecipeError, SnugfitError, UsageError
from snugfit.job.gpu import Gpu
from snugfit.measurement.exchange import BadDocument, read_document, write_document
from snugfit.prediction.predict import predict
from snugfit.prediction.profile import installed_versions

WARMUP, STEPS = 3, 8
"""Of a measured run: states are born at the end of the first step, and the second is like all later ones;
several steady ones, because a step's time is their median."""

DEADLINE_SECONDS = 240.0
LARGEST_FILE = 64 << 20


def accuracy(
    seed: int,
    count: int,
    gpu: Gpu,
    *,
    file: Path,
    measured: bool = True,
    workers: int = 1,
    tell: Callable[[str], None] = lambda line: None,
) -> Accuracy:
    """Draws `count` runs from `seed`, predicts each for `gpu`, measures it here, and keeps all in `file`.

    `tell` hears what is being done. Raises `SnugfitError` when `file` cannot be written.
    """
    result = Accuracy(seed=seed, gpu=gpu.name, device=None, versions=installed_versions(), runs=())
    tell("predicting the first draw")
    for foreseen in side_by_side(partial(foresee, seed, gpu), range(count), workers):
        number, run, device = foreseen.number, foreseen, None
        if measured:
            tell(f"measuring {number + 1} of {count}: {foreseen.job.model.name} · {foreseen.recipe}")
            run, device = see(foreseen)
        result = replace(result, device=device or result.device, runs=(*result.runs, run))
        _keep(result, file)
        tell(f"predicting {number + 2} of {count}")
    return result


def foresee(seed: int, gpu: Gpu, number: int) -> Run:
    """The draw of this number, predicted. A recipe that the model turns out not to take is passed over."""
    passed_over: list[str] = []
    for drawn in proposals(seed, number):
        began = time.monotonic()
        try:
            seen = predict(drawn.job, drawn.recipe, gpu=gpu)
        except RecipeError as refusal:
            passed_over.append(f"{drawn.job.model.name}, {drawn.recipe}: {refusal}")
            continue
        except Exception as failure:  # a draw that fails is a result, whatever failed
            return _run(drawn, passed_over, refused=_one_line(failure))
        taken = round(time.monotonic() - began, 2)
        return replace(
            _run(drawn, passed_over),
            predicted=seen.footprint,
            fits=seen.fits,
            predicted_step_seconds=seen.timing.step_seconds if seen.timing else None,
            bound=seen.timing.bound if seen.timing else None,
            doubts=seen.doubts,
            prediction_seconds=taken,
        )
    raise SnugfitError(f"Draw {number} of seed {seed} gave no lawful job and recipe.")


def _run(drawn: Drawn, passed_over: Iterable[str], refused: str = "") -> Run:
    return Run(
        number=drawn.number,
        family=drawn.family,
        job=drawn.job,
        recipe=drawn.recipe,
        passed_over=tuple(passed_over),
        refused=refused,
    )


def _one_line(failure: Exception) -> str:
    kind = "" if isinstance(failure, SnugfitError) else f"{type(failure).__name__}: "
    return kind + " ".join(str(failure).split())


def see(run: Run) -> tuple[Run, str | None]:
    """The run measured here, in a process of its own; and on what."""
    from snugfit.measurement.measure import measure

    try:
        seen = measure(
            run.job,
            run.recipe,
            warmup=WARMUP,
            steps=STEPS,
            deadline_seconds=DEADLINE_SECONDS,
            ledger=None,
        )
    except SnugfitError as refusal:
        return replace(run, outcome="refused", message=str(refusal)), None
    done = replace(
        run,
        outcome=seen.outcome,
        measured=seen.footprint,
        step_seconds=seen.timing.step_seconds if seen.timing else None,
        spread=seen.timing.spread if seen.timing else None,
        contaminated=seen.contaminated,
        message=seen.message,
        when=seen.when,
        versions=seen.versions,
    )
    return done, seen.device.name


def read(file: Path) -> Accuracy:
    """The draw in a file. Raises `UsageError` when it is none of ours."""
    try:
        document = read_document(file, limit=LARGEST_FILE)
    except FileNotFoundError:
        raise UsageError(f"{file}: no such file.") from None
    except BadDocument as fault:
        raise _no_result(file, str(fault)) from None
    what, schema = document.get("what"), document.get("schema")
    if what != "accuracy":
        raise _no_result(file, f"it says it is {what!r}" if what else "it does not say what it is")
    if schema != SCHEMA:
        raise _no_result(file, f"it is of schema {schema!r}, and this snugfit reads {SCHEMA}")
    try:
        return Accuracy.from_json(document)
    except KeyError as fault:
        raise _no_result(file, f"it has no {fault}") from None
    except SnugfitError as fault:
        raise _no_result(file, str(fault)) from None
    except (AttributeError, TypeError, ValueError) as fault:
        raise _no_result(file, f"it is damaged ({fault})") from None


def _no_result(file: Path, why: str) -> UsageError:
    return UsageError(
        f"{file} is no result of `snugfit accuracy`: {why.rstrip('.')}. Name an accuracy-seed*.json, or the "
        "folder that holds it."
    )


def _keep(result: Accuracy, file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_document(file, result.to_json())
    except OSError as error:
        raise SnugfitError(f"{file}: cannot be written ({error.strerror}).") from None
