"""Compare published training speeds with predictions for cards whose rates are scaled from an H200's.

    python lab/published_speeds.py OUT.json [--minutes 4]    predicts, and adds to OUT.json

Each row names its source, and the recipe nearest to its settings. Rows of other software count apart: Lambda
and NVIDIA ran NVIDIA's own BERT, with fused norms and GELU. LLM.Q is an engine in C++ and CUDA, and Qwen's
code has fused norms and rotations. They show how fast a card is beside other cards. The script needs no GPU.
A second call predicts the rows that OUT.json lacks.

The summary has the median error of each card. It also has the error with one source left out: the ratios of
all other sources of a card correct its predictions. A card's correction needs three rows from two sources.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from snugfit import Job, predict
from snugfit.documents import read_document, write_document
from snugfit.errors import SnugfitError
from snugfit.job.model import Model
from snugfit.versions import versions

TORCHTUNE = "meta-pytorch/torchtune README.md (2024 to 2026)"
PEFT = "huggingface/peft method_comparison/MetaMathQA (2026-07-15; 210 tokens a sample in the mean)"
LLM_Q = "IST-DASLab/llmq README.md (2026-05)"
LAMBDA = "lambdal/deeplearning-benchmark pytorch/csv_v1_v2 (2025-12; SQuAD, NVIDIA's BERT)"
NVIDIA = "NVIDIA DeepLearningExamples BERT (container 21.11; SQuAD)"
NEUSIGHT = "NeuSight labels (2025; torch 2.1, no update)"
QWEN = "Qwen finetuning profile (torch 2.0; 8 micro-batches; seconds with one decimal)"
OTHER_SOFTWARE = frozenset({LLM_Q, LAMBDA, NVIDIA, QWEN})
CHUNKS = "bf16_pure + compiled + chunked_loss"
EAGER_CHUNKS = "bf16_pure + chunked_loss"

QWEN_SIZES = {"Qwen-1.8B": (2048, 24, 16, 5504), "Qwen-7B": (4096, 32, 32, 11008)}
"""Width, layers, heads and inner width of models that are no architecture of transformers; Qwen2's is the
nearest."""


class Row(NamedTuple):
    """A published speed in tokens a second (samples times the length), with the nearest job and recipe."""

    source: str
    gpu: str
    model: str
    batch_size: int
    sequence_length: int
    recipe: str
    tokens_per_second: float
    task: str = "causal-lm"
    phase: str = "train"


WRITTEN_OUT = (
    Row(TORCHTUNE, "a100-80gb", "Llama-3.2-3B", 2, 4096, "bf16_pure", 7075),
    Row(TORCHTUNE, "a100-80gb", "Llama-3.2-3B", 2, 4096, "bf16_pure + compiled", 8998),
    Row(TORCHTUNE, "a100-80gb", "Llama-3.2-3B", 2, 4096, CHUNKS, 9174),
    Row(TORCHTUNE, "a100-80gb", "Llama-3.2-3B", 2, 4096, f"{CHUNKS} + every_layer", 7210),
    Row(TORCHTUNE, "a100-80gb", "Llama-3.2-3B", 2, 4096, f"lora(r=8) + {CHUNKS} + every_layer", 8210),
    Row(TORCHTUNE, "rtx 4090", "Llama-3.1-8B", 2, 2048, "lora(r=8) + compiled + every_layer", 3083),
    Row(TORCHTUNE, "a100-80gb", "Llama-3.2-3B", 2, 4096, f"qlora(r=8) + {EAGER_CHUNKS} + every_layer", 8035),
    Row(TORCHTUNE, "rtx 4090", "Llama-3.1-8B", 2, 2048, "qlora(r=8) + bf16_pure + every_layer", 2413),
    Row(PEFT, "l40s", "Llama-3.2-3B", 4, 210, "lora(r=32) + bf16_pure", 7194),
    Row(LLM_Q, "l40s", "Qwen2.5-1.5B", 8, 1024, "bf16_pure + fused + chunked_loss", 17_000),
    Row(LLM_Q, "rtx 4090", "Qwen2.5-1.5B", 4, 1024, "bf16_pure + fused + chunked_loss", 14_000),
    Row(LLM_Q, "rtx 4090", "Qwen2.5-0.5B", 16, 1024, "bf16_pure + fused + chunked_loss", 40_000),
    Row(LLM_Q, "h100", "Qwen2.5-0.5B", 32, 1024, "bf16_pure + fused + chunked_loss", 149_000),
)


SQUAD = {
    "v100-sxm2-16": ((48, 189, 24, 42), (16, 57, 8, 12)),
    "rtx 3090": ((96, 172, 48, 85), (28, 52, 16, 24)),
    "a100-pcie-40": ((160, 368, 80, 179), (48, 117, 28, 53)),
    "a100-pcie-80": ((320, 415, 172, 224), (112, 140, 64, 70)),
    "a100-80gb": ((320, 443, 172, 239), (112, 152, 64, 75)),
    "rtx 4090": ((96, 297, 48, 137), (28, 93, 16, 44)),
    "b200": ((768, 1405, 384, 855), (256, 523, 128, 281)),
    "h100": ((320, 858, 172, 432), (112, 311, 64, 145)),
    "a10": ((80, 135, 48, 70), (28, 42, 12, 19)),
    "rtx 6000 ada": ((192, 255, 96, 136), (64, 79, 32, 44)),
    "rtx a6000": ((192, 198, 96, 101), (64, 68, 32, 33)),
}
"""Lambda's rows: for BERT-base and BERT-large, batch and samples a second in fp16, then in tf32 or fp32."""

FORWARD_BACKWARD = {
    "a100-pcie-80": (
        ("bert-large-uncased", 2, 512, 213.18), ("bert-large-uncased", 8, 512, 716.22),
        ("openai-community/gpt2-large", 1, 1024, 524.05), ("openai-community/gpt2-large", 4, 1024, 1635.74),
    ),
    "l4": (
        ("bert-large-uncased", 2, 512, 316.3), ("bert-large-uncased", 8, 512, 1275.44),
        ("openai-community/gpt2-large", 1, 1024, 967.44),
    ),
    "v100-pcie-32": (
        ("bert-large-uncased", 2, 512, 234.26), ("bert-large-uncased", 8, 512, 841.12),
        ("openai-community/gpt2-large", 1, 1024, 576.92),
    ),
    "t4": (
        ("bert-large-uncased", 16, 512, 1485.19), ("bert-large-uncased", 8, 512, 694.46),
        ("openai-community/gpt2-large", 4, 1024, 2505.22), ("openai-community/gpt2-large", 8, 1024, 4822.51),
    ),
}  # fmt: skip
"""NeuSight's milliseconds: model, batch, length. Those of the T4 are forward passes alone."""

QWEN_SECONDS = {
    ("Qwen-1.8B", "lora(r=64, targets=all-linear) + bf16_pure + every_layer"): (1.1, 1.7, 3.3, 6.8),
    ("Qwen-1.8B", "qlora(r=64, targets=all-linear) + bf16_pure + every_layer"): (1.4, 2.0, 3.4, 6.5),
    ("Qwen-7B", "lora(r=64, targets=all-linear) + bf16_pure + every_layer"): (2.8, 5.2, 10.1, 21.3),
}
"""Seconds of 8 micro-batches of one sample with 1024, 2048, 4096 and 8192 tokens on an A100."""


def rows() -> Iterator[Row]:
    """Yield all rows that a job can express."""
    yield from WRITTEN_OUT
    for gpu, models in SQUAD.items():
        for name, (half, in_half, single, in_single) in zip(("base", "large"), models, strict=True):
            model, full = f"bert-{name}-uncased", "" if "v100" in gpu else "tf32 + "
            for batch, samples, precision in ((half, in_half, "fp16 + "), (single, in_single, full)):
                recipe = f"eager + {precision}adamw_fused"
                yield Row(LAMBDA, gpu, model, batch, 384, recipe, samples * 384, "question-answering")
    for gpu, batch, precision, samples in (
        ("a100-80gb", 32, "tf32 + ", 61.5), ("a100-80gb", 32, "fp16 + ", 110.5),
        ("v100-sxm2-32", 8, "", 12), ("v100-sxm2-32", 16, "fp16 + ", 52),
    ):  # fmt: skip
        recipe = f"eager + {precision}adamw_fused"
        yield Row(NVIDIA, gpu, "bert-large-uncased", batch, 384, recipe, samples * 384, "question-answering")
    for gpu, steps in FORWARD_BACKWARD.items():
        for model, batch, length, milliseconds in steps:
            task = "sequence-classification" if "bert" in model else "causal-lm"
            phase, tokens = "evaluate" if gpu == "t4" else "train", batch * length / milliseconds * 1e3
            yield Row(NEUSIGHT, gpu, model, batch, length, "eager + sgd", tokens, task, phase)
    for (model, recipe), every in QWEN_SECONDS.items():
        for length, seconds in zip((1024, 2048, 4096, 8192), every, strict=True):
            yield Row(QWEN, "a100-80gb", model, 1, length, recipe, 8 * length / seconds)


def model_of(name: str) -> Model:
    """Return the model of a row."""
    if name not in QWEN_SIZES:
        return Model.find(name)
    width, layers, heads, inner = QWEN_SIZES[name]
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": inner}
    of_heads = {"num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": 151_936}
    return Model.from_config({"model_type": "qwen2", **sizes, **of_heads}, name=name)


def compare(row: Row) -> dict[str, Any]:
    """Return the row with the predicted tokens a second, and their ratio to the published ones."""
    sizes = {"batch_size": row.batch_size, "sequence_length": row.sequence_length}
    try:
        job = Job(model=model_of(row.model), task=row.task, phase=row.phase, **sizes)  # type: ignore[arg-type]
        recipe = row.recipe.replace("eager + sgd", "eager") if row.phase == "evaluate" else row.recipe
        timing = predict(job, recipe, gpu=row.gpu).timing
    except SnugfitError as refused:
        return {**row._asdict(), "refused": str(refused)}
    assert timing is not None
    predicted = row.batch_size * row.sequence_length / timing.step_seconds
    return {**row._asdict(), "predicted": predicted, "ratio": predicted / row.tokens_per_second}


def error(ratios: Sequence[float]) -> float:
    """Return the median of the absolute errors."""
    return statistics.median(abs(ratio - 1) for ratio in ratios)


def by_card(compared: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return each card's ratios, its error, and its error with the row's own source left out.

    The correction of a row is the median ratio of the same card's rows of other sources, if there are three.
    """
    cards: dict[str, Any] = {}
    for gpu in sorted({row["gpu"].split("-")[0] for row in compared}):
        own = [row for row in compared if row["gpu"].split("-")[0] == gpu]
        left_out = [
            row["ratio"] / statistics.median(others)
            for row in own
            if len(others := [other["ratio"] for other in own if other["source"] != row["source"]]) >= 3
        ]
        ratios = [row["ratio"] for row in own]
        cards[gpu] = {
            "rows": len(own), "sources": len({row["source"] for row in own}),
            "median_ratio": statistics.median(ratios), "median_error": error(ratios),
            "median_error_left_out": error(left_out) if left_out else None,
        }  # fmt: skip
    return cards


def main() -> None:
    """Compare the rows that the file lacks, print them and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=4.0)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    known = read_document(given.out)["rows"] if given.out.exists() else []
    end = time.monotonic() + 60 * given.minutes
    for row in rows():
        if time.monotonic() < end and not any(row._asdict().items() <= old.items() for old in known):
            known.append(compare(row))
            print(f"{known[-1].get('ratio', 0):.2f}  {row.gpu}  {row.model}  {row.recipe}", flush=True)
            # A run may be killed at its time limit.
            write_document(given.out, {"rows": known})
    compared = [row for row in known if "ratio" in row]
    errors = {
        name: error([row["ratio"] for row in compared if (row["source"] in OTHER_SOFTWARE) is other] or [1.0])
        for name, other in (("of the same software", False), ("of other software", True))
    }
    print(f"median errors: {errors}")
    document = {
        "what": "published speeds",
        "versions": versions(),
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rows": known,
        "median_errors": errors,
        "cards": by_card(compared),
    }
    write_document(given.out, document)


if __name__ == "__main__":
    main()
