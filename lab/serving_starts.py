"""Compare predicted starts of vLLM with published ones.

    python lab/serving_starts.py [--write results/serving-starts-2026-11-30.json]

The rows are in `src/snugfit/features/serving/vllm_starts.json`. Each row's cache, weights, activations and
non-torch memory are predicted from the model's config and the server's options alone. The last lines have the
shares of rows within 2 % and the constants of `vllm.py`, fitted again to the models for fitting.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from snugfit.documents import write_document
from snugfit.features.serving import vllm
from snugfit.features.serving.answer import ServingAnswer
from snugfit.features.serving.published import PublishedStart, cache_error, distinct, published_starts
from snugfit.features.serving.sizes import read_sizes
from snugfit.units import GIB, MIB

PARTS = {
    "weights_gib": "weights_bytes",
    "activation_gib": "activation_bytes",
    "non_torch_gib": "non_torch_bytes",
    "graphs_gib": "graph_bytes",
    "cache_gib": "cache_bytes",
}
"""Published figures with the fields of the answer."""

WITHIN = 0.02


def row_of(start: PublishedStart, answer: ServingAnswer) -> dict[str, Any]:
    """Return the published and predicted figures of a start, in GiB."""
    parts = {
        name.removesuffix("_gib"): [start.row[name], round(getattr(answer, field) / GIB, 3)]
        for name, field in PARTS.items()
        if name in start.row
    }
    options = {key: value for key, value in start.row.items() if not key.endswith(("_gib", "_tokens"))}
    tokens = {"tokens": [start.row.get("cache_tokens"), answer.cache_tokens]}
    error = {"cache_error": round(cache_error(start, answer), 5), "fit": start.fits}
    return {**options, **error, "published_and_predicted_gib": parts, **tokens}


def summary(starts: tuple[PublishedStart, ...], errors: dict[int, float]) -> dict[str, Any]:
    """Return the number of rows and configurations within 2 %, for fitting and for testing."""
    found: dict[str, Any] = {}
    for name, fits in (("test", False), ("fit", True)):
        chosen = [start for start in starts if start.fits is fits]
        logged = [start for start in chosen if start.row["source"] == "log"]
        groups = (("rows", chosen), ("configurations", distinct(chosen)), ("logged rows", logged))
        for kind, members in groups:
            sizes = sorted(abs(errors[id(one)]) for one in members)
            found[f"{name} {kind}"] = {
                "count": len(sizes),
                "within_2_percent": sum(size <= WITHIN for size in sizes),
                "median": round(statistics.median(sizes), 5),
                "largest": round(sizes[-1], 5),
            }
    return found


def fitted(starts: tuple[PublishedStart, ...]) -> dict[str, Any]:
    """Return the constants by the rows for fitting, beside those of the code."""
    rows = [start for start in starts if start.fits and "version" not in start.row]
    one = [
        start.row["non_torch_gib"]
        for start in rows
        if start.row["tensor_parallel"] == 1 and "non_torch_gib" in start.row
    ]
    several = [start.row["non_torch_gib"] for start in rows if start.row["tensor_parallel"] > 1]
    graphs = [start.row["graphs_gib"] for start in rows if "graphs_gib" in start.row]
    forward = next(start for start in rows if "CodeLlama" in start.row["model"])
    sizes = read_sizes(forward.model, 1)
    state = 8192 * sizes.hidden * 2
    workspace = vllm.CUBLAS_WORKSPACE
    rest = forward.row["activation_gib"] * GIB - workspace - 3 * 8192 * sizes.intermediate * 2
    return {
        "NON_TORCH": [vllm.NON_TORCH, round(statistics.median(one), 3)],
        "NON_TORCH_RANKS": [vllm.NON_TORCH_RANKS, round(statistics.median(several), 3)],
        "FORWARD_HIDDEN": [vllm.FORWARD_HIDDEN, round(rest / state, 2)],
        "graphs of 1024 sequences, MiB": [
            round(vllm.graph_bytes(vllm.LARGEST_GRAPH) / MIB),
            round(statistics.mean(graphs) * 1024),
        ],
    }


def main() -> None:
    """Print the table of errors, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE")
    write = parser.parse_args().write
    starts = published_starts()
    answers = [start.predict() for start in starts]
    errors = {id(start): cache_error(start, answer) for start, answer in zip(starts, answers, strict=True)}
    for start, answer in sorted(zip(starts, answers, strict=True), key=lambda pair: abs(errors[id(pair[0])])):
        row, kind = start.row, "fit " if start.fits else "test"
        print(
            f"{kind} {row['model'][-45:]:45} tp {row['tensor_parallel']} cache {row['cache_gib']:6.2f} "
            f"predicted {answer.cache_bytes / GIB:6.2f} GiB {100 * errors[id(start)]:+6.2f} %"
        )
    refused = [start.predict() for start in published_starts("refused")]
    document = {
        "what": "predicted starts of vLLM beside published ones",
        "engine": "vllm",
        "gpu": "H100-SXM",
        "summary": summary(starts, errors),
        "constants, code and fit": fitted(starts),
        "refused": [f"{answer.model}: {answer.refusal}" for answer in refused],
        "rows": [row_of(start, answer) for start, answer in zip(starts, answers, strict=True)],
    }
    shown = {key: value for key, value in document.items() if key != "rows"}
    print(json.dumps(shown, indent=1))
    if write:
        write_document(write, document)


if __name__ == "__main__":
    main()
