"""Offloading the first k layers: gradients bit for bit, copied tensors and their times, and each front-end.

Bytes and copies are between those of offloading no layer and all layers.
"""

from __future__ import annotations

import gc
import importlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from test_activation_offload import INPUT, NBYTES, Stack, copies_of, gradients

import test_accelerate
import test_fit_law
from small_models import small_job
from small_runs import resumed_as_whole, small_run
from snugfit.errors import RecipeError
from snugfit.features.offload import activations as activation_offload
from snugfit.features.offload.activations import OffloadedStorage, offload_activations
from snugfit.features.offload.fields import OffloadWish
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job
from snugfit.planning.search.search import plan
from snugfit.prediction.pinned import pinned_bytes
from snugfit.prediction.predict import predict
from snugfit.prediction.rates import rates_for
from snugfit.prediction.seconds import step_seconds
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import COPY_BACK, COPY_OUT, Trace
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.training.run.cut_loss import Verdict
from test_law_loops import hold
from test_law_rehearsed_equals_real import hold_to_reports, job
from tiers import slow_but

LAYERS = 6


@pytest.fixture(autouse=True)
def small_tensors_travel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offload small tensors too, except in tests of plans, whose tensors are large."""
    if request.node.get_closest_marker("stored_rehearsals"):
        return
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 1024)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return the bytes of each storage copied to the host, by group of copies."""
    batches: list[list[int]] = []
    link = activation_offload.link_to_host(torch.device("cpu")).__class__
    send = link.send

    def note(self: Any, tensors: Any) -> Any:
        batches.append([tensor.untyped_storage().nbytes() for tensor in tensors])
        return send(self, tensors)

    monkeypatch.setattr(link, "send", note)
    # comparisons of micro-batches with the whole batch offload too, with other samples in each loop
    monkeypatch.setattr("snugfit.training.run.cut_loss._verdict", lambda *_: Verdict())
    return batches


@pytest.mark.parametrize(
    ("family", "recipe", "offload", "autocast"),
    slow_but(
        [
            ("bert", "sdpa", "host(all, layers=1)", True),
            ("gpt2", "every_layer", "host(checkpoints, layers=1)", False),
            ("llama", "lora + selective(products)", "host(all, layers=1)", True),
            ("llama", "first_layers(1)", "host(all, layers=1)", True),
            ("llama", "every_nth_layer(2)", "host(all, layers=1)", False),
            ("t5", "every_layer", "host(checkpoints, layers=1)", True),
            ("t5", "sdpa", "host(all, layers=1)", False),
            ("mixtral", "sdpa", "host(all, layers=1)", False),
        ],
        3,
    ),
)
def test_gradients_are_the_same_bit_for_bit(
    family: str, recipe: str, offload: str, autocast: bool, sent: list[list[int]]
) -> None:
    plain = gradients(family, recipe, autocast=autocast)
    assert plain
    travelled = gradients(family, f"{recipe} + {offload}", autocast=autocast)
    few = sum(map(sum, sent))
    sent.clear()
    gradients(family, f"{recipe} + {offload.replace(', layers=1', '')}", autocast=autocast)
    assert 0 < few < sum(map(sum, sent))
    assert plain.keys() == travelled.keys()
    assert all(torch.equal(plain[name], travelled[name]) for name in plain)


def test_as_many_as_there_are_is_all_of_them(sent: list[list[int]]) -> None:
    assert gradients("t5", "every_layer + host(all, layers=2)", autocast=False)
    some = [*sent]
    sent.clear()
    assert gradients("t5", "every_layer + host(all)", autocast=False)
    assert some == sent
    prediction = predict(small_job("bert", 2), "host(all, layers=2)", gpu="h200")
    assert any("activations of all move" in line for line in prediction.doubts)


def test_a_span_of_layers_belongs_to_its_last_one(sent: list[list[int]]) -> None:
    gradients("gpt2", "segments(1) + host(checkpoints, layers=1)", autocast=False)
    assert not sent


# ---- offloaded tensors, and times of their copies ----------------------------------------------------------


def on_the_device() -> int:
    gc.collect()
    alive = [one for one in gc.get_objects() if type(one) is OffloadedStorage]
    return sum(one.base is not None for one in alive)


def test_the_first_layers_send_what_they_save_and_all_of_it_leaves(sent: list[list[int]]) -> None:
    model = Stack()
    offload_activations(model, OffloadWish(what="all", first=2))
    loss = model(INPUT)
    assert sent == [[NBYTES] * 2, [NBYTES]]
    assert on_the_device() == 0
    loss.backward()


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (4, ["3", "fetch", "2", "fetch", "1", "0"]),
        (5, ["4", "fetch", "3", "fetch", "2", "1", "0"]),
        (7, ["6", "fetch", "5", "fetch", "4", "3", "2", "1", "0"]),
    ],
)
def test_they_come_back_as_early_as_there_is_room(
    depth: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two offloaded layers, the second one's fetch starts when the last layer is done and frees its
    memory."""
    model = Stack(depth)
    offload_activations(model, OffloadWish(what="all", first=2))
    events: list[str] = []
    link = activation_offload.link_to_host(torch.device("cpu")).__class__
    fetch = link.fetch

    def note(self: Any, extents: Any, dtypes: Any) -> Any:
        events.append("fetch")
        return fetch(self, extents, dtypes)

    def told_by(number: int) -> Any:
        return lambda gradient: events.append(str(number))

    monkeypatch.setattr(link, "fetch", note)
    for number, layer in enumerate(model.layers):
        inner: Any = layer.inner
        inner.weight.register_hook(told_by(number))
    loss = model(INPUT)
    assert on_the_device() == 0
    loss.backward()
    assert events == expected


def test_a_copy_has_as_long_as_there_is_room() -> None:
    """Offloading one layer of six raises the peak no further than awaiting its copy at once.

    A link on which a copy takes as long as three layers does not make the step longer. Recomputing the layer
    does.
    """
    this, gpu = small_job("llama", LAYERS, batch_size=64, sequence_length=8192), find_gpu("h200")
    plain, early = on_a_gpu(this, "bf16"), on_a_gpu(this, "bf16 + host(all, layers=1)")
    again = on_a_gpu(this, "bf16 + first_layers(1)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation_offload.Window, "leave", _leave_at_once)
        at_once = on_a_gpu(this, "bf16 + host(all, layers=1)")
    assert early.peak().nbytes == at_once.peak().nbytes < plain.peak().nbytes
    computing = step_seconds(plain, gpu, batch_size=64).device_seconds
    three_layers = 3 * computing / 3 / LAYERS  # a forward pass is a third of a step's products
    rates = replace(rates_for(gpu), link=sum(copies_of(early, COPY_OUT)) / three_layers)
    without, with_room, recomputed, without_room = (
        step_seconds(trace, gpu, batch_size=64, rates=rates).step_seconds
        for trace in (plain, early, again, at_once)
    )
    assert with_room == pytest.approx(without, rel=0.01)
    assert recomputed > 1.03 * without
    assert without_room > 1.03 * without


def _leave_at_once(self: activation_offload.Window) -> None:
    self.is_inside = False
    self._leave_device(self._index - 1)


def test_a_stack_may_run_several_times(sent: list[list[int]]) -> None:
    """Models that loop over their layers run a stack several times."""
    model, plain = Stack(5), Stack(5)
    plain.load_state_dict(model.state_dict())
    offload_activations(model, OffloadWish(what="all", first=2))
    for one in (model, plain):
        layers = one.layers
        one.layers = torch.nn.Sequential()
        one.add_module("again", layers)
        one.layers.forward = lambda x, layers=layers: layers(layers(x))  # type: ignore[method-assign]
        one(INPUT).backward()
    assert len(sent) == 4
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(own.grad, other.grad) for own, other in pairs)  # type: ignore[arg-type]


def test_the_wish_goes_through_json() -> None:
    recipe = Recipe.parse("bf16 + host(all, layers=3)")
    assert str(recipe) == "bf16 + host(all, layers=3)"
    assert Setup.from_json(recipe.setup().to_json()) == recipe.setup()
    assert str(Recipe.parse("host(all)")) == "host(all)"
    with pytest.raises(RecipeError, match="layers is 0"):
        Recipe.parse("host(all, layers=0)")


# ---- simulation
# ---------------------------------------------------------------------------------------------


def deep(family: str) -> Job:
    """Return a job whose activations exceed all other memory."""
    return small_job(family, LAYERS, batch_size=32, sequence_length=256)


def on_a_gpu(this: Job, recipe: str) -> Trace:
    return rehearse(this, Recipe.parse(recipe).setup(), CudaPolicy())


@pytest.mark.parametrize("family", slow_but(["llama", "t5"], 1))
def test_each_further_layer_frees_memory_and_sends_more(family: str) -> None:
    this, gpu = deep(family), find_gpu("l4")
    recipes = ["on_device", *(f"host(all, layers={k})" for k in range(1, LAYERS))]
    traces = [on_a_gpu(this, recipe) for recipe in recipes]
    needed = [trace.peak().nbytes for trace in traces]
    assert needed == sorted(needed, reverse=True)
    freed = [before - after for before, after in pairwise(needed)][1:-2]
    assert max(freed) < 1.2 * min(freed)
    out = [sum(copies_of(trace, COPY_OUT)) for trace in traces]
    back = [sum(copies_of(trace, COPY_BACK)) for trace in traces]
    assert out == sorted(set(out))
    assert back == out  # the other layers' tensors stay, so all of it is copied back
    pinned = [pinned_bytes(trace.kernels) for trace in traces]
    assert pinned == sorted(pinned)
    assert pinned[0] == 0 < pinned[1]
    links = [step_seconds(trace, gpu, batch_size=32).link_seconds for trace in traces]
    assert links == sorted(links)


@pytest.mark.slow
def test_a_layer_that_is_both_is_recomputed_and_only_its_input_waits() -> None:
    this = deep("llama")
    both = on_a_gpu(this, "first_layers(3) + host(all, layers=3)")
    inputs = on_a_gpu(this, "first_layers(3) + host(checkpoints)")
    assert copies_of(both, COPY_OUT) == copies_of(inputs, COPY_OUT)
    more = on_a_gpu(this, "first_layers(3) + host(all, layers=4)")
    a_layer = sum(copies_of(more, COPY_OUT)) - sum(copies_of(both, COPY_OUT))
    assert a_layer > sum(copies_of(both, COPY_OUT))
    assert more.peak().nbytes < both.peak().nbytes


@pytest.mark.whole
@pytest.mark.parametrize(
    ("family", "recipe"),
    slow_but(
        [
            ("gpt2", "every_layer + host(checkpoints, layers=1) + micro_batches(2)"),
            ("t5", "first_layers(1) + host(all, layers=1)"),
            ("bert", "bf16 + host(all, layers=1)"),
            ("llama", "lora + bf16_pure + host(all, layers=1) + micro_batches(2)"),
        ],
        1,
    ),
)
def test_a_real_step_allocates_what_its_trace_says(family: str, recipe: str) -> None:
    hold_to_reports(job(family), Recipe.parse(recipe))


@pytest.mark.whole
@pytest.mark.parametrize("loop", slow_but(["accelerate", "trainer"], 1))
def test_other_loops_send_the_same(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("torch.optim.optimizer")  # torch.optim has a class of the same name
    monkeypatch.setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cpu", "meta"])
    hold(job("bert"), "bf16 + host(all, layers=1)", loop)


@pytest.mark.whole
def test_a_users_trainer_and_loop_train_as_our_own(sent: list[list[int]], tmp_path: Path) -> None:
    recipe = "host(all, layers=1)"
    laws = (
        lambda folder: test_fit_law.test_the_trainer_fitted_equals_our_own_loop(
            "bert", (2, 2), recipe, folder
        ),
        lambda folder: test_accelerate.test_it_equals_our_own_loop("bert", recipe, folder),
    )
    for number, law in enumerate(laws):
        sent.clear()
        folder = tmp_path / str(number)
        folder.mkdir()
        law(folder)
        assert sent[: len(sent) // 2] == sent[len(sent) // 2 :] != []


@pytest.mark.whole
def test_a_run_is_resumed_where_it_was(tmp_path: Path) -> None:
    resumed_as_whole(small_run(tmp_path, "host(all, layers=1)", max_steps=4, save_steps=2), 3)


# ---- planned -----------------------------------------------------------------------------------------------

DEPTH = 4
KEEP = (
    "lora(r=4) + bf16 + sdpa + adamw_fused + uncompiled + torch_kernels + whole_logits + ieee + whole_batch"
    " + all_gradients + inline"
)


def planned(memory: int, more: str) -> Recipe:
    """Return the recipe of a plan, after a comparison of its bytes and seconds with its own prediction."""
    this = small_job("llama", DEPTH, batch_size=4, sequence_length=32_768)
    found = plan(this, gpu="h200", memory_bytes=memory, keep=f"{KEEP} + {more}", workers=1)
    assert found.best is not None
    assert found.verified
    assert needed(found.best.recipe) <= memory
    assert not any(reason.why_not for reason in found.reasons if reason.slot == "activation_offload")
    return Recipe.parse(found.best.recipe)


def needed(recipe: str) -> int:
    this = small_job("llama", DEPTH, batch_size=4, sequence_length=32_768)
    footprint = predict(this, recipe, gpu="h200").footprint
    return (footprint.reserved_bytes or 0) + footprint.context_bytes


OF = "lora(r=4) + bf16 + adamw_fused"


@pytest.mark.whole
@pytest.mark.stored_rehearsals
def test_a_plan_sends_layers_where_that_costs_less() -> None:
    """The memory suffices for all layers but one, whose copy overlaps the others."""
    memory = needed(f"{OF} + host(all, layers=1)")
    recipe = planned(memory, "default")
    wish = recipe.setup().activation_offload
    assert wish is not None
    assert wish.first is not None
    again = recipe.setup().checkpoint
    assert again is None or (again.first or DEPTH) < wish.first


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.stored_rehearsals
def test_a_plan_sends_no_layer_over_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snugfit.planning.search.search.link_of", lambda gpu: 1.0)
    memory = needed(f"{OF} + host(all, layers=1)")
    assert planned(memory, "default").setup().activation_offload is None


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.stored_rehearsals
def test_a_plan_that_keeps_it_for_all_layers_sends_as_few_as_fit() -> None:
    memory = (needed(OF) + needed(f"{OF} + every_layer")) // 2
    recipe = planned(memory, "keep_all + host(all)")
    wish = recipe.setup().activation_offload
    assert wish is not None
    assert wish.what == "all"
    k = wish.first or DEPTH
    assert 1 < k < DEPTH
    assert needed(str(recipe).replace(f"layers={k}", f"layers={k - 1}")) > memory
    exactly = planned(memory, f"keep_all + host(all, layers={k + 1})")
    assert exactly.setup().activation_offload == OffloadWish(what="all", first=k + 1)
