"""Words that people bring from other libraries and that are no technique here: what to say to them.

A word that another library uses for something that snugfit has stands in that technique's `elsewhere`; this
table holds only the rest. Names that transformers removed are from its version 5 migration guide.
"""

from __future__ import annotations

_LICENCE = (
    "apollo-torch's licence (CC BY-NC 4.0) forbids commercial use, so snugfit does not offer APOLLO. "
    "Low-memory optimizers here: 'adafactor', 'adamw_8bit'."
)
_BATCH = "the batch is part of the job, not of the recipe; 'micro_batches(n)' cuts it into n pieces."
_SCHEDULE = "it changes no byte of a step and is no technique of a recipe."

_ADVICE = {
    "apollo": _LICENCE,
    "apollo_adamw": _LICENCE,
    "apollo_adamw_layerwise": _LICENCE,
    "batch_size": _BATCH,
    "per_device_train_batch_size": _BATCH,
    "auto_find_batch_size": _BATCH,
    "evaluation_strategy": f"{_SCHEDULE} (transformers 5 calls it 'eval_strategy'.)",
    "eval_strategy": _SCHEDULE,
    "warmup_ratio": f"{_SCHEDULE} (transformers 5 calls it 'warmup_steps'.)",
    "warmup_steps": _SCHEDULE,
    "lr": "the learning rate is part of the job, not of the recipe.",
    "learning_rate": "the learning rate is part of the job, not of the recipe.",
    "max_grad_norm": "clipping is part of the job, not of the recipe.",
    "no_cuda": "where a step runs is no technique of a recipe. (transformers 5 calls it 'use_cpu'.)",
    "use_cpu": "where a step runs is no technique of a recipe.",
}


def advice(word: str) -> str | None:
    """What to tell someone who wrote `word` in a recipe; None when the word is not known either."""
    return _ADVICE.get(word.lower())
