"""Measure loads of a checkpoint on the CPU beside the formula of `features/inference/loading.py`.

    OMP_NUM_THREADS=1 python lab/loading_seconds.py OUT.json [--rounds N] [--folder FOLDER]

The formula is the larger one of two times: bytes of the files by the disk's rate, and copied bytes by the
rate of copies. Here each weight is cloned after the load, in place of the copy to a GPU. Each round measures
both rates. For the disk, threads touch the pages of the mapped file. For copies, tensors of the cached file
are cloned. The seconds of Python, which the formula leaves out, are those of a model with few weights.

Other processes slow all actions of a round, so the errors are medians over the rounds. Pages leave the cache
by `posix_fadvise`.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.core_model_loading import GLOBAL_WORKERS

from snugfit.versions import versions

SIZES: dict[str, dict[str, Any]] = {
    "0.2 GB": {"hidden_size": 640, "num_hidden_layers": 10, "intermediate_size": 2560, "vocab_size": 32000},
    "0.3 GB": {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072, "vocab_size": 32000},
}
"""Sizes of the saved models, in bf16."""

NARROW = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
"""Sizes of the model whose load shows Python's time."""


FORMULA = {"cached": ("copies",), "uncached": ("read from disk", "copies")}
"""Measured parts of which the larger one is the formula's seconds, by kind of load."""


def save(folder: Path, sizes: Mapping[str, Any]) -> None:
    heads = sizes["hidden_size"] // 64
    config = LlamaConfig(num_attention_heads=heads, num_key_value_heads=heads, **sizes)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def seconds_of(action: Callable[[], Any]) -> float:
    gc.collect()
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def load_and_copy(folder: Path) -> None:
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map={"": "cpu"})
    for weight in model.parameters():
        weight.data = weight.data.clone()


def clone_all(file: Path) -> None:
    """Clone each tensor of a file in the page cache. The rate of copies is the bytes by these seconds."""
    with safe_open(file, framework="pt") as tensors:
        copies = [tensors.get_tensor(name).clone() for name in tensors.keys()]  # noqa: SIM118
    del copies


def read(file: Path) -> None:
    """Touch each page of the mapped file, in as many threads as transformers has."""
    pages = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
    parts = pages.split(16 << 20)
    with ThreadPoolExecutor(GLOBAL_WORKERS) as threads:
        list(threads.map(lambda part: part[:: mmap.PAGESIZE].sum(), parts))


def leave_cache(file: Path) -> None:
    gc.collect()  # mapped pages do not leave the cache
    with file.open("rb") as stream:
        os.fdatasync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def one_round(folder: Path, narrow: Path) -> dict[str, float]:
    """Return the seconds of each measured action, once."""
    file = folder / "model.safetensors"
    leave_cache(file)
    found = {"read from disk": seconds_of(lambda: read(file))}
    found["copies"] = seconds_of(lambda: clone_all(file))
    found["load, cached"] = seconds_of(lambda: load_and_copy(folder))
    leave_cache(file)
    found["load, uncached"] = seconds_of(lambda: load_and_copy(folder))
    found["Python"] = seconds_of(lambda: load_and_copy(narrow))
    return found


def measured(sizes: Mapping[str, Any], rounds: int, parent: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder, narrow = Path(name) / "model", Path(name) / "narrow"
        save(folder, sizes)
        save(narrow, {**sizes, **NARROW})
        load_and_copy(narrow)  # imports
        taken = [one_round(folder, narrow) for _ in range(rounds)]
        size = (folder / "model.safetensors").stat().st_size
    medians = {key: statistics.median(one[key] for one in taken) for key in taken[0]}
    errors = {
        kind: [(max(one[part] for part in parts) + one["Python"]) / one[f"load, {kind}"] - 1 for one in taken]
        for kind, parts in FORMULA.items()
    }
    return {
        "bytes": size,
        "disk_bytes_per_second": size / medians["read from disk"],
        "copy_bytes_per_second": size / medians["copies"],
        "median_seconds": medians,
        "median_errors": {kind: statistics.median(found) for kind, found in errors.items()},
        "errors": errors,
        "rounds": taken,
    }


def main() -> None:
    """Measure each size, and write the result after it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure")
    given = parser.parse_args()
    rows: dict[str, Any] = {}
    for name, sizes in SIZES.items():
        rows[name] = measured(sizes, given.rounds, given.folder)
        document = {"threads": torch.get_num_threads(), "versions": versions(), "rows": rows}
        given.out.write_text(json.dumps(document, indent=1) + "\n")
        print(name, {key: round(value, 3) for key, value in rows[name]["median_errors"].items()}, flush=True)


if __name__ == "__main__":
    main()
