"""Time FlashOptim's AdamW (arXiv 2602.23349) in a plain loop over transformers' model, as `measure` does.

    python lab/peer_flashoptim.py '{"model": NAME, "task": TASK, ...}' [--bits 24] [--release]

The argument holds the arguments of a `Job` as JSON. Weights are in bfloat16, moments in 8 bits, masters of 24
or 32 bits. If it releases gradients within the backward pass, it has no norm to clip by and does not clip.
The script prints a row of `fastest_step.py`. It needs `pip install flashoptim`.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.step.batches import micro_batches, place
from snugfit.step.build import build_model
from snugfit.step.loss import loss_of
from snugfit.techniques.recipe import Recipe

CUDA = torch.device("cuda", 0)
WARM, STEPS = 5, 20


def measured(job: Job, bits: int, *, release: bool) -> dict[str, Any]:
    """Return the median of some steps, and the most bytes that the allocator reserved."""
    from flashoptim import FlashAdamW, cast_model, enable_gradient_release

    setup = Recipe.parse("plain").setup()
    model = build_model(job, setup, CUDA)
    cast_model(model, dtype=torch.bfloat16)
    optimizer = FlashAdamW(model.parameters(), lr=job.learning_rate, master_weight_bits=bits)
    if release:
        enable_gradient_release(model, optimizer)
    batches = micro_batches(job, setup, CUDA, setup.micro_batches)
    seconds = []
    for step in range(WARM + STEPS):
        if step == WARM:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss_of(model(**place(next(batches)[0], CUDA))).backward()
        if not release:
            if job.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    steady = sorted(seconds[WARM:])
    middle = steady[len(steady) // 2]
    return {
        "loop": "flashoptim",
        "recipe": f"{bits} bits{', released, not clipped' if release else ''}",
        "outcome": "ok",
        "step_seconds": middle,
        "samples_per_second": job.batch_size / middle,
        "spread": (steady[-2] - steady[1]) / middle,
        "requested_bytes": torch.cuda.memory_stats()["requested_bytes.all.peak"],
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=json.loads)
    parser.add_argument("--bits", type=int, default=24)
    parser.add_argument("--release", action="store_true")
    given = parser.parse_args()
    facts = {**given.job, "model": Model.find(given.job["model"])}
    print(json.dumps(measured(Job(**facts), given.bits, release=given.release)))


if __name__ == "__main__":
    main()
