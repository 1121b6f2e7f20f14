"""GGUF headers, also truncated and hostile ones, and the memory of llama.cpp that follows from them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from snugfit.cli.main import run
from snugfit.errors import ModelError, UsageError
from snugfit.features.serving.gguf import GgufHeader, read_gguf
from snugfit.features.serving.predict import predict_serving
from snugfit.features.serving.request import ServingRequest
from snugfit.job.gpu import find_gpu
from snugfit.job.model import Model
from snugfit.units import MIB

LLAMA = {
    "general.architecture": "llama", "llama.block_count": 2, "llama.embedding_length": 512,
    "llama.attention.head_count": 8, "llama.attention.head_count_kv": 2, "llama.context_length": 4096,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
}  # fmt: skip
TENSORS = [
    ("token_embd.weight", (512, 1024), 12), ("blk.0.attn_q.weight", (512, 512), 12),
    ("blk.0.attn_norm.weight", (512,), 0), ("output.weight", (512, 1024), 14),
]  # fmt: skip


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, value: Any) -> bytes:
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    if isinstance(value, list) and isinstance(value[0], str):
        return text(key) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    if isinstance(value, list):
        return text(key) + struct.pack("<IIQ", 9, 4, len(value)) + struct.pack(f"<{len(value)}I", *value)
    return text(key) + struct.pack("<II", 4, value)


def content(
    metadata: Mapping[str, Any] = LLAMA, tensors: Sequence[Any] = TENSORS, *, version: int = 3
) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    parts += [entry(key, value) for key, value in metadata.items()]
    for name, shape, kind in tensors:
        sizes = struct.pack(f"<{len(shape)}Q", *shape)
        parts.append(text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, 0))
    return b"".join(parts)


def header(tmp_path: Path, raw: bytes) -> GgufHeader:
    file = tmp_path / "model.gguf"
    file.write_bytes(raw)
    return read_gguf(file)


def request_of(model: Model | GgufHeader, **options: Any) -> ServingRequest:
    return ServingRequest(model=model, gpu=find_gpu("rtx 4090"), engine="llama.cpp", **options)


def test_a_header_gives_metadata_and_bytes(tmp_path: Path) -> None:
    found = header(tmp_path, content())
    assert found.number("attention.head_count_kv") == 2
    assert found.metadata["tokenizer.ggml.tokens"] == 3
    assert [tensor.size for tensor in found.tensors] == [
        512 * 1024 // 256 * 144, 512 * 512 // 256 * 144, 512 * 4, 512 * 1024 // 256 * 210,
    ]  # fmt: skip


def test_a_file_without_all_tensors_has_a_warning(tmp_path: Path) -> None:
    raw = content()
    bytes_of_tensors = sum(tensor.size for tensor in header(tmp_path, raw).tensors)
    whole = header(tmp_path, raw + bytes(bytes_of_tensors))
    cut = header(tmp_path, raw + bytes(bytes_of_tensors - 100_000))
    assert (whole.missing_bytes, cut.missing_bytes) == (0, 100_000)
    warnings = [predict_serving(request_of(one)).doubts[-1] for one in (whole, cut)]
    assert "download it again" not in warnings[0]
    assert "ends 97.7 KiB before the end of its tensors" in warnings[1]


def test_every_truncated_header_is_one_error(tmp_path: Path) -> None:
    whole = content()
    for length in range(0, len(whole), 7):
        with pytest.raises(ModelError, match="not a usable GGUF file"):
            header(tmp_path, whole[:length])


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b"GGML" + content()[4:], "does not begin with GGUF"),
        (content(version=1), "version is 1"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0), "tensors"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 40), "entries"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1 << 62), "a text has"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + text("k") + struct.pack("<I", 99), "unknown type 99"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 4, 1 << 50), "a list"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + text("k") + struct.pack("<IIQI", 9, 9, 1, 4), "type 9"),
        (content(tensors=[("t", (512, 1 << 60), 0)]), "shape"),
        (content(tensors=[("t", (512,), 77)]), "unknown type 77"),
        (content(tensors=[("t", (100,), 12)]), "no blocks of 256"),
        (content(tensors=[TENSORS[0], TENSORS[0]]), "occurs twice"),
    ],
)
def test_a_hostile_header_is_one_error(tmp_path: Path, raw: bytes, fault: str) -> None:
    with pytest.raises(ModelError) as error:
        header(tmp_path, raw)
    assert fault in str(error.value)


def test_a_file_of_another_model_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lacking = {key: value for key, value in LLAMA.items() if "embedding" not in key}
    deep = LLAMA | {"llama.block_count": 4_000_000_000}
    for raw in (content(lacking), content(tensors=TENSORS[1:]), content({}), content(deep)):
        (tmp_path / "model.gguf").write_bytes(raw)
        command = ["serve", str(tmp_path / "model.gguf"), "--engine", "llama.cpp", "--gpu", "t4"]
        assert run(command) == 2
        assert "Traceback" not in capsys.readouterr().err
    assert run(["serve", str(tmp_path / "none.gguf"), "--engine", "llama.cpp", "--gpu", "t4"]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("raw", [b"version https://git-lfs.github.com/spec/v1\n", b"\x08", bytes(40)])
def test_weights_that_no_engine_loads_are_one_error(
    raw: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16"}))
    (tmp_path / "model.safetensors").write_bytes(raw)
    assert run(["serve", str(tmp_path), "--gpu", "h200"]) == 2
    printed = capsys.readouterr().err
    assert "model.safetensors: not a usable safetensors file" in printed
    assert "Download the file again" in printed


def test_the_embedding_stays_on_the_host_unless_it_is_the_head(tmp_path: Path) -> None:
    apart = predict_serving(request_of(header(tmp_path, content())))
    sizes = [tensor.size for tensor in header(tmp_path, content()).tensors]
    assert apart.weights_bytes == sum(sizes[1:])
    tied = predict_serving(request_of(header(tmp_path, content(tensors=TENSORS[:3]))))
    assert tied.weights_bytes == sum(sizes[:3])
    assert apart.token_bytes == 2 * 2 * 2 * 64 * 2  # layers, keys and values, heads, width, bytes


def test_an_embedding_of_llama_3_8b_has_the_bytes_of_published_logs(tmp_path: Path) -> None:
    found = header(tmp_path, content(tensors=[("token_embd.weight", (4096, 128_256), 12)]))
    assert found.tensors[0].kind == "Q4_K"
    assert round(found.tensors[0].size / MIB, 2) == 281.81


def test_llama_3_8b_has_the_graph_s_buffer_of_published_logs() -> None:
    answer = predict_serving(request_of(Model.find("Meta-Llama-3-8B", online=False), max_model_len=512))
    assert answer.activation_bytes == int(258.5 * MIB)
    assert answer.token_bytes * 512 == 64 * MIB


def test_layers_with_a_window_hold_it_and_a_micro_batch(tmp_path: Path) -> None:
    gemma = {key.replace("llama", "gemma3"): value for key, value in LLAMA.items()}
    gemma |= {"general.architecture": "gemma3", "gemma3.block_count": 6, "gemma3.context_length": 1 << 17}
    whole = predict_serving(request_of(header(tmp_path, content(gemma)), tokens=1 << 17))
    limited = gemma | {"gemma3.attention.sliding_window": 1024}
    few = predict_serving(request_of(header(tmp_path, content(limited)), tokens=1 << 17))
    tokens, cells = 1 << 17, 1024 + 512
    assert few.sequences / whole.sequences == pytest.approx(6 * tokens / (tokens + 5 * cells), rel=0.05)


@pytest.mark.parametrize(
    ("pattern", "limited"), [(2, 3), (3, 4), (0, 6), ([1, 0, 0], 2), ([1, 1, 1, 1, 1, 0], 5)]
)
def test_the_header_names_the_layers_with_a_window(tmp_path: Path, pattern: Any, limited: int) -> None:
    gemma = {key.replace("llama", "gemma3"): value for key, value in LLAMA.items()}
    gemma |= {"general.architecture": "gemma3", "gemma3.block_count": 6, "gemma3.context_length": 1 << 17}
    gemma |= {"gemma3.attention.sliding_window": 1024, "gemma3.attention.sliding_window_pattern": pattern}
    answer = predict_serving(request_of(header(tmp_path, content(gemma)), tokens=1 << 17))
    # Each slot has its own window and micro-batch, or all tokens: keys and values, heads, width, bytes.
    slot = 2 * 2 * 64 * 2 * (limited * (1024 + 512) + (6 - limited) * (1 << 17))
    assert answer.sequences == answer.cache_bytes // slot


def test_a_pattern_of_windows_that_is_no_number_is_one_error(tmp_path: Path) -> None:
    wrong = LLAMA | {"llama.attention.sliding_window_pattern": "six"}
    with pytest.raises(ModelError, match="sliding_window_pattern"):
        predict_serving(request_of(header(tmp_path, content(wrong))))


def test_cache_types_of_llama_cpp_pack_numbers() -> None:
    model = Model.find("Qwen3-0.6B", online=False)
    half, packed = (predict_serving(request_of(model, cache_dtype=kind)) for kind in ("f16", "q8_0"))
    assert packed.token_bytes / half.token_bytes == pytest.approx(34 / 64)


def test_other_engines_and_several_gpus_refuse_a_file(tmp_path: Path) -> None:
    found = header(tmp_path, content())
    with pytest.raises(UsageError, match=r"--engine llama\.cpp"):
        predict_serving(ServingRequest(model=found, gpu=find_gpu("h100")))
    with pytest.raises(UsageError, match="divides a model by layers"):
        predict_serving(request_of(found, tensor_parallel=2))
    with pytest.raises(UsageError, match="b6325 and later"):
        request_of(found, version="b100")
