"""Compare the kernels for one weight at a time with those over all weights (`masters_in_triton.py`).

Run as a process: with `TRITON_INTERPRET=1` on the CPU in Triton's interpreter, and with `cuda` on a GPU.
"""

from __future__ import annotations

import itertools
import random
import sys
from typing import Any
from unittest.mock import patch

import torch
from masters_in_triton import CLOSE, exact, two_models, updated_by

from snugfit.features.engine.masters import one_weight
from snugfit.features.engine.masters.adamw import MOMENTS, MasterAdamW
from snugfit.features.engine.masters.compact_adamw import CompactAdamW
from snugfit.features.engine.masters.one_weight import MasterUpdates
from snugfit.step.clipping import gradient_norm, scale
from triton_cases import asks_all

STEPS = 3


def compare(
    device: str, dtype: torch.dtype, kind: type[MasterAdamW], most: float | None, **more: Any
) -> None:
    """Compare some steps of the kernel for one weight and the kernel for all weights, from the same
    gradients. One weight has no gradient in the second step. With clipping, a gradient of the last step is
    NaN.
    """
    both = two_models(device, dtype)
    pairs = list(zip(*both, strict=True))
    groups = [[{"params": list(m)[:3]}, {"params": list(m)[3:], "weight_decay": 0.0}] for m in both]
    together, apart = (kind(one, lr=1e-2, **more) for one in groups)
    draw = torch.Generator().manual_seed(11)
    with updated_by(True), patch.object(one_weight, "is_on_gpu", lambda tensor: True):
        updates = MasterUpdates(apart)
        for step in range(STEPS):
            for number, (one, other) in enumerate(pairs):
                slope = (torch.randn(one.shape, generator=draw) / 10).to(device, one.dtype)
                if step == STEPS - 1 and number == 1 and most is not None:
                    slope[:3] = float("nan")
                one.grad = None if step == 1 and number == 2 else slope
                other.grad = None if one.grad is None else slope.clone()
            arrived = [other for _, other in pairs if other.grad is not None]
            random.Random(step).shuffle(arrived)
            taken = take_norms(updates, arrived)
            if most is not None:
                norm = gradient_norm(together, both[0])
                torch.testing.assert_close(taken, norm, rtol=1e-6, atol=0.0, equal_nan=True)
                scale(both[0], most, norm, together)
            together.step()
            updates.begin_update(None if most is None else taken, most or 0.0)
            for weight in arrived:
                assert weight.grad is not None
                updates.update(weight, weight.grad)
            updates.count(arrived)
    name = ", ".join([kind.__name__, str(dtype), *(f"{key} {value}" for key, value in more.items())])
    print(f"{name}, clip {most}: {differences(pairs, together, apart)}")


def take_norms(updates: MasterUpdates, weights: list[Any]) -> torch.Tensor:
    updates.begin_norm()
    for weight in weights:
        updates.take(weight, weight.grad)
    return updates.norm()


def differences(pairs: list[tuple[Any, Any]], together: MasterAdamW, apart: MasterAdamW) -> str:
    """Assert that weights and moments agree and return the differences; a code may differ by one."""
    largest, codes = 0.0, 0
    for one, other in pairs:
        left, right = exact(together, one), exact(apart, other)
        torch.testing.assert_close(left, right, **CLOSE)
        largest = max(largest, float((left - right).abs().max()))
        for name in MOMENTS:
            moments = together.state[one][name], apart.state[other][name]
            if moments[0].dtype is torch.float32:
                torch.testing.assert_close(*moments, **CLOSE)
            else:
                off = (moments[0].int() - moments[1].int()).abs()
                assert int(off.max()) <= 1, name
                codes += int(off.sum())
        assert together.state[one]["step"] == apart.state[other]["step"]
    return f"largest difference {largest:.2e}, {codes} codes differ by one"


if __name__ == "__main__":
    asked = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    kinds: tuple[type[MasterAdamW], ...] = (MasterAdamW, CompactAdamW)
    for kind, dtype in itertools.product(kinds, (torch.bfloat16, torch.float32)):
        for most in (None, 0.5):
            once = (kind, dtype, most) in (
                (MasterAdamW, torch.float32, 0.5),
                (CompactAdamW, torch.float32, None),
            )
            if asks_all(asked) or once:  # each kind once, with clipping and without
                compare(asked, dtype, kind, most)
    for most in (None, 0.5) if asks_all(asked) else (0.5,):
        compare(asked, torch.bfloat16, CompactAdamW, most, master_bits=24)
    print("as all together")
