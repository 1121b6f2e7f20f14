"""Count how often a reader of `snugfit.fit` returns to a folder that the calls have left.

    python lab/reading_walk.py

One run of `fit(trainer, "bf16 + micro_batches(2)")` on a tiny model is traced. Each function counts at its
first call only, as a reader reads it once. A folder is a folder of `src/snugfit`, or of its `features`. Files
beside these folders do not count.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import snugfit

SOURCE = Path(snugfit.__file__).parent


def tiny_trainer(folder: str) -> Trainer:
    """Return a Trainer on the CPU, of a model with two layers."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=100, **sizes))
    samples = [{"input_ids": torch.arange(16) + number, "labels": number % 2} for number in range(32)]
    arguments = TrainingArguments(folder, per_device_train_batch_size=8, report_to=[], use_cpu=True)
    return Trainer(model=model, args=arguments, train_dataset=samples)


def folder_of(file: str) -> str:
    """Return the folder of a source file, or an empty text for a file outside of all folders."""
    path = Path(file)
    folders = path.relative_to(SOURCE).parts[:-1] if path.is_relative_to(SOURCE) else ()
    return "/".join(folders[: 1 + (folders[:1] == ("features",))])


def first_calls(trainer: Trainer) -> list[tuple[str, str]]:
    """Return the folder and the name of each function that `fit` calls, by the first call."""
    calls: dict[CodeType, tuple[str, str]] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_function = bool(code.co_flags & inspect.CO_OPTIMIZED) and not code.co_name.startswith("<")
        if event == "call" and is_function and code not in calls and (folder := folder_of(code.co_filename)):
            calls[code] = folder, code.co_qualname

    fit = snugfit.fit  # importing it is not part of the walk
    sys.setprofile(note)
    try:
        fit(trainer, "bf16 + micro_batches(2)")
    finally:
        sys.setprofile(None)
    return list(calls.values())


def main() -> None:
    """Print the walk, and its number of returns."""
    with tempfile.TemporaryDirectory() as folder:
        calls = first_calls(tiny_trainer(folder))
    left: list[str] = []
    returns = 0
    for folder, name in calls:
        if left[-1:] != [folder]:
            returns += folder in left
            print(f"{folder}{'  (return)' if folder in left else ''}")
            left.append(folder)
        print(f"    {name}")
    print(f"{len(calls)} functions in {len({*left})} folders, {returns} returns.")


if __name__ == "__main__":
    main()
