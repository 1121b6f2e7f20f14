"""Compare a sample of the predictions of `breadth.py` with real steps on the CPU.

    python lab/breadth_steps.py results/breadth-DATE.json [--sample 100] [--seed 1] [--processes 2]
    python lab/breadth_steps.py results/breadth-DATE.json --pairs bert:masked-lm,t5:seq2seq-lm
    python lab/breadth_steps.py results/breadth-DATE.json --again results/breadth-steps-DATE.json

Each pair is drawn from the predicted ones and runs in a process of its own. Its config has few layers of
every kind. `narrow` reduces widths, vocabulary, experts and pictures, so that two cores can train it. The
first division of widths counts whose rehearsal succeeds and stays below `LARGEST` bytes. Three steps with
random weights (forward, backward, update) then run on the CPU. torch's profiler reports every allocation. The
same three steps are rehearsed for the CPU. The comparison is that of laws 1 and 7 (`tests/reported.py`,
`tests/cpu_scratch.py`). It covers the peak of requested bytes, to the byte, and the events of the third step.

A pair has one of these outcomes:

- `same`
- `doubted`: the peaks differ, and the prediction names its assumption
- `silently wrong`: the peaks differ, and no doubt of the prediction explains it
- `refused`: by the rehearsal under every division, with its texts
- `failed`: the real step raised an error, the rehearsal did not
- `crashed` or `timed out`

The script writes results/breadth-steps-DATE.json atomically. A sample of 100 takes half an hour.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import logging
import random
import re
import subprocess
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from breadth import RESULTS, default_configs, difference, merge

from snugfit.documents import write_document
from snugfit.versions import versions

SHAPES = {"sequence_length": 64, "target_length": 32}
ROWS = (4, 1)
"""Samples of a batch. The second number applies if nothing else makes the step small enough."""

LARGEST = 6 << 30
"""Largest rehearsed peak of a real run, in bytes."""

DIVISIONS = (8, 4, 2, 1)
"""Divisors of widths, the smallest models first. The last leaves the config as it is."""

WORDS, EXPERTS, PIXELS = 1024, 16, 224
"""Largest vocabulary, number of experts of a layer, and side of a picture in pixels, in a narrowed config."""

WIDTHS = re.compile(r"size|dim|width|channel|d_model|d_ff|d_kv|d_head|n_embd|n_inner|ffn|_rank|features")
NO_WIDTHS = re.compile(r"vocab|image|patch|kernel|window|chunk|position|num_|group|block|stride|token|_rate")

EXPLAINS_NOTHING = ("The model has faster kernels in", "trainable parameters get no gradient from this batch")
"""Doubts about another machine or another batch, which cannot explain a difference on the CPU."""


def narrow(config: dict[str, Any], division: int) -> dict[str, Any]:
    """Return the config and its nested configs with divided widths, few words and few experts."""
    narrowed: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            narrowed[key] = narrow(value, division)
        elif "vocab_size" in key and _is_count(value):
            narrowed[key] = min(value, WORDS)
        elif key.endswith(("token_id", "token_index")) and _is_count(value) and value >= WORDS:
            narrowed[key] = WORDS - 1 - value % 64
        elif "experts" in key and "per_" not in key and _is_count(value):
            narrowed[key] = min(value, EXPERTS)
        elif key == "image_size" and _is_count(value):
            narrowed[key] = min(value, PIXELS)
        elif WIDTHS.search(key) and not NO_WIDTHS.search(key):
            narrowed[key] = _divided(value, division)
        else:
            narrowed[key] = value
    return narrowed


def _divided(value: Any, division: int) -> Any:
    if isinstance(value, list) and all(_is_count(one) for one in value):
        parts = [_divided(one, division) for one in value]
        return parts if all(new != old for new, old in zip(parts, value)) else value
    return value // division if _is_count(value) and value >= 64 and value % division == 0 else value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def narrowed_configs(model_type: str, task: str, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the config of `breadth.py` called `name`, narrowed less each time, with its description."""
    from transformers import AutoConfig

    config = default_configs(model_type, task)[name]
    complete = merge(json.loads(AutoConfig.for_model(model_type).to_json_string(use_diff=False)), config)
    for division in DIVISIONS:
        yield f"1/{division}", merge(config, difference(complete, narrow(complete, division)))
    yield "whole", config


def held_to_steps(model_type: str, task: str, name: str, lengths: dict[str, Any]) -> dict[str, Any]:
    """Compare one pair with real steps and return its outcome."""
    from aligned import compare, peak
    from cpu_scratch import compared
    from reported import foreseen, reports
    from snugfit import Job, Model, SnugfitError
    from snugfit.job.config import parse_config
    from snugfit.rehearsal.device.policy import CpuPolicy
    from snugfit.rehearsal.rehearse import rehearse
    from snugfit.techniques.recipe import Recipe

    shapes = SHAPES | {k: min(v, SHAPES.get(k, v)) if _is_count(v) else v for k, v in lengths.items()}
    refusals: dict[str, str] = {}
    for rows, (division, config) in itertools.product(ROWS, [*narrowed_configs(model_type, task, name)]):
        ending: dict[str, Any] = {"narrowed": division, "batch_size": rows}
        tried = f"{division}, batch of {rows}"
        try:
            facts = parse_config(json.dumps(config).encode(), location=model_type)
            model = Model.from_config(facts, name=model_type)
            job = Job(model=model, task=task, batch_size=rows, **shapes)  # type: ignore[arg-type]
            trace = rehearse(job, Recipe().setup(), CpuPolicy())
        except SnugfitError as refused:
            refusals[tried] = str(refused)
            continue
        except Exception:
            return ending | {"ends": "crashed", "text": error_line(traceback.format_exc())}
        if trace.peak()[0] <= LARGEST:
            break
        refusals[tried] = f"a peak of {trace.peak()[0]:,} bytes"
    else:
        return {"ends": "refused", "text": refusals}
    ending |= {"doubts": list(trace.doubts)}
    try:
        real = compared(reports(job, Recipe().setup()))
    except Exception:
        return ending | {"ends": "failed", "text": error_line(traceback.format_exc())}
    predicted = compared(foreseen(trace))
    peaks = {"predicted_bytes": peak(predicted), "real_bytes": peak(real)}
    third = [[event for event in events if event.step == 2] for events in (real, predicted)]
    alike = compare(*third)
    explained = any(not any(told in doubt for told in EXPLAINS_NOTHING) for doubt in trace.doubts)
    differs = peaks["predicted_bytes"] != peaks["real_bytes"]
    return ending | {
        "ends": "same" if not differs else "doubted" if explained else "silently wrong",
        **peaks,
        "events_alike": round(alike.similarity, 5),
        "events_that_differ": list(alike.lines[:8]),
    }


def run_pair(pair: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Run one pair in a process of its own and return its outcome."""
    lengths = {key: pair[key] for key in ("sequence_length", "target_length", "build_on") if key in pair}
    asked = json.dumps([pair["model_type"], pair["task"], pair["config"], lengths])
    command = [sys.executable, __file__, "--one", asked]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        ending = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        ending = {"ends": "timed out"}
    except (IndexError, ValueError):
        ending = {"ends": "crashed", "text": error_line(done.stderr)}
    ending = {"model_type": pair["model_type"], "task": pair["task"], **ending}
    shown = ("model_type", "task", "ends", "narrowed", "predicted_bytes", "real_bytes", "events_alike")
    print(*(ending.get(key, "") for key in shown), file=sys.stderr, flush=True)
    return ending


def error_line(output: str) -> str:
    """Return the error line of a traceback without the machine's paths, or the last line."""
    lines = output.strip().splitlines() or [""]
    return next(
        (line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception)\b", line)), lines[-1]
    )[:500]


def drawn(breadth: dict[str, Any], sample: int, seed: int, named: str | None) -> list[dict[str, Any]]:
    """Return the sampled or the named pairs among all predicted ones."""
    predicted = [pair for pair in breadth["pairs"] if pair["ends"] == "predicted"]
    if named:
        names = named.split(",")
        return [pair for pair in predicted if f"{pair['model_type']}:{pair['task']}" in names]
    return random.Random(seed).sample(predicted, sample)


def document_of(asked: argparse.Namespace) -> dict[str, Any]:
    """Return the document: versions, the count of each outcome, and each pair."""
    now = datetime.datetime.now(datetime.UTC)
    breadth = json.loads(asked.breadth.read_text())
    last = [end for path in asked.again for end in json.loads(path.read_text())["pairs"]]
    kept = {(end["model_type"], end["task"]): end for end in last if end["ends"] in ("same", "doubted")}
    with ThreadPoolExecutor(asked.processes) as threads:
        endings = list(
            threads.map(
                lambda pair: kept.get((pair["model_type"], pair["task"])) or run_pair(pair, asked.seconds),
                drawn(breadth, asked.sample, asked.seed, asked.pairs),
            )
        )
    return {
        "schema": 1,
        "what": "breadth-steps",
        "date": now.isoformat(timespec="seconds"),
        "versions": versions(),
        "sampled_from": asked.breadth.name,
        "seed": None if asked.pairs else asked.seed,
        "seconds_limit": asked.seconds,
        "counts": dict(Counter(ending["ends"] for ending in endings)),
        "pairs": endings,
    }


def main() -> None:
    """Run the sample and write the day's file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("breadth", type=Path, nargs="?", help="a file of breadth.py")
    parser.add_argument("--sample", type=int, default=100)
    parser.add_argument("--seed", type=int, default=20261122)
    parser.add_argument("--pairs", help="TYPE:TASK, with commas, in the place of a sample")
    parser.add_argument(
        "--again", type=Path, nargs="+", default=[], help="files of this: `same`, `doubted` stay"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=240.0, help="of each pair")
    parser.add_argument("--out", type=Path, help="results/breadth-steps-DATE.json where not given")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        sys.path.insert(0, str(RESULTS.parent / "tests"))
        logging.disable(logging.ERROR)
        warnings.simplefilter("ignore")
        print(json.dumps(held_to_steps(*json.loads(asked.one))))
        return
    document = document_of(asked)
    path = asked.out or RESULTS / f"breadth-steps-{document['date'][:10]}.json"
    write_document(path, document)
    print(document["counts"], path)


if __name__ == "__main__":
    main()
