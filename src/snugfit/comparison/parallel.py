"""Many predictions at once, in as many processes as there are cores to give.

A rehearsal is Python on one core, and the guide's suite is some forty of them. They go to processes that
share nothing: each question is plain data, and so is its answer. A question that cannot be answered is
answered with the reason.

The workers come from a fork server, which has imported torch once and never computed anything: a copy of a
process that has is not safe. They die with whoever asked, also when it is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, TypeVar

from snugfit.errors import SnugfitError
from snugfit.prediction.predict import predict
from snugfit.techniques.recipe import Recipe

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.results.prediction import Prediction

_Asked = TypeVar("_Asked")
_Given = TypeVar("_Given")

_PRELOADED = ["torch", "transformers", "snugfit.prediction.predict"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """One prediction that is wanted."""

    about: str
    """What it is for, in words."""

    job: Job
    """What must be trained."""

    recipe: str
    """How, as text: a recipe that cannot be read is an answer too."""

    gpu: Gpu
    """On what."""

    loop: str = "plain"
    """By which loop."""

    software: str = "installed"
    """Under which software."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from the suite's other questions."""
        return self.about, self.gpu.key, self.software


def answer(question: Question) -> Prediction | str:
    """The prediction, or why there is none."""
    try:
        return predict(
            question.job,
            Recipe.parse(question.recipe),
            gpu=question.gpu,
            loop=question.loop,
            software=question.software,
        )
    except SnugfitError as refusal:
        return str(refusal)


def answers(
    questions: Sequence[Question], *, workers: int, tell: Callable[[str], None] = lambda about: None
) -> list[Prediction | str]:
    """The answers in the questions' order; `tell` hears what each is about when its turn comes."""
    found = []
    for question, given in zip(questions, side_by_side(answer, questions, workers), strict=True):
        tell(question.about)
        found.append(given)
    return found


def side_by_side(
    function: Callable[[_Asked], _Given], asked: Sequence[_Asked], workers: int
) -> Iterator[_Given]:
    """What `function` gives for each, in order, each as soon as it and those before it are there.

    Function, questions and answers travel between processes, so all of them are picklable.
    """
    if workers <= 1 or len(asked) <= 1:
        yield from map(function, asked)
        return
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    pool = ProcessPoolExecutor(min(workers, len(asked)), mp_context=context, initializer=_begin)
    try:
        yield from pool.map(function, asked)
        pool.shutdown()  # a worker that is not waited for leaves its semaphores to be complained about
    except BrokenProcessPool:
        raise SnugfitError(
            "A worker process was killed, perhaps because memory ran out. Try with --workers 1."
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _begin() -> None:
    """In a worker: Ctrl-C ends it without a word, and so does the end of whoever asked."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel
        threading.Thread(target=lambda: (wait([sentinel]), os._exit(1)), daemon=True).start()
