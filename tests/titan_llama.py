"""torchtitan's Llama and its loop, for a rehearsal.

The architecture, the groups of FSDP2 and the order of a step are torchtitan's, written anew. `HABITS` holds
its behaviour at two dates. `data/published-titan.json` holds the published memory figures.

Weights are sharded before they have bytes (`to_empty`), so no whole weight is ever on the GPU. Every layer is
a group of its own, and the rest of the model is one more group. The last layer stays gathered after the
forward pass. Layers are checkpointed within their groups. Attention is flash attention, which torch chose
then.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from small_models import small_job
from snugfit.job.gpu import find_gpu
from snugfit.prediction.device import policy_for
from snugfit.prediction.profile import INSTALLED, find_software
from snugfit.rehearsal.rehearse import record_step
from snugfit.rehearsal.trace.trace import Trace
from snugfit.step.build import _host
from snugfit.step.selective import checkpoint_arguments
from snugfit.step.step import Observer, Step
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import on_gpus

Recomputes = Literal["full", "selective op"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a model and of a GPU's batch."""

    vocabulary: int
    key_value_heads: int
    feed_forward: int
    rows: int
    length: int
    width: int = 4096
    layers: int = 32
    heads: int = 32


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Behaviour of torchtitan and of FSDP2 at one date."""

    keeps_logits: bool
    """True: the model returns its logits in fp32, and they live until the next step's logits replace them.
    False: they are bf16, the loss widens them, and they are dropped before the backward pass."""

    angles: int
    """Number of positions whose rotary angles are stored."""

    gradients_apart: bool = False
    """FSDP2 allocates the gradients to reduce from the pool of the reducing stream. Later versions allocate
    from that of the computing stream (pytorch 129721)."""


HABITS = {
    "2024-03": Habits(keeps_logits=True, angles=65_536, gradients_apart=True),
    "2024-12": Habits(keeps_logits=False, angles=8192),
}
"""Behaviour by the date of publication."""


class Norm(nn.Module):
    """RMS norm, in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return wide.type_as(x) * self.weight


def turned(q: torch.Tensor, k: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by a complex number for each position. Intermediate tensors live until both are
    done."""
    q_pairs = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    k_pairs = torch.view_as_complex(k.float().reshape(*k.shape[:-1], -1, 2))
    angles = angles[: q.size(1)].view(1, q.size(1), 1, -1)
    q_turned = torch.view_as_real(q_pairs * angles).flatten(3)
    k_turned = torch.view_as_real(k_pairs * angles).flatten(3)
    return q_turned.type_as(q), k_turned.type_as(k)


class Attention(nn.Module):
    """Causal attention with repeated key and value heads."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.repeats = sizes.heads // sizes.key_value_heads
        self.head = sizes.width // sizes.heads
        narrow = sizes.key_value_heads * self.head
        self.wq = nn.Linear(sizes.width, sizes.width, bias=False)
        self.wk = nn.Linear(sizes.width, narrow, bias=False)
        self.wv = nn.Linear(sizes.width, narrow, bias=False)
        self.wo = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (of(x) for of in (self.wq, self.wk, self.wv))
        q, k, v = (heads.view(rows, length, -1, self.head) for heads in (q, k, v))
        q, k = turned(q, k, angles)
        k, v = self._repeated(k), self._repeated(v)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.transpose(1, 2).contiguous()
        return self.wo(out.view(rows, length, -1))

    def _repeated(self, heads: torch.Tensor) -> torch.Tensor:
        if self.repeats == 1:
            return heads
        rows, length, count, head = heads.shape
        repeated = heads.unsqueeze(3).expand(rows, length, count, self.repeats, head)
        return repeated.reshape(rows, length, count * self.repeats, head)


class FeedForward(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.width, sizes.feed_forward, bias=False)
        self.w2 = nn.Linear(sizes.feed_forward, sizes.width, bias=False)
        self.w3 = nn.Linear(sizes.width, sizes.feed_forward, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(sizes), FeedForward(sizes)
        self.attention_norm, self.ffn_norm = Norm(sizes.width), Norm(sizes.width)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), angles)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    """The whole Llama model."""

    angles: torch.Tensor

    def __init__(self, sizes: Sizes, habits: Habits) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(sizes.vocabulary, sizes.width)
        half = sizes.width // sizes.heads // 2
        self.register_buffer("angles", torch.zeros(habits.angles, half, dtype=torch.complex64))
        self.layers = nn.ModuleList([Block(sizes) for _ in range(sizes.layers)])
        self.norm = Norm(sizes.width)
        self.output = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, self.angles)
        return self.output(self.norm(h))


@contextlib.contextmanager
def _gradients_apart() -> Iterator[None]:
    """Make FSDP2 allocate gradients in the stream that reduces them."""
    import torch.distributed.fsdp._fully_shard._fsdp_param_group as groups

    reduce = groups.foreach_reduce
    parameters = inspect.signature(reduce)

    def reduce_apart(*arguments: Any, **keywords: Any) -> Any:
        bound = parameters.bind(*arguments, **keywords)
        apart = _Apart(bound.arguments["reduce_scatter_comm"], bound.arguments["reduce_scatter_stream"])
        bound.arguments["reduce_scatter_comm"] = apart
        return reduce(*bound.args, **bound.kwargs)

    with patch.object(groups, "foreach_reduce", reduce_apart):
        yield


class _Apart:
    """FSDP2's gradient reduction with all tensors in one stream."""

    def __init__(self, exchange: Any, stream: Any) -> None:
        self._exchange, self._stream = exchange, stream

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._exchange(*arguments, **keywords)

    def allocate(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        with self._stream:
            return self._exchange.allocate(*arguments, **keywords)


class TitanStep(Step):
    """torchtitan's loop, as one of so many ranks."""

    def __init__(self, *, ranks: int, recomputes: Recomputes, sizes: Sizes, habits: Habits) -> None:
        setup = on_gpus(Recipe.parse("bf16 + fsdp").setup(), ranks)
        super().__init__(small_job("llama", 1), setup, torch.device("meta"))
        self._ranks, self._recomputes, self._sizes, self._habits = ranks, recomputes, sizes, habits
        self._logits: torch.Tensor | None = None

    def run(self, steps: int, observer: Observer) -> list[float]:
        with _gradients_apart() if self._habits.gradients_apart else contextlib.nullcontext():
            self._train(steps, observer)
        return []

    def _train(self, steps: int, observer: Observer) -> None:
        observer.phase("build")
        with _host(self.device):  # no parameter has bytes so far
            model = self._spread(Transformer(self._sizes, self._habits))
        model.to_empty(device=self.device)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        observer.build_ends(model, optimizer)
        for index in range(steps):
            observer.step_begins(index)
            self._take(model, optimizer, observer)
            observer.step_ends(index)

    def _spread(self, model: Transformer) -> Transformer:
        mesh = init_device_mesh("meta", (self._ranks,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        last = len(model.layers) - 1
        for index, layer in enumerate(model.layers):
            kept = "every_other_product" if self._recomputes == "selective op" else ""
            wrapped = checkpoint_wrapper(layer, preserve_rng_state=False, **checkpoint_arguments(kept))
            model.layers[index] = fully_shard(wrapped, **options, reshard_after_forward=index < last)
        return fully_shard(model, **options)

    def _take(self, model: nn.Module, optimizer: torch.optim.Optimizer, observer: Observer) -> None:
        observer.phase("load")
        size = (self._sizes.rows, self._sizes.length)
        tokens, labels = (torch.zeros(size, dtype=torch.long, device=self.device) for _ in range(2))
        optimizer.zero_grad()
        observer.phase("forward")
        logits = model(tokens)
        if self._habits.keeps_logits:
            logits = self._logits = logits.float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
        del logits
        observer.phase("backward")
        loss.backward()
        observer.phase("clip")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        observer.phase("update")
        optimizer.step()


PUBLISHED: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "published-titan.json").read_text())
MODELS = {
    "7B": {"vocabulary": 32_000, "key_value_heads": 32, "feed_forward": 11_008},
    "8B": {"vocabulary": 128_256, "key_value_heads": 8, "feed_forward": 14_336},
}


def rehearsed(row: Mapping[str, Any]) -> Trace:
    """Return the trace of a GPU of a published row, by torchtitan's own model and loop."""
    sizes = Sizes(**MODELS[row["model"]], rows=row["rows"], length=row["length"])
    step = TitanStep(ranks=row["gpus"], recomputes=row["recomputes"], sizes=sizes, habits=HABITS[row["time"]])
    policy = policy_for(find_gpu("h100-sxm"), find_software(INSTALLED))
    return record_step(step, policy, 3).trace
