"""Models that torch.compile compiles whole, as the Trainer's `torch_compile=True` does, in a simulation.

Law 1 holds for them on the CPU, event by event, as for compiled layers (`test_compiled.py`). On a GPU they
are compared with three runs of a bare loop on an H200.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin
from compiled_on_cpu import idle_kernels, no_vectors  # noqa: F401
from test_compiled import LOSS_OUTSIDE, of_llama, rehearsed

from aligned import compare, peak
from cpu_scratch import compared
from reported import foreseen, reports
from small_models import small_job
from snugfit.errors import RecipeError, RehearsalError
from snugfit.features.compile import compiling
from snugfit.features.compile.fields import CompileWish
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.planning.cost.startup_share import PlannedRun, StartupShares
from snugfit.prediction.predict import predict
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import Trace
from snugfit.results.prediction import Prediction
from snugfit.step.build import build_model
from snugfit.techniques.recipe import Recipe
from tiers import slow_but

WHOLE = "compiled(what=model)"
WITHIN = "compiled(what=model, autocast=within)"

LAW = [
    (family, recipe)
    for family in ("bert", "llama", "gpt2", "t5", "vit")
    for recipe in (WHOLE, f"bf16 + {WHOLE}", f"lora + bf16 + {WHOLE}")
] + [
    ("llama", f"{WHOLE} + every_layer"),
    ("bert", f"{WHOLE} + micro_batches(2)"),
    ("modernbert", f"bf16 + {WHOLE}"),
    *((family, f"bf16 + {WITHIN}") for family in ("bert", "llama", "gpt2")),
]

IN_ANOTHER_LAYOUT = {("vit", f"bf16 + {WHOLE}"), ("vit", f"lora + bf16 + {WHOLE}")}
"""oneDNN computes the gradient of a convolution's weight in 16 bits as channels last, and torch then copies
it."""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_whole_model_with_recomputed_layers_is_predicted_for_a_gpu(family: str) -> None:
    """Its program saves the random state for recomputed attention. All kernels of the forward pass are
    compiled."""
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    setup = Recipe.parse(f"bf16 + {WHOLE} + every_layer").setup()
    # otherwise it compiles twice
    once = {"problem_type": "single_label_classification"} if family == "bert" else {}
    kernels = rehearse(small_job(family, 2, once), setup, CudaPolicy()).kernels
    attention = "aten::_scaled_dot_product_cudnn_attention"
    assert [kernel.phase for kernel in kernels if kernel.operator == attention].count("backward") == 2
    assert all(kernel.compiled for kernel in kernels if kernel.phase == "forward")


@pytest.mark.whole
@pytest.mark.parametrize(("family", "recipe"), slow_but(LAW, lambda case: case == ("llama", WHOLE)))
@pytest.mark.usefixtures("idle_kernels")
def test_a_step_of_a_whole_model_allocates_what_its_trace_says(family: str, recipe: str) -> None:
    often = (family, recipe) == ("llama", WHOLE)
    job = small_job(family, layers=1 if often else 2)
    trace = foreseen(of_whole_llama() if often else rehearsed(job, recipe))
    torch._dynamo.reset()
    real = reports(job, Recipe.parse(recipe).setup())
    assert 0 <= peak(compared(real)) - peak(compared(trace)) <= LOSS_OUTSIDE
    if (family, recipe) not in IN_ANOTHER_LAYOUT:
        third = [compared([event for event in events if event.step == 2]) for events in (real, trace)]
        assert compare(*third).similarity == 1.0


@functools.cache
def of_whole_llama() -> Trace:
    """Return the trace of a model of one layer that is compiled whole; the tests share it."""
    return rehearsed(small_job("llama", layers=1), WHOLE)


@functools.cache
def after_a_rank() -> Trace:
    """Return a trace simulated after others, the last one that of a rank. Each simulation replaces functions
    of its own, which Dynamo traces.
    """
    of_whole_llama()
    predict(small_job("gpt2", layers=1, batch_size=4), "fsdp", gpu="h200", gpus=2)
    return rehearsed(small_job("gpt2", layers=1), WHOLE)


@pytest.mark.whole
def test_a_loss_that_is_a_graph_of_its_own_has_gradients_in_every_rehearsal() -> None:
    """transformers warns about GPT-2's loss, where Dynamo breaks the graph. torch's kernel for shapes of a
    loss would hide its gradient, unless autograd's kernel precedes it. In a process's first rehearsal it
    does."""
    trace = after_a_rank()
    programs = [(kernel.phase, kernel.programs) for kernel in trace.kernels if kernel.programs]
    assert sum(count for phase, count in programs if phase == "forward") == 2, "two graphs"
    assert sum(count for phase, count in programs if phase == "backward") == 2


@pytest.mark.whole
def test_a_rank_s_rehearsal_leaves_dynamo_s_table_of_functions_as_it_was() -> None:
    """GPT-2's attention calls `math.sqrt`, which is replaced during a rehearsal."""
    assert after_a_rank().kernels
    root = torch.compile(lambda x: x * math.sqrt(x.shape[-1]), backend="eager", fullgraph=True)
    assert root(torch.ones(4)).tolist() == [2.0] * 4


class Broken(torch.nn.Module):
    """A model with an operation that breaks Dynamo's graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.second(_outside(self.first(x))).mean()}


@pytest.mark.whole
def test_what_ran_beside_the_programs_is_refused_by_name() -> None:
    model = Model.from_module(Broken(), {"x": torch.zeros(1, 8)})
    job = Job(model=model, task=Task.CUSTOM, batch_size=4)
    with pytest.raises(RehearsalError, match=r"Broken.forward: aten::sin .*ran outside its programs"):
        rehearsed(job, WHOLE)


@torch._dynamo.disable
def _outside(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@pytest.mark.parametrize(
    ("words", "told"),
    [("chunked_loss", "compiled whole"), ("segments", "joins")],
)
def test_what_was_not_tried_in_a_whole_model_is_refused(words: str, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        Recipe.parse(f"{WHOLE} + {words}").check(small_job("llama"), installed=False)


def test_what_stands_around_a_compiled_model_stays_when_it_runs_as_written_again() -> None:
    """accelerate wraps a model's forward pass in autocast, and never removes the wrapper."""
    model = build_model(small_job("llama", layers=2), Recipe.parse(WHOLE).setup(), torch.device("cpu"))
    compiled = model.forward

    def around(*arguments: Any, **keywords: Any) -> Any:
        return compiled(*arguments, **keywords)

    model.forward = around
    compiling.run_as_written(model)
    assert model.forward is around
    assert model.train()(input_ids=torch.zeros(1, 4, dtype=torch.int64)).past_key_values is not None
    model.forward = compiled
    compiling.compile_parts(model, CompileWish(what="model"))
    compiling.run_as_written(model)
    assert model.forward is compiled


@pytest.mark.whole
def test_a_short_run_pays_for_compiling_the_whole_model() -> None:
    """Compiling the whole model costs more even with fewer layers."""
    once = {}
    for recipe, layers, trace in (("compiled", 3, of_llama()), (WHOLE, 1, of_whole_llama())):
        job = small_job("llama", layers)
        once[recipe] = StartupShares(job, PlannedRun(steps=10)).of(Recipe.parse(recipe).setup(), trace).once
    assert once[WHOLE] > once["compiled"] + 1


TRUTH = json.loads((Path(__file__).parent / "data" / "compiled-h200.json").read_text())
RUNS = {run["name"]: run for run in TRUTH["runs"]}
BERT = {
    "model_type": "bert", "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096,
    "vocab_size": 30522,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 32000,
}  # fmt: skip


def measured_job(name: str) -> Job:
    """Return the job of one of the recorded runs."""
    if name == "llama4_whole":
        model = Model.from_config(LLAMA, name=name)
        return Job(model=model, task=Task.CAUSAL_LM, batch_size=2, sequence_length=2048)
    model = Model.from_config({**BERT, "num_hidden_layers": 24 if "24" in name else 4}, name=name)
    return Job(model=model, task=Task.SEQUENCE_CLASSIFICATION, batch_size=4, sequence_length=512)


@pytest.mark.parametrize("name", slow_but(["llama4_whole", "bert4_whole", "bert24_whole"], 0))
def test_the_bytes_of_a_bare_compiled_step_are_met(name: str) -> None:
    """The predicted bytes equal the measured ones. transformers 5.23 traces BERT differently from 5.17.
    `test_compiled_truth.py` checks measured bytes of compiled layers in `make test`.
    """
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    job = measured_job(name)
    found: Prediction = predict(job, Recipe.parse(f"bf16 + adamw_fused + {WHOLE}"), gpu="h200")
    steady, most = (
        RUNS[name]["steps"][2],
        {key: max(step[key] for step in RUNS[name]["steps"]) for key in ("allocated", "reserved")},
    )
    assert found.footprint
    assert found.startup
    if name.startswith("bert") and found.footprint.allocated_bytes < 0.9 * steady["allocated"]:
        import transformers

        pytest.skip(f"lacks transformers 5.17: {transformers.__version__} makes no mask where none is given")
    assert found.footprint.requested_bytes == pytest.approx(steady["requested"], rel=5e-5)
    assert found.footprint.allocated_bytes == pytest.approx(steady["allocated"], rel=5e-5)
    assert found.footprint.allocated_bytes == pytest.approx(most["allocated"], rel=0.025)
    assert found.footprint.reserved_bytes == pytest.approx(most["reserved"], rel=0.03)
    assert found.startup.first_step_seconds == pytest.approx(RUNS[name]["steps"][0]["seconds"], rel=0.3)
    assert any("four runs" in doubt for doubt in found.doubts)


@pytest.mark.slow
def test_attention_is_what_the_traced_model_asks_for() -> None:
    """A given mask is a tensor in the graph. Without any mask, attention stays fused."""
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    trace: Trace = rehearsed(small_job("llama", 1, {"hidden_size": 256}), f"bf16 + {WHOLE}", CudaPolicy())
    names = {kernel.operator for kernel in trace.kernels}
    assert any("scaled_dot_product" in name for name in names), names
    assert all(kernel.compiled for kernel in trace.kernels if kernel.phase == "forward")


class Precise(torch.nn.Module):
    """A module that multiplies in 32 bits within autocast, as routers and norms do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 64 * 64).reshape(64, 64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of the product's squares."""
        with torch.autocast("cpu", enabled=False):
            return (rows @ self.weight).square().sum()


@pytest.mark.whole
def test_autocast_within_is_what_accelerate_compiles() -> None:
    """accelerate wraps a model's forward pass in autocast and compiles both; so does the Trainer. The
    reference program traces its backward pass without autocast, and gradients are equal bit for bit. With
    autocast around the program, its backward pass multiplies in 16 bits."""
    AcceleratorState._reset_state(reset_partial_state=True)
    gradients = {}
    for begins in ("accelerate", "within", "around"):
        torch._dynamo.reset()
        model = Precise()
        if begins == "accelerate":
            plugin = TorchDynamoPlugin(backend="aot_eager")
            run = Accelerator(cpu=True, mixed_precision="bf16", dynamo_plugin=plugin).prepare(model)
        else:
            wish = CompileWish(what="model", backend="aot_eager", autocast=begins)
            run = compiling.compiled_function(model.forward, wish)
        with torch.autocast("cpu", torch.bfloat16, enabled=begins != "accelerate"):
            loss = run(torch.linspace(0, 1, 8 * 64).reshape(8, 64))
        loss.backward()
        assert model.weight.grad is not None
        gradients[begins] = model.weight.grad
    AcceleratorState._reset_state(reset_partial_state=True)
    assert torch.equal(gradients["within"], gradients["accelerate"])
    assert not torch.equal(gradients["around"], gradients["accelerate"])
