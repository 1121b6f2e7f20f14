"""Compare the memory that torchtitan published with two predictions of each row, without a GPU.

    python lab/published_titan.py OUT.json

Rows are those of `tests/data/published-titan.json`. The first prediction rehearses torchtitan's own model and
loop (`tests/titan_llama.py`). The second is snugfit's for the nearest recipe, with transformers' model and
snugfit's own loop. Unlike torchtitan, that loop builds the whole model on the GPU before it shards it. So the
peak is that of a step alone. The script writes OUT.json and prints a table.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit import Job, predict
from snugfit.documents import write_document
from snugfit.job.model import Model
from snugfit.prediction.allocator import replay
from snugfit.prediction.predict import rehearse_again
from snugfit.versions import versions

if TYPE_CHECKING:
    from snugfit.rehearsal.trace.trace import Trace

TESTS = Path(__file__).resolve().parents[1] / "tests"
GIB = 1 << 30
GPU = "h100-sxm"

LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 11_008, "num_attention_heads": 32, "num_key_value_heads": 32,
    "num_hidden_layers": 32, "vocab_size": 32_000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
"""Config as Meta published it."""

TECHNIQUES = {"full": "every_layer", "selective op": "selective(every_other_product)"}
"""Techniques for torchtitan's names of recomputation."""


def nearest(row: Mapping[str, Any]) -> tuple[Job, str]:
    """Return the most similar job and recipe."""
    llama_2 = row["model"] == "7B"
    job = Job(
        model=Model.from_config(LLAMA_2_7B, name="Llama-2-7B") if llama_2 else Model.find("Llama-3.1-8B"),
        batch_size=row["rows"] * row["gpus"],
        sequence_length=row["length"],
        dtype="float32",
        clip=1.0,
    )
    return job, f"bf16 + adamw + fsdp + {TECHNIQUES[row['recomputes']]}"


def most_in_last_step(trace: Trace) -> int:
    """Return the peak of requested bytes in the last step."""
    begin = next(
        number
        for number, event in enumerate(trace.events)
        if event > 0 and trace.blocks[event - 1].step == trace.blocks[-1].step
    )
    held = most = 0
    for number, event in enumerate(trace.events):
        held += trace.blocks[event - 1].nbytes if event > 0 else -trace.blocks[-event - 1].nbytes
        if number >= begin:
            most = max(most, held)
    return most


def compare(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return one row beside both predictions."""
    from titan_llama import rehearsed

    trace = rehearsed(row)
    own = replay(trace)
    expandable = replay(trace, expandable=True)
    job, recipe = nearest(row)
    prediction = predict(job, recipe, gpu=GPU, gpus=row["gpus"])
    figures = {
        "own_model_and_loop": {
            "active_gib": own.allocated_peak,
            "reserved_gib": own.reserved_peak,
            "reserved_expandable_gib": expandable.reserved_peak,
        },
        "nearest_recipe": {
            "active_gib": most_in_last_step(rehearse_again(prediction)),
            "reserved_gib": prediction.footprint.reserved_bytes,
        },
    }
    in_gib = {
        name: {figure: round(nbytes / GIB, 2) for figure, nbytes in those.items()}
        for name, those in figures.items()
    }
    return {**row, "recipe": recipe, **in_gib}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows in Markdown."""
    lines = [
        "| model, GPUs, a GPU's batch | layers | printed | own code | nearest recipe |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        own, near = row["own_model_and_loop"], row["nearest_recipe"]
        model, what = row["name"].split(", ")
        for figure in ("active", "reserved"):
            if (printed := row.get(f"{figure}_gib")) is None:
                continue
            cells = [own[f"{figure}_gib"], near[f"{figure}_gib"]]
            shown = [f"{cell:.2f} ({cell / printed - 1:+.1%})" for cell in cells]
            where = f"{model}, {row['gpus']}, {row['rows']} x {row['length']:,}"
            lines.append(f"| {where} | {what} | {figure} {printed} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    """Compare every row, and write the output file."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.path.insert(0, str(TESTS))
    from titan_llama import PUBLISHED

    rows = [compare(row) for row in PUBLISHED["rows"]]
    document = {
        "what": "published memory of torchtitan",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "gpu": GPU,
        "meaning": PUBLISHED["meaning"],
        "rows": rows,
        "left_out": PUBLISHED["left_out"],
    }
    write_document(Path(sys.argv[1]), document)
    print(table(rows))


if __name__ == "__main__":
    main()
