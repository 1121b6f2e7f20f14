"""Predict every architecture of transformers with every head of snugfit's tasks.

    python lab/breadth.py [--recipe TEXT] [--types bert,t5] [--processes 2] [--seconds 120]
    python lab/breadth.py --again results/breadth-DATE.json  # pairs that timed out, and --types

Each model type of the seven tasks has the default config of its class, in the form that transformers saves.
The config is cut to a few layers, and every kind of layer remains. If the cut config gives no prediction, the
whole default config is predicted. If a refusal names a length that fits, the prediction uses that length. If
it names building on the host, the prediction does that. Worker processes run the pairs under a time limit.

Each pair ends as `predicted`, `refused` (with the text), `crashed` (with the traceback) or `timed out`. Types
without a default config of their own are listed separately. The script writes results/breadth-DATE.json
atomically. A full run takes some fifteen minutes on two cores.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import multiprocessing
import queue
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from snugfit.documents import write_document
from snugfit.job.architectures import heads, model_types, tasks_of
from snugfit.job.config import LAYERS
from snugfit.versions import versions

RESULTS = Path(__file__).resolve().parents[1] / "results"
GPU = "h200"

ROPE = {"rope_type": "default", "rope_theta": 10000.0}

MENDED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blenderbot": {"encoder_layers": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "esm": {"vocab_size": 33, "pad_token_id": 1},
    "granitemoehybrid": {"layer_types": ["mamba"] * 31 + ["attention"]},
    "granite_speech": {"projector_config": {"encoder_hidden_size": 1024}},
    "granite_speech_plus": {"projector_config": {"encoder_hidden_size": 1024}},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv"] * 31 + ["full_attention"]},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "reformer": {"axial_pos_shape": [16, 32]},
    "reformer causal-lm": {"is_decoder": True},
}
"""Contradictions and gaps in the defaults of a class that make a real step of 512 tokens fail."""

FEW = 4
"""Layers that remain if all are of one kind."""

COUNTS = LAYERS | {"depth", "num_blocks"}
"""Keys that count layers. They set the length of lists with an entry for each layer."""

PERIODS = ("period", "interval", "offset", "first_k_dense_replace", "num_dense_layers", "sparse_step")
"""Parts of the names of keys that put another kind of layer at regular positions, or after the first."""


def pairs(types: list[str]) -> list[tuple[str, str]]:
    """Return every model type with each task that it has a head for."""
    return [(name, task) for name in sorted(types) for task in tasks_of(name)]


def cut(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config and its nested configs with few layers of every kind."""
    config = {key: cut(value) if isinstance(value, dict) else value for key, value in config.items()}
    periods = [v for k, v in config.items() if any(p in k for p in PERIODS) and _is_count(v) and v < 17]
    for key in COUNTS & config.keys():
        depth = config[key]
        if not _is_count(depth) or depth <= FEW:
            continue
        lists = {k: v for k, v in config.items() if isinstance(v, list) and len(v) == depth}
        kinds: dict[str, int] = {}
        for layer in range(depth):
            kinds.setdefault(json.dumps([entries[layer] for entries in lists.values()]), layer)
        some = set(kinds.values()) if len(kinds) <= 2 * FEW else set()
        kept = sorted(some | set(range(min(depth, max([FEW - len(some), *(1 + p for p in periods)])))))
        config |= {k: [entries[layer] for layer in kept] for k, entries in lists.items()}
        config[key] = len(kept)
    return config


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def default_configs(model_type: str, task: str) -> dict[str, dict[str, Any]]:
    """Return the default configs of this type's class, as transformers saves them.

    `cut` has a few layers of every kind, `whole` has all.
    """
    from transformers import AutoConfig

    mended = merge(MENDED.get(model_type, {}), MENDED.get(f"{model_type} {task}", {}))
    made = AutoConfig.for_model(model_type)
    saved = merge({**json.loads(made.to_json_string()), "model_type": model_type}, mended)
    complete = merge(json.loads(made.to_json_string(use_diff=False)), mended)
    return {"cut": merge(saved, difference(complete, cut(complete))), "whole": saved}


def merge(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the config with these changes, also within nested configs."""
    merged = dict(config)
    for key, value in changes.items():
        inner = merged.get(key)
        merged[key] = merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def difference(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of `new` that differ. Nested configs hold only their differing keys."""
    changes: dict[str, Any] = {}
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(old.get(key), dict):
            if inner := difference(old[key], value):
                changes[key] = {k: v for k, v in value.items() if k == "model_type"} | inner
        elif value != old.get(key):
            changes[key] = value
    return changes


def predict_pair(model_type: str, task: str, recipe: str) -> dict[str, Any]:
    """Predict one pair and return its outcome."""
    try:
        configs = default_configs(model_type, task)
    except Exception as error:
        return {"ends": "no default config", "text": f"{type(error).__name__}: {error}".strip()[:300]}
    ending: dict[str, Any] = {}
    for name, config in configs.items():
        ending = {**_predict(config, model_type, task, recipe), "config": name}
        if ending["ends"] == "predicted":
            break
    return ending


def _predict(config: dict[str, Any], model_type: str, task: str, recipe: str) -> dict[str, Any]:
    from snugfit import Job, Model, SnugfitError, predict
    from snugfit.job.config import parse_config

    lengths: dict[str, Any] = {}
    for _ in range(3):
        try:
            facts = parse_config(json.dumps(config).encode(), location=model_type)
            job = Job(model=Model.from_config(facts, name=model_type), task=task, **lengths)  # type: ignore[arg-type]
            told = predict(job, recipe, gpu=GPU).to_json()
        except SnugfitError as refused:
            shorter = re.search(r"(sequence|target) length .* Try (\d+) or less", str(refused))
            if shorter:
                lengths[f"{shorter[1]}_length"] = int(shorter[2])
            elif "build_on='host'" in str(refused) and not lengths:
                lengths["build_on"] = "host"
            else:
                return {"ends": "refused", "text": str(refused)}
        except Exception:
            return {"ends": "crashed", "text": traceback.format_exc()[-2000:]}
        else:
            return {
                "ends": "predicted",
                "nvml_bytes": told["footprint"]["nvml_bytes"],
                "doubts": told["doubts"],
                **lengths,
            }
    return {"ends": "refused", "text": "no length fits"}


class Worker:
    """A process that runs pairs one after the other. It is replaced after a crash or a timeout."""

    MOST_PAIRS = 50
    """Pairs after which a process is replaced, because leftovers of pairs accumulate."""

    def __init__(self, recipe: str, seconds: float) -> None:
        self.recipe, self.seconds = recipe, seconds
        self.pairs = 0
        self._start()

    def run(self, pair: tuple[str, str]) -> dict[str, Any]:
        """Run one pair and return its outcome."""
        began = time.monotonic()
        self.pairs += 1
        self.connection.send(pair)
        try:
            ready = self.connection.poll(self.seconds)
            ending = self.connection.recv() if ready else {"ends": "timed out"}
        except EOFError:
            ready, ending = False, {"ends": "crashed", "text": "the process ended"}
        if not ready or self.pairs >= self.MOST_PAIRS:
            self.end()
            self._start()
        ending |= {"model_type": pair[0], "task": pair[1], "seconds": round(time.monotonic() - began, 1)}
        print(json.dumps({k: ending[k] for k in ("model_type", "task", "ends", "seconds")}), file=sys.stderr)
        return ending

    def end(self) -> None:
        """End the process."""
        self.child.kill()
        self.child.join()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, there = context.Pipe()
        self.child = context.Process(target=_work, args=(there, self.recipe), daemon=True)
        self.child.start()
        there.close()
        self.pairs = 0


def _work(connection: Any, recipe: str) -> None:
    """Run pair after pair from the connection."""
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    while True:
        model_type, task = connection.recv()
        connection.send(predict_pair(model_type, task, recipe))


def record(
    types: list[str], recipe: str, processes: int, seconds: float, before: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the document: versions, the count of each outcome, and each pair.

    Pairs of `before` are not run again.
    """
    now = datetime.datetime.now(datetime.UTC)
    workers = [Worker(recipe, seconds) for _ in range(processes)]
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def run(pair: tuple[str, str]) -> dict[str, Any]:
        worker = idle.get()
        try:
            return worker.run(pair)
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(processes) as threads:
        kept = {(end["model_type"], end["task"]): end for end in before}
        endings = list(threads.map(lambda pair: kept.get(pair) or run(pair), pairs(types)))
    for worker in workers:
        worker.end()
    return {
        "schema": 1,
        "what": "breadth",
        "date": now.isoformat(timespec="seconds"),
        "versions": versions(),
        "recipe": recipe,
        "gpu": GPU,
        "seconds_limit": seconds,
        "counts": dict(Counter(ending["ends"] for ending in endings)),
        "by_task": {task: _counts(endings, task) for task in heads()},
        "pairs": endings,
    }


def _counts(endings: list[dict[str, Any]], task: str) -> dict[str, int]:
    return dict(Counter(ending["ends"] for ending in endings if ending["task"] == task))


def _refusals(endings: list[dict[str, Any]]) -> Iterator[str]:
    for ending in endings:
        if ending["ends"] != "predicted":
            text = str(ending.get("text", "")).strip().splitlines() or [""]
            yield f"{ending['model_type']} {ending['task']}: {ending['ends']}: {text[-1]}"


def main() -> None:
    """Run the pairs and write the day's file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--recipe", default="plain")
    parser.add_argument("--types", help="model types, with commas; all where not given")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each pair")
    parser.add_argument("--out", type=Path, help="results/breadth-DATE.json where not given")
    parser.add_argument("--again", type=Path, help="a file of this script: what timed out, and --types, anew")
    asked = parser.parse_args()
    types = asked.types.split(",") if asked.types else sorted(model_types())
    before: list[dict[str, Any]] = []
    if asked.again:
        last = json.loads(asked.again.read_text())["pairs"]
        anew = set(types) if asked.types else set()
        before = [end for end in last if end["ends"] != "timed out" and end["model_type"] not in anew]
        types = sorted({end["model_type"] for end in last})
    document = record(types, asked.recipe, asked.processes, asked.seconds, before)
    print("\n".join(_refusals(document["pairs"])))
    print(document["counts"])
    path = asked.out or RESULTS / f"breadth-{document['date'][:10]}.json"
    write_document(path, document)
    print(path)


if __name__ == "__main__":
    main()
