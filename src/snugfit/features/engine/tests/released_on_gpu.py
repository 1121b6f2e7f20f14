"""Compare updates within the backward pass with the same steps that keep their gradients, on a GPU.

    python released_on_gpu.py [FILE] [large | played]

It writes its results as JSON, and fails where one is wrong. `large` adds BERT-large 4 x 512 and Llama-3.2-1B
2 x 2048. `played` compares only recorded steps.

In `test_released.py` the CPU computes both, bit for bit. A GPU adds sums in another order, and attention's
backward pass adds in any order. So weights are close here, and losses agree within a bound.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from captured_on_gpu import BERT, CUDA, LLAMA, STEPS, STILL, job_of

from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.step.open_step import open_step
from snugfit.step.step import Observer
from snugfit.techniques.recipe import Recipe

LARGE_BERT = {
    "model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096, "vocab_size": 30522,
}  # fmt: skip
LARGE_LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}  # fmt: skip
CLOSE = 2e-4
"""Bound on the mean difference of weights, which 12 steps at 1e-3 have moved by up to 1.2e-2."""


APART = 0.1
"""Bound on the difference of losses. With 8-bit moments, one differently rounded code changes the later
steps."""

SMALL = 4096
"""Bytes of a clip coefficient, a norm and sums."""


class Timed(Observer):
    """An observer that records the start time of each step, after a synchronization with the device."""

    def __init__(self) -> None:
        self.begun: list[float] = []

    def step_begins(self, index: int) -> None:
        """Synchronise the device and store the time."""
        torch.cuda.synchronize(CUDA)
        self.begun.append(time.perf_counter())


class Ran(NamedTuple):
    losses: list[float]
    weights: dict[str, torch.Tensor]
    peak: int
    ms: float


def run(job: Job, recipe: str, steps: int) -> Ran:
    """Run some steps and record the peak of torch's allocated bytes."""
    gc.collect()
    torch.cuda.init()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(CUDA)
    before = torch.cuda.memory_allocated(CUDA)
    torch.manual_seed(11)
    step: Any = open_step(job, Recipe.parse(recipe).setup(), "plain", CUDA, keep_losses=True)
    watch = Timed()
    losses = step.run(steps, watch)
    peak = torch.cuda.max_memory_allocated(CUDA) - before
    taken = sorted(b - a for a, b in zip(watch.begun, watch.begun[1:], strict=False))
    weights = {name: value.cpu() for name, value in step.model.state_dict().items()}
    return Ran(losses, weights, peak, 1e3 * taken[len(taken) // 2])


def compare(name: str, job: Job, recipe: str, more: str, steps: int = STEPS) -> dict[str, Any]:
    """Compare losses, weights and peaks of the recipe with and without `more`."""
    kept, released = (run(job, one, steps) for one in (recipe, f"{recipe} + {more}"))
    apart = [
        (kept.weights[key].float() - value.float()).abs()
        for key, value in released.weights.items()
        if value.is_floating_point()
    ]
    mean = sum(float(one.sum()) for one in apart) / sum(one.numel() for one in apart)
    losses_apart = max(abs(a - b) for a, b in zip(kept.losses, released.losses, strict=True))
    return {
        "case": name, "recipe": recipe, "more": more, "clip": job.clip, "losses_apart": losses_apart,
        "weights_apart": max(float(one.max()) for one in apart), "weights_apart_mean": mean,
        "peak_kept": kept.peak, "peak_released": released.peak,
        "weights": sum(value.numel() for value in kept.weights.values()),
        "ms_kept": round(kept.ms, 2), "ms_released": round(released.ms, 2),
        "right": kept.losses[0] == released.losses[0] and losses_apart < APART and mean < CLOSE
        and released.losses[0] != released.losses[-1]
        and (released.peak <= kept.peak + SMALL or more == "captured"),
        "losses": [kept.losses, released.losses],
    }  # fmt: skip


def cases() -> list[tuple[str, Job, str, str]]:
    recipes = ("bf16_master + adamw_fused", "bf16_master + adamw_compact", "bf16 + adamw_fused")
    jobs = (
        ("bert, dropout", job_of(BERT)),
        ("bert, no clip", job_of(BERT, clip=None)),
        ("bert, still", job_of({**BERT, **STILL})),
        ("llama, tied", job_of({**LLAMA, "tie_word_embeddings": True})),
    )
    found = [(name, job, recipe, "released") for name, job in jobs for recipe in recipes]
    fused = "bf16_master + adamw_fused + fused"
    return [
        *found,
        ("bert, fused", job_of(BERT), fused, "released"),
        ("llama, fused", job_of(LLAMA), f"{fused} + chunked_loss", "released"),
        *played_cases(fused),
    ]


def played_cases(fused: str) -> list[tuple[str, Job, str, str]]:
    """Return cases with replayed passes, and with layers that keep attention with dropout."""
    bert, llama = job_of(BERT), job_of(LLAMA)
    compact = "bf16_master + adamw_compact + fused"
    short = "bf16_master + adamw_compact(master_bits=24) + fused"
    return [
        ("bert, played", bert, f"{fused} + released", "captured"),
        ("bert, no clip, played", job_of(BERT, clip=None), f"{fused} + released", "captured"),
        ("bert, compact, played", bert, f"{compact} + released", "captured"),
        ("bert, torch's kernels, played", bert, "bf16_master + adamw_fused + released", "captured"),
        ("llama, played", llama, f"{fused} + chunked_loss + released", "captured"),
        ("llama, recomputed, played", llama, f"{fused} + every_layer + released", "captured"),
        ("bert, attention kept", bert, f"{fused} + captured", "selective(attention)"),
        ("bert, products kept", bert, f"{fused} + captured", "selective(products)"),
        ("bert, all of it", bert, f"{fused} + captured", "selective(attention) + released"),
        ("bert, all of it, compact", bert, f"{compact} + captured", "selective(attention) + released"),
        ("bert, all of it, 24 bits", bert, f"{short} + captured", "selective(attention) + released"),
    ]


def large_cases() -> list[tuple[str, Job, str, str]]:
    """Return cases that recompute layers. Otherwise the peak is before the backward pass, where no gradients
    exist."""
    bert = Job(
        model=Model.from_config(LARGE_BERT, name="bert-large"), task=Task.SEQUENCE_CLASSIFICATION,
        batch_size=4, sequence_length=512, clip=1.0,
    )  # fmt: skip
    llama = Job(
        model=Model.from_config(LARGE_LLAMA, name="llama-1b"), task=Task.CAUSAL_LM, batch_size=2,
        sequence_length=2048, clip=1.0,
    )  # fmt: skip
    return [
        (
            f"{job.model.name}, clip {job.clip}",
            job,
            f"bf16_master + fused + every_layer + {optimizer}{head}",
            "released",
        )
        for one, head in ((bert, ""), (llama, " + chunked_loss"))
        for job in (one, replace(one, clip=None))
        for optimizer in ("adamw_fused", "adamw_compact")
    ]


def main() -> int:
    large = "large" in sys.argv
    small = [case for case in cases() if "played" not in sys.argv or "captured" in " ".join(case[2:])]
    asked = [(*case, STEPS) for case in small] + [(*case, 5) for case in large_cases() if large]
    found = []
    for name, job, recipe, more, steps in asked:
        try:
            one = compare(name, job, recipe, more, steps)
        except Exception as error:  # the remaining cases are reported too
            one = {
                "case": name,
                "recipe": recipe,
                "right": False,
                "error": f"{type(error).__name__}: {error}",
            }
        found.append(one)
        print(json.dumps({key: value for key, value in one.items() if key != "losses"}), flush=True)
    files = [argument for argument in sys.argv[1:] if argument not in ("large", "played")]
    if files:
        gpu = torch.cuda.get_device_name(CUDA)
        Path(files[0]).write_text(json.dumps({"gpu": gpu, "torch": torch.__version__, "cases": found}))
    return int(not all(one["right"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
