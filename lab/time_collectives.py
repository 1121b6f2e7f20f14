"""Time NCCL's exchanges on the GPUs of this host.

    torchrun --standalone --nproc-per-node N lab/time_collectives.py OUT.json

The file holds seconds of each exchange by size, and bytes outside the allocator. It also holds the slowdown
of a matrix product beside exchanges. Sizes are those of NCCL's own tests: the whole tensor that is summed,
gathered or scattered.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from snugfit.versions import versions

SIZES = [1 << power for power in range(10, 31, 2)]
"""Bytes of the whole tensor."""

REPEATS = {True: 60, False: 12}
"""Number of timed exchanges of up to 16 MiB, and above."""

PRODUCT = 8192
"""Rows and columns of the matrices whose products run beside exchanges."""


Probes = dict[str, Callable[[int], Callable[[], Any]]]
"""Functions by name. Each returns one exchange of a size in bytes."""


def main() -> None:
    """Run all probes on every rank. Rank 0 writes its figures."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.empty(1, device=device)
    memory = {"context": used(device)}
    dist.init_process_group("nccl", device_id=None)
    memory["group"] = used(device)
    dist.all_reduce(torch.ones(1, device=device))
    torch.cuda.synchronize()
    memory["first all_reduce"] = used(device)
    probes = exchanges(device, ranks)
    timed: dict[str, list[dict[str, float]]] = {}
    for name, make in probes.items():
        timed[name] = [time_exchange(make(size), size, device) for size in SIZES]
        memory[name] = used(device)
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(torch.ones(1, device=device), group=pair)
    torch.cuda.synchronize()
    memory["second group of two"] = used(device)
    beside = time_beside(device, probes)
    dist.barrier()
    if rank == 0:
        document = {
            "what": "collectives", "ranks": ranks, "device": torch.cuda.get_device_name(device),
            "versions": versions() | {"nccl": ".".join(map(str, torch.cuda.nccl.version()))},
            "when": time.strftime("%Y-%m-%dT%H:%M:%S"), "nvml_bytes": memory, "seconds": timed,
            "beside": beside,
        }  # fmt: skip
        Path(sys.argv[1]).write_text(json.dumps(document, indent=1))
    dist.destroy_process_group()


def used(device: torch.device) -> int:
    """Return the bytes in use on the GPU by any process, less those that torch's allocator has reserved."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def exchanges(device: torch.device, ranks: int) -> Probes:
    """Return functions by name. Each returns one exchange of a size."""

    def tensor(nbytes: int) -> torch.Tensor:
        return torch.zeros(max(1, nbytes // 4), device=device)

    def all_reduce(size: int) -> Callable[[], Any]:
        whole = tensor(size)
        return lambda: dist.all_reduce(whole)

    def all_gather(size: int) -> Callable[[], Any]:
        part, whole = tensor(size // ranks), tensor(size // ranks * ranks)
        return lambda: dist.all_gather_into_tensor(whole, part)

    def reduce_scatter(size: int) -> Callable[[], Any]:
        part, whole = tensor(size // ranks), tensor(size // ranks * ranks)
        return lambda: dist.reduce_scatter_tensor(part, whole)

    def all_to_all(size: int) -> Callable[[], Any]:
        sent, got = tensor(size // ranks * ranks), tensor(size // ranks * ranks)
        return lambda: dist.all_to_all_single(got, sent)

    def broadcast(size: int) -> Callable[[], Any]:
        whole = tensor(size)
        return lambda: dist.broadcast(whole, 0)

    def pass_on(size: int) -> Callable[[], Any]:
        sent, got = tensor(size), tensor(size)
        to, source = (dist.get_rank() + 1) % ranks, (dist.get_rank() - 1) % ranks

        def both() -> None:
            operations = [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, got, source)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        return both

    return {
        "all_reduce": all_reduce,
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_to_all": all_to_all,
        "broadcast": broadcast,
        "send and receive": pass_on,
    }


def time_exchange(exchange: Callable[[], Any], size: int, device: torch.device) -> dict[str, float]:
    """Return medians of seconds: on the device around one exchange, on it per exchange in a row, and of one
    launch on the host."""
    repeats = REPEATS[size <= 16 << 20]
    for _ in range(5):
        exchange()
    alone, host = [], []
    for _ in range(repeats):
        torch.cuda.synchronize(device)
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        began = time.perf_counter()
        exchange()
        host.append(time.perf_counter() - began)
        end.record()
        torch.cuda.synchronize(device)
        alone.append(start.elapsed_time(end) / 1e3)
    torch.cuda.synchronize(device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        exchange()
    end.record()
    torch.cuda.synchronize(device)
    return {
        "bytes": size,
        "alone": statistics.median(alone),
        "in_a_row": start.elapsed_time(end) / 1e3 / repeats,
        "host": statistics.median(host),
    }


def time_beside(
    device: torch.device, probes: dict[str, Callable[[int], Callable[[], Any]]]
) -> dict[str, float]:
    """Return seconds of one bf16 product alone and beside incessant exchanges, and of such an exchange alone
    and beside products."""
    matrix = torch.zeros(PRODUCT, PRODUCT, device=device, dtype=torch.bfloat16)
    side = torch.cuda.Stream(device)
    seconds: dict[str, float] = {}
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        exchange = probes[name](256 << 20)
        for with_products, with_exchanges in ((True, False), (False, True), (True, True)):
            torch.cuda.synchronize(device)
            dist.barrier()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            side_first, side_last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            with torch.cuda.stream(side):
                side_first.record()
                for _ in range(30 if with_exchanges else 0):
                    exchange()
                side_last.record()
            for _ in range(30 if with_products else 0):
                matrix @ matrix
            last.record()
            torch.cuda.synchronize(device)
            key = f"{name}, products {with_products}, exchanges {with_exchanges}"
            seconds[f"{key}: product"] = first.elapsed_time(last) / 30e3
            seconds[f"{key}: exchange"] = side_first.elapsed_time(side_last) / 30e3
    return seconds


if __name__ == "__main__":
    main()
