"""What it takes that GPUs exchange tensors: bytes that NCCL keeps, and seconds of each exchange.

An exchange of size `S` among `n` GPUs takes a start and `factor * S` bytes over the bus, as NCCL's own tests
count: `factor` is `2 (n - 1) / n` where tensors are summed everywhere, `(n - 1) / n` where they are gathered,
scattered or turned about, 1 where one sends to the rest (nccl-tests, doc/PERFORMANCE.md). The bus is the
GPUs' own link within a host. Between hosts it is the network: as many adapters work at a time as GPUs of the
group are in one host.

Measured: two and four H200s of one host over NVLink (`results/h200-2026-11-26/collectives-*.json`). All
else is scaled by data sheets, and a network's figures are taken from what is usual; a prediction says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from snugfit.rehearsal.trace.trace import (
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    COLLECTIVES,
    RECEIVE,
    SEND,
    Kernel,
    Trace,
)
from snugfit.units import MIB

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.prediction.rates import Rates

FIRST_GROUP, FURTHER_GROUP = 847 * MIB, 484 * MIB
"""NVML bytes that NCCL takes for the first group of GPUs and for each further one: with them, 28 drawn runs
on two and four H200s of one host are met within 7 MiB (2026-11-26, NCCL 2.28.9, 24 channels). On two H200s of
2026-11-22 it took 320 MiB for the first."""

PEERS = 446 * MIB
"""And for each GPU that this one sends to without the rest: with it five runs of `context(2)` and
`pipeline(2)` on two H100s are met within 5 MiB (results/h100-2026-11-26/several-gpus-2.json)."""

FURTHER_PEERS = 384 * MIB
"""And for each GPU after the first that it sends to so: `pipeline(4)` on four H200s, whose first and last
stage have one neighbour and the others two (results/h200-2026-11-26/several-gpus-x4.json)."""

START = 22e-6
"""Seconds that the smallest exchange takes within a host."""

BUS = {ALL_REDUCE: (0.72, 0.79)}
OTHER_BUS = (0.61, 0.74)
"""Share of the link's bytes per second in one direction that large exchanges reach: of two GPUs, of more."""

PCIE_BUS = 0.4
"""The same of PCIe where GPUs have no link of their own: a guess."""

GPUS_PER_HOST = 8
"""GPUs of one host: what is sold and rented most."""

NETWORK, NETWORK_SHARE = 50e9, 0.85
"""Bytes per second of the adapter that belongs to each GPU (400 Gb/s, as in NVIDIA's DGX H100), and how much
of it large exchanges reach: a guess."""

HOP, HOST_HOP = 2.5e-6, 12e-6
"""Seconds that each further host's GPU adds to what is gathered or scattered, in a ring, and that each
doubling of hosts adds to a sum, in a tree: guesses."""

SLOWED_EXCHANGE, SLOWED_KERNEL = 1.9, 1.12
"""How many times as long exchanges and other kernels take while both run: 1.2 to 2.4 and 1.09 to 1.24 where
products of 8192 x 8192 matrices ran beside exchanges of 256 MiB (same hosts). Which is inside, a step's own
kernels decide; fitted to none yet."""


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """How GPUs are connected; bytes per second are of one GPU in one direction."""

    link: float
    """Between two GPUs of a host."""

    is_pcie: bool = False
    """Whether that is PCIe, and no link of the GPUs' own."""

    network: float = NETWORK
    """From one host to another."""

    gpus_per_host: int = GPUS_PER_HOST

    bus: Mapping[str, float] = field(default_factory=dict)
    """By NCCL's kernel: the share of the link that large exchanges reach, where it was calibrated."""

    def seconds(self, kernel: Kernel) -> float:
        """Seconds of an exchange while nothing else runs."""
        peers, stride = kernel.peers
        if peers < 2:
            return 0.0
        within = max(1, min(peers, self.gpus_per_host // max(1, abs(stride))))
        hosts = math.ceil(peers / within)
        start = START
        if hosts > 1:
            in_tree = kernel.operator == ALL_REDUCE
            start += HOST_HOP * math.log2(hosts) if in_tree else HOP * (peers - within)
        return start + _factor(kernel.operator, peers) * kernel.nbytes / self._bus(kernel, within, hosts)

    def _bus(self, kernel: Kernel, within: int, hosts: int) -> float:
        inside = self.link * self.share(kernel.operator, within) if within > 1 else math.inf
        return min(inside, within * self.network * NETWORK_SHARE if hosts > 1 else math.inf)

    def share(self, operator: str, within: int) -> float:
        """Share of the link that this kernel reaches among so many GPUs of one host."""
        usual = PCIE_BUS if self.is_pcie else BUS.get(operator, OTHER_BUS)[within > 2]
        return self.bus.get(operator, usual)


def _factor(operator: str, peers: int) -> float:
    if operator in (BROADCAST, SEND, RECEIVE):
        return 1.0
    return (2 if operator == ALL_REDUCE else 1) * (peers - 1) / peers


def interconnect_of(gpu: Gpu, rates: Rates | None = None) -> Interconnect:
    """How GPUs of this kind are connected within a host, by the table, and by these rates where they were
    calibrated on several."""
    bus = rates.bus if rates else {}
    if gpu.gpu_link:
        return Interconnect(link=float(gpu.gpu_link["bytes_per_second"]), bus=bus)
    pcie = float((gpu.host_link or {}).get("bytes_per_second") or 15_750_000_000)
    return Interconnect(link=pcie, is_pcie=True, bus=bus)


def communication_bytes(trace: Trace, gpus: int) -> int:
    """NVML bytes that NCCL keeps beside the allocator's: for the group of all GPUs, in which any run
    exchanges something, and for each further group."""
    exchanges = [kernel for kernel in trace.kernels if kernel.operator in COLLECTIVES]
    if not exchanges:
        return 0
    to_one = {kernel.peers for kernel in exchanges if kernel.operator in (SEND, RECEIVE)}
    groups = {kernel.peers for kernel in exchanges if kernel.operator not in (SEND, RECEIVE)}
    further = {stride for _, stride in groups - {(gpus, 1)}}
    nearest = {min((abs(stride) for _, stride in to_one), default=1)}
    of_stages = nearest - {1} - further  # the group of the stages, where it sums nothing
    sends = to_one | {kernel.peers for kernel in exchanges if kernel.operator == ALL_TO_ALL}
    more = max(len(groups - {(gpus, 1)}) + len(of_stages), trace.groups)
    peers = sum(peers - 1 for peers, _ in sends)
    return FIRST_GROUP + FURTHER_GROUP * more + PEERS * min(peers, 1) + FURTHER_PEERS * max(peers - 1, 0)


MEASURED = ("H200-SXM",)
"""GPUs whose exchanges within a host were measured."""


def doubts_about_exchanges(trace: Trace, gpu: Gpu | None, rates: Rates | None = None) -> list[str]:
    """Sentences on what is uncertain about a trace's exchanges on GPUs of this kind, with these rates."""
    peers = [kernel.peers for kernel in trace.kernels if kernel.operator in COLLECTIVES]
    if not peers or gpu is None:
        return []
    connected = interconnect_of(gpu)
    doubts = []
    if gpu.key not in MEASURED and not (rates and rates.bus):
        how = "PCIe, of which a guess is taken" if connected.is_pcie else "their link's data sheet"
        doubts.append(
            f"No exchanges between {gpu.name}s were measured. Their seconds follow {how}, and NCCL's memory "
            "is an H200's."
        )
    if any((count - 1) * abs(stride) >= connected.gpus_per_host for count, stride in peers):
        doubts.append(
            f"Hosts are taken to have {connected.gpus_per_host} GPUs and a network of "
            f"{8 * connected.network / 1e9:.0f} Gb/s for each. No exchange between hosts was measured."
        )
    return doubts
