"""The table of GPUs: tolerant names, refused names, and consistent entries."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from snugfit.errors import GpuError
from snugfit.job.gpu import Gpu, all_gpus, find_gpu
from snugfit.units import MIB

FOUND = {
    "h200": "H200-SXM",
    "v100-16gb": "V100-SXM2-16",
    "rtx 4090": "RTX4090",
    "a100-80gb": "A100-SXM-80",
    "RTX 3090": "RTX3090",
    "tesla t4": "T4",
    "l40s": "L40S",
    "L40": "L40",
    "4090": "RTX4090",
    "rtx3090ti": "RTX3090Ti",
    "a6000": "RTXA6000",
    "a100_40gb_pcie": "A100-PCIE-40",
    "A100 80GB PCIe": "A100-PCIE-80",
    "NVIDIA A100-SXM4-80GB": "A100-SXM-80",
    "h100 nvl": "H100-NVL",
    "H100 80 GB": "H100-SXM",
    "b200 180gb": "B200",
    "nvidia geforce rtx 4070 ti super": "RTX4070TiS",
    "mi300x": "MI300X",
}


@pytest.mark.parametrize("text", FOUND)
def test_names_forgive(text: str) -> None:
    assert find_gpu(text).key == FOUND[text]


@pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.key)
def test_every_entry_is_found_by_each_of_its_names(gpu: Gpu) -> None:
    assert [find_gpu(name) for name in (gpu.key, *gpu.names, gpu.key.lower())] == [gpu] * (2 + len(gpu.names))


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        ("RTX 9999", ["RTX4090", "RTX3090"]),
        ("gh200", ["GH200-96", "GH200-144"]),
        ("a100-60gb", ["A100-SXM-80"]),
        ("rtx 6000", ["QRTX6000", "RTX6000Ada"]),
        ("", ["snugfit gpus"]),
        ("80gb", ["snugfit gpus"]),
    ],
)
def test_unknown_and_ambiguous_names_list_the_nearest(text: str, listed: list[str]) -> None:
    with pytest.raises(GpuError) as caught:
        find_gpu(text)
    assert caught.value.exit_code == 2
    assert repr(text) in str(caught.value)
    assert all(key in str(caught.value) for key in listed)


@pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.key)
def test_every_entry_agrees_with_itself(gpu: Gpu) -> None:
    assert gpu.names
    assert gpu.sources, "a figure without a source"
    assert (gpu.platform == "cuda") == (gpu.vendor == "NVIDIA") == (gpu.compute_capability is not None)
    if gpu.nvml_total_bytes and gpu.memory_bytes:
        assert gpu.driver_reserved_bytes is not None
        assert abs(gpu.nvml_total_bytes - gpu.driver_reserved_bytes - gpu.memory_bytes) <= 2 * MIB
    if gpu.memory_bytes and gpu.marketed_gb:
        assert 0.89 < gpu.memory_bytes / (gpu.marketed_gb << 30) <= 1.0 + 0.01
    if gpu.compute_capability:
        assert gpu.bf16_native == gpu.tf32 == (gpu.compute_capability >= (8, 0))
    assert ("tf32" in gpu.peak_dense) <= gpu.tf32
    assert all(rate > 0 for rate in gpu.peak_dense.values())
    if gpu.tensor_cores and gpu.vendor == "NVIDIA":
        assert gpu.peak_dense["fp16"] > gpu.peak_dense["fp32"]
    assert (gpu.context_bytes is None) == (gpu.context_source is None)
    assert gpu.context_bytes is not None or gpu.libraries_bytes is None


@pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.key)
def test_entries_round_trip_through_json(gpu: Gpu) -> None:
    assert Gpu.from_json(json.loads(json.dumps(gpu.to_json()))) == gpu


def test_keys_are_unique() -> None:
    keys = [gpu.key.lower() for gpu in all_gpus()]
    assert len(set(keys)) == len(keys)


def test_the_h200_holds_what_was_measured() -> None:
    """One H200, driver 580.159.04: NVML reports 143,771 MiB, 615 of them reserved. The context is
    650,969,088 B, with libraries 751 to 767 MiB."""
    gpu = find_gpu("h200")
    assert (gpu.nvml_total_bytes, gpu.driver_reserved_bytes) == (143_771 * MIB, 615 * MIB)
    assert gpu.memory_bytes == 143_156 * MIB
    assert gpu.context_bytes == 650_969_088
    trained = gpu.context_bytes + (gpu.libraries_bytes or 0) + (gpu.backward_bytes or 0)
    assert trained == 783_876_096  # measured in training without cuDNN
    assert gpu.cudnn_bytes == 16 * MIB


@pytest.mark.whole
def test_the_table_is_read_without_torch() -> None:
    script = (
        "import sys; from snugfit.job.gpu import find_gpu; find_gpu('h200'); print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "False"
