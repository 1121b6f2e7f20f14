"""Decoders with our kernels: outputs and gradients of the untouched model, nothing else of it changed.

On the CPU the operations are plain torch; `decoders_in_triton.py` holds the kernels to it."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from bare_process import script_in_triton
from small_models import small_job
from snugfit.errors import RecipeError, UsageError
from snugfit.features.kernels.decoders.forms import fused_parts
from snugfit.features.kernels.fused_model import use_fused
from snugfit.features.kernels.head.deferred_logits import defer_logits
from snugfit.features.kernels.operations import cross_entropy
from snugfit.features.kernels.operations.joint_linear import joint_view
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.planning.keep import kept_of
from snugfit.prediction.allocator import replay
from snugfit.prediction.predict import predict
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import TRITON
from snugfit.step.checkpointing import checkpoint_layers
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import CheckpointWish, LogitsWish
from third_step import hold_third_step
from tiers import crossed, slow_but

SIZES: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "head_dim": 12, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip

PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 2 / 3}}
"""Settings that rotate eight of twelve columns of each head."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"num_attention_heads": 4},
    "qwen3": {},
    "mistral": {"sliding_window": 4},
    "gemma": {},
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 12},
    "gemma3_text": {"sliding_window": 4, "query_pre_attn_scalar": 12},
    "phi3": PARTIAL,
    "granite": {"residual_multiplier": 0.5},
    "ministral": {"sliding_window": 4},
    "smollm3": {"no_rope_layers": [1, 0]},
    "glm4": PARTIAL,
    "ernie4_5": {},
}

EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip

IN_PARTS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "nemotron": (PARTIAL, {"Attention"}),
    "apertus": ({}, {"Attention", "RMSNorm"}),
    "helium": ({}, {"Attention", "MLP"}),
    "olmo2": ({}, {"MLP", "DecoderLayer", "RMSNorm"}),
    "olmo3": ({"sliding_window": 4}, {"MLP", "DecoderLayer", "RMSNorm"}),
    "exaone4": (
        {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        {"Attention", "MLP", "DecoderLayer", "RMSNorm"},
    ),
    "seed_oss": (
        {"residual_dropout": 0.0, "attention_dropout": 0.0}, {"Attention", "DecoderLayer", "RMSNorm"}
    ),
    "starcoder2": ({"residual_dropout": 0.0, "attention_dropout": 0.0}, {"Attention"}),
    "glm4_moe": (
        {**EXPERTS, **PARTIAL, "use_qk_norm": True, "first_k_dense_replace": 2},
        {"Attention", "MLP", "DecoderLayer", "RMSNorm"},
    ),
    "gemma4_text": (
        {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8}, {"MLP", "RMSNorm"}
    ),
    "qwen3_5_text": (
        {
            "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
            "linear_num_value_heads": 2, "linear_key_head_dim": 12, "linear_value_head_dim": 12, **PARTIAL,
        },
        {"Attention", "MLP", "RMSNorm"},
    ),
    "mixtral": (EXPERTS, {"Attention", "DecoderLayer", "RMSNorm"}),
    "qwen3_moe": (EXPERTS, {"Attention", "DecoderLayer", "RMSNorm"}),
    "gpt_oss": ({**EXPERTS, "sliding_window": 4}, {"Attention", "RMSNorm"}),
    "granite_swa": ({"sliding_window": 4}, {"Attention", "MLP", "DecoderLayer", "RMSNorm"}),
}  # fmt: skip
"""Families that have other code in some parts of a layer, with the parts that have kernels."""
EVERY = [*FAMILIES, *IN_PARTS]
"""All families. In `make test`, each one runs in 16 bits or under autocast."""

PARTS = {"Attention", "MLP", "DecoderLayer", "RMSNorm"}


def small(family: str, attention: str = "eager", seed: int = 0) -> Any:
    """Return a small model of this family in training, with norms' scales other than one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    sizes = FAMILIES[family] if family in FAMILIES else IN_PARTS[family][0]
    config = AutoConfig.for_model(family, **{**SIZES, **sizes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def ids(length: int = 7) -> torch.Tensor:
    return torch.randint(3, 96, (2, length), generator=torch.Generator().manual_seed(1))


def run(model: Any, **inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the logits, and the gradients by name."""
    tokens = ids()
    out = model(input_ids=tokens, labels=tokens, **inputs)
    out.loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return out.logits.detach(), gradients


def hold(plain: Any, fused: Any, bound: float, **inputs: Any) -> None:
    """Check that logits and all gradients are close, and that no gradient is zero."""
    expected, got = run(plain, **inputs), run(fused, **inputs)
    torch.testing.assert_close(got[0], expected[0], rtol=bound, atol=bound)
    for name, gradient in expected[1].items():
        assert gradient is not None, name
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(
            got[1][name], gradient, rtol=bound, atol=bound * float(gradient.abs().max()), msg=name
        )


@pytest.mark.parametrize("family", EVERY)
def test_a_fused_model_is_the_model(family: str) -> None:
    plain = small(family)
    fused = copy.deepcopy(plain)
    use_fused(fused)
    names = {type(one).__name__ for one in fused.modules() if "forward" in vars(one)}
    parts = IN_PARTS[family][1] if family in IN_PARTS else PARTS
    assert {part for part in PARTS if any(name.endswith(part) for name in names)} == parts
    assert fused_parts(family) - {"Experts"} >= (parts if parts != {"RMSNorm"} else set())
    assert {name: value.shape for name, value in fused.state_dict().items()} == {
        name: value.shape for name, value in plain.state_dict().items()
    }
    assert all(torch.equal(*pair) for pair in zip(fused.parameters(), plain.parameters(), strict=True))
    hold(plain, fused, 2e-5)


def test_a_head_s_norm_of_other_code_stays() -> None:
    """An attention with the code of Qwen3, whose norms are of another kind, runs its own code."""
    plain = small("qwen3")
    for layer in plain.model.layers:
        layer.self_attn.q_norm = torch.nn.LayerNorm(SIZES["head_dim"])
    fused = copy.deepcopy(plain)
    use_fused(fused)
    assert not any("forward" in vars(layer.self_attn) for layer in fused.model.layers)
    hold(plain, fused, 2e-5)


def test_an_attention_s_own_dropout_drops_the_same_elements() -> None:
    plain = small("seed_oss")
    for layer in plain.model.layers:
        layer.self_attn.residual_dropout = 0.3
    fused = copy.deepcopy(plain)
    use_fused(fused)
    results = []
    for model, training in ((plain, True), (fused, True), (fused, False)):
        torch.manual_seed(5)
        results.append(run(model.train(training))[0])
    torch.testing.assert_close(results[1], results[0], rtol=2e-5, atol=2e-5)
    assert not torch.allclose(results[1], results[2], atol=1e-3)


def hold_errors(plain: list[Any], *, autocast: bool, factor: float = 1.3) -> None:
    """Check the total error of 16-bit gradients against the error of the model's own code: the median of some
    draws of weights.

    Over twelve draws of weights the errors were 0.80 to 0.95 of its own, and one draw may exceed it.
    """
    ratios = []
    for model in plain:
        exact, fused = copy.deepcopy(model).float(), copy.deepcopy(model)
        use_fused(fused)
        _, expected = run(exact)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            (_, own), (_, ours) = run(model), run(fused)
        assert {one.dtype for one in ours.values()} == {next(model.parameters()).dtype}
        errors = [sum(float((one[name] - expected[name]).norm() ** 2) for name in one) for one in (own, ours)]
        ratios.append(errors[1] / errors[0])
    assert sorted(ratios)[len(ratios) // 2] < factor


def draws(family: str) -> list[Any]:
    """Return models of a family with other weights. Rounding may change the experts of a token, and sinks
    make one draw unlike another, so these families have five.
    """
    return [small(family, seed=seed) for seed in range(5 if family in ("gpt_oss", "granite_swa") else 1)]


@pytest.mark.parametrize("family", slow_but(EVERY, EVERY[::2].__contains__))
def test_under_autocast_it_is_as_close_as_the_model_s_own_code(family: str) -> None:
    # Under autocast transformers computes experts in their weights' 32 bits, and `fused` in 16.
    hold_errors(draws(family), autocast=True, factor=2.0 if family == "gpt_oss" else 1.3)


@pytest.mark.parametrize("family", slow_but(EVERY, EVERY[1::2].__contains__))
def test_in_16_bits_it_is_as_close_as_the_model_s_own_code(family: str) -> None:
    hold_errors([model.bfloat16() for model in draws(family)], autocast=False)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_layers_that_are_computed_again_give_the_same_gradients(family: str) -> None:
    fused = small(family)
    again = copy.deepcopy(fused)
    use_fused(fused)
    use_fused(again)
    again.gradient_checkpointing_enable({"use_reentrant": False})
    (logits, gradients), (other_logits, other_gradients) = run(fused), run(again)
    assert torch.equal(logits, other_logits)
    assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_mlps_that_are_computed_again_give_the_same_gradients(family: str) -> None:
    fused = small(family)
    again = copy.deepcopy(fused)
    use_fused(fused)
    use_fused(again, recomputed_mlps=1)
    (logits, gradients), (other_logits, other_gradients) = run(fused), run(again)
    assert torch.equal(logits, other_logits)
    assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)


def test_each_mlp_that_is_computed_again_frees_its_product_and_takes_one_more() -> None:
    job = small_job("llama", 4, batch_size=64, sequence_length=128)
    wide = 2 * job.model.config["intermediate_size"]
    tokens = job.batch_size * job.sequence_length
    traces = [
        rehearse(job, Recipe.parse(f"bf16_pure + {fused}").setup(), CudaPolicy())
        for fused in ("fused", "fused(recomputed_mlps=1)", "fused(recomputed_mlps=3)")
    ]
    peaks = [replay(trace).requested_peak for trace in traces]
    assert peaks[0] - peaks[1] == 2 * tokens * wide
    assert peaks[0] - peaks[2] == 3 * (peaks[0] - peaks[1])
    flops = [sum(kernel.flops for kernel in trace.kernels) for trace in traces]
    products = [sum(kernel.operator == "aten::mm" for kernel in trace.kernels) for trace in traces]
    assert flops[2] - flops[0] == 3 * (flops[1] - flops[0]) > 0
    assert products[2] - products[0] == 3 * (products[1] - products[0]) > 0


def test_more_mlps_than_there_are_layers_are_all_of_them_and_that_is_said() -> None:
    said = [
        [one for one in Recipe.parse(f"fused(recomputed_mlps={count})").check(job) if "2 layers" in one]
        for job in [small_job("llama", 2)]
        for count in (2, 3)
    ]
    assert said == [
        [],
        [
            "fused(recomputed_mlps=3): llama has 2 layers, so all of them recompute the product. "
            "Give a smaller number to recompute fewer."
        ],
    ]


def test_where_no_mlp_is_gated_nothing_can_be_computed_again() -> None:
    recipe = Recipe.parse("fused(recomputed_mlps=2)")
    with pytest.raises(RecipeError, match=r"no gated MLP is in bert. Try 'fused', or 'first_layers'"):
        recipe.check(small_job("bert", 2), installed=False)
    with pytest.raises(UsageError, match=r"plans do not search with fused\(recomputed_mlps=2\)"):
        kept_of(small_job("llama", 2), "fused(recomputed_mlps=2)").refuse()


@pytest.mark.parametrize(
    ("keep", "family"), crossed(["attention", "products", "every_other_product"], ["llama", "qwen3"])
)
def test_products_that_are_kept_are_not_changed(family: str, keep: str) -> None:
    """Selective checkpointing returns a product again, which is then rotated once more."""
    fused = small(family, "sdpa")
    again = copy.deepcopy(fused)
    use_fused(fused)
    use_fused(again)
    checkpoint_layers(again, CheckpointWish(keep=keep))
    (logits, gradients), (other_logits, other_gradients) = run(fused), run(again)
    assert torch.equal(logits, other_logits)
    assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)


def test_padding_is_masked_as_ever() -> None:
    plain = small("llama", "sdpa")
    fused = copy.deepcopy(plain)
    use_fused(fused)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, 5:] = 0
    hold(plain, fused, 2e-5, attention_mask=mask)


def test_where_sequences_end_is_no_encoder_s_business() -> None:
    """A collator of packed rows passes the ends; sdpa reads the causal mask and ignores them."""
    plain = small("llama", "sdpa")
    fused = copy.deepcopy(plain)
    use_fused(fused)
    ends = torch.tensor([0, 7, 14], dtype=torch.int32)
    hold(plain, fused, 2e-5, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=7, max_length_k=7)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_it_generates_as_before(family: str) -> None:
    """Outside training its modules run their own code, with a cache; in training a cache is filled."""
    plain = small(family, "sdpa")
    fused = copy.deepcopy(plain)
    use_fused(fused)
    caches = [model(input_ids=ids()).past_key_values for model in (plain, fused)]
    with torch.no_grad():
        following = [
            model(input_ids=ids(3), past_key_values=cache).logits
            for model, cache in zip((plain, fused), caches, strict=True)
        ]
    torch.testing.assert_close(*following, rtol=1e-4, atol=1e-4)
    written = [
        model.eval().generate(ids(), max_new_tokens=5, min_new_tokens=5, do_sample=False)
        for model in (plain, fused)
    ]
    assert torch.equal(*written)


def test_a_hook_of_a_linear_layer_runs() -> None:
    model = small("llama")
    use_fused(model)
    called = []
    for name in ("self_attn.q_proj", "mlp.up_proj"):
        layer = model.model.layers[0].get_submodule(name)
        layer.register_forward_hook(lambda *_, name=name: called.append(name))
    run(model)
    assert called == ["self_attn.q_proj", "mlp.up_proj"]


def test_frozen_weights_get_no_gradients() -> None:
    plain = small("qwen3")
    for name, weight in plain.named_parameters():
        weight.requires_grad_(
            any(part in name for part in ("k_proj", "down_proj", "q_norm", "layers.0.input"))
        )
    fused = copy.deepcopy(plain)
    use_fused(fused)
    expected, got = run(plain), run(fused)
    for name, gradient in expected[1].items():
        assert (gradient is None) == (got[1][name] is None), name
        if gradient is not None:
            torch.testing.assert_close(got[1][name], gradient, rtol=2e-5, atol=2e-5)


def test_weights_lie_together_and_may_be_taken_apart(tmp_path: Path) -> None:
    """Moved or cast weights give the same results, and each is saved separately."""
    from transformers import AutoModelForCausalLM

    fused = small("qwen2")
    use_fused(fused)
    attention = fused.model.layers[0].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert joint_view([layer.weight for layer in layers]) is not None
    assert joint_view([layer.bias for layer in layers]) is not None
    apart = copy.deepcopy(fused).double().float()
    assert None is joint_view(
        [getattr(apart.model.layers[0].self_attn, f"{name}_proj").weight for name in "qkv"]
    )
    (logits, gradients), (other_logits, other_gradients) = run(fused), run(apart)
    torch.testing.assert_close(logits, other_logits)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, other_gradients[name])
    fused.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for one, other in zip(loaded.parameters(), fused.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_second_backward_pass_is_refused() -> None:
    """The gradients have overwritten the MLP's saved tensor."""
    fused = small("llama")
    use_fused(fused)
    loss = fused(input_ids=ids(), labels=ids()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- a whole step ----------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize(
    ("family", "recipe"),
    crossed(
        ["llama", "qwen2", "gemma2"],
        ["bf16 + fused", "bf16_master + adamw_fused + fused", "fused + every_layer"],
        keep=2,
    ),
)
def test_a_real_step_allocates_what_its_trace_says(family: str, recipe: str) -> None:
    hold_third_step(small_job(family, 2), Recipe.parse(recipe).setup())


@pytest.mark.whole
def test_a_real_step_with_neighbouring_columns_rotated_allocates_what_its_trace_says() -> None:
    config = small("glm4").config.to_diff_dict()
    model = Model.from_config({**config, "model_type": "glm4"}, name="small")
    job = Job(model=model, task=Task.CAUSAL_LM, batch_size=2, sequence_length=16)
    hold_third_step(job, Recipe.parse("lora(r=4, targets=all-linear) + bf16_pure + fused").setup())


def test_without_a_gpu_its_kernels_are_predicted() -> None:
    """Each is launched as often as there are layers, and moves the bytes that it reads and writes."""
    job = small_job("llama", 3, batch_size=2)
    assert predict(job, "bf16_master + adamw_fused + fused", gpu="h200").timing is not None
    trace = rehearse(job, Recipe.parse("bf16_master + adamw_fused + fused").setup(), CudaPolicy())
    kernels = [kernel for kernel in trace.kernels if kernel.operator.startswith(TRITON)]
    launched = Counter(kernel.operator.removeprefix(TRITON) for kernel in kernels)
    assert launched == {
        "rms_norm": 4, "rms_norm_again": 6, "add_rms_norm": 3, "rms_norm_backward": 7, "column_sums": 7,
        "rotate": 3, "rotate_backward": 3, "gate": 3, "gate_backward": 3, "adamw_of_weights": 1,
    }  # fmt: skip
    tokens, hidden, inner = 2 * 16, 64, 112
    moved = {kernel.operator.removeprefix(TRITON): kernel.nbytes for kernel in kernels}
    assert moved["gate"] == 2 * tokens * 3 * inner
    assert moved["gate_backward"] == 2 * tokens * 6 * inner
    assert moved["add_rms_norm"] == 2 * (4 * tokens * hidden + hidden) + 4 * tokens
    assert not any(kernel.operator == "aten::cat" for kernel in trace.kernels if "layers" in kernel.module)


@pytest.mark.parametrize(("family", "by_kernel"), [("llama", True), ("gemma2", False)])
def test_a_loss_in_chunks_has_a_kernel(family: str, by_kernel: bool) -> None:
    """Each chunk takes one launch if the model only casts its logits, and no second tensor of their size."""
    job = small_job(family, 2, batch_size=4)
    trace = rehearse(job, Recipe.parse("bf16_pure + fused + chunked_loss(tokens=16)").setup(), CudaPolicy())
    launched = Counter(kernel.operator for kernel in trace.kernels)
    assert launched[f"{TRITON}cross_entropy_gradient"] == (4 if by_kernel else 0)
    assert launched["aten::_log_softmax"] == (0 if by_kernel else 4)


@pytest.mark.parametrize("tokens", [5, 64])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_the_loss_and_its_gradients_are_those_of_whole_logits(
    tokens: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain torch replaces the kernel, and some tokens are ignored."""
    kernel = cross_entropy.CrossEntropyKernel
    monkeypatch.setattr(kernel, "write_gradient", staticmethod(cross_entropy.reference))
    monkeypatch.setattr(kernel, "multiply", staticmethod(cross_entropy.reference_multiply))
    monkeypatch.setattr(kernel, "takes", lambda self, tensor: True)
    plain = small("llama")
    fused = copy.deepcopy(plain)
    use_fused(fused)
    defer_logits(fused, LogitsWish(tokens=tokens))
    labels = ids().clone()
    labels[0, 2:5] = -100
    losses = [model(input_ids=ids(), labels=labels).loss for model in (plain, fused)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        (scale * loss).backward()
    for one, other in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-5, atol=2e-6)


def test_what_it_keeps_is_less_than_the_model_s_own_code_keeps() -> None:
    job = small_job("llama", 4, batch_size=64, sequence_length=128)
    peaks = {
        recipe: replay(rehearse(job, Recipe.parse(recipe).setup(), CudaPolicy())).requested_peak
        for recipe in ("bf16_pure", "bf16_pure + fused")
    }
    assert peaks["bf16_pure + fused"] < 0.8 * peaks["bf16_pure"]


@pytest.mark.whole
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_kernels_do_what_the_references_do(device: str, tmp_path: Path) -> None:
    """The kernels run in Triton's interpreter, and on a GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU, and SNUGFIT_TEST_GPU=1")
    script_in_triton(Path(__file__).with_name("decoders_in_triton.py"), device, tmp_path / "told")


def test_a_decoder_without_padding_creates_no_mask() -> None:
    """gpt-oss has the loss of its own code, and a padded batch has its mask."""
    pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    model = small("gpt_oss")
    ids = torch.arange(24).view(2, 12)
    expected = model(input_ids=ids, labels=ids).loss
    use_fused(model)
    calls: list[Any] = []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda part, given, keywords: calls.append(keywords["attention_mask"]), with_kwargs=True
    )
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected)
    model(input_ids=ids, attention_mask=torch.ones(2, 12).tril(9))
    assert [mask is None for mask in calls] == [True, False]
