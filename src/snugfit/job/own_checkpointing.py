"""The activation checkpointing of transformers itself, which a model's class switches on for all layers."""

from __future__ import annotations

from typing import Any

NAMES = ("activation_checkpointing", "gradient_checkpointing")
"""Names of the attribute with which transformers' versions switch checkpointing on, the newest first."""


def stop_own_checkpointing(model: Any) -> None:
    """Turn off transformers' own activation checkpointing, if it is on."""
    known = next((name for name in NAMES if hasattr(type(model), f"is_{name}")), None)
    if known and getattr(model, f"is_{known}"):
        getattr(model, f"{known}_disable")()
