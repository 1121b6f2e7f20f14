"""Bytes of quantized layers and key-value caches by architecture, and sglang's memory fraction."""

from __future__ import annotations

from typing import Any

import pytest

from snugfit.errors import ModelError
from snugfit.features.serving.predict import predict_serving
from snugfit.features.serving.quantization import read_layout
from snugfit.features.serving.request import ServingRequest
from snugfit.features.serving.sizes import read_sizes
from snugfit.features.serving.weights import weight_bytes
from snugfit.job.config import check_facts
from snugfit.job.gpu import find_gpu
from snugfit.job.model import Model
from snugfit.units import MIB

NUMBERS = 4096 * 4096


def compressed(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
        "ignore": ["lm_head", "re:.*gate$"],
    }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "fp8"}, NUMBERS + 4),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, NUMBERS + 32 * 32 * 4),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, NUMBERS // 2 + 4096 * 32 * (2 + 0.5)),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, NUMBERS + 4096 * (2 + 1)),
        (compressed(num_bits=8, type="int", strategy="channel"), NUMBERS + 4096 * 4),
        (compressed(num_bits=8, type="float", strategy="tensor"), NUMBERS + 4),
        (compressed(num_bits=4, type="int", strategy="group", group_size=128), NUMBERS // 2 + 4096 * 32 * 2),
        (compressed(num_bits=4, type="float", strategy="tensor_group", group_size=16), NUMBERS * 9 // 16),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, NUMBERS * 9 // 16),
        ({"quant_method": "mxfp4"}, NUMBERS * 17 // 32),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, NUMBERS // 2 + 4096 * 64 * 4),
    ],
)
def test_a_matrix_has_the_bytes_of_its_layout(config: dict[str, Any], expected: float) -> None:
    layout = read_layout({"quantization_config": config}, None, name="m")
    assert layout is not None
    assert layout.bytes_of(4096, 4096) == expected
    assert layout.excludes("lm_head")
    assert not layout.excludes("model.layers.0.mlp.down_proj")


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"quant_method": "gptqq"}, "Did you mean 'gptq'"),
        ({"quant_method": "gptq", "bits": 4}, "the key .group_size. is missing"),
        ({"quant_method": "awq", "bits": "four", "group_size": 128}, "a key has a wrong value"),
        (["fp8"], "Allowed are fp8"),
        ({"quant_method": "gptq", "bits": 10**9, "group_size": 128}, "cannot be used"),
        ({"quant_method": "fp8", "weight_block_size": [0, 0]}, "cannot be used"),
        (compressed(num_bits=8) | {"ignore": ["re:("]}, "cannot be used"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "cannot be used"),
    ],
)
def test_an_unusable_quantization_is_one_error(config: Any, fault: str) -> None:
    with pytest.raises(ModelError, match=fault):
        read_layout({"quantization_config": config}, None, name="m")


def test_excluded_modules_are_found_under_other_prefixes() -> None:
    config = compressed(num_bits=8, type="int", strategy="channel") | {
        "ignore": ["language_model.model.layers.0.mlp.gate", "model.visual.*"]
    }
    layout = read_layout({"quantization_config": config}, None, name="m")
    assert layout is not None
    assert layout.excludes("model.language_model.layers.0.mlp.gate")
    assert layout.excludes("model.visual.blocks.1")
    assert not layout.excludes("model.language_model.layers.0.mlp.gate_proj")


def test_experts_alone_are_in_mxfp4() -> None:
    model = Model.find("gpt-oss-20b", online=False)
    whole, layout = weight_bytes(model, dtype="bfloat16", at_start=None, tensor_parallel=1)
    assert layout is not None
    # 24 layers, 32 experts, three matrices of 2880 by 2880, at 17 bytes for 32 numbers.
    experts = 24 * 32 * 3 * 2880 * 2880 * 17 // 32
    # The embedding and the head stay in 16 bits, and attention is smaller than both.
    rest = 2 * 201_088 * 2880 * 2
    assert experts + rest < whole < experts + 2 * rest


def test_ranks_divide_matrices_and_keep_a_head_of_keys() -> None:
    model = Model.find("Qwen2.5-7B", online=False)
    one, two, four, eight = (read_sizes(model, ranks).layers[0].token_numbers for ranks in (1, 2, 4, 8))
    assert (one, two, four, eight) == (1024, 512, 256, 256)


def facts(model_type: str, **sizes: Any) -> Model:
    common = {"hidden_size": 512, "num_hidden_layers": 2, "vocab_size": 1024, "num_attention_heads": 8}
    document = {"model_type": model_type, **common, **sizes}
    return Model.from_config(check_facts(document, where=model_type), name=model_type)


def test_mla_caches_the_latent_vector_on_each_rank() -> None:
    model = facts(
        "deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        num_key_value_heads=8, n_routed_experts=8, num_experts_per_tok=2, first_k_dense_replace=1,
    )  # fmt: skip
    for ranks in (1, 4):
        sizes = read_sizes(model, ranks)
        assert [layer.token_numbers for layer in sizes.layers] == [576, 576]
        assert sizes.absorbed_numbers == 2 * 8 * 256 * 512 // ranks


@pytest.mark.parametrize(
    ("model", "state"),
    [
        (facts("falcon_mamba", state_size=16, expand=2, conv_kernel=4), 1024 * 3 + 1024 * 16),
        (
            facts("mamba2", state_size=64, expand=2, conv_kernel=4, n_groups=1, num_heads=16, head_dim=64),
            (1024 + 2 * 64) * 3 + 1024 * 64,
        ),
        (
            facts(
                "qwen3_next", layer_types=["linear_attention"] * 2, linear_num_value_heads=4,
                linear_num_key_heads=2, linear_key_head_dim=32, linear_value_head_dim=64,
                linear_conv_kernel_dim=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
            ),
            (2 * 64 + 256) * 3 + 4 * 32 * 64,
        ),
    ],
)  # fmt: skip
def test_states_have_the_size_of_their_architecture(model: Model, state: int) -> None:
    layers = read_sizes(model, 1).layers
    assert [layer.state_numbers for layer in layers] == [state, state]
    assert all(layer.token_numbers == 0 for layer in layers)


def test_sglang_gives_the_cache_its_share_of_the_free_memory() -> None:
    model = Model.find("Llama-3.1-8B", online=False)
    plain = predict_serving(ServingRequest(model=model, gpu=find_gpu("h200"), engine="sglang"))
    free = plain.total_bytes - plain.non_torch_bytes
    capacity = find_gpu("h200").nvml_total_bytes
    assert capacity
    assert plain.utilization == round(1 - (512 + 8192 * 1.5 + 512 + 128) * MIB / capacity, 3)
    assert plain.cache_bytes == int(free * (plain.utilization or 0)) - plain.weights_bytes
    assert plain.cache_tokens == plain.cache_bytes // 131072
    config = Model.find("Qwen3-235B-A22B", online=False).config | {"dtype": "bfloat16"}
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    large = Model.from_config(config | {"quantization_config": blocks}, name="Qwen3-235B-A22B-FP8")
    four = ServingRequest(
        model=large, gpu=find_gpu("h100"), engine="sglang", utilization=0.93, tensor_parallel=4
    )
    # vllm-project/vllm issue 21348: 367,404 tokens, keys and values 8.23 GiB each.
    assert predict_serving(four).cache_tokens == pytest.approx(367_404, rel=0.02)
    small = ServingRequest(model=model, gpu=find_gpu("t4"), engine="sglang", utilization=0.9)
    answer = predict_serving(small)
    assert not answer.starts
    assert answer.sequences == 0


def test_sglang_shares_its_cache_with_states_and_encoders() -> None:
    model = facts(
        "qwen3_next", num_hidden_layers=4, layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_value_heads=64, linear_num_key_heads=32, linear_key_head_dim=256, dtype="bfloat16",
        linear_value_head_dim=256, linear_conv_kernel_dim=4, num_key_value_heads=2, num_experts=4,
        num_experts_per_tok=2, max_position_embeddings=4096,
    )  # fmt: skip
    answer = predict_serving(ServingRequest(model=model, gpu=find_gpu("h200"), engine="sglang"))
    whole = answer.usable_bytes - answer.weights_bytes
    assert answer.cache_bytes == pytest.approx(whole / 1.9, rel=0.01)
    state = sum(layer.state_numbers for layer in read_sizes(model, 1).layers) * 2
    # A running request takes three states.
    assert answer.most_sequences == min(4096, (whole - answer.cache_bytes) // state // 3)
    encoder = Model.find("gemma-3-4b-pt", online=False)
    text = Model.find("Llama-3.1-8B", online=False)
    shares = [
        predict_serving(ServingRequest(model=one, gpu=find_gpu("h200"), engine="sglang")).utilization or 0
        for one in (encoder, text)
    ]
    # 27 layers of 1152: 1.42 times ViT-L/14.
    growth = 27 * 1152**2 / (24 * 1024**2) - 1
    assert shares[0] / shares[1] == pytest.approx(0.95 * (1 - 0.1 * growth))
