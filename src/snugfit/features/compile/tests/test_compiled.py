"""Layers that torch.compile compiles one by one: their simulation equals the real run.

Law 1 (real and simulated allocations are equal) holds for them on the CPU, event by event. There Inductor
generates C++ instead of Triton. All other code is the same as for a GPU: tracing, partitioning, fusion and
the reuse of buffers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo
from compiled_on_cpu import no_vectors  # noqa: F401
from torch._inductor.fx_utils import get_node_storage
from torch._subclasses import fake_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from aligned import compare, peak
from cpu_scratch import compared
from kept import kept
from reported import foreseen, reports
from small_models import small_job
from snugfit.errors import RecipeError, RehearsalError
from snugfit.features.compile import compiling
from snugfit.features.compile.fields import CompileWish
from snugfit.features.compile.prices import STARTUP_SECONDS
from snugfit.features.compile.simulation.joint_passes import PADDED
from snugfit.features.compile.simulation.layers import Compiler
from snugfit.features.compile.simulation.lowering import relabel
from snugfit.job.job import Job
from snugfit.planning.cost.startup_share import PlannedRun, StartupShares
from snugfit.planning.keep import kept_of
from snugfit.planning.search.search import plan
from snugfit.planning.search.space import space_of
from snugfit.rehearsal.device.policy import CpuPolicy, CudaPolicy, Policy
from snugfit.rehearsal.record.recorder import Recorder
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import GENERATED, Trace, Work
from snugfit.results.footprint import Kind
from snugfit.step.build import build_model
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot
from snugfit.units import MIB
from tiers import slow_but

pytestmark = pytest.mark.whole

LOSS_OUTSIDE = 256
"""Bytes of numbers that Python wraps, which a trace does not hold."""


OTHERS = "ieee + torch_kernels + whole_logits + on_device + all_gradients + default + inline"
"""Fixed slots without influence on compiling, for tests of a search space."""


def rehearsed(job: Job, recipe: str = "compiled", policy: Policy | None = None) -> Trace:
    return rehearse(job, Recipe.parse(recipe).setup(), policy or CpuPolicy())


@functools.cache
def of_llama() -> Trace:
    """Return the trace of the first simulation of three compiled layers; the tests share it."""
    return rehearsed(small_job("llama", layers=3))


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["compiled", "bf16 + compiled + every_layer"])
@pytest.mark.parametrize("family", ["llama", "bert", "gpt2", "vit", "t5"])
def test_a_compiled_step_allocates_what_its_trace_says(family: str, recipe: str) -> None:
    """Real and simulated allocations agree event by event. T5's agree only at the peak: its decoder allocates
    two buffers in another order.
    """
    this = small_job(family, layers=2)
    trace = foreseen(rehearsed(this, recipe))
    torch._dynamo.reset()
    real = reports(this, Recipe.parse(recipe).setup())
    assert 0 <= peak(real) - peak(trace) <= LOSS_OUTSIDE
    if family != "t5":
        third = [compared([event for event in events if event.step == 2]) for events in (real, trace)]
        assert compare(*third).similarity == 1.0


@pytest.mark.whole
def test_layers_share_a_program_and_every_rehearsal_is_the_first() -> None:
    """torch caches the destination of traced operators. Unless the cache is cleared, the second simulation
    has no gradients of layers.
    """
    first, second = of_llama(), rehearsed(small_job("llama", layers=3))
    assert (first.blocks, first.events, first.kernels) == (second.blocks, second.events, second.kernels)
    launched = [
        [
            kernel.operator
            for kernel in first.kernels
            if kernel.module == f"model.layers.{n}" and kernel.compiled
        ]
        for n in range(3)
    ]
    assert launched[0] == launched[1] == launched[2]
    assert any(name.startswith(GENERATED) for name in launched[0])
    gradients = {block.module for block in first.blocks if block.kind == Kind.GRADIENTS and block.step == 2}
    assert {f"model.layers.{n}.mlp.down_proj" for n in range(3)} <= gradients


@pytest.mark.slow
@pytest.mark.whole
def test_where_nothing_else_compiles_what_dynamo_traced_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers of plans reuse traced graphs. Elsewhere the graphs are dropped, so that they do not count
    towards Dynamo's limits for user code.
    """
    graphs = []
    own = Compiler.compiled_graph

    def counted(self: Compiler, graph: Any, inputs: Any, *how: Any) -> Any:
        graphs.append(graph)
        return own(self, graph, inputs, *how)

    monkeypatch.setattr(Compiler, "compiled_graph", counted)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    first, second = (rehearsed(small_job("llama", layers=2)) for _ in range(2))
    assert len(graphs) == 1
    assert (first.blocks, first.events, first.kernels) == (second.blocks, second.events, second.kernels)
    rehearsed(small_job("llama", layers=2), policy=replace(CpuPolicy(), softmax_saves_input=True))
    assert len(graphs) == 2, "another policy makes other choices"
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    for _ in range(2):
        rehearsed(small_job("llama", layers=2))
    assert len(graphs) == 4


@pytest.mark.whole
def test_fewer_kernels_run_and_nothing_of_a_layer_is_uncompiled() -> None:
    compiled, plain = of_llama(), rehearsed(small_job("llama", layers=3), "plain")
    inside = [
        kernel for kernel in compiled.kernels if ".layers." in kernel.module and kernel.phase == "forward"
    ]
    assert inside
    assert all(kernel.compiled for kernel in inside)
    assert len(compiled.kernels) < 0.8 * len(plain.kernels)
    assert not compiled.doubts


@pytest.mark.whole
def test_what_torch_would_run_uncompiled_is_refused() -> None:
    with torch._dynamo.config.patch(disable=True), pytest.raises(RehearsalError, match="did not compile"):
        rehearsed(small_job("bert", layers=2))


@pytest.mark.whole
@pytest.mark.parametrize("inner", slow_but([False, True], lambda inner: not inner))
def test_a_dispatch_mode_that_hears_of_compilers_is_noticed(
    inner: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under such a mode torch silently runs layers uncompiled, so wrong figures would look plausible. The
    default setting (`inner`) still compiles code within the dispatch of an operator, which is not a layer."""
    monkeypatch.setattr(Recorder, "ignore_compile_internals", classmethod(lambda cls: False))
    config = torch._dynamo.config.patch(inline_torch_dispatch_torch_compile=inner)
    with config, pytest.raises(RehearsalError, match="did not compile"):
        rehearsed(small_job("bert", layers=2))


@functools.cache
def of_bert_on_a_gpu() -> tuple[Trace, Sequence[torch.device], Sequence[str]]:
    """Return the trace of compiled layers in bfloat16 on a GPU of few multiprocessors, the devices that torch
    initialized for tensors without data, and Inductor's advice.
    """
    from torch._inductor.utils import is_big_gpu

    opened: list[torch.device] = []
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    is_big_gpu.cache_clear()  # the advice comes once in a process
    logger = logging.getLogger("torch._inductor.utils")
    logger.addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fake_tensor, "init_gpu_context", opened.append)
            job = small_job("bert", 2, facts={"hidden_size": 256})
            return rehearsed(job, "bf16 + compiled", CudaPolicy(multiprocessors=28)), opened, records
    finally:
        logger.removeHandler(handler)


def test_inductors_advice_for_small_gpus_stays_out_of_an_answer() -> None:
    """torch's logger writes to stderr itself, so its records are counted."""
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    assert not of_bert_on_a_gpu()[2]


@pytest.mark.parametrize("family", slow_but(["bert", "llama"], 1))
def test_masks_are_made_outside_so_attention_stays_fused(family: str) -> None:
    """In a model that is compiled whole, transformers builds a mask even without padding. Attention then
    stores every score."""
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    if family == "bert":
        trace = of_bert_on_a_gpu()[0]
    else:
        trace = rehearsed(small_job(family, 2, {"hidden_size": 256}), "bf16 + compiled", CudaPolicy())
    operators = {kernel.operator for kernel in trace.kernels}
    assert not operators & {"aten::_softmax", "aten::_safe_softmax", "aten::bmm"}, operators
    assert any("scaled_dot_product" in name for name in operators)


@pytest.mark.parametrize(
    ("precision", "replaced"), slow_but([("ieee", False), ("tf32", True), ("bf16_pure", True)], 0)
)
def test_attention_that_is_written_out_is_replaced_as_on_a_gpu(precision: str, replaced: bool) -> None:
    """Inductor inserts the kernel that torch chooses on a GPU. In fp32 it does so only with tf32, which the
    kernels multiply in. `test_compiled_backends.py` covers 16 bits in `make test`."""
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    job = small_job("bert", 2, facts={"hidden_size": 128, "num_attention_heads": 2})
    kernels = rehearsed(job, f"{precision} + eager + compiled", CudaPolicy()).kernels
    names = {kernel.operator for kernel in kernels if "scaled_dot" in kernel.operator}
    assert bool(names) == replaced
    assert not any("for_cpu" in name for name in names), names


@pytest.mark.slow
@pytest.mark.parametrize(("positions", "pads"), [(1500, True), (1536, False)])
def test_products_of_odd_sizes_are_padded_and_that_is_said(positions: int, pads: bool) -> None:
    """With padded products, Inductor does not replace attention by a kernel: a Whisper on an H200 stored its
    scores. Other sizes are replaced, as above."""
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    facts = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": positions}
    job = small_job("bert", 2, facts=facts, sequence_length=positions)
    trace = rehearsed(job, "bf16_pure + eager + compiled", CudaPolicy())
    names = {kernel.operator for kernel in trace.kernels}
    assert (PADDED in trace.doubts) == pads
    assert any("scaled_dot" in name for name in names) != pads, names


@pytest.mark.whole
def test_a_graph_that_is_said_to_be_elsewhere_shares_the_same_storages() -> None:
    """Inductor compares storages: it keeps a copy of a saved tensor and drops any other. A LoRA beside a
    product of attention's result is such a copy. A ModernBERT on an H200 took 1 % more for it."""

    def part(x: torch.Tensor) -> torch.Tensor:
        return x.sin().transpose(0, 1).cos()

    graph = make_fx(part, tracing_mode="fake")(torch.ones(4, 8))
    relabel(graph, torch.device("cuda", 0))
    sine, view, cosine = (node for node in graph.graph.nodes if node.op == "call_function")
    assert get_node_storage(sine) == get_node_storage(view) != get_node_storage(cosine)
    assert view.meta["val"].stride() == (1, 8)
    assert {node.meta["val"].device.type for node in (sine, view, cosine)} == {"cuda"}


@functools.cache
def of_llama_on_a_gpu(cache_bytes: int) -> Trace:
    """Return the trace of compiled layers on a GPU whose L2 cache has this size."""
    job = small_job("llama", 2, {"hidden_size": 256})
    return rehearsed(job, policy=CudaPolicy(cache_bytes=cache_bytes))


@pytest.mark.slow
def test_the_first_step_holds_what_timing_a_kernels_settings_takes() -> None:
    """Triton's benchmark of a kernel with several configurations allocates as many bytes as the GPU's L2
    cache has. 14 layers of a Mistral with adapters took 1.7 % more at their peak on an H200.
    """
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    traces = [of_llama_on_a_gpu(nbytes) for nbytes in (60 * MIB, 0)]
    timed = [[block for block in trace.blocks if block.nbytes == 60 * MIB] for trace in traces]
    assert len(timed[0]) > 4
    assert {block.step for block in timed[0]} == {0}
    assert {block.phase for block in timed[0]} == {"forward", "backward"}
    assert not timed[1]
    assert traces[0].kernels == traces[1].kernels


@pytest.mark.whole
@pytest.mark.slow
def test_what_only_the_first_step_holds_is_in_no_lower_bound() -> None:
    """60 MiB exist only in the first step, before the optimizer states. A plan counted them in every step. It
    failed because the whole step took less than its bound."""
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    found = plan(small_job("llama", 2), gpu="h200", keep=kept("bf16 + compiled", but="allocator"), workers=1)
    assert "compiled" in str(found.best.recipe)


@pytest.mark.whole
def test_a_short_run_pays_for_compiling_in_each_of_its_steps() -> None:
    job, traces = small_job("llama", layers=3), {}
    for recipe, trace in (("compiled", of_llama()), ("plain", rehearsed(job, "plain"))):
        traces[recipe] = Recipe.parse(recipe).setup(), trace
    for steps in (10, 1000):
        shares = StartupShares(job, PlannedRun(steps=steps))
        compiled, plain = (shares.of(*traces[recipe]) for recipe in ("compiled", "plain"))
        assert compiled.once - plain.once > STARTUP_SECONDS
        assert compiled.share - plain.share == pytest.approx((compiled.once - plain.once) / steps)
    setup, trace = traces["compiled"]
    least = shares.least_share(setup, [Work(kernels=trace.kernels[: len(trace.kernels) // 2], waits=())])
    assert plain.share < least <= compiled.share


def test_a_described_gpu_is_not_opened() -> None:
    """If torch is built with CUDA, its tensors without data open a context, or fail without a GPU."""
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    assert not of_bert_on_a_gpu()[1]


def test_plans_for_one_gpu_look_at_it_and_plans_for_many_when_they_are_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = next(one for one in roster.techniques() if one.name == "compiled")
    monkeypatch.setattr(kind, "needs", ())
    job = small_job("llama")
    few = f"{OTHERS} + adamw_fused"
    searched = space_of(job, fixed=kept_of(job, few))
    assert kind() in searched.offers(Slot.ENGINE)
    together = {"eager", "compiled"}
    assert not [one for one in searched.candidates if together <= set(map(str, one.recipe))]
    asked = space_of(job, fixed=kept_of(job, f"{few} + eager"))
    assert [one for one in asked.candidates if together <= set(map(str, one.recipe))]
    many = space_of(job, many_gpus=True, fixed=kept_of(job, few))
    assert kind() not in many.offers(Slot.ENGINE)
    assert any(one.what == "compiled" and "--keep 'compiled'" in one.why for one in many.excluded)
    kept = space_of(job, many_gpus=True, fixed=kept_of(job, f"{few} + compiled"))
    assert [str(one) for one in kept.offers(Slot.ENGINE)] == ["compiled"]


@pytest.mark.parametrize(
    ("words", "told"),
    [("selective(products)", "every_layer"), ("segments", "every_nth_layer")],
)
def test_what_does_not_go_with_it_is_said(words: str, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        Recipe.parse(f"compiled + {words}").check(small_job("llama"), installed=False)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(RecipeError, match="nothing to compile"):
        compiling.compile_layers(torch.nn.Linear(2, 2), CompileWish())


def test_what_is_compiled_can_run_as_written_again() -> None:
    setup = Recipe.parse("compiled + every_layer").setup()
    model = build_model(small_job("bert", layers=2), setup, torch.device("meta"))
    layer = model.bert.encoder.layer[0]  # type: ignore[union-attr,index]
    assert "forward" in vars(layer)
    compiling.run_as_written(model)
    assert "forward" not in vars(layer)


def test_on_a_gpu_layers_run_generated_kernels_and_fused_attention() -> None:
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    names = {kernel.operator for kernel in of_bert_on_a_gpu()[0].kernels if kernel.compiled}
    assert any("triton" in name for name in names)
    assert any("scaled_dot_product" in name for name in names), names
