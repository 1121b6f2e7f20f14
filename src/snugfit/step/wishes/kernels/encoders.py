"""Encoders whose modules our kernels know: BERT, RoBERTa, ELECTRA, DistilBERT, ViT; and GPT-2.

Modules are matched by the name of their class and of the file that it stands in, so that no model's file is
imported which the process does not use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def fuse(model: torch.nn.Module) -> list[str]:
    """Gives known modules of this model our forward passes; the names of their classes, once each."""
    return []
