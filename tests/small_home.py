"""Write a user's folder: a model, its tokenizer, a file of samples, and a job that trains the model on
them."""

from __future__ import annotations

import json
import random
from pathlib import Path

from small_tokenizers import WORDS, tokenizer

JOB = """\
model: ./model
task: sequence-classification
batch_size: 8
sequence_length: 32
learning_rate: 1e-3
recipe: micro_batches(2)
gpu: rtx 4090
dataset: data.jsonl
eval_dataset: data.jsonl
output_dir: out
from_scratch: true
max_steps: 12
eval_strategy: epoch
logging_steps: 5
"""


def write_home(folder: Path) -> None:
    """Write all of these files into the folder."""
    words = tokenizer("bert")
    words.save_pretrained(folder / "model")
    config = {
        "model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 64, "vocab_size": len(words), "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    (folder / "model" / "config.json").write_text(json.dumps(config))
    draw = random.Random(0)
    lines = [
        {
            "text": " ".join(draw.choices(WORDS[:5] if index % 2 else WORDS[5:10], k=8)),
            "label": f"c{index % 2}",
        }
        for index in range(64)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "job.yaml").write_text(JOB)
