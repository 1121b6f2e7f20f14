"""Memory of an engine's session: measured in the process that runs it, and predicted for the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.features.engines.fields import RUNTIME
from snugfit.measurement.host import peak_resident_bytes
from snugfit.results.footprint import Kind

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup


class SessionParts(NamedTuple):
    """Bytes of a simulated call in eager torch, from which the memory of an engine's session follows."""

    weights: int
    activations: int
    """Peak of the tensors that the model's layers allocate, without those of the loss."""
    outputs: int
    """Largest tensor that a module at the top of the model allocates, such as the logits."""


class SessionModel(NamedTuple):
    """Memory of an engine's session on the CPU, as a weighted sum of `SessionParts`."""

    base: int
    """Bytes of a session with a tiny model: libraries that are loaded late, and the graph."""
    weights: float
    activations: float
    outputs: float
    attention: str
    """Attention of the simulated call: `eager` stores the scores, and `sdpa` does not."""
    largest_error: float
    """Largest relative error in all measured sessions."""
    sessions: int
    """Number of measured sessions. The constants are fitted to five evaluations, or four generations."""

    def session_bytes(self, parts: SessionParts) -> int:
        """Return the predicted growth of the resident memory of a process by this session, in bytes."""
        return self.base + int(
            self.weights * parts.weights + self.activations * parts.activations + self.outputs * parts.outputs
        )


ENGINES: Mapping[str, Mapping[str, SessionModel]] = {
    "onnxruntime": {
        # Its arena keeps the blocks of the first call. From the second call on, all activations of a size
        # that was seen are in a further, planned block (`enable_mem_pattern`). Outputs are not in it.
        "evaluate": SessionModel(47_000_000, 1.0, 3.2, -0.8, "eager", 0.16, 8),
        "generate": SessionModel(47_000_000, 1.34, 2.43, 0.0, "eager", 0.18, 6),
    },
    "openvino": {
        # The CPU plugin repacks weights, and the mapped file stays resident. Outputs are copied to torch.
        "evaluate": SessionModel(50_000_000, 2.0, 0.5, 2.0, "sdpa", 0.15, 8),
        # Weights are packed for prompts and for single tokens.
        "generate": SessionModel(50_000_000, 2.77, 3.07, 0.0, "sdpa", 0.23, 6),
    },
}
"""Models of sessions on the CPU, by engine and phase. `python lab/engine_memory.py` measures and fits them in
fp32. The rows are in `results/cpu-2026-11-30/engine-memory.json`.
"""


def session_model(job: Job, engine: str) -> SessionModel:
    """Return the formula of an engine's session for this job."""
    return ENGINES[engine]["evaluate" if job.added_phase is None else "generate"]


def session_parts(job: Job, setup: Setup, engine: str) -> SessionParts:
    """Return the bytes of a call of this job, from a simulation in eager torch."""
    from snugfit.rehearsal.device.policy import CpuPolicy
    from snugfit.rehearsal.rehearse import rehearse

    eager = setup.with_fields(
        **{RUNTIME.name: RUNTIME.default}, attention=session_model(job, engine).attention
    )
    trace = rehearse(job, eager, CpuPolicy())
    live = peak = weights = outputs = 0
    for event in trace.events:
        block = trace.blocks[abs(event) - 1]
        if block.kind == Kind.WEIGHTS:
            weights += block.nbytes if event > 0 else 0
        # The model itself computes the loss, which an exported model does not have.
        elif block.module:
            live += block.nbytes if event > 0 else -block.nbytes
            peak = max(peak, live)
            if "." not in block.module:
                outputs = max(outputs, block.nbytes)
    return SessionParts(weights, peak, outputs)


def watch_session(engine: str, loop: Any) -> None:
    """Let the first comparison of outputs add `session_bytes` to a step's results, and their prediction in
    fp32 on the CPU.

    `session_bytes` are the bytes by which the memory of the process has grown since this call, at its peak.
    On a GPU they are the used bytes of the device without those of torch's allocator. An engine's arena never
    shrinks there, so the bytes after the last call are the peak.
    """
    before, outputs = occupied_bytes(loop.device), loop.outputs

    def outputs_and_bytes() -> Any:
        loop.results.setdefault("session_bytes", occupied_bytes(loop.device, peak=True) - before)
        if "predicted_session_bytes" not in loop.results and _is_predicted(loop):
            parts = session_parts(loop.job, loop.setup, engine)
            loop.results["predicted_session_bytes"] = session_model(loop.job, engine).session_bytes(parts)
        return outputs()

    loop.outputs = outputs_and_bytes


def _is_predicted(loop: Any) -> bool:
    """Return True for the device and dtype to which the models of sessions were fitted."""
    return bool(loop.device.type == "cpu" and loop.setup.created_dtype(loop.job) == "float32")


def occupied_bytes(device: torch.device, *, peak: bool = False) -> int:
    """Return the resident bytes of this process, or with `peak` their largest value so far. For a GPU, return
    the used bytes of the device without those of torch's allocator.
    """
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return total - free - torch.cuda.memory_reserved(device)
    return peak_resident_bytes() if peak else _resident_bytes()


def _resident_bytes() -> int:
    """Return the resident memory of this process in bytes, or its peak if the system has no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return peak_resident_bytes()
    import resource

    return pages * resource.getpagesize()
