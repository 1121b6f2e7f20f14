"""Trainers, their arguments and adapters that are not predicted, each with the reason."""

from __future__ import annotations

from snugfit.features.exchange.python.objects import TRAINERS

NO_PLAIN_LOOP = "Give the model itself: snugfit predict MODEL --task TASK --batch-size N --recipe ..."

_GENERATING = ("GRPO", "RLOO", "PPO", "OnlineDPO", "XPO", "NashMD", "GKD", "MiniLLM", "GOLD")
_PREFERRING = ("DPO", "KTO", "ORPO", "CPO", "Reward", "BCO", "IPO", "PRM", "SimPO")
_OF_SCRIPTS = ("ModelConfig", "ScriptConfig", "DatasetConfig", "DatasetMixtureConfig")
_OF_LORA = ("LoraConfig", "PeftConfig", "LoftQConfig", "EvaConfig", "CordaConfig")


def reason_against(name: str, library: str, *, is_trainer: bool) -> str | None:
    """Return the reason why a trainer, its arguments or an adapter are not predicted; None if they are."""
    if library == "peft" and name.endswith("Config") and name not in _OF_LORA:
        return "is not predicted. Among peft's methods, only LoraConfig is."
    is_config = name.endswith("Config") and name not in (*_OF_SCRIPTS, "SFTConfig")
    if not is_config and not (is_trainer and name not in TRAINERS):
        return None
    stem = name.removesuffix("Trainer").removesuffix("Config")
    if stem in _GENERATING:
        return "trains on texts that it generates, which snugfit does not support yet."
    if stem in _PREFERRING:
        return "trains on preferences, which snugfit does not support yet."
    read = f"Read are {', '.join(TRAINERS)} and classes derived from them."
    own = f"runs passes of its own, which are not read. {read}"
    return f"{own} {NO_PLAIN_LOOP}" if is_trainer else None
