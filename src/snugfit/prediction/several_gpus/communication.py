"""The cost of exchanging tensors between GPUs: NCCL's bytes, and the seconds of each exchange.

An exchange of size `S` among `n` GPUs takes a start and `factor * S` bytes over the bus. NCCL's own tests
count so (nccl-tests, doc/PERFORMANCE.md). `factor` is

- `2 (n - 1) / n` for an all-reduce,
- `(n - 1) / n` for an all-gather, a reduce-scatter and an all-to-all,
- 1 for a broadcast.

The bus is the GPUs' own link within a host. Between hosts it is the network: as many adapters work at a time
as GPUs of the group are in one host.

Measured: two and four H200s of one host over NVLink (`results/h200-2026-11-26/collectives-*.json`).
Everything else is scaled by data sheets, and a network has usual figures. A prediction reports both.
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
"""NVML bytes that NCCL takes for the first group of GPUs and for each further one.

With them, 28 drawn runs on two and four H200s of one host are met within 7 MiB. They used NCCL 2.28.9 with 24
channels on 2026-11-26. On two H200s of 2026-11-22 it took 320 MiB for the first.
"""

PEERS = 446 * MIB
"""The same for the first GPU that this one sends to without the rest.

With it, five runs of `context(2)` and `pipeline(2)` on two H100s are met within 5 MiB
(results/h100-2026-11-26/several-gpus-2.json).
"""

FURTHER_PEERS = 384 * MIB
"""The same for each GPU after the first that this one sends to without the rest.

The source is `pipeline(4)` on four H200s (results/h200-2026-11-26/several-gpus-x4.json). Its first and last
stage have one neighbour and the others two.
"""

START = 22e-6
"""Seconds that the smallest exchange takes within a host."""

BUS = {ALL_REDUCE: (0.72, 0.79)}
OTHER_BUS = (0.61, 0.74)
"""Share of the link's bytes per second in one direction that large exchanges reach: of two GPUs, of more."""

PCIE_BUS = 0.4
"""The same of PCIe where GPUs have no link of their own: a guess."""

GPUS_PER_HOST = 8
"""GPUs of one host: the usual number in hosts for sale and for rent."""

NETWORK, NETWORK_SHARE = 50e9, 0.85
"""Bytes per second of each GPU's network adapter (400 Gb/s, as in NVIDIA's DGX H100).

The second figure is the share that large exchanges reach: a guess.
"""

HOP, HOST_HOP = 2.5e-6, 12e-6
"""Seconds that each further host's GPU adds to a gather or a scatter, in a ring.

The second figure is for each doubling of hosts in a sum, in a tree. Both are guesses.
"""

SLOWED_EXCHANGE, SLOWED_KERNEL = 1.9, 1.12
"""Factors on the seconds of exchanges and of other kernels while both run.

Exchanges of 256 MiB during products of 8192 x 8192 matrices gave 1.2 to 2.4 and 1.09 to 1.24 (same hosts). A
step's own kernels decide the value inside of that range. It is fitted to none yet.
"""


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """Connections of GPUs. Bytes per second are of one GPU in one direction."""

    link: float
    """Between two GPUs of a host."""

    is_pcie: bool = False
    """True if that is PCIe, and no link of the GPUs' own."""

    network: float = NETWORK
    """From one host to another."""

    gpus_per_host: int = GPUS_PER_HOST

    bus: Mapping[str, float] = field(default_factory=dict)
    """Calibrated share of the link that large exchanges reach, by NCCL's kernel."""

    def seconds(self, kernel: Kernel) -> float:
        """Return the seconds of an exchange while no other kernel runs."""
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
        """Return the share of the link that this kernel reaches among so many GPUs of one host."""
        usual = PCIE_BUS if self.is_pcie else BUS.get(operator, OTHER_BUS)[within > 2]
        return self.bus.get(operator, usual)


def _factor(operator: str, peers: int) -> float:
    if operator in (BROADCAST, SEND, RECEIVE):
        return 1.0
    return (2 if operator == ALL_REDUCE else 1) * (peers - 1) / peers


def interconnect_of(gpu: Gpu, rates: Rates | None = None) -> Interconnect:
    """Return the connection of GPUs of this kind within a host, from the table of GPUs.

    The shares of `rates` apply if they were calibrated on several GPUs.
    """
    bus = rates.bus if rates else {}
    if gpu.gpu_link:
        return Interconnect(link=float(gpu.gpu_link["bytes_per_second"]), bus=bus)
    pcie = float((gpu.host_link or {}).get("bytes_per_second") or 15_750_000_000)
    return Interconnect(link=pcie, is_pcie=True, bus=bus)


def communication_bytes(trace: Trace, gpus: int) -> int:
    """Return the NVML bytes of NCCL, which are outside of the allocator's.

    They are for the group of all GPUs, in which any run exchanges tensors, and for each further group.
    """
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
    """Return sentences on the uncertainty of a trace's exchanges on GPUs of this kind, with these rates."""
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
