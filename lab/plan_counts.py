"""Count the rehearsals and full simulations of some plans, and fail where they rise without a reason.

    python lab/plan_counts.py
    python lab/plan_counts.py --update --reason "TEXT"

`make lint` runs it. A plan's seconds depend on the machine, these counts do not. Each plan runs in this one
process, with one worker. `lab/plan_counts.json` holds the counts and the reasons for each rise. Counts
that fall are printed too, and `--update` needs no reason for them. `plan_time.py` measures seconds.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from committed_counts import compare, read_arguments

GPT2 = {
    "model_type": "gpt2",
    "n_layer": 4,
    "n_embd": 64,
    "n_head": 4,
    "vocab_size": 500,
    "n_positions": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


class Question(NamedTuple):
    """A plan to count."""

    model: str | dict[str, Any]
    """A name of the table, or a config."""
    job: dict[str, Any]
    plan: dict[str, Any]


PLANS = {
    "small GPT-2 on an RTX 4090": Question(
        GPT2, {"task": "causal-lm", "batch_size": 4, "sequence_length": 64}, {"gpu": "rtx 4090"}
    ),
    "Llama-3.1-8B with LoRA on an RTX 4090": Question(
        "Llama-3.1-8B",
        {"task": "causal-lm", "batch_size": 16},
        {"gpu": "rtx 4090", "keep": "lora(r=16) + adamw_compact + bf16"},
    ),
    "bert-base-uncased on an H200, captured": Question(
        "bert-base-uncased", {"task": "sequence-classification"}, {"gpu": "h200", "keep": "captured"}
    ),
}

COUNTED = {
    "rehearsals": ("snugfit.rehearsal.record.recorder", "Recorder.recording"),
    "screens": ("snugfit.planning.cost.parts", "Parts.screen"),
    "full simulations": ("snugfit.planning.cost.parts", "Parts.evaluate"),
    "programs lowered": ("snugfit.features.compile.simulation.layers", "lower"),
}
"""Counted functions with their modules, by the name of the count."""


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the calls of the functions in `COUNTED`."""
    calls: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
    patches = [
        patch(f"{module}.{path}", _counted(name, module, path, calls))
        for name, (module, path) in COUNTED.items()
    ]
    for one in patches:
        one.start()
    try:
        yield calls
    finally:
        for one in patches:
            one.stop()


def _counted(name: str, module: str, path: str, calls: Counter[str]) -> Callable[..., Any]:
    function: Callable[..., Any] = functools.reduce(
        getattr, path.split("."), __import__(module, fromlist=["_"])
    )

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        calls[name] += 1
        return function(*arguments, **named)

    return call


def count(question: Question) -> dict[str, int]:
    """Return the counts of one plan."""
    from snugfit import Job, Model
    from snugfit.planning.search.search import plan  # this function reads no stored plan

    named = isinstance(question.model, str)
    model = Model.find(question.model) if named else Model.from_config(question.model, name="gpt2")
    with counting() as calls:
        plan(Job(model=model, **question.job), workers=1, **question.plan)
    return dict(calls)


def main() -> int:
    """Compare the counts with the table. Return 1 if one rose."""
    asked = read_arguments(__doc__.splitlines()[0])
    logging.disable(logging.WARNING)
    counts = {name: count(question) for name, question in PLANS.items()}
    table = Path(__file__).with_suffix(".json")
    return compare(table, counts, what="Counts of plans", update=asked.update, reason=asked.reason)


if __name__ == "__main__":
    sys.exit(main())
