"""Awkward modules with unusual inputs or outputs, or with requirements on the device or on a compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from awkward_modules import WIDTH, Numbers, Words, awkward, numbers, words


class _Named(NamedTuple):
    loss: Tensor
    logits: Tensor


@dataclass
class _Output:
    logits: Tensor
    loss: Tensor


class _Gives(Words):
    give: Callable[[Tensor, Tensor], Any]

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        h = self.block(self.embed(ids))
        logits = self.head(h)
        return self.give(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


GIVES: list[tuple[str, Callable[[Tensor, Tensor], Any], dict[str, str]]] = [
    ("GivesAPair", lambda loss, logits: (loss, logits), {}),
    ("GivesANamedPair", _Named, {}),
    ("GivesADataclass", lambda loss, logits: _Output(logits, loss), {}),
    ("GivesADictionary", lambda loss, logits: {"logits": logits, "loss": loss}, {}),
    ("GivesOneNumberInARow", lambda loss, logits: loss[None], {}),
    ("GivesItsLogitsFirst", lambda loss, logits: (logits, loss), {}),  # nanoGPT: the loss is the only element
    (
        "GivesTwoLosses",
        lambda loss, logits: [loss, logits.square().mean()],
        {"doubt": r"2 numbers with gradients\. Only the first"},
    ),
    (
        "GivesADictionaryWithoutLoss",
        lambda loss, logits: {"logits": logits},
        {"refused": "output has no loss"},
    ),
    (
        "GivesALossForEachToken",
        lambda loss, logits: logits.logsumexp(-1),
        {"refused": r"one number|has the shape \(4, 64\)"},
    ),
    ("GivesNothing", lambda loss, logits: None, {"refused": "output has no loss"}),
]
for _name, _give, _says in GIVES:
    awkward(**_says)(type(_name, (_Gives,), {"give": staticmethod(_give)}))


def _nested() -> dict[str, Any]:
    return {"inputs": words()}


@awkward(_nested)
class TakesANestedBatch(Words):
    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.loss(self.block(self.embed(inputs["ids"])), inputs["labels"])


@awkward(refused="positional")
class TakesItsBatchByPosition(Words):
    def forward(self, ids: Tensor, labels: Tensor, /) -> Tensor:
        return self.loss(self.block(self.embed(ids)), labels)


@awkward(numbers, refused=r"has no such device.*On a GPU")
class MovesToCuda(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        return (self.block(x) + torch.ones(WIDTH).cuda()).square().mean()


@awkward(numbers, doubt="flex_attention was predicted by the tensors")
class FlexesItsAttention(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        h = self.block(x)[:, None]
        return flex_attention(h, h, h).square().mean()


@awkward(numbers, refused="not installed|natten")
class WantsAPackage(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        import natten  # noqa: F401

        return self.block(x).square().mean()


@awkward(numbers, doubt="compile")
class CompilesItself(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.inner.compile(backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).square().mean()


@awkward(numbers)
class ClosesOverItself(Numbers):
    """Functions close over the module: those of a copy call the copy."""

    def __init__(self) -> None:
        super().__init__()

        def repeat(x: Tensor, times: int) -> Tensor:
            return repeat(self.block(x), times - 1) if times else x

        self.call = lambda x: 1 * self.block(x)
        self.steps = {"first": [repeat]}
        self.inner.register_forward_hook(lambda module, args, out: out + self.outer.bias.sum())

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.steps["first"][0](x, 2)).square().mean()


@awkward(numbers, refused="mixes tensors on the CPU")
class LeavesATableOnTheHost(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        return self.block(x + torch.ones(WIDTH, device="cpu")).square().mean()


@awkward(numbers)
class AsksWhetherItCompiles(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or torch.jit.is_scripting() or torch.jit.is_tracing():
            return self.inner(x).mean()
        return self.block(x).square().mean()


@awkward(numbers, recipe="bf16_pure", refused="dtype|BFloat16|bfloat16")
class MixesDtypes(Numbers):
    """A table in fp32 beside weights in bf16: torch's matrix products need a single dtype."""

    def forward(self, x: Tensor) -> Tensor:
        turn = torch.eye(WIDTH, device=x.device, dtype=torch.float32)
        return self.block(self.inner.weight.T.to(torch.bfloat16)[None] @ turn).square().mean()


@awkward(numbers, refused="LazyLinear|lazy|not initialized|uninitialized")
class WaitsForItsShapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LazyLinear(256)
        self.last = nn.Linear(256, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x))).square().mean()


@awkward(numbers, refused="jit|script")
class RunsAScript(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.scripted = torch.jit.script(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.scripted(x)).square().mean()
