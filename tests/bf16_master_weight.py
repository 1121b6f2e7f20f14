"""The model and the loop of DeepSpeedExamples' `training/bf16_master_weight`, for a rehearsal.

The architecture, configuration and order of a step are those of the script, written anew. The script's
printed memory figures are in `data/published-zero3.json`. The model is built on the host and passed to
`deepspeed.initialize`; the script runs on random tokens.

DeepSpeed of that time (0.18) replaced torch's linear function only for models built within `zero.Init`.
DeepSpeed 0.19 replaces it whenever it partitions a model. Torch's own function saves the gathered weights for
the backward pass: 7.9 GiB of the large model's peak without checkpointing. `memory_efficient_linear` keeps
torch's function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from small_models import small_job
from snugfit.step.applier import forward_context
from snugfit.step.build import _host
from snugfit.step.step import Observer, Step
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import on_gpus

VOCABULARY, LENGTH = 50_000, 512
BUCKET = 50_000_000
"""Number of elements, as in the script's configurations."""


class Block(nn.Module):
    """Attention and a feed-forward part, each followed by its norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended, _ = self.attention(x, x, x)
        x = self.norms[0](x + attended)
        return self.norms[1](x + self.ff(x))


class LanguageModel(nn.Module):
    """Embeddings, blocks, and an untied projection to the vocabulary."""

    def __init__(self, *, width: int, layers: int, heads: int, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.size(1), device=tokens.device).unsqueeze(0).expand(len(tokens), -1)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


class ScriptStep(Step):
    """The script's loop, as one of several ranks."""

    def __init__(self, *, ranks: int, rows: int, low_precision: bool, **sizes: Any) -> None:
        recipe = "bf16 + zero3(offload=none)"
        super().__init__(
            small_job("bert", 1), on_gpus(Recipe.parse(recipe).setup(), ranks), torch.device("meta")
        )
        self._rows, self._low_precision, self._sizes = rows, low_precision, sizes
        self._logits: torch.Tensor | None = None
        """Output of the last step: the script's variable holds it until the next step replaces it."""

    def run(self, steps: int, observer: Observer) -> list[float]:
        from snugfit.features.distributed.engine.loop import in_process_group

        with in_process_group(self.device):
            observer.phase("build")
            with _host(self.device):
                model = LanguageModel(**self._sizes)
            engine = self._engine(model)
            engine.train()
            observer.build_ends(engine.module, engine.optimizer.optimizer)
            for index in range(steps):
                observer.step_begins(index)
                self._take(engine, observer)
                observer.step_ends(index)
            engine.destroy()
        return []

    def _engine(self, model: nn.Module) -> Any:
        import deepspeed

        low = self._low_precision
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
        config = {
            "train_micro_batch_size_per_gpu": self._rows,
            "gradient_accumulation_steps": 1,
            "zero_allow_untested_optimizer": True,
            "bf16": {
                "enabled": True,
                **dict.fromkeys(("bf16_master_weights_and_grads", "bf16_optimizer_states"), low),
            },
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "reduce_bucket_size": BUCKET,
                "stage3_param_persistence_threshold": 0,
                "memory_efficient_linear": False,
            },
            "torch_autocast": {"enabled": low, "dtype": "torch.bfloat16"},
        }
        return deepspeed.initialize(model=model, optimizer=optimizer, config_params=config)[0]

    def _take(self, engine: Any, observer: Observer) -> None:
        size = (self._rows, LENGTH)
        tokens, labels = (torch.zeros(size, dtype=torch.long, device=self.device) for _ in range(2))
        observer.phase("forward")
        with forward_context(Recipe.parse("bf16" if self._low_precision else "plain").setup(), self.device):
            self._logits = engine(tokens)
            loss = nn.functional.cross_entropy(self._logits.view(-1, VOCABULARY), labels.view(-1))
        observer.phase("backward")
        loss.backward()
        observer.phase("update")
        engine.step()
