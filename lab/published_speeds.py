"""Compare published training speeds with predictions for cards whose rates are scaled from an H200's.

    python lab/published_speeds.py OUT.json

Each row names its source, and the recipe nearest to its settings. Rows of LLM.Q ran another engine, in C++
and CUDA. They show how fast a card is, so they count apart. The script needs no GPU. It writes OUT.json and
prints a line for each row.
"""

from __future__ import annotations

import datetime
import logging
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

from snugfit import Job, predict
from snugfit.documents import write_document
from snugfit.job.model import Model
from snugfit.versions import versions

TORCHTUNE = "meta-pytorch/torchtune README.md (2024 to 2026)"
PEFT = "huggingface/peft method_comparison/MetaMathQA (2026-07-15; 210 tokens a sample in the mean)"
LLM_Q = "IST-DASLab/llmq README.md (2026-05)"
CHUNKS = "bf16_pure + compiled + chunked_loss"


class Row(NamedTuple):
    """A published speed in tokens a second, with the nearest job and recipe."""

    source: str
    gpu: str
    model: str
    batch_size: int
    sequence_length: int
    recipe: str
    tokens_per_second: float


ROWS = (
    Row(TORCHTUNE, "a100-80gb", "Llama-3.2-3B", 2, 4096, "bf16_pure", 7075),
    Row(TORCHTUNE, "a100-80gb", "Llama-3.2-3B", 2, 4096, "bf16_pure + compiled", 8998),
    Row(TORCHTUNE, "a100-80gb", "Llama-3.2-3B", 2, 4096, CHUNKS, 9174),
    Row(TORCHTUNE, "a100-80gb", "Llama-3.2-3B", 2, 4096, f"{CHUNKS} + every_layer", 7210),
    Row(TORCHTUNE, "a100-80gb", "Llama-3.2-3B", 2, 4096, f"lora(r=8) + {CHUNKS} + every_layer", 8210),
    Row(TORCHTUNE, "rtx 4090", "Llama-3.1-8B", 2, 2048, "lora(r=8) + compiled + every_layer", 3083),
    Row(PEFT, "l40s", "Llama-3.2-3B", 4, 210, "lora(r=32) + bf16_pure", 7194),
    Row(LLM_Q, "l40s", "Qwen2.5-1.5B", 8, 1024, "bf16_pure + fused + chunked_loss", 17_000),
    Row(LLM_Q, "rtx 4090", "Qwen2.5-1.5B", 4, 1024, "bf16_pure + fused + chunked_loss", 14_000),
    Row(LLM_Q, "rtx 4090", "Qwen2.5-0.5B", 16, 1024, "bf16_pure + fused + chunked_loss", 40_000),
    Row(LLM_Q, "h100", "Qwen2.5-0.5B", 32, 1024, "bf16_pure + fused + chunked_loss", 149_000),
)


def compare(row: Row) -> dict[str, Any]:
    """Return the row with the predicted tokens a second, and their ratio to the published ones."""
    job = Job(
        model=Model.find(row.model),
        task="causal-lm",
        batch_size=row.batch_size,
        sequence_length=row.sequence_length,
    )
    timing = predict(job, row.recipe, gpu=row.gpu).timing
    assert timing is not None
    predicted = row.batch_size * row.sequence_length / timing.step_seconds
    return {**row._asdict(), "predicted": predicted, "ratio": predicted / row.tokens_per_second}


def main() -> int:
    """Compare all rows, print them and write the file."""
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    logging.disable(logging.WARNING)
    rows = [compare(row) for row in ROWS]
    for row in rows:
        print(f"{row['ratio']:.2f}  {row['gpu']}  {row['model']}  {row['recipe']}")
    errors = {
        name: statistics.median(abs(1 - row["ratio"]) for row in rows if (row["source"] == LLM_Q) is own)
        for name, own in (("of the same software", False), ("of another engine", True))
    }
    print(f"median errors: {errors}")
    document = {
        "what": "published speeds",
        "versions": versions(),
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rows": rows,
        "median_errors": errors,
    }
    write_document(Path(sys.argv[1]), document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
