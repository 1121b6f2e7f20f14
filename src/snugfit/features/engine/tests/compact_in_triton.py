"""Compare the kernel for 8-bit moments with plain torch. Arguments are those of `masters_in_triton.py`.

Both sides start each step from the same states. Stochastic rounding may differ in the last bit of a code.
Such a difference is one part in hundreds, and would change the next step.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any, Literal

import masters_in_triton as exact_moments
import torch
from masters_in_triton import CLOSE, MODELS, exact, milliseconds, say, two_models, updated_by, weights_on_gpu

from snugfit.features.engine.masters.block import LaunchSettings
from snugfit.features.engine.masters.compact_adamw import SCALES, CompactAdamW
from snugfit.features.engine.masters.table import MOMENTS
from snugfit.step.clipping import gradient_norm, scale
from triton_cases import asks_all

SETTINGS = (LaunchSettings(), LaunchSettings(block=2048, warps=8, narrow=16))

SHARES = ((512, 4), (1024, 4), (1024, 8), (2048, 8))
"""Elements of a block and warps."""

MOST_DIFFERENT = 1e-3
"""Share of codes whose stochastic rounding may differ, where a product and a sum are fused."""


NEIGHBOURS = {"rtol": 2.0**-15, "atol": CLOSE["atol"]}
"""Largest distance between two masters of 24 bits."""

MOST_MASTERS = 1e-2
"""Share of 24-bit masters whose stochastic rounding may differ. Hardware roots, quotients and fused
multiply-adds differ in the last of 32 bits; a draw has 256 such units."""


def begin_alike(ours: CompactAdamW, theirs: CompactAdamW, pairs: list[tuple[Any, Any]]) -> None:
    for one, other in pairs:
        other.data.copy_(one.data)
        for name, value in ours.state[one].items():
            if isinstance(value, torch.Tensor):
                theirs.state[other][name].copy_(value)


def compare(
    device: str,
    dtype: torch.dtype,
    settings: LaunchSettings,
    most: float | None,
    master_bits: Literal[32, 24] = 32,
) -> None:
    """Compare several steps by the kernel and by plain torch, from the same gradients. Masters of 24 bits may
    differ by one unit after stochastic rounding."""
    both = two_models(device, dtype)
    pairs = list(zip(*both, strict=True))
    plain, launched = (CompactAdamW(model, lr=1e-2, master_bits=master_bits) for model in both)
    draw = torch.Generator().manual_seed(11)
    elements = differ = masters_differ = 0
    largest = 0.0
    for step in range(4 if asks_all(device) else 2):
        if step:
            begin_alike(plain, launched, pairs)
        for one, other in pairs:
            slope = (torch.randn(one.shape, generator=draw) ** 3 / 10).to(device, one.dtype)
            one.grad, other.grad = slope, slope.clone()
        for kernel, optimizer, model in ((False, plain, both[0]), (True, launched, both[1])):
            with updated_by(kernel, settings):
                if most is not None:
                    scale(model, most, gradient_norm(optimizer, model), optimizer)
                optimizer.step()
        for one, other in pairs:
            left, right = exact(plain, one), exact(launched, other)
            torch.testing.assert_close(left, right, **(CLOSE if master_bits == 32 else NEIGHBOURS))
            masters_differ += int((~torch.isclose(left, right, **CLOSE)).sum())
            largest = max(largest, float((left - right).abs().max()))
            for name in SCALES:
                torch.testing.assert_close(plain.state[one][name], launched.state[other][name], **CLOSE)
            for name in MOMENTS:
                apart = (plain.state[one][name].int() - launched.state[other][name].int()).abs()
                assert int(apart.max()) <= 1, (name, int(apart.max()))
                differ, elements = differ + int(apart.sum()), elements + apart.numel()
    name = f"{dtype}, {master_bits} bits, {settings}, clip {most}"
    print(
        f"{name}: largest difference {largest:.2e}, {differ} of {elements} codes and "
        f"{masters_differ} masters differ by one"
    )
    assert differ <= MOST_DIFFERENT * elements
    assert masters_differ <= MOST_MASTERS * elements / 2


def time_updates() -> None:
    """Time updates with many settings: 14.25 bytes an element in halves, 12.25 with masters of 24 bits, 16.25
    in fp32."""
    kinds: tuple[tuple[str, Literal[32, 24], float], ...] = (
        ("halves", 32, 14.25), ("24 bits", 24, 12.25), ("fp32", 32, 16.25),
    )  # fmt: skip
    for (model, sizes), (kind, bits, nbytes) in itertools.product(MODELS.items(), kinds):
        weights = weights_on_gpu(sizes, halves=kind != "fp32")
        count = sum(weight.numel() for weight in weights)
        optimizer = CompactAdamW(weights, master_bits=bits)
        best: tuple[float, Any] = (float("inf"), None)
        for settings in exact_moments.settings_to_time(SHARES):
            exact_moments.launched_with(optimizer, settings)
            taken = milliseconds(optimizer.launch, 7)
            say(f"8-bit update, {kind}", model, count, taken, nbytes, **settings._asdict())
            best = min(best, (taken, settings), key=lambda one: one[0])
        print(
            json.dumps(
                {"what": f"best 8-bit update, {kind}", "model": model, "ms": best[0], **best[1]._asdict()}
            )
        )
        exact_moments.time_torch(model, sizes)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    asked = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    for (at, kind), (place, chosen) in itertools.product(
        enumerate((torch.float32, torch.bfloat16)), enumerate(SETTINGS)
    ):
        if asks_all(asked) or at == place:
            compare(asked, kind, chosen, 0.5 if chosen.narrow > 8 else None)
    for chosen in SETTINGS if asks_all(asked) else SETTINGS[1:]:
        compare(asked, torch.bfloat16, chosen, 0.5 if chosen.narrow > 8 else None, master_bits=24)
    print("as the reference")
    if sys.argv[2:] == ["time"]:
        time_updates()
