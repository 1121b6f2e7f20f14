"""Awkward modules that leave the ordinary path of autograd. They compute gradients within forward, change
tensors in place, use hooks or recompute. Some hold parameters in other containers or states that grow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from awkward_modules import WIDTH, WORDS, Numbers, Words, awkward, numbers


class _Clamp(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        return gradient * (x.abs() <= 1)


@awkward(numbers)
class WritesItsOwnFunction(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        return _Clamp.apply(self.block(x)).square().mean()


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient.neg()


@awkward(numbers)
class ReversesGradients(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        return self.block(_Reverse.apply(self.block(x))).square().mean()


@awkward(numbers)
class PenalisesGradients(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = self.block(x).square().mean()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return y + (gradient.norm(dim=-1) - 1).square().mean()


@awkward(numbers)
class TakesAnInnerStep(Numbers):
    """MAML: one step of gradient descent within the forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.inner.named_parameters())
        loss = torch.func.functional_call(self.inner, weights, (x,)).square().mean()
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        return self.outer(torch.func.functional_call(self.inner, fast, (x,))).square().mean()


@awkward(numbers)
class MapsOverRows(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(self.block)(x).square().mean()


@awkward(numbers)
class TakesJacobianProducts(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        y, tangent = torch.func.jvp(self.block, (x,), (torch.ones_like(x),))
        return y.square().mean() + tangent.square().mean()


@awkward(numbers)
class TakesVectorJacobians(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        y, pull = torch.func.vjp(self.block, x)
        return y.square().mean() + pull(torch.ones_like(y))[0].square().mean()


@awkward(numbers)
class LearnsFromATeacher(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = Numbers().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher.block(x)
        return F.mse_loss(self.block(x), target)


@awkward(numbers)
class FollowsItsAverage(Numbers):
    """An exponential moving average of the weights, updated in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = Numbers().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            own = (*self.inner.parameters(), *self.outer.parameters())
            for slow, fast in zip(self.mean.parameters(), own, strict=True):
                slow.mul_(0.99).add_(fast, alpha=0.01)
        return F.mse_loss(self.block(x), self.mean.block(x))


@awkward(numbers)
class NormsItsWeights(Numbers):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.inner)
        parametrizations.spectral_norm(self.outer)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).square().mean()


class _Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@awkward(numbers)
class KeepsItsWeightsSymmetric(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.square, "weight", _Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.square(x)).square().mean()


@awkward(numbers)
class WritesInPlace(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        h[:, :8] *= 2
        h[..., 0].add_(1)
        h.view(-1, h.shape[-1])[::2].mul_(0.5)
        h.relu_()
        return self.outer(h).square().mean()


@awkward(numbers)
class AddsAtPlaces(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.block(x)
        places = torch.arange(x.shape[1], device=x.device).remainder(7)[None, :, None].expand_as(h)
        pooled = torch.zeros(len(x), 7, WIDTH, device=x.device).scatter_add_(1, places, h)
        return self.block(pooled.gather(1, places)).square().mean()


@awkward(numbers)
class GrowsABuffer(Numbers):
    """A buffer that is longer after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(1, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(x)
        self.memory = torch.cat((self.memory, h.detach().flatten(0, 1)))
        return (h + self.block(self.memory).mean(0)).square().mean()


@awkward(numbers)
class KeepsARingBuffer(Numbers):
    """MoCo's queue: written in place at a pointer that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(512, WIDTH))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(x).mean(1)
        start = int(self.pointer)
        self.queue[start : start + len(h)] = h.detach()
        self.pointer[0] = (start + len(h)) % len(self.queue)
        return (h @ self.queue.clone().T).square().mean()


@awkward(numbers)
class ChecksPointsOfItsOwn(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.block, x, use_reentrant=False)
        return checkpoint(self.block, h, use_reentrant=False).square().mean()


@awkward(numbers)
class ChecksPointsReentrantly(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, self.block(x), use_reentrant=True).square().mean()


@awkward(numbers)
class ChecksPointsInSequence(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(checkpoint_sequential(self.stack, 3, x, use_reentrant=False)).square().mean()


@awkward(numbers)
class HooksItsModules(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        self.inner.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
        self.inner.register_forward_hook(self._keep)
        self.outer.register_full_backward_hook(lambda module, given, gave: (given[0] * 0.5,))

    def _keep(self, module: nn.Module, given: Any, out: Tensor) -> Tensor:
        self.kept["inner"] = out.detach().clone()
        return out + 1

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).square().mean() + self.kept["inner"].mean()


@awkward(numbers)
class HooksItsTensors(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.block(x)
        h.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return self.block(h).square().mean()


@awkward(numbers)
class PacksSavedTensors(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        pack, unpack = (lambda t: t.to(torch.bfloat16)), (lambda t: t.to(torch.float32))
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            h = self.block(x)
        return h.square().mean()


@awkward(numbers)
class SavesOnTheHost(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            h = self.block(x)
        return h.square().mean()


@awkward()
class TiesItsHead(Words):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.block(self.embed(ids)), labels)


@awkward(numbers)
class CallsOneBlockOften(Numbers):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = self.block(x)
        return x.square().mean()


@awkward(numbers)
class GoesStraightThrough(Numbers):
    """A vector quantiser: the nearest of 64 codes, with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(x)
        nearest = self.codes[torch.cdist(h, self.codes).argmin(-1)]
        return (h + (nearest - h).detach()).square().mean() + F.mse_loss(nearest, h.detach())


@awkward(numbers)
class HoldsItsWeightsInLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(3))
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH, 256), "b": torch.randn(256, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.many:
            x = torch.tanh(x @ weight)
        return (x @ self.named["a"] @ self.named["b"]).square().mean()


@awkward(numbers, doubt="no gradient")
class HasUnusedWeights(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, 512)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).square().mean()


@awkward(numbers)
class CallsBackwardItself(Numbers):
    """Runs the backward pass of one loss within forward; the loop runs that of the other."""

    def forward(self, x: Tensor) -> Tensor:
        self.block(x).square().mean().backward()
        return self.block(x).abs().mean()
