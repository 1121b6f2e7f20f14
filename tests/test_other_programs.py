"""Doubts about programs that may differ from the rehearsed one: compilers, kernels, LayerDrop."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from aligned import peak
from bare_process import command
from cpu_scratch import compared
from reported import foreseen, reports
from small_models import FAMILIES, small_job
from snugfit.job.config import check_facts
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.rehearsal.device.other_programs import COMPILED, FLEX, without_package
from snugfit.rehearsal.device.policy import CpuPolicy, CudaPolicy
from snugfit.rehearsal.record import cuda_names
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import Trace
from snugfit.techniques.recipe import Recipe
from tiers import slow_but


class Stack(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.mean()


def trace_of(module: nn.Module) -> Trace:
    model = Model.from_module(module, {"x": torch.ones(2, 8)})
    return rehearse(Job(model=model, task=Task.CUSTOM, batch_size=2), Recipe().setup(), CudaPolicy())


def trace_of_config(model_type: str, task: Task = Task.CAUSAL_LM, **facts: Any) -> Trace:
    model = Model.from_config(check_facts({"model_type": model_type, **facts}, where="test"), name=model_type)
    job = Job(model=model, task=task, batch_size=2, sequence_length=16)
    return rehearse(job, Recipe().setup(), CudaPolicy())


@pytest.mark.parametrize("family", slow_but(FAMILIES, 1))
def test_ordinary_models_raise_no_such_doubt(family: str) -> None:
    assert rehearse(small_job(family), Recipe().setup(), CudaPolicy()).doubts == ()


# ---- compilers -----------------------------------------------------------------------------------------


def compiled_method() -> nn.Module:
    module = Stack()
    module.layers[1].compile()
    return module


def compiled_within() -> nn.Module:
    class Within(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            @torch.compile(dynamic=True)
            def double(x: torch.Tensor) -> torch.Tensor:
                return x * 2

            return double(super().forward(x))

    return Within()


def compiled_function() -> nn.Module:
    double = torch.compile(lambda x: x * 2, fullgraph=True)

    class Calls(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return double(super().forward(x))

    return Calls()


@pytest.mark.whole
@pytest.mark.parametrize(
    "made",
    [lambda: torch.compile(Stack(), fullgraph=True), compiled_method, compiled_within, compiled_function],
    ids=["module", "method", "within", "function"],
)
def test_what_compiles_itself_is_rehearsed_uncompiled(
    made: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiles(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("compiled")

    module = made()
    monkeypatch.setattr("torch._dynamo.convert_frame.ConvertFrame.__call__", compiles)
    compiler = torch.compile
    trace = trace_of(module)
    assert trace.doubts == (COMPILED,)
    assert trace.peak()[0] == pytest.approx(trace_of(Stack()).peak()[0], abs=1024)
    assert torch.compile is compiler


def test_a_library_that_compiles_functions_when_it_is_imported_is_no_doubt() -> None:
    """bitsandbytes compiles functions at import. The result must not depend on the time of the import."""

    class Imports(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.compile(lambda x: x * 2)  # never called
            return super().forward(x)

    assert trace_of(Imports()).doubts == ()


# ---- packages of kernels -------------------------------------------------------------------------------


HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("model_type", "facts", "packages"),
    slow_but(
        [
            ("mamba", {}, ("mamba_ssm", "causal_conv1d", "mambapy")),
            ("lfm2", {**HEADS, "layer_types": ["conv", "full_attention"]}, ("causal_conv1d",)),
            ("rwkv", {"attention_hidden_size": 32}, ("kernels",)),
        ],
        1,
    ),
)
def test_a_model_with_kernels_elsewhere_says_so(
    model_type: str, facts: dict[str, Any], packages: tuple[str, ...]
) -> None:
    trace = trace_of_config(model_type, num_hidden_layers=2, hidden_size=32, vocab_size=96, **facts)
    assert {doubt.partition(",")[0].rpartition(" ")[2] for doubt in trace.doubts} == set(packages)


@pytest.fixture
def scans() -> Iterator[types.ModuleType]:
    """Fake an installed package whose kernels take no tensors on `meta`."""

    def scan(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Triton needs a GPU")

    package = sys.modules["fast_scans"] = types.ModuleType("fast_scans")
    package.scan = scan  # type: ignore[attr-defined]
    yield package
    del sys.modules["fast_scans"]


@pytest.mark.usefixtures("scans")
def test_an_installed_package_of_kernels_does_not_break_a_rehearsal() -> None:
    @use_kernel_func_from_hub_with_fallback("scan", "fast_scans")
    def scan(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0)

    class Scans(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(scan(x))

    with pytest.raises(RuntimeError, match="Triton"):
        Scans()(torch.ones(2, 8))
    assert trace_of(Scans()).doubts == (without_package("fast_scans", installed=True),)


# ---- random numbers of the host ------------------------------------------------------------------------

DRAWS: dict[str, Callable[[float], Any]] = {
    "random.random": lambda chance: random.random() < chance,
    "random.uniform": lambda chance: random.uniform(0, 1) <= chance,
    "numpy.random.uniform": lambda chance: numpy.random.uniform(0, 1) < chance,
    "numpy.random.rand": lambda chance: chance > numpy.random.rand(),
    "torch.rand": lambda chance: torch.rand([]) < chance,
    "torch.rand(1)": lambda chance: not torch.rand(1) >= chance,
    "torch.rand.item": lambda chance: torch.rand((1,)).item() < chance,
}


class Dropping(Stack):
    """LayerDrop."""

    def __init__(self, dropped: Callable[[], Any]) -> None:
        super().__init__()
        self.dropped = dropped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if not self.dropped():
                x = layer(x).relu()
        return self.layers[0](x).mean()


@pytest.mark.parametrize("draw", slow_but(DRAWS, 2))
def test_no_layer_is_dropped_and_that_is_a_doubt(draw: str) -> None:
    trace = trace_of(Dropping(lambda: DRAWS[draw](0.5)))
    assert trace.peak() == trace_of(Dropping(lambda: False)).peak()
    (doubt,) = trace.doubts
    assert "test_other_programs.py" in doubt


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_what_every_number_decides_alike_is_no_doubt(draw: str, chance: float) -> None:
    trace, certain = trace_of(Dropping(lambda: DRAWS[draw](chance))), trace_of(Dropping(lambda: chance == 1))
    assert (trace.peak(), trace.doubts) == (certain.peak(), certain.doubts)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: random.randint(0, 9) > 9,
        lambda: int(random.random() * 2) > 2,
        lambda: numpy.random.choice(3) > 3,
        lambda: torch.rand([]).add(1) > 2,
    ],
    ids=["randint", "int", "choice", "add"],
)
def test_any_other_use_of_a_number_drawn_is_a_doubt(draw: Callable[[], Any]) -> None:
    (doubt,) = trace_of(Dropping(draw)).doubts
    assert "test_other_programs.py" in doubt


def test_layerdrop_of_transformers_is_a_doubt_where_it_is_on() -> None:
    sizes: dict[str, Any] = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {"layers": 2, "ffn_dim": 32, "attention_heads": 2}.items()
    }
    asked: dict[str, Any] = {**sizes, "d_model": 32, "vocab_size": 96}
    on = trace_of_config("m2m_100", Task.SEQ2SEQ_LM, **asked)  # 0.05 by default
    off = trace_of_config("m2m_100", Task.SEQ2SEQ_LM, encoder_layerdrop=0.0, decoder_layerdrop=0.0, **asked)
    assert [doubt.split(".")[0] for doubt in on.doubts] == ["M2M100Encoder", "M2M100Decoder"]
    assert off.doubts == ()
    assert on.peak() == off.peak()


# ---- flex attention ------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize("masked", slow_but([False, True], 1))
def test_flex_attention_saves_what_flash_attention_saves(masked: bool) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)

    class Flex(nn.Module):
        def __init__(self, *, flex: bool) -> None:
            super().__init__()
            self.flex, self.project = flex, nn.Linear(32, 96)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, _ = x.shape
            query, key, value = self.project(x).view(batch, length, 3, 2, 16).permute(2, 0, 3, 1, 4)
            if not self.flex:
                out = nn.functional.scaled_dot_product_attention(query, key, value)
            elif masked:
                mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, x.device)
                out = compiled(query, key, value, block_mask=mask)
            else:
                out = compiled(query, key, value, score_mod=lambda score, b, h, i, j: score * 2)
            return out.pow(2).mean()

    def trace(*, flex: bool) -> Trace:
        model = Model.from_module(Flex(flex=flex), {"x": torch.ones(2, 256, 32)})
        job = Job(model=model, task=Task.CUSTOM, batch_size=2)
        return rehearse(job, Recipe.parse("bf16").setup(), CudaPolicy(capability=(8, 0)))

    def activations(trace: Trace) -> int:
        return sum(block.nbytes for block in trace.blocks if block.kind == "activations" and block.step == 2)

    flex, flash = trace(flex=True), trace(flex=False)
    assert FLEX in flex.doubts
    assert flash.attention == ("flash",)
    scores = 2 * 2 * 256 * 256
    assert abs(activations(flex) - activations(flash)) < scores / 2


@pytest.mark.whole
@pytest.mark.slow
def test_an_optimizers_library_that_compiles_itself_is_no_doubt_about_the_model(
    tmp_path: Path,
) -> None:
    """bitsandbytes compiles functions at import, and a prediction may be the first to import it.
    `test_quantized.py` imports it within a rehearsal."""
    asked = ["predict", "bert-base-uncased", "--task", "sequence-classification", "--gpu", "h200"]
    told = command(*asked, "--recipe", "adamw_8bit", stdout=tmp_path / "stdout")
    assert "adamw_8bit" in told
    assert "Uncertain" not in told


# ---- models that check for the meta device -------------------------------------------------------------


@pytest.mark.whole
def test_longt5_s_buckets_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """LongT5 passes `device=None`, the host, if its weights are on `meta`. The buckets live until
    backward."""
    facts = {
        "model_type": "longt5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 2,
        "vocab_size": 96, "decoder_start_token_id": 0, "local_radius": 48,
    }  # fmt: skip
    model = Model.from_config(check_facts(facts, where="longt5"), name="longt5")
    job = Job(model=model, task=Task.SEQ2SEQ_LM, batch_size=2, sequence_length=64, target_length=12)

    def predicted() -> int:
        return peak(compared(foreseen(rehearse(job, Recipe().setup(), CpuPolicy()))))

    real = peak(compared(reports(job, Recipe().setup())))
    assert predicted() == real
    monkeypatch.setattr(cuda_names, "makes_on_the_host", lambda code: False)
    assert predicted() == real - 49 * 3 * 49 * 8, "each bucket is an int64"


def test_buffers_that_a_model_makes_on_the_host_are_moved() -> None:
    """LeViT builds `torch.LongTensor`s, which no ambient device moves."""
    trace = trace_of_config("levit", "image-classification", image_size=224, depths=[1, 1, 1])
    assert "made on the host" not in " ".join(trace.doubts)
    indices = 196 * 196 * 8
    assert indices in [block.nbytes for block in trace.blocks if block.operator == "aten::empty_like"]
