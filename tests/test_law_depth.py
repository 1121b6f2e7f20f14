"""Law 5, for models that are compiled whole: traces grown from few layers equal traces lowered in full.

A deep model's moves follow from two programs: one of few layers, and one with a further period. Tests run
on eager steps, which need no compiler, and on compiled steps of one family after another. A program that
does not repeat, or that Inductor compiles differently at full depth, must be refused.
"""

from __future__ import annotations

from typing import Any

import pytest

from small_models import small_job
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.prediction.allocator import replay
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.splice import Part, rehearse_passes
from snugfit.rehearsal.trace.deepen import deepen
from snugfit.rehearsal.trace.depth import depth_of
from snugfit.rehearsal.trace.grow import Entry, grow
from snugfit.rehearsal.trace.relative import Alloc, RelativeTrace
from snugfit.rehearsal.trace.trace import Trace
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from tiers import slow_but

CUDA = CudaPolicy()
WHOLE = "compiled(what=model)"
DEEP = 9

FACTS: dict[str, dict[str, Any]] = {
    "bert": {
        "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "vocab_size": 30522,
        "max_position_embeddings": 512,
    },
    "llama": {
        "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192,
        "vocab_size": 128256,
    },
    "gpt2": {"n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
    "t5": {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_heads": 12, "vocab_size": 32128},
}  # fmt: skip
"""The sizes of real models. Small ones take as long to lower, and their buffers have equal sizes by chance.
"""


def setup_of(recipe: str) -> Setup:
    return Recipe.parse(recipe).setup()


def job_of(family: str, layers: int, **more: Any) -> Job:
    if family not in FACTS:
        job = Job(model=Model.find(family), task=Task.CAUSAL_LM, **more)
        depth = depth_of(job, setup_of("plain"))
        assert depth is not None
        return depth.shallower(job, layers)
    return small_job(family, layers, FACTS[family], **{"batch_size": 4, "sequence_length": 512, **more})


def figures(trace: Trace) -> tuple[int, int, int]:
    after = replay(trace, expandable=False)
    return after.requested_peak, after.allocated_peak, after.reserved_peak


# ---- lists ---------------------------------------------------------------------------------------------


def listed(layers: int) -> list[Entry]:
    """Return a program with two passes through the layers, and entries before and after them.

    Each forward layer ends with `norm`, which is also the first entry after the layers.
    """
    there = [entry for n in range(layers) for entry in (Entry("in", (n,)), Entry("norm", (0,)))]
    back = [
        entry for n in reversed(range(layers)) for entry in (Entry("out", (n, 7)), Entry("free", (n, layers)))
    ]
    return [Entry("begin"), Entry("norm", (0,)), *there, Entry("norm", (1,)), Entry("loss"), *back]


def test_a_list_grows_at_each_stack_of_layers_and_counts_on() -> None:
    few, more, many = listed(3), listed(4), listed(11)
    grown = grow(few, more, 7)
    assert grown is not None
    assert [Entry(more[one.like].key, one.numbers) for one in grown] == many


@pytest.mark.parametrize(
    ("few", "more"),
    [
        ("a b b c", "a b b d c"),  # the inserted entry has no other copy
        ("a b x b c", "a x b b x b c"),
        ("a b b c", "a b c"),
        ("a b b c", "a b b b d"),
    ],
)
def test_what_does_not_repeat_does_not_grow(few: str, more: str) -> None:
    assert grow([*map(Entry, few.split())], [*map(Entry, more.split())], 2) is None


# ---- moves ---------------------------------------------------------------------------------------------

AS_WRITTEN = [
    ("bert", "bf16", {"padding": 0.3}),
    ("llama", "bf16 + every_layer", {}),
    ("gpt2", "fp16 + lora", {}),
    ("t5", "plain", {}),
    ("llama", "micro_batches(2)", {}),
]


def part_of(family: str, layers: int, recipe: str, **more: Any) -> Part:
    return rehearse_passes(job_of(family, layers, **more), setup_of(recipe), CUDA)


@pytest.mark.parametrize(("family", "recipe", "more"), slow_but(AS_WRITTEN, lambda case: case[0] == "t5"))
def test_moves_of_few_layers_tell_those_of_many(family: str, recipe: str, more: dict[str, Any]) -> None:
    few, deeper, many = (part_of(family, layers, recipe, **more).trace for layers in (3, 4, DEEP - 1))
    written = deepen(few, deeper, DEEP - 5)
    assert written is not None
    found, asked = written.trace(), many.trace()
    assert found.blocks == asked.blocks
    assert found.kernels == asked.kernels
    assert found.waits == asked.waits
    assert figures(found) == figures(asked)


def test_a_stranger_among_the_layers_is_refused() -> None:
    """The third of four layers has one block more."""
    few, deeper = (part_of("llama", layers, "bf16").trace for layers in (3, 4))
    moves = [*deeper.moves]
    at = next(
        number for number, move in enumerate(moves)
        if isinstance(move, Alloc) and move.phase == "forward" and ".2." in move.module
    )  # fmt: skip
    moves.insert(at, Alloc(12_345, "aten::empty", moves[at].module, "forward", "activations"))  # type: ignore[union-attr]
    planted = RelativeTrace((*moves,), deeper.attention, deeper.doubts)
    assert deepen(few, deeper, 3) is not None
    assert deepen(few, planted, 3) is None
