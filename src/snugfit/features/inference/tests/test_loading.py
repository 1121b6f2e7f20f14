"""Real loads of small checkpoints on the CPU: their peaks, files and warm-up are the predicted ones."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from generating_models import generating_job
from transformers import core_model_loading

from reported import Marks, reports_of
from snugfit.features.inference.loading import (
    DISK_RATE,
    CheckpointTensor,
    loading_results,
    replay_loading,
    tensors_of,
    warm_up_bytes,
)
from snugfit.job.build import instantiate
from snugfit.job.gpu import find_gpu
from snugfit.prediction.kernel_seconds import PAGEABLE
from snugfit.prediction.predict import predict
from snugfit.units import GIB, MIB

pytestmark = pytest.mark.whole

WIDE = {"hidden_size": 256, "intermediate_size": 512}

APART = 1024
"""Largest allowed difference of the peaks in bytes: buffers, and numbers from which bitsandbytes computes its
codes.
"""


def skeleton(family: str, facts: dict[str, Any], dtype: str = "float32") -> Any:
    with torch.device("meta"):
        return instantiate(generating_job(family, facts=facts), dtype=dtype, attention="sdpa")


def saved(family: str, facts: dict[str, Any], folder: Path) -> list[Path]:
    """Write a checkpoint in bfloat16 with two shards or more, and return its files."""
    model: Any = instantiate(generating_job(family, facts=facts), dtype="bfloat16", attention="sdpa")
    model.save_pretrained(folder, max_shard_size=f"{sum(p.nbytes for p in model.parameters()) // 1500}KB")
    files = list(folder.glob("*.safetensors"))
    assert len(files) > 1
    return files


def quantization(bits: int) -> dict[str, Any]:
    return (
        {"quantization_config": transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})}
        if bits
        else {}
    )


def real_peak(model: Any, folder: Path, files: list[Path], bits: int) -> int:
    """Return the peak of a real load in fp32, without mapped files and the scratch of the CPU's kernels."""
    marks, loaded = Marks(), []

    def load() -> None:
        marks.phase("build")
        how = {"dtype": torch.float32, "device_map": {"": "cpu"}, **quantization(bits)}
        loaded.append(type(model).from_pretrained(folder, **how))

    sizes = {file.stat().st_size for file in files}
    live = top = 0
    for event in reports_of(load, marks):
        if abs(event.nbytes) in sizes or any(name.startswith("bitsandbytes::") for name in event.inside):
            continue
        live += event.nbytes
        top = max(top, live)
    return top


class InOrder:
    """A pool without threads, which computes a result on demand, after all that were submitted before."""

    def __init__(self, **how: Any) -> None:
        self.waiting: list[tuple[Any, Future[Any]]] = []

    def submit(self, function: Any) -> Future[Any]:
        future = Pending(self)
        self.waiting.append((function, future))
        return future

    def shutdown(self, **how: Any) -> None:
        pass


class Pending(Future[Any]):
    """A result of `InOrder`."""

    def __init__(self, pool: InOrder) -> None:
        super().__init__()
        self.pool = pool

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            function, future = self.pool.waiting.pop(0)
            future.set_result(function())
        return super().result(timeout)


LOADS = [
    ("llama", WIDE, 0),
    ("mixtral", WIDE, 0),  # experts, which are stacked and joined
    ("t5", {}, 0),  # tied weights
    ("llama", WIDE, 4),
    ("gpt2", {}, 4),  # transposed weights
    ("llama", WIDE, 8),
]


def test_sources_that_lie_between_others_are_read_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixtral's three weights of an expert lie together, and belong to two tensors."""
    monkeypatch.setattr(core_model_loading, "ThreadPoolExecutor", InOrder)
    files, model = saved("mixtral", WIDE, tmp_path), skeleton("mixtral", WIDE)
    tensors, buffers = tensors_of(model, "bfloat16")
    foreseen = replay_loading(tensors, buffers).requested_peak
    assert foreseen > replay_loading(tensors, buffers, threads=False).requested_peak
    assert foreseen == pytest.approx(real_peak(model, tmp_path, files, 0), abs=APART)


@pytest.mark.parametrize(("family", "facts", "bits"), LOADS)
def test_the_peak_of_a_real_load(
    family: str, facts: dict[str, Any], bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bits:
        pytest.importorskip("bitsandbytes")
    # torch's profiler follows one thread.
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    files, model = saved(family, facts, tmp_path), skeleton(family, facts)
    tensors, buffers = tensors_of(model, "bfloat16")
    foreseen = replay_loading(tensors, buffers, bits=bits, threads=False).requested_peak
    assert foreseen == pytest.approx(real_peak(model, tmp_path, files, bits), abs=APART)
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)
    assert (
        sum(one.elements * one.file_size for one in tensors) == sum(f.stat().st_size for f in files) - headers
    )


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_the_warm_up_is_that_of_transformers(bits: int) -> None:
    from transformers.modeling_utils import get_total_byte_count, local_torch_dtype
    from transformers.quantizers import AutoHfQuantizer

    model, quantizer = skeleton("gpt2", {}, "bfloat16"), None
    foreseen = warm_up_bytes(tensors_of(model, None)[0], bits, None)
    if bits:
        pytest.importorskip("bitsandbytes")
        quantizer = AutoHfQuantizer.from_config(quantization(bits)["quantization_config"])
        with torch.device("meta"), local_torch_dtype(torch.bfloat16):
            quantizer.preprocess_model(model=model, device_map=None)
    device = torch.device("meta")
    counted = get_total_byte_count(model, dict.fromkeys(model.state_dict(), device), quantizer)
    assert foreseen == pytest.approx(counted[device], abs=2)


def test_a_large_model_leaves_memory_free_in_the_warm_up() -> None:
    gpu = find_gpu("h200")
    tensor = CheckpointTensor(sources=(200 * GIB,), file_size=2, size=2)
    assert warm_up_bytes([tensor], 0, gpu) < (gpu.memory_bytes or 0) - 1 * GIB


def test_the_block_of_the_warm_up_holds_the_weights() -> None:
    """Small tensors have segments of their own; the large ones reuse the block."""
    tensors = [CheckpointTensor(sources=(8 * MIB,), file_size=2, size=2)] * 8
    small = [CheckpointTensor(sources=(128,), file_size=2, size=2)]
    after = replay_loading(tensors + small, 0, warm_up=warm_up_bytes(tensors + small, 0, None))
    # The block has whole 2 MiB, and so has the segment of small tensors.
    assert after.reserved_peak == 8 * 16 * MIB + 2 * 2 * MIB


def test_results_of_a_prediction() -> None:
    job = generating_job("llama", facts=WIDE)
    whole, four, eight = loading_results(predict(job, gpu="h200"))
    assert (whole.weights, four.weights, eight.weights) == ("as saved", "4 bits", "8 bits")
    assert whole.read_bytes == four.read_bytes == eight.read_bytes
    assert whole.copied_bytes == four.copied_bytes < eight.copied_bytes
    assert whole.copy_seconds == pytest.approx(whole.copied_bytes / PAGEABLE)
    assert whole.disk_seconds == pytest.approx(whole.read_bytes / DISK_RATE)
    assert loading_results(predict(job))[0].copy_seconds is None
    # The file has the model's dtype, so the host copies nothing. In 8 bits, weights are copied back to the
    # host.
    assert whole.host_copy_bytes == four.host_copy_bytes == 0 < eight.host_copy_bytes
    facts = {**WIDE, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert loading_results(replace(predict(job), job=generating_job("llama", facts=facts))) == ()
    assert all(value is not None for value in json.loads(json.dumps(asdict(eight))).values())
