"""Names of tuned models and mirrors, and the bundled preset that has their sizes.

A tuned model has its base's sizes (`Qwen2.5-7B-Instruct`), a mirror its original's (`unsloth/Llama-3.2-1B`).
A distilled model has those of the model that it started from. Quantized weights have none of these sizes,
since their bytes differ. Such a name has no preset here and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from snugfit.errors import nearest

_TUNED = re.compile(
    r"^meta-(?=llama)|-(coder|math)(?=-)|-(instruct|it|base|chat|pt|thinking)(?=-v\d|-hf|-\d{4}|$)",
    re.IGNORECASE,
)
"""Parts of a model's name, such as `Instruct`, that do not change its sizes. Examples:
Mistral-7B-Instruct-v0.3, gemma-2-2b-it, Mistral-Nemo-Base-2407, Qwen2.5-Coder-7B; Meta-Llama-3.1-8B is
Llama-3.1-8B's first name.
"""

_QUANTIZED = re.compile(
    r"-(?:(?:unsloth-)?bnb-[48]bit|gptq|awq|aqlm|gguf|fp8|nvfp4|mxfp4|w[48]a\d+|int[48]|[48]bit)(?:-.*)?$",
    re.IGNORECASE,
)
"""Endings of model names that mark quantized weights."""

MIRRORS = ("unsloth", "NousResearch")
"""Owners on the Hugging Face hub who publish others' models under the same names."""

CONVERTED = re.compile(r"unsloth/phi-", re.IGNORECASE)
"""Pattern of the mirrored models whose layers may differ from the original's, such as a Phi converted to a
Llama or Mistral.
"""

SAME_SIZES = {
    "allenai/Olmo-3-7B-Instruct": "allenai/Olmo-3-1025-7B",
    "allenai/Olmo-3-7B-Think": "allenai/Olmo-3-1025-7B",
    "allenai/Olmo-3-32B-Think": "allenai/Olmo-3-1125-32B",
    "allenai/Olmo-3.1-32B-Instruct": "allenai/Olmo-3-1125-32B",
    "allenai/Olmo-3.1-32B-Think": "allenai/Olmo-3-1125-32B",
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": "Qwen/Qwen3-8B",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "meta-llama/Llama-3.1-8B",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": "meta-llama/Llama-3.3-70B-Instruct",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": "Qwen/Qwen2.5-7B",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": "Qwen/Qwen2.5-14B",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": "Qwen/Qwen2.5-32B",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": "Qwen/Qwen3-30B-A3B-Instruct-2507",
    "unsloth/llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "unsloth/llama-3-8b-Instruct": "meta-llama/Meta-Llama-3-8B",
    "unsloth/gemma-2-2b": "google/gemma-2-2b-it",
    "unsloth/gemma-2-9b": "google/gemma-2-9b-it",
    "unsloth/gemma-2-27b": "google/gemma-2-27b-it",
}
"""Presets with the sizes and dtype of a model, by the model's name. Names that show their preset are omitted.
unsloth's Gemma 2 is in bfloat16, as Google's tuned ones are and its base models are not.
"""


def preset_of_same_size(name: str, presets: Iterable[str]) -> str | None:
    """Return the preset with the sizes of the model `name`; None if there is none.

    A preset of exactly this name has priority over one without `Instruct` or `Base`: a tuned model's dtype
    may differ.
    """
    # Layers of such a mirror may be those of another architecture.
    if CONVERTED.match(name):
        return None
    owner, _, bare = name.rpartition("/")
    known = {preset: preset for preset in presets} | SAME_SIZES
    if name in SAME_SIZES:
        return SAME_SIZES[name]
    # A mirror's model has its original owner's sizes.
    if owner.lower() in map(str.lower, MIRRORS):
        owner = ""
    named = [(full_name.split("/"), preset) for full_name, preset in known.items()]
    # Exact names first, since a tuned model may have another dtype than its base.
    for reduce in (str.lower, _without_tuning):
        for (its_owner, its_bare), preset in named:
            if reduce(bare) == reduce(its_bare) and owner.lower() in ("", its_owner.lower()):
                return preset
    return None


def unquantized_name(name: str) -> str | None:
    """Return the name without its mark of quantized weights; None for a name without such a mark."""
    rest = _QUANTIZED.sub("", name)
    return rest if rest != name else None


def presets_like(name: str, presets: Collection[str]) -> str:
    """Return a sentence with three presets of the same family as `name`, by its first letters.

    Without a family of a similar name, it is empty.
    """
    families = nearest(_family(name), map(_family, presets), count=1)
    related = [preset.split("/")[1] for preset in presets if _family(preset) in families]
    like = nearest(name.rpartition("/")[2], related, cutoff=0)
    return f" Presets: {', '.join(like)}." if like else ""


def _family(name: str) -> str:
    first = re.split(r"[_.-]", _without_tuning(name.rpartition("/")[2]))[0]
    letters = first.rstrip("0123456789")
    # A family of two letters (`mt5`) needs its number.
    return letters if len(letters) > len("mt") else first


def _without_tuning(bare: str) -> str:
    return _TUNED.sub("", bare).lower()
