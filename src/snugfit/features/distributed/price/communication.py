"""Bytes and seconds of exchanging tensors between GPUs: NCCL's memory, and the duration of each exchange.

An exchange of `S` bytes among `n` GPUs takes a constant time, and transfers `factor * S` bytes over the bus
(`_factor`). Within a host, the bus is the link between GPUs. Between hosts it is the network, with one
adapter in use for each GPU of the group in one host.

Measured: two and four H200s of one host over NVLink (`evidence.json`). Everything else is scaled by data
sheets, and a network has usual figures. A prediction reports both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from snugfit.features.distributed.price.evidence import devices, total
from snugfit.prediction.exchanges import GPUS_PER_HOST, GpuLink
from snugfit.prediction.rates import Rates, host_link_bandwidth
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

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu


@dataclass(frozen=True, kw_only=True)
class Interconnect(GpuLink):
    """Links between GPUs, in bytes per second of one GPU in one direction."""

    link: float
    """Link rate between two GPUs of one host, in bytes per second."""

    is_pcie: bool = False
    """True if the GPUs of a host are linked only by PCIe, not by NVLink."""

    network: float = field(default_factory=lambda: total("network"))
    """Network rate between two hosts, in bytes per second."""

    gpus_per_host: int = GPUS_PER_HOST

    bus: Mapping[str, float] = field(default_factory=dict)
    """Calibrated share of the link's rate that large exchanges reach, by the name of NCCL's kernel."""

    def seconds(self, kernel: Kernel) -> float:
        """Return the seconds of a collective or transfer kernel while no other kernel runs beside it."""
        peers, stride = kernel.peers
        if peers < 2:
            return 0.0
        # Number of ranks of a group that share one host, if neighbours are `stride` ranks apart.
        within = max(1, min(peers, self.gpus_per_host // max(1, abs(stride))))
        hosts = math.ceil(peers / within)
        # Between hosts, NCCL sums in a tree. Other collectives use a ring.
        in_tree = kernel.operator == ALL_REDUCE
        counts = {
            "exchanges": 1,
            "GPUs of further hosts in a ring": 0 if in_tree else peers - within,
            "doublings of hosts in a tree": math.log2(hosts) if in_tree else 0,
        }
        start = total("seconds", kernel.operator, counts=counts)
        return start + _factor(kernel.operator, peers) * kernel.nbytes / self._bus(kernel, within, hosts)

    def _bus(self, kernel: Kernel, within: int, hosts: int) -> float:
        inside = self.link * self.share(kernel.operator, within) if within > 1 else math.inf
        # An exchange that uses both limits takes the slower one.
        share = total("bus_share", conditions=("network",))
        return min(inside, within * self.network * share if hosts > 1 else math.inf)

    def share(self, operator: str, gpus: int) -> float:
        """Return the fraction of the link's data rate, from 0 to 1, that an NCCL kernel reaches among GPUs of
        one host.
        """
        if operator in self.bus:
            return self.bus[operator]
        kind = operator if operator == ALL_REDUCE else "other exchanges"
        return total("bus_share", kind, ["PCIe" if self.is_pcie else "more GPUs" if gpus > 2 else "two GPUs"])


def _factor(operator: str, peers: int) -> float:
    """Return the bytes over the bus for each byte of a collective, as nccl-tests counts them (its
    PERFORMANCE.md).
    """
    if operator in (BROADCAST, SEND, RECEIVE):
        return 1.0
    # An all-reduce is a reduce-scatter with an all-gather after it.
    return (2 if operator == ALL_REDUCE else 1) * (peers - 1) / peers


def interconnect_of(gpu: Gpu, rates: Rates | None = None) -> Interconnect:
    """Return the data rates of links between GPUs of this model within a host, from the table of GPUs.
    Measured fractions in `rates` apply if they were calibrated on several GPUs.
    """
    bus = rates.bus if rates else {}
    if gpu.gpu_link:
        return Interconnect(link=float(gpu.gpu_link["bytes_per_second"]), bus=bus)
    return Interconnect(link=host_link_bandwidth(gpu), is_pcie=True, bus=bus)


def communication_bytes(trace: Trace, gpus: int) -> int:
    """Return the GPU memory that NCCL takes in addition to torch's allocator, in bytes by NVML.

    It is the sum over the process group of all GPUs and each further group.
    """
    exchanges = [kernel for kernel in trace.kernels if kernel.operator in COLLECTIVES]
    if not exchanges:
        return 0
    to_one = {kernel.peers for kernel in exchanges if kernel.operator in (SEND, RECEIVE)}
    groups = {kernel.peers for kernel in exchanges if kernel.operator not in (SEND, RECEIVE)}
    # The group of all ranks, with stride 1, is counted first.
    further = {stride for _, stride in groups - {(gpus, 1)}}
    nearest = {min((abs(stride) for _, stride in to_one), default=1)}
    of_stages = nearest - {1} - further  # the group of the stages, if it has no all-reduce
    # Sends and all-to-all need a connection to each peer, with buffers of its own.
    sends = to_one | {kernel.peers for kernel in exchanges if kernel.operator == ALL_TO_ALL}
    # Some groups communicate only before the recorded step.
    more = max(len(groups - {(gpus, 1)}) + len(of_stages), trace.groups)
    peers = sum(peers - 1 for peers, _ in sends)
    counts = {
        "first group": 1,
        "further groups": more,
        "first peer": min(peers, 1),
        "further peers": max(peers - 1, 0),
    }
    return int(total("nvml_bytes", counts=counts))


def doubts_about_exchanges(trace: Trace, gpu: Gpu | None, rates: Rates | None = None) -> list[str]:
    """Return warnings about the uncertainty of a trace's collectives, for this GPU model and these rates."""
    peers = [kernel.peers for kernel in trace.kernels if kernel.operator in COLLECTIVES]
    if not peers or gpu is None:
        return []
    connected = interconnect_of(gpu)
    doubts = []
    # A calibration of this machine's own exchanges needs no such warning.
    if gpu.key not in devices("bus_share") and not (rates and rates.bus):
        how = "PCIe, whose data rate is a guess" if connected.is_pcie else "their link's data sheet"
        doubts.append(
            f"No exchanges between {gpu.name}s were measured. Their seconds follow {how}, and NCCL's "
            "memory is an H200's. snugfit calibrate --gpus on such GPUs measures them."
        )
    # A group whose last rank is outside of the first host.
    if any((count - 1) * abs(stride) >= connected.gpus_per_host for count, stride in peers):
        doubts.append(
            f"Hosts are taken to have {connected.gpus_per_host} GPUs and a network of "
            f"{8 * connected.network / 1000000000.0:.0f} Gb/s for each. No exchange between hosts was "
            "measured. Measure there before you rely on it."
        )
    return doubts
