"""Record on a GPU the attention kernel that torch chooses, over drawn operands, switches and orders.

    python lab/attention_choices.py OUT.json [--draws 3000]

`torch._fused_sdp_choice` chooses without running a kernel. `case_of` draws each case from a seed. The result
is torch's number of the backend, or the first line of the error. tests/test_attention.py compares these
results with snugfit's choices for the same cases.
"""

from __future__ import annotations

import argparse
import random
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from snugfit.documents import write_document
from snugfit.versions import versions

BACKENDS = ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")


def case_of(seed: int) -> dict[str, Any]:
    """Draw one call: half of them ordinary, half with a property that a kernel may refuse."""
    drawn = random.Random(seed)

    def seldom(usual: Any, *others: Any, chance: float = 0.12) -> Any:
        return drawn.choice(others) if drawn.random() < chance else usual

    heads, width, length = drawn.choice([1, 4, 8]), drawn.choice([32, 64, 64, 128]), drawn.choice([16, 64])
    width = seldom(width, 1, 4, 20, 36, 72, 192, 200, 240, 256, 264, chance=0.25)
    key_length = seldom(length, 1, 40, 7)
    key_heads = seldom(heads, 1, 2, 3)
    return {
        "dtype": drawn.choice(["float32", "float16", "bfloat16", "bfloat16", seldom("bfloat16", "float64")]),
        "dim": seldom(4, 3, 5, chance=0.05),
        "query": [seldom(2, 1), heads, seldom(length, 1), width],
        "key": [2, key_heads, key_length, width],
        "value": [2, seldom(key_heads, 1, heads, chance=0.05), key_length, seldom(width, 16, 64, 128)],
        "last_stride": seldom(1, 2, chance=0.05),
        "mask": seldom(None, "bool", "float", "learns", "rows", "3d", "stride", chance=0.4),
        "dropout": seldom(0.0, 0.1, 0.125, 0.5, chance=0.3),
        "causal": drawn.random() < 0.3,
        "grouped": drawn.random() < 0.35,
        "needs_grad": drawn.random() < 0.7,
        "backends": seldom(None, *(drawn.sample(BACKENDS, count) for count in (1, 2, 3, 4)), chance=0.25),
        "set_priority": drawn.random() < 0.5,
        "deterministic": drawn.random() < 0.03,
    }


def operands_of(case: dict[str, Any], device: str) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Return query, key, value and mask."""
    dtype = getattr(torch, case["dtype"])

    def tensor(shape: list[int]) -> torch.Tensor:
        shape = shape[1:] if case["dim"] == 3 else [1, *shape] if case["dim"] == 5 else shape
        whole = torch.empty(*shape[:-1], shape[-1] * case["last_stride"], dtype=dtype, device=device)
        return whole[..., :: case["last_stride"]].requires_grad_(case["needs_grad"])

    rows, columns = case["query"][2], case["key"][2]
    kinds = {
        "bool": ((2, 1, rows, columns), torch.bool),
        "float": ((2, 1, rows, columns), dtype),
        "learns": ((1, 1, rows, columns), dtype),
        "rows": ((rows, columns), dtype),
        "3d": ((case["query"][1], rows, columns), dtype),
        "stride": ((2, 1, columns, rows), dtype),
    }
    mask = None
    if case["mask"]:
        shape, kind = kinds[case["mask"]]
        mask = torch.zeros(shape, dtype=kind, device=device)
        mask = mask.transpose(-1, -2) if case["mask"] == "stride" else mask
        mask.requires_grad_(case["mask"] == "learns")
    return [tensor(case[name]) for name in ("query", "key", "value")], mask


def switched(case: dict[str, Any], undo: ExitStack) -> None:
    """Switch backends on and off as in the case."""
    if case["backends"]:
        backends = [getattr(SDPBackend, name) for name in case["backends"]]
        undo.enter_context(sdpa_kernel(backends, set_priority=case["set_priority"]))
    if case["deterministic"]:
        undo.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        torch.use_deterministic_algorithms(True)


def choice(case: dict[str, Any], device: str = "cuda") -> int | str:
    """Return torch's number of the chosen backend, or the first line of its error."""
    (query, key, value), mask = operands_of(case, device)
    with ExitStack() as undo:
        switched(case, undo)
        try:
            return int(
                torch._fused_sdp_choice(  # type: ignore[attr-defined]
                    query, key, value, mask, case["dropout"], case["causal"], enable_gqa=case["grouped"]
                )
            )
        except RuntimeError as error:
            return str(error).partition("\n")[0]


def main() -> None:
    """Run the cases and write the output file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--draws", type=int, default=3000)
    asked = parser.parse_args()
    about = {
        "device": torch.cuda.get_device_name(),
        "cudnn": torch.backends.cudnn.version(),
        "versions": versions(),
    }
    warnings.simplefilter("ignore")  # torch warns with the reasons of a refusal
    choices = [choice(case_of(seed)) for seed in range(asked.draws)]
    write_document(Path(asked.out), about | {"choices": choices})


if __name__ == "__main__":
    main()
