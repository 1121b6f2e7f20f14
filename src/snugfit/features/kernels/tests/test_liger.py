"""Liger's kernels: the models that support them, their records in a simulation, and the unchanged rest.

Tests that need liger-kernel or Triton are skipped without it, and give that reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from in_roster import are_in_roster
from kept import kept
from small_models import small_job
from snugfit.errors import RecipeError
from snugfit.features.kernels import liger_table
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job
from snugfit.planning.keep import kept_of
from snugfit.planning.search.space import space_of
from snugfit.prediction.allocator import Replay, replay
from snugfit.prediction.device import policy_for
from snugfit.prediction.profile import Software
from snugfit.prediction.rates import packaged_rates
from snugfit.prediction.seconds import step_seconds
from snugfit.prediction.startup import STARTUP_RATES, distinct_kernels, startup
from snugfit.rehearsal.device.policy import CudaPolicy, PoliciesDiffer
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import TRITON, Trace
from snugfit.results.measurement import Measurement
from snugfit.results.step_seconds import StepSeconds
from snugfit.step.applier import set_process
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot
from snugfit.units import MIB
from snugfit.versions import version_of
from tiers import slow_but

LIGER = roster.find("liger")
installed = pytest.mark.skipif(bool(LIGER.missing_package()), reason=LIGER.missing_package() or "")

LAYERS = 3


def llama(**changes: int) -> Job:
    return small_job("llama", LAYERS, **{"batch_size": 2, "sequence_length": 64, **changes})


def trace_of(recipe: str, policy: CudaPolicy | None = None) -> Trace:
    return rehearse(llama(), Recipe.parse(recipe).setup(), policy or CudaPolicy())


def launches(trace: Trace) -> Counter[tuple[str, str]]:
    """Return the number of launches of each of Triton's kernels, by name and phase."""
    return Counter(
        (kernel.operator.removeprefix(TRITON), kernel.phase)
        for kernel in trace.kernels
        if kernel.operator.startswith(TRITON)
    )


def test_a_cpu_is_refused_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Recipe.parse("liger").setup()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RecipeError, match=r"liger: .*on GPUs alone. Take 'torch_kernels'"):
        set_process(setup, torch.device("cpu"))
    set_process(setup, torch.device("meta"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    set_process(setup, torch.device("cpu"))


# ---- which models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "recipe", "says"),
    [
        ("bert", "liger", "Liger has no kernels for bert. It covers deepseek, "),
        ("llama", "liger + chunked_loss", "both take the head's place. Try 'liger(fused_linear_cross"),
        ("llama", "liger(layer_norm=true)", "Liger has no layer_norm for llama; it has fused_linear"),
        ("llama", "liger(geglu=true)", "Liger has no geglu for llama; it has fused_linear"),
    ],
)
def test_what_liger_cannot_do_is_said_before_it_is_tried(family: str, recipe: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.parse(recipe).check(small_job(family, 2), installed=False)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("llama", "liger(swiglu=true, geglu=true, layer_norm=false)"),
        ("gemma2", "liger(swiglu=true, geglu=true, layer_norm=false)"),
        ("llama", "liger(geglu=false)"),
    ],
)
def test_parts_of_other_models_are_ignored_as_liger_does(family: str, recipe: str) -> None:
    """axolotl's `liger_glu_activation` turns both gated activations on, and its plugin the rest off."""
    Recipe.parse(recipe).check(small_job(family, 2), installed=False)


@pytest.mark.parametrize(
    ("recipe", "fails"),
    [
        ("lora(targets=all-linear) + liger", True),
        ("lora(targets=down_proj) + liger", True),
        ("lora + liger", False),
        ("lora(targets=all-linear) + liger(swiglu=false)", False),
    ],
)
def test_adapters_of_experts_do_not_go_with_its_code_for_them(recipe: str, fails: bool) -> None:
    """peft wraps the module whose code Liger replaces: a random run on an H100 failed for that reason."""
    job, parsed = small_job("mixtral", 2), Recipe.parse(recipe)
    if not fails:
        parsed.check(job, installed=False)
        return
    with pytest.raises(RecipeError, match=r"adapts the weights of experts.*liger\(swiglu=false\)"):
        parsed.check(job, installed=False)


@pytest.mark.parametrize(
    ("family", "recipe", "said"),
    [("mixtral", "liger", True), ("mixtral", "liger(swiglu=false)", False), ("llama", "liger", False)],
)
def test_minutes_of_timing_kernels_for_experts_are_said(family: str, recipe: str, said: bool) -> None:
    """Two random runs of a Mixtral on an H200 took minutes before their first step."""
    told = Recipe.parse(recipe).check(small_job(family, 2), installed=False)
    assert any("first step of each process" in line for line in told) == said


def test_with_its_loss_off_it_goes_beside_another_head() -> None:
    Recipe.parse("liger(fused_linear_cross_entropy=false) + chunked_loss").check(llama(), installed=False)


@installed
def test_plans_take_it_without_its_loss() -> None:
    offered = [
        {str(one) for one in space_of(job, fixed=kept_of(job, kept(but="kernels"))).offers(Slot.KERNELS)}
        for job in (llama(), small_job("bert", 2))
    ]
    assert offered == [
        {"torch_kernels", "fused", "liger(fused_linear_cross_entropy=false)"},
        {"torch_kernels", "fused"},
    ]


def test_without_the_package_one_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snugfit.techniques.technique.version_of", lambda package: None)
    with pytest.raises(RecipeError, match=r'needs liger-kernel.*Try: pip install "snugfit\[liger\]"'):
        Recipe.parse("liger").check(llama())


@pytest.mark.skipif(
    version_of("liger-kernel") != "0.8.5", reason="liger_models.json is of liger-kernel 0.8.5"
)
def test_the_packaged_table_is_liger_s_own() -> None:
    packaged = json.loads(liger_table.PACKAGED.read_text(encoding="utf-8"))
    assert {name: frozenset(parts) for name, parts in packaged.items()} == liger_table.parts_by_model_type()


# ---- simulation
# ---------------------------------------------------------------------------------------------


@installed
def test_every_kernel_that_should_run_is_launched() -> None:
    norms = 2 * LAYERS + 1
    assert launches(trace_of("bf16 + liger")) == {
        ("rms_norm_forward_kernel", "forward"): norms,
        ("rms_norm_backward_kernel", "backward"): norms,
        ("triton_rope", "forward"): LAYERS,
        ("triton_rope", "backward"): LAYERS,
        ("swiglu_forward_kernel", "forward"): LAYERS,
        ("swiglu_backward_kernel", "backward"): LAYERS,
        ("liger_cross_entropy_kernel", "forward"): launches(trace_of("bf16 + liger"))[
            "liger_cross_entropy_kernel", "forward"
        ],
    }


@installed
def test_a_part_that_is_off_is_not_launched() -> None:
    names = {name for name, _ in launches(trace_of("liger(rope=false, fused_linear_cross_entropy=false)"))}
    assert names == {
        "rms_norm_forward_kernel", "rms_norm_backward_kernel", "swiglu_forward_kernel",
        "swiglu_backward_kernel",
    }  # fmt: skip


@installed
def test_bytes_are_those_of_what_a_kernel_loads_and_stores() -> None:
    """The gated activation loads two tensors and stores one; backward loads three and stores two."""
    job, trace = llama(), trace_of("liger")
    inner = 4 * job.batch_size * job.sequence_length * int(job.transformers_config().intermediate_size)
    moved = {kernel.operator: kernel.nbytes for kernel in trace.kernels}
    assert moved[f"{TRITON}swiglu_forward_kernel"] == 3 * inner
    assert moved[f"{TRITON}swiglu_backward_kernel"] == 5 * inner


@installed
def test_nothing_of_the_process_is_another_afterwards() -> None:
    """Liger changes names in transformers' files, but a model that is simulated later has its own code."""
    from transformers.models.llama import modeling_llama

    before, names = trace_of("bf16"), dict(vars(modeling_llama))
    assert trace_of("bf16 + liger") != before
    assert vars(modeling_llama) == names
    assert trace_of("bf16") == before


@installed
def test_partial_sums_have_a_row_for_each_multiprocessor() -> None:
    width = int(llama().transformers_config().hidden_size)
    for count in (132, 108):
        sizes = {block.nbytes for block in trace_of("liger", CudaPolicy(multiprocessors=count)).blocks}
        assert 4 * width * count in sizes
    peer = CudaPolicy(multiprocessors=108)
    with pytest.raises(PoliciesDiffer):
        trace_of("liger", CudaPolicy(peers=(peer,)))


@installed
def test_the_host_waits_where_liger_reads_values() -> None:
    """It counts the labels, and checks the scale of the loss."""
    assert trace_of("liger").syncs == trace_of("plain").syncs + 2


@installed
def test_timing_the_kernels_of_experts_takes_a_buffer_in_the_first_step() -> None:
    """The buffer has 256 MiB, and is freed after each kernel, once for each of its keys with any number of
    layers.

    The allocator's history of a Mixtral on an H100 shows the same; there the buffer's segment stayed
    reserved.
    """
    policy, recipe = CudaPolicy(), Recipe.parse("liger(fused_linear_cross_entropy=false)").setup()
    counts = []
    for layers in (2, 3):
        trace = rehearse(small_job("mixtral", layers), recipe, policy)
        flushed = [index for index, one in enumerate(trace.blocks) if one.nbytes == 256 * MIB]
        assert {trace.blocks[index].step for index in flushed} == {0}
        assert all(trace.events[trace.events.index(index + 1) + 1] == -(index + 1) for index in flushed)
        counts.append(Counter(trace.blocks[index].phase for index in flushed))
    assert counts[0] == counts[1] == {"forward": 3, "backward": 5}
    assert not any(one.nbytes == 256 * MIB for one in trace_of("liger").blocks)


@installed
def test_compiling_its_kernels_is_part_of_the_start_up() -> None:
    recipe, trace = Recipe.parse("liger"), trace_of("liger")
    kernels = distinct_kernels(trace.kernels)
    compiled = {key for key in kernels if str(key).startswith(f"('{TRITON}")}
    without = startup(llama(), recipe.setup(), kernels - compiled)
    more = startup(llama(), recipe.setup(), kernels).first_step_seconds - without.first_step_seconds
    assert more == pytest.approx(len(compiled) * (STARTUP_RATES.triton + STARTUP_RATES.kernel))


# ---- measured runs
# ------------------------------------------------------------------------------------------

MEASURED = Path(__file__).parents[5] / "results" / "h200-2026-11-23" / "liger" / "runs.json"
RUNS = [
    Measurement.from_json(run)
    for run in json.loads(MEASURED.read_text(encoding="utf-8"))["runs"]
    if are_in_roster(run["recipe"])
]
SECONDS = 0.08
"""Allowed relative error of predicted seconds, for a step that the GPU bounds."""


def step_of(run: Measurement) -> tuple[Replay, StepSeconds]:
    """Return the bytes and the seconds of a measured run, predicted again."""
    gpu, setup = find_gpu(run.device.name or ""), run.recipe.setup()
    trace = rehearse(run.job, setup, policy_for(gpu, Software()))
    seconds = step_seconds(trace, gpu, batch_size=run.job.batch_size, rates=packaged_rates(gpu))
    return replay(trace, expandable=setup.expandable_segments), seconds


def with_liger() -> list[Measurement]:
    return [run for run in RUNS if "liger" in str(run.recipe)]


@installed
@pytest.mark.parametrize("run", slow_but(with_liger(), 1), ids=lambda run: f"{run.recipe} {run.job.dtype}")
def test_what_was_measured_is_predicted_again(run: Measurement) -> None:
    """Bytes match exactly, and seconds within tolerance where the GPU bounds the step."""
    seen, timing = run.footprint, run.timing
    assert seen is not None
    assert timing is not None
    memory, seconds = step_of(run)
    assert memory.requested_peak == seen.requested_bytes
    assert memory.allocated_peak == seen.allocated_bytes
    assert memory.reserved_peak == pytest.approx(seen.reserved_bytes, rel=0.0005)
    if seconds.bound != "host" and seconds.host_seconds < seconds.device_seconds / 2:
        assert seconds.step_seconds == pytest.approx(timing.step_seconds, rel=SECONDS)


AGAIN = json.loads((MEASURED.parent / "again.json").read_text(encoding="utf-8"))
RELATIVE = 0.1
"""Allowed relative error of the ratio of seconds with and without Liger, for steps that the host bounds.

Prediction and measurement are for the same host at different times.
"""


def pairs() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return steps of small models with Liger, each with the same step without, by name."""
    runs = {(run["job"]["model"]["name"], run["recipe"]): run for run in AGAIN["host"]}
    found = {}
    for (name, recipe), run in runs.items():
        without = " + ".join(word for word in recipe.split(" + ") if "liger" not in word) or "plain"
        if without != recipe and (name, without) in runs:
            found[f"{name}, {recipe}"] = (run, runs[name, without])
    return found


@installed
@pytest.mark.parametrize("name", slow_but(list(pairs()), 1))
def test_what_its_functions_take_the_host_is_as_measured(name: str) -> None:
    gpu, pair = find_gpu("h200"), pairs()[name]
    seconds = []
    for run in pair:
        job = Job.from_json(run["job"])
        trace = rehearse(job, Recipe.parse(run["recipe"]).setup(), policy_for(gpu, Software()))
        seconds.append(step_seconds(trace, gpu, batch_size=job.batch_size, rates=packaged_rates(gpu)))
    assert {one.bound for one in seconds} == {"host"}
    measured = pair[0]["measured"]["step_seconds"] / pair[1]["measured"]["step_seconds"]
    assert seconds[0].step_seconds / seconds[1].step_seconds == pytest.approx(measured, rel=RELATIVE)


@installed
@pytest.mark.slow
def test_liger_is_faster_or_slower_as_it_was_measured() -> None:
    """Faster with weights in bfloat16; slower in fp32, where its loss writes a gradient twice as large."""
    faster = {}
    for run in RUNS:
        if str(run.recipe) in ("bf16", "bf16 + liger") and run.job.model.name.endswith("Llama-3.2-1B"):
            assert run.timing is not None
            pair = faster.setdefault(str(run.job.dtype), {})
            pair[str(run.recipe)] = step_of(run)[1].step_seconds, run.timing.step_seconds
    signs = {}
    for dtype, pair in faster.items():
        predicted, measured = zip(pair["bf16 + liger"], pair["bf16"], strict=True)
        signs[dtype] = (predicted[0] < predicted[1], measured[0] < measured[1])
    assert signs == {"bfloat16": (True, True), "float32": (False, False)}


@installed
@pytest.mark.slow
@pytest.mark.whole
def test_on_the_cpu_gradients_and_allocations_are_those_of_a_real_step() -> None:
    """The step runs in Triton's interpreter, which needs a process of its own."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("liger_on_the_cpu.py"))],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.stdout.split("\n")[:2] == ["gradients agree", "allocations agree"], done.stderr[-3000:]
