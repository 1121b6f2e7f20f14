"""Record on a GPU what nn.LSTM, nn.GRU and nn.RNN allocate, whose reserve and workspace cuDNN sizes.

    python benchmarks/rnn_on_gpu.py OUT.json [--draws 300]

Each record is a module, an input, and the events of the caching allocator in their order: `[n, bytes]`
allocates block n, `[-n]` frees it. `build` is the module made on the GPU, `move` the module made on the host
and moved, `cast` its cast to half precision, `first` the first forward pass, `forward` and `backward`
those of the second step, whose gradients were set to None before. The sizes are drawn with one seed.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from snugfit.documents import write_document
from snugfit.versions import versions

SEED = 20261122
Events = list[list[int]]


@contextmanager
def events(into: dict[str, Events], name: str) -> Iterator[None]:
    """Writes what the caching allocator does within it under this name."""
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, context=None, clear_history=True)
    before = len(torch.cuda.memory._snapshot()["device_traces"][0])
    yield
    trace = torch.cuda.memory._snapshot()["device_traces"][0][before:]
    torch.cuda.memory._record_memory_history(enabled=None)
    blocks: dict[int, int] = {}
    number, written = 0, into.setdefault(name, [])
    for entry in trace:
        if entry["action"] == "alloc":
            number += 1
            blocks[entry["addr"]] = number
            written.append([number, entry["size"]])
        elif entry["action"] == "free_completed":
            written.append([-blocks.pop(entry["addr"], 0)])


def draws(count: int) -> Iterator[dict[str, Any]]:
    """One plain module, what differs from it in one way, and `count` drawn ones."""
    plain: dict[str, Any] = {
        "kind": "LSTM", "batch": 8, "length": 50, "input": 256, "hidden": 256, "layers": 1, "bias": True,
        "bidirectional": False, "dropout": 0.0, "proj": 0, "dtype": "float32", "autocast": None,
        "packed": False, "tf32": True, "batch_first": False, "train": True,
    }  # fmt: skip
    yield plain
    ways: dict[str, list[Any]] = {
        "kind": ["GRU", "RNN"], "batch": [1, 16, 24, 64, 200], "length": [1, 2, 25, 51, 100, 500],
        "input": [1, 32, 100, 250, 257, 512], "hidden": [1, 10, 32, 64, 100, 128, 129, 192, 193, 250, 384,
        385, 512, 1024, 1500], "layers": [2, 3, 4], "bias": [False], "bidirectional": [True], "proj": [100],
        "dtype": ["float16", "bfloat16", "float64"], "autocast": ["float16", "bfloat16"], "packed": [True],
        "tf32": [False], "batch_first": [True], "train": [False],
    }  # fmt: skip
    for name, values in ways.items():
        for value in values:
            yield plain | {name: value}
    yield plain | {"layers": 2, "dropout": 0.2}
    yield plain | {"layers": 3, "dropout": 0.2, "bidirectional": True}
    drawn = random.Random(SEED)
    for _ in range(count):
        kind, layers = drawn.choice(["LSTM", "LSTM", "GRU", "RNN"]), drawn.choice([1, 1, 2, 3])
        hidden = drawn.choice([8, 10, 64, 96, 100, 128, 160, 192, 200, 256, 300, 384, 512, 640, 1024])
        yield plain | {
            "kind": kind, "layers": layers, "hidden": hidden,
            "batch": drawn.choice([1, 2, 3, 8, 15, 16, 32, 64, 96, 128, 130]),
            "length": drawn.choice([1, 3, 10, 32, 77, 128, 200]),
            "input": drawn.choice([1, 5, 40, 64, 80, 100, 128, 256, 384, 500, 512, 1024]),
            "bidirectional": drawn.random() < 0.4, "bias": drawn.random() < 0.85,
            "dropout": 0.2 if layers > 1 and drawn.random() < 0.4 else 0.0,
            "proj": hidden // 2 if kind == "LSTM" and drawn.random() < 0.1 else 0,
            "dtype": drawn.choice(["float32", "float32", "float16", "bfloat16"]),
            "packed": drawn.random() < 0.2, "tf32": drawn.random() < 0.6,
        }  # fmt: skip


def module_of(draw: dict[str, Any], device: str) -> nn.RNNBase:
    """The module that a draw describes, in fp32."""
    extra = {"proj_size": draw["proj"]} if draw["proj"] else {}
    module: nn.RNNBase = getattr(nn, draw["kind"])(
        draw["input"], draw["hidden"], draw["layers"], bias=draw["bias"], batch_first=draw["batch_first"],
        dropout=draw["dropout"], bidirectional=draw["bidirectional"], device=device, **extra,
    )  # fmt: skip
    return module.train(draw["train"])


def record(draw: dict[str, Any]) -> dict[str, Any]:
    """The draw with its events."""
    precision = "tf32" if draw["tf32"] else "ieee"
    torch.backends.cudnn.rnn.fp32_precision = precision  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.fp32_precision = precision
    dtype = getattr(torch, draw["dtype"])
    written: dict[str, Events] = {}
    with events(written, "build"):
        module = module_of(draw, "cuda")
    del module
    with events(written, "move"):
        module = module_of(draw, "cpu").cuda()
    if dtype != torch.float32:
        with events(written, "cast"):
            module = module.to(dtype)
    shape = (draw["batch"], draw["length"]) if draw["batch_first"] else (draw["length"], draw["batch"])
    data = torch.randn(*shape, draw["input"], device="cuda", dtype=dtype, requires_grad=True)
    lengths = torch.tensor([max(1, draw["length"] - number % 4) for number in range(draw["batch"])])
    low = draw["autocast"]
    sizes: dict[str, int] = {}
    for step in range(2):
        module.zero_grad(set_to_none=True)
        data.grad = None
        written.pop("forward", None)
        written.pop("backward", None)
        with torch.autocast("cuda", getattr(torch, low)) if low else nullcontext():
            operand: Any = data
            if draw["packed"]:
                operand = pack_padded_sequence(
                    data, lengths, batch_first=draw["batch_first"], enforce_sorted=False
                )
            with events(written, "forward" if step else "first"):
                out = module(operand)[0]
            result = out.data if draw["packed"] else out
            sizes = saved_sizes(result.grad_fn)
            gradient = torch.ones_like(result)
        if draw["train"]:
            with events(written, "backward"):
                result.backward(gradient)
        del out, result, gradient
    return draw | {"saved": sizes, "events": written}


def saved_sizes(node: Any) -> dict[str, int]:
    """Bytes of each tensor that cuDNN's node of the graph saves."""
    while node is not None and "Cudnn" not in type(node).__name__:
        node = node.next_functions[0][0] if node.next_functions else None
    found: dict[str, int] = {"cudnn": int(node is not None)}
    for name in ("_saved_result0", "_saved_result3", "_saved_result4"):
        saved = getattr(node, name, None)
        if isinstance(saved, torch.Tensor):
            found[name] = saved.numel() * saved.element_size()
    return found


def main() -> None:
    """Writes the file that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--packed", action="store_true", help="draw packed sequences and dropout only")
    parser.add_argument("--seconds", type=float, default=100, help="draw no more after so long")
    asked = parser.parse_args()
    torch.randn(8, 8, device="cuda") @ torch.randn(8, 8, device="cuda")
    records: list[dict[str, Any]] = []
    ends = time.monotonic() + asked.seconds
    for draw in draws(asked.draws):
        if time.monotonic() > ends:
            break
        if asked.packed and not (draw["packed"] or draw["dropout"]):
            continue
        try:
            records.append(record(draw))
        except RuntimeError as error:
            records.append(draw | {"error": str(error)})
    about = {
        "device": torch.cuda.get_device_name(),
        "cudnn": torch.backends.cudnn.version(),
        "versions": versions(),
    }
    write_document(Path(asked.out), about | {"records": records})


if __name__ == "__main__":
    main()
