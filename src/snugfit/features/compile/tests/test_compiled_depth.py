"""Law 5 for models that are compiled whole: traces extended from few layers equal traces of all layers.

A program that does not repeat, or that Inductor compiles differently at full depth, must be refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from snugfit.features.compile.simulation.decisions import Decisions, Reuse
from snugfit.job.job import Job
from snugfit.prediction import predict as predictions
from snugfit.prediction.predict import predict
from snugfit.rehearsal import few_layers
from snugfit.rehearsal.few_layers import rehearse_from_few_layers
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.splice import rehearse_passes
from snugfit.rehearsal.trace.depth import depth_of
from snugfit.rehearsal.trace.trace import Trace
from snugfit.techniques.setup import Setup
from test_law_depth import CUDA, DEEP, figures, job_of, setup_of
from tiers import slow_but

WHOLE = "compiled(what=model)"


# ---- decisions of Inductor on a whole program ----------------------------------------------------------


def decisions(layers: int, *, other: int, between: int, taken: bool = True) -> Decisions:
    """Return made-up Inductor decisions for a program that keeps 10 bytes per layer, or `other` bytes in
    another kernel order.
    """
    timeline = [5, *(5 + 10 * n for n in range(1, layers + 1))]
    reuse = [Reuse(4, taken, 5 + between * n) for n in range(1, layers + 1)]
    return Decisions([timeline, [25, *(25 + other * n for n in range(1, layers + 1))]], timeline, reuse)


def test_a_deep_model_decides_as_shallow_ones_where_the_estimates_say_so() -> None:
    few, more = (decisions(layers, other=10, between=9) for layers in (3, 4))
    assert few.are_alike(more, 20)


def test_an_order_that_is_better_only_in_a_deep_model_is_noticed() -> None:
    """The other kernel order takes 20 bytes more in total and 1 byte less in each layer."""
    few, more = (decisions(layers, other=9, between=9) for layers in (3, 4))
    assert few.are_alike(more, 5)
    assert not few.are_alike(more, 40)


def test_a_buffer_that_would_be_taken_only_in_a_shallow_model_is_noticed() -> None:
    few, more = (decisions(layers, other=10, between=11) for layers in (3, 4))
    few.reuses[-1:], more.reuses[-1:] = [], []
    assert few.are_alike(more, 0)
    assert not few.are_alike(more, 20)


# ---- compiled models -----------------------------------------------------------------------------------

LONG = {"batch_size": 2, "sequence_length": 2048}

COMPILED = [
    ("Llama-3.2-1B", f"bf16 + {WHOLE}", LONG),
    ("bert", f"bf16 + {WHOLE}", {}),
    ("gpt2", f"bf16 + {WHOLE}", {}),
    ("t5", f"bf16 + {WHOLE}", {}),
    ("llama", f"bf16 + {WHOLE}", {}),
]


@pytest.mark.whole
@pytest.mark.parametrize(("family", "recipe", "more"), slow_but(COMPILED, 0))
def test_a_compiled_model_of_few_layers_tells_of_a_deep_one(
    family: str, recipe: str, more: dict[str, Any]
) -> None:
    """The trace equals that of the deep model, or no trace is returned.

    A further layer can move buffers to other places in GPT-2, T5, and Llama with fp32 weights. The sizes
    and dtypes decide if it does.
    """
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    job, setup = job_of(family, DEEP - 1, **more), setup_of(recipe)
    found = rehearse_from_few_layers(job, setup, CUDA)
    if found is None:
        assert (family, more) not in WRITTEN
        return
    asked = rehearse(job, setup, CUDA)
    assert figures(found) == figures(asked)
    assert found.kernels == asked.kernels
    assert found.doubts == asked.doubts


@pytest.mark.whole
@pytest.mark.parametrize(
    "recipe",
    slow_but(["bf16 + compiled + every_layer + micro_batches(2)", "fp16 + compiled + budget(0.5)"], 0),
)
def test_compiled_layers_of_few_tell_of_many(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    monkeypatch.setattr(few_layers, "DEEP", DEEP)
    job, setup = job_of("bert", 2 * DEEP), setup_of(recipe)
    found, asked = rehearse_from_few_layers(job, setup, CUDA), rehearse(job, setup, CUDA)
    assert found == asked


WRITTEN = [("Llama-3.2-1B", LONG), ("bert", {})]
"""Cases that must not be refused."""


@pytest.mark.slow
def test_what_inductor_decides_by_the_memory_of_a_program_is_noted() -> None:
    """Simulate one layer and its loss, forward and backward: the decisions need no more layers."""
    pytest.importorskip("triton", reason="Inductor writes Triton for a GPU, which must be importable")
    job, setup = job_of("gpt2", DEEP), setup_of(f"bf16 + {WHOLE}")
    depth = depth_of(job, setup)
    assert depth is not None
    noted = few_layers._rehearse(depth, job, setup, CUDA, 1, rehearse_passes)
    assert noted.decisions
    assert all(one.timeline and one.orders for one in noted.decisions)
    assert any(one.reuses for one in noted.decisions)
    assert all(one.are_alike(one, 0) for one in noted.decisions)


class Asked:
    """Simulates eager passes in place of compiled ones, and records the number of layers of each call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, of: list[Decisions] | None = None) -> None:
        self.layers: list[int] = []
        self._decisions = of or []
        monkeypatch.setattr(few_layers, "_rehearse", self._rehearse)

    def _rehearse(self, depth: Any, job: Job, setup: Setup, policy: Any, layers: int, record: Any) -> Any:
        self.layers.append(layers)
        part = record(depth.shallower(job, layers), replace(setup, compile=None), policy)
        number = (len(self.layers) - 1) % 2  # the shallow model, or the deeper one
        return few_layers._ShallowPasses(part, self._decisions[number : number + 1])


@pytest.mark.parametrize(
    ("deep", "asked"), slow_but([(8, [3, 4]), (24, [3, 4]), (11, [4, 5])], lambda case: case[0] == 11)
)
def test_few_layers_are_even_or_odd_as_the_whole_model_is(
    deep: int, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Asked(monkeypatch)
    job, setup = job_of("llama", deep), setup_of(f"bf16 + {WHOLE}")
    found = rehearse_from_few_layers(job, setup, CUDA)
    assert recorded.layers == asked
    assert found is not None
    assert figures(found) == figures(rehearse(job, replace(setup, compile=None), CUDA))


@pytest.mark.parametrize(
    ("recipe", "deep"), [("bf16 + compiled", 12), ("bf16", 12), (f"bf16 + {WHOLE}", 7), ("budget(0.5)", 12)]
)
def test_what_is_no_less_work_or_looks_at_all_layers_is_not_written_from_few(
    recipe: str, deep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Asked(monkeypatch)
    setup = setup_of(recipe if "budget" not in recipe else f"bf16 + {WHOLE} + {recipe}")
    assert rehearse_from_few_layers(job_of("llama", deep), setup, CUDA) is None
    assert recorded.layers == []


@pytest.mark.whole
def test_a_model_whose_programs_would_be_decided_otherwise_is_lowered_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planted = [decisions(layers, other=9, between=9) for layers in (3, 4)]
    Asked(monkeypatch, planted)
    in_full: list[Job] = []

    def counted(job: Job, setup: Setup, policy: Any, **_: Any) -> Trace:
        in_full.append(job)
        return rehearse(job_of("llama", 2), replace(setup, compile=None), policy)

    monkeypatch.setattr(predictions, "rehearse", counted)
    predict(job_of("llama", 8), f"bf16 + {WHOLE}", gpu="h200")
    assert not in_full
    predict(job_of("llama", 28), f"bf16 + {WHOLE}", gpu="h200")
    assert [job.model.config["num_hidden_layers"] for job in in_full] == [28]
