"""Low-rank adapters in our kernels: results and gradients of peft's own modules, from one joint product.

On the CPU the operations are plain torch, of which the products are the same on a GPU."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_fused_decoders import ids, run, small
from torch import nn

from fitted import classified, losses_of, model_of, quiet, spoken, trainer_of
from small_models import small_job
from small_runs import (
    resumed_as_whole,
    skip_without_packages,
    small_run,
)
from snugfit import fit
from snugfit.features.kernels.fused_model import use_fused
from snugfit.features.kernels.operations.adapted import objection, projections_of, unsupported_settings
from snugfit.features.kernels.operations.four_bits import unpack
from snugfit.features.kernels.operations.philox import keep_mask, threshold
from snugfit.features.kernels.operations.projections import lora_linear
from snugfit.features.kernels.operations.seeds import MAX_SEED
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.prediction.allocator import replay
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.step.build import build_model
from snugfit.step.checkpointing import checkpoint_layers
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import CheckpointWish
from third_step import hold_third_step
from tiers import slow_but

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SOME = ["q_proj", "v_proj", "down_proj"]
SIZES = (20, 12, 12)
HIDDEN = 36
MASTERS = "lora(r=4, targets=all-linear) + bf16_master + fused"
LLAMA = replace(small_job("llama", 2), batch_size=4, sequence_length=16)
ROWS = [{"input_ids": [5 + (7 * row + token) % 90 for token in range(6 + row % 9)]} for row in range(42)]


class Three(nn.Module):
    """Three linear layers of one input, as queries, keys and values are."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, size, bias=bias) for size in SIZES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x)], -1)


def adapted(model: nn.Module, targets: list[str] | str, r: int = 4, **more: Any) -> Any:
    """Return the model with adapters by peft, whose B are other than zero."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=r, lora_alpha=2 * r + 1, target_modules=targets, init_lora_weights=False, **more)
    torch.manual_seed(3)
    return get_peft_model(model, config)


OWN_CODE: dict[str, dict[str, Any]] = {
    "DoRA with dropout": {"use_dora": True, "lora_dropout": 0.1},
    "lora_bias": {"lora_bias": True},
}


def three(dtype: torch.dtype, *, bias: bool = False, **more: Any) -> Any:
    torch.manual_seed(0)
    return adapted(Three(bias=bias).to(dtype), **{"targets": ["q", "k", "v"], **more})


def gradients_of(module: Any, x: torch.Tensor, *, ours: bool) -> dict[str, torch.Tensor]:
    """Return y and the gradients of x, A and B, under a loss with different slopes for all entries."""
    x = x.clone().requires_grad_()
    if ours:
        inner = module.base_model.model
        projections = projections_of((inner.q, inner.k, inner.v))
        assert projections is not None
        y = torch.cat(lora_linear(x, projections), -1)
    else:
        y = module(x)
    torch.manual_seed(5)
    # Gradients that 16 bits represent exactly.
    y.backward(torch.randn(y.shape).bfloat16().to(y.dtype))
    trained = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
    assert all("lora" in name or name.endswith("bias") for name in trained)
    module.zero_grad()
    return {"y": y.detach(), "x": x.grad, **trained}  # type: ignore[dict-item]


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest error relative to the largest entry."""
    return float((got.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize(
    ("tokens", "settings"),
    [
        (1, {"r": 1}),
        (7, {"r": 4, "targets": ["q", "v"]}),
        (64, {"r": 8, "rank_pattern": {"k": 3}, "alpha_pattern": {"v": 5}}),
        (129, {"r": 16, "bias": True, "use_rslora": True}),
    ],
)
def test_results_in_32_bits_are_those_of_64(tokens: int, settings: dict[str, Any]) -> None:
    plain = three(torch.float32, **settings)
    x = torch.randn(tokens, HIDDEN)
    exact = gradients_of(copy.deepcopy(plain).double(), x.double(), ours=False)
    got = gradients_of(plain, x, ours=True)
    assert got.keys() == exact.keys()
    assert len(got) == 2 + 2 * len(settings.get("targets", "qkv"))
    for name, value in exact.items():
        assert got[name].shape == value.shape
        assert error(got[name], value) < 1e-5, name


def test_biases_that_train_have_the_gradients_of_peft() -> None:
    plain = three(torch.float32, bias=True)
    for name, weight in plain.named_parameters():
        weight.requires_grad_(weight.requires_grad or name.endswith("bias"))
    x = torch.randn(7, HIDDEN)
    exact = gradients_of(copy.deepcopy(plain).double(), x.double(), ours=False)
    got = gradients_of(plain, x, ours=True)
    assert got.keys() == exact.keys()
    assert sum(name.endswith("bias") for name in got) == 3
    assert max(error(got[name], exact[name]) for name in got) < 1e-5


@pytest.mark.parametrize("autocast", [True, False])
def test_16_bits_are_nowhere_less_exact_than_peft(autocast: bool) -> None:
    """Without autocast peft computes updates in 32 bits. The sums over all entries are compared, since one
    entry may be nearer by chance. The updates are smaller than the products, as in training."""
    plain = three(torch.float32 if autocast else torch.bfloat16, r=8)
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            weight.mul_(0.25 if "lora_B" in name else 1.0)
    x = torch.randn(129, HIDDEN, dtype=torch.float32 if autocast else torch.bfloat16)
    exact = gradients_of(copy.deepcopy(plain).double(), x.double(), ours=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        own, ours = (gradients_of(plain, x, ours=one) for one in (False, True))
    for name, value in exact.items():
        assert ours[name].dtype == own[name].dtype, name
        errors = [float((one[name].double() - value).norm() / value.norm()) for one in (own, ours)]
        # A and B of 32 bits have gradients of 16 significant bits at least.
        assert errors[1] < max(1.02 * errors[0], 0 if autocast or name in "xy" else 1e-5), (name, errors)


class Masked(nn.Module):
    """Dropout by the mask of a call site."""

    def __init__(self, seed: torch.Tensor, site: int, drops: int) -> None:
        super().__init__()
        self.arguments, self.factor = (seed, site), 65536 / (65536 - drops)
        self.drops = drops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * keep_mask(*self.arguments, *x.shape, self.drops) * self.factor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_of_adapters_has_a_mask_for_each(dtype: torch.dtype) -> None:
    """peft's modules with the same masks are the reference."""
    plain = three(dtype, r=4, lora_dropout=0.3, targets=["q", "v"]).train()
    exact = copy.deepcopy(plain).double()
    torch.manual_seed(11)
    seed = torch.randint(MAX_SEED, (1,))
    for site, layer in enumerate((exact.base_model.model.q, exact.base_model.model.v)):
        layer.lora_dropout["default"] = Masked(seed, site, threshold(0.3))
    x = torch.randn(64, HIDDEN, dtype=dtype)
    expected = gradients_of(exact, x.double(), ours=False)
    torch.manual_seed(11)
    got = gradients_of(plain, x, ours=True)
    for name, value in expected.items():
        bound = 1e-5 if dtype is torch.float32 or name not in "xy" else 2**-7
        assert error(got[name], value) < 2 * bound, name
    still = gradients_of(plain.eval(), x, ours=True)["y"]
    assert not torch.equal(got["y"], still)


def test_dropout_of_adapters_is_drawn_again_by_layers_that_are_computed_again() -> None:
    fused = adapted(small("llama"), ALL, lora_dropout=0.2)
    again = copy.deepcopy(fused)
    use_fused(fused)
    use_fused(again)
    checkpoint_layers(again, CheckpointWish())
    results = []
    for model in (fused, again):
        torch.manual_seed(2)
        results.append(run(model))
    assert torch.equal(results[0][0], results[1][0])
    for name, gradient in results[0][1].items():
        assert gradient is None or torch.equal(gradient, results[1][1][name]), name
    torch.manual_seed(3)
    assert not torch.equal(run(fused)[0], results[0][0])


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        *((family, targets) for family in ("llama", "qwen2", "qwen3", "gemma2") for targets in (ALL, SOME)),
        # Attention runs its own code here, with single products of its adapters.
        ("glm4", "all-linear"), ("olmo2", ALL), ("phi3", "all-linear"), ("granite", SOME), ("smollm3", ALL),
    ],
)  # fmt: skip
def test_a_fused_model_with_adapters_is_the_model(
    monkeypatch: pytest.MonkeyPatch, family: str, targets: list[str] | str
) -> None:
    """It calls none of peft's modules, and its state has the same keys."""
    from peft.tuners.lora.layer import Linear

    plain = adapted(small(family), targets, rank_pattern={"v_proj": 2})
    fused = copy.deepcopy(plain)
    use_fused(fused)
    assert {name: value.shape for name, value in fused.state_dict().items()} == {
        name: value.shape for name, value in plain.state_dict().items()
    }
    expected = run(plain)
    monkeypatch.setattr(Linear, "forward", lambda *_: pytest.fail("peft's code ran"))
    got = run(fused)
    torch.testing.assert_close(got[0], expected[0], rtol=2e-5, atol=2e-5)
    for name, gradient in expected[1].items():
        assert (gradient is None) == (got[1][name] is None) == ("lora" not in name), name
        if gradient is not None:
            bound = 2e-5 * float(gradient.abs().max())
            torch.testing.assert_close(got[1][name], gradient, rtol=2e-5, atol=bound, msg=name)


@pytest.mark.parametrize("why", OWN_CODE)
def test_unsupported_adapters_run_peft_s_code(why: str) -> None:
    plain = adapted(small("qwen2"), ["q_proj", "down_proj"], **OWN_CODE[why])
    fused = copy.deepcopy(plain)
    use_fused(fused)
    assert objection(fused.base_model.model.model.layers[0].self_attn.q_proj) == why
    changed = {type(one).__name__ for one in fused.modules() if "forward" in vars(one)}
    assert changed == {"Qwen2DecoderLayer", "Qwen2RMSNorm"}
    model = Model.from_module(plain, {"input_ids": ids(), "labels": ids()})
    job = Job(model=model, task=Task.CUSTOM)
    [line] = [line for line in Recipe.parse("fused").check(job, installed=False) if "peft" in line]
    assert line == f"fused: layers with adapters run peft's own code, as there are no kernels for {why}."
    torch.manual_seed(7)
    expected = run(plain)
    torch.manual_seed(7)
    got = run(fused)
    torch.testing.assert_close(got[0], expected[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("family", "adapters", "why"),
    [
        ("llama", "lora(dropout=0.1, dora=true)", "DoRA with dropout"),
        ("llama", "qlora(bits=8)", "weights of 8 bits"),
        ("gpt2", "lora", "adapters of a Conv1D"),
    ],
)
def test_a_recipe_with_unsupported_adapters_has_a_warning(family: str, adapters: str, why: str) -> None:
    job = small_job(family, 2)
    lines = Recipe.parse(f"fused + {adapters}").check(job, installed=False)
    assert f"fused: layers with adapters run peft's own code, as there are no kernels for {why}." in lines
    assert not [line for line in Recipe.parse("fused").check(job, installed=False) if "peft" in line]


@pytest.mark.parametrize(("family", "targets"), [("llama", ALL), ("qwen2", ["q_proj", "down_proj"])])
def test_a_fused_model_with_dora_is_the_model(
    monkeypatch: pytest.MonkeyPatch, family: str, targets: list[str]
) -> None:
    """Layers with DoRA are single products, with the magnitude and the bias of queries."""
    from peft.tuners.lora.dora import DoraLinearLayer

    plain = adapted(small(family), targets, use_dora=True)
    for name, weight in plain.named_parameters():
        if "magnitude" in name:
            nn.init.uniform_(weight, 0.5, 2.0)
    fused = copy.deepcopy(plain)
    use_fused(fused)
    assert not unsupported_settings(fused)
    expected = run(plain)
    monkeypatch.setattr(DoraLinearLayer, "forward", lambda *_, **__: pytest.fail("peft's code ran"))
    got = run(fused)
    torch.testing.assert_close(got[0], expected[0], rtol=2e-5, atol=2e-5)
    for name, gradient in expected[1].items():
        assert (gradient is None) == (got[1][name] is None), name
        if gradient is not None:
            bound = 2e-5 * float(gradient.abs().max())
            torch.testing.assert_close(got[1][name], gradient, rtol=2e-5, atol=bound, msg=name)


@pytest.mark.parametrize("autocast", [True, False])
def test_dora_in_16_bits_is_nowhere_less_exact_than_peft(autocast: bool) -> None:
    plain = adapted(small("qwen2") if autocast else small("qwen2").bfloat16(), ALL, use_dora=True)
    fused, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    use_fused(fused)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        own, ours = run(plain)[1], run(fused)[1]
    expected = {name: one for name, one in run(exact)[1].items() if one is not None}
    errors = [
        sum(float((one[name] - true).norm() ** 2) for name, true in expected.items()) for one in (own, ours)
    ]
    assert errors[1] < errors[0]


def test_merged_and_disabled_adapters_run_peft_s_code() -> None:
    fused = adapted(small("llama"), ALL)
    use_fused(fused)
    with torch.no_grad():
        before = fused(input_ids=ids()).logits
        fused.merge_adapter()
        torch.testing.assert_close(fused(input_ids=ids()).logits, before, rtol=1e-4, atol=1e-4)
        fused.unmerge_adapter()
        with fused.disable_adapter():
            assert (fused(input_ids=ids()).logits - before).abs().max() > 0.1


@pytest.mark.whole
@pytest.mark.parametrize(
    "recipe",
    slow_but(
        [
            "lora(r=4, targets=all-linear) + bf16_pure",
            "lora(r=4, targets=q_proj|down_proj, dropout=0.1) + bf16 + every_layer",
            "lora(r=4, targets=all-linear, dora=true) + bf16_pure",
        ],
        1,
    ),
)
def test_a_real_step_with_adapters_allocates_what_its_trace_says(recipe: str) -> None:
    hold_third_step(small_job("llama", 2), Recipe.parse(f"{recipe} + fused").setup())


def test_without_a_gpu_its_products_are_predicted() -> None:
    """No frozen weight has a gradient, and a layer saves nothing of peft's 32-bit copies of its input."""
    job = small_job("llama", 3, batch_size=16, sequence_length=128)
    adapters = "lora(r=1, targets=all-linear)"
    recipes = ("bf16_pure + fused", *(f"{adapters} + bf16_pure{kernels}" for kernels in ("", " + fused")))
    whole, peft, ours = (rehearse(job, Recipe.parse(one).setup(), CudaPolicy()) for one in recipes)
    counts = Counter(kernel.operator for kernel in ours.kernels)
    # Each of four products adds to its adapters' updates, in both passes. The first layer's input needs no
    # gradient.
    assert counts["aten::addmm_"] == 3 * (4 + 4) - 1
    # A and B of seven adapters, S and its gradient.
    assert counts["triton::split_halves"] == 3 * 7 * 4
    products = [
        sum(kernel.flops for kernel in trace.kernels if "mm" in kernel.operator) for trace in (whole, ours)
    ]
    assert products[1] < 0.85 * products[0], "two products of three, and those with adapters"
    peaks = [replay(trace).requested_peak for trace in (peft, ours)]
    tokens, hidden = 16 * 128, job.model.config["hidden_size"]
    assert peaks[0] - peaks[1] > 3 * 4 * tokens * hidden * 4, "of three layers' four inputs"


# ---- masters of adapters ---------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize("recipe", slow_but([MASTERS, f"q{MASTERS}", MASTERS.replace(" + fused", "")], 1))
def test_adapters_with_masters_resume_bit_for_bit(recipe: str, tmp_path: Path) -> None:
    """Adapters train in bfloat16, as peft's file has them. A run without their low halves would differ."""
    skip_without_packages(recipe)
    run = small_run(tmp_path, recipe, job=LLAMA, samples=ROWS, max_steps=6, save_steps=2)
    again = resumed_as_whole(run, 5)
    trained = {name: one for name, one in again.model.named_parameters() if one.requires_grad}
    assert {one.dtype for one in trained.values()} == {torch.bfloat16}
    kept = load_file(tmp_path / "killed" / "checkpoint-6" / "adapter_model.safetensors")
    assert len(kept) == len(trained) == 28
    for name, weight in trained.items():
        assert torch.equal(kept[name.replace(".default", "")], weight)


# ---- weights in 4 bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize(
    ("shapes", "dtype"),
    [
        ([(64, 128), (32, 128)], torch.bfloat16),
        ([(5, 36), (3, 36)], torch.float32),
        ([(130, 256)], torch.float16),
    ],
)
def test_4_bit_weights_are_unpacked_bit_for_bit(
    double: bool, shapes: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    """Blocks of 64 may begin within a row, and a second scale's block of 16,384 weights may not be full."""
    functional = pytest.importorskip("bitsandbytes", reason="the extra qlora is not installed").functional

    torch.manual_seed(0)
    packed, states = [], []
    for shape in shapes:
        weight, state = functional.quantize_4bit(
            torch.randn(shape).to(dtype), quant_type="nf4", compress_statistics=double
        )
        packed.append(weight)
        states.append(state)
    expected = [functional.dequantize_4bit(*one) for one in zip(packed, states, strict=True)]
    got = unpack(packed, states, dtype)
    assert torch.equal(got, torch.cat(expected))
    assert got.dtype is dtype


@pytest.mark.parametrize("family", ["llama", "qwen2", "bert"])
@pytest.mark.parametrize("targets", ["all-linear", "q_proj|v_proj"])
def test_a_fused_model_in_4_bits_is_the_model(family: str, targets: str) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra qlora is not installed")
    targets = "query" if family == "bert" and targets != "all-linear" else targets
    job, device = small_job(family, 2), torch.device("cpu")
    plain = build_model(job, Recipe.parse(f"qlora(r=4, targets={targets})").setup(), device)
    for name, weight in plain.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)
    fused = copy.deepcopy(plain)
    use_fused(fused)
    tokens = torch.randint(3, 60, (2, 7))
    labels = torch.tensor([0, 1]) if family == "bert" else tokens
    results = []
    for model in (plain, fused):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        out = model(input_ids=tokens, labels=labels)
        out.loss.backward()
        results.append((out.logits, [one.grad for one in model.parameters() if one.requires_grad]))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=2e-5, atol=2e-5)
    for got, expected in zip(results[1][1], results[0][1], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.whole
@pytest.mark.parametrize(
    "recipe", slow_but(["qlora(r=4, targets=all-linear) + bf16_pure", "qlora(r=4) + bf16"], 1)
)
def test_a_real_step_in_4_bits_allocates_what_its_trace_says(recipe: str) -> None:
    hold_third_step(small_job("llama", 2), Recipe.parse(f"{recipe} + fused").setup())


def test_an_unpacked_weight_is_written_once() -> None:
    """bitsandbytes' operator has its result among the arguments, and a simulation does not count it as
    read."""
    pytest.importorskip("bitsandbytes", reason="the extra qlora is not installed")
    job = small_job("llama", 1, batch_size=16, sequence_length=128)
    trace = rehearse(job, Recipe.parse("qlora(r=4) + bf16_pure + fused").setup(), CudaPolicy())
    moved = {kernel.nbytes for kernel in trace.kernels if kernel.operator == "bitsandbytes::dequantize_4bit"}
    weight = job.model.config["hidden_size"] * job.model.config["intermediate_size"]
    # Half a byte a number, 4 bytes for each block of 64, and 2 bytes a number of the result.
    assert weight // 2 + 4 * weight // 64 + 2 * weight in moved


# ---- other loops -----------------------------------------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets a name for each training pass of peft's own code of linear layers."""
    from peft.tuners.lora.layer import Linear

    passes: list[str] = []
    own = Linear.forward

    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if self.training:
            passes.append("peft")
        return own(self, *arguments, **keywords)

    monkeypatch.setattr(Linear, "forward", forward)
    return passes


@pytest.mark.whole
@pytest.mark.parametrize(
    "recipe", slow_but(["bf16", "lora(4, targets=all-linear) + bf16_pure + every_layer"], 1)
)
def test_a_trainer_runs_the_kernels_of_adapters(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapters are those of the recipe or the user's own, and another recipe removes the kernels."""
    passes = counted(monkeypatch)
    runs = []
    for kernels in ("", " + fused", " + fused(recomputed_mlps=1)"):
        torch.manual_seed(0)
        model = model_of("llama") if "lora" in recipe else adapted(model_of("llama"), ALL)
        trainer = trainer_of(tmp_path / str(len(runs)), model, spoken())
        if kernels:
            fit(trainer, "bf16 + fused", watch=quiet)
        passes.clear()
        fit(trainer, recipe + kernels, watch=quiet).train()
        assert bool(passes) is (not kernels)
        runs.append(losses_of(trainer))
    for other in runs[1:]:
        assert other == pytest.approx(runs[0], rel=2e-3)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_recipe_without_the_kernels_removes_them(family: str, tmp_path: Path) -> None:
    data = spoken() if family == "llama" else classified()
    trainer = trainer_of(tmp_path, model_of(family), data)
    hooks = [len(one._forward_pre_hooks) for one in trainer.model.modules()]
    fit(trainer, "fused", watch=quiet)
    assert any("forward" in vars(one) for one in trainer.model.modules())
    fit(trainer, "plain", watch=quiet)
    assert not any("forward" in vars(one) for one in trainer.model.modules())
    assert [len(one._forward_pre_hooks) for one in trainer.model.modules()] == hooks
