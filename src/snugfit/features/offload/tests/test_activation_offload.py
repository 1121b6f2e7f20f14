"""Activation offloading leaves the gradients unchanged bit for bit, and a real step allocates as its trace.

Freed memory is used again, and the link bounds the time of a step.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import test_accelerate
import test_fit_law
from kept import kept
from snugfit.errors import RecipeError
from snugfit.features.offload import activations as activation_offload
from snugfit.features.offload.activations import ActivationOffload, OffloadedStorage, offload_activations
from snugfit.features.offload.fields import OffloadWish
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.planning.cost.timer import GpuTimers, seconds_of
from snugfit.planning.keep import Kept
from snugfit.planning.search.reasons import cures
from snugfit.planning.search.search import plan
from snugfit.prediction.pinned import pinned_bytes
from snugfit.prediction.predict import predict
from snugfit.prediction.rates import rates_for
from snugfit.prediction.seconds import COMPUTES, TRAVELS, simulate_queue, step_seconds
from snugfit.prediction.timeline import queue_moments
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.record.module_tracker import ModuleTracker
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import AWAIT_COPY, COPIES, COPY_BACK, COPY_OUT, Trace, Work
from snugfit.step.build import build_model
from snugfit.step.host_link import SLAB_BYTES, Slabs
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity, Slot
from snugfit.training.run.cut_loss import Verdict
from test_law_loops import hold
from test_law_rehearsed_equals_real import hold_to_reports, job
from test_seconds import FREE
from tiers import slow_but

CPU = torch.device("cpu")
ALL = OffloadWish(what="all")


@pytest.fixture(autouse=True)
def small_tensors_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 1024)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return the bytes of each storage copied to the host, by group of copies."""
    batches: list[list[int]] = []
    send = activation_offload.link_to_host(CPU).__class__.send

    def note(link: Any, tensors: Any) -> Any:
        batches.append([tensor.untyped_storage().nbytes() for tensor in tensors])
        return send(link, tensors)

    monkeypatch.setattr("snugfit.features.offload.host_link.Link.send", note)
    # comparisons of micro-batches with the whole batch offload too, with other samples in each loop
    monkeypatch.setattr("snugfit.training.run.cut_loss._verdict", lambda *_: Verdict())
    return batches


def gradients(family: str, recipe: str, *, autocast: bool) -> dict[str, Tensor]:
    """Return the gradients of a model with its dropout, of two micro-batches from one seed, with padding."""
    this = job(family)
    torch.manual_seed(0)
    model = build_model(this, Recipe.parse(recipe).setup(), CPU).train()
    ids = torch.arange(4 * 16).view(4, 16) % 96
    mask = torch.ones_like(ids)
    mask[1, 10:] = 0
    labels = torch.arange(4) % 2 if this.task is Task.SEQUENCE_CLASSIFICATION else ids
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
        loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize(
    ("family", "recipe", "what", "autocast"),
    slow_but(
        [
            ("bert", "sdpa", "all", True),
            ("bert", "every_layer", "checkpoints", False),
            ("gpt2", "segments(1)", "checkpoints", True),
            ("gpt2", "eager", "all", False),
            ("llama", "every_nth_layer(2)", "all", True),
            ("llama", "selective(products)", "checkpoints", True),
            ("llama", "lora + every_nth_layer(2)", "checkpoints", True),
            ("t5", "first_layers(1)", "checkpoints", True),
            ("t5", "sdpa", "all", False),
            ("t5", "every_layer", "all", True),
            ("mixtral", "sdpa", "all", False),
        ],
        lambda case: (
            case[:2] in (("bert", "sdpa"), ("t5", "every_layer"))
            or case[1] in ("segments(1)", "selective(products)")
        ),
    ),
)
def test_gradients_are_the_same_bit_for_bit(
    family: str, recipe: str, what: str, autocast: bool, sent: list[list[int]]
) -> None:
    plain = gradients(family, recipe, autocast=autocast)
    assert plain
    assert not sent
    travelled = gradients(family, f"{recipe} + host({what})", autocast=autocast)
    assert sent
    assert plain.keys() == travelled.keys()
    assert all(torch.equal(plain[name], travelled[name]) for name in plain)


# ---- offloaded tensors -------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer that saves its input and one more tensor for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Stack(nn.Module):
    """A model whose layers are between an embedding and a head; these save tensors too."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 64), nn.Linear(64, 64)
        self.layers = nn.Sequential(*[Layer() for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.first(x).exp())).sin().sum()
        return out


INPUT = torch.linspace(-1, 1, 32 * 64).view(32, 64)
NBYTES = 32 * 64 * 4


def on_the_device(model: nn.Module) -> int:
    gc.collect()
    alive = [one for one in gc.get_objects() if type(one) is OffloadedStorage]
    return sum(one.base is not None for one in alive)


def test_each_layer_sends_what_it_saves_and_the_last_one_stays(sent: list[list[int]]) -> None:
    """A layer's output is the next one's input and is copied once. Saved tensors of embeddings, head and loss
    stay on the device.
    """
    model = Stack()
    offload_activations(model, ALL)
    loss = model(INPUT)
    assert sent == [[NBYTES] * 2, [NBYTES], [NBYTES], [NBYTES]]
    assert on_the_device(model) == 1
    loss.backward()
    assert on_the_device(model) == 0


OLDER_CHECKPOINT = """
class SaveInput(torch.autograd.Function):
    @staticmethod
    def forward(dummy, x):
        return torch.empty((0,))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, gradient):
        return None, None

def checkpoint(x):
    return SaveInput.apply(torch.empty((0,), requires_grad=True), x).grad_fn
"""
"""Code that saves the inputs of a checkpoint as torch before 2.12, by an autograd function of torch's
module.
"""


@pytest.mark.parametrize("rehearsed", [False, True])
def test_inputs_of_a_checkpoint_travel_where_functions_are_counted_too(
    rehearsed: bool, sent: list[list[int]]
) -> None:
    """In a simulation, a wrapper calls autograd functions, so the call stack has one frame more."""
    code: dict[str, Any] = {"__name__": activation_offload.CHECKPOINTS, "torch": torch}
    exec(OLDER_CHECKPOINT, code)

    class Checkpointed(Layer):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = code["checkpoint"](x)
            return super().forward(x)

    model = Stack()
    model.layers = nn.Sequential(*[Checkpointed() for _ in range(4)])
    offload_activations(model, OffloadWish(what="checkpoints"))
    with ModuleTracker()._count_functions() if rehearsed else contextlib.nullcontext():
        model(INPUT)
    assert sent == [[NBYTES]] * 4


def test_small_tensors_stay(sent: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", NBYTES + 1)
    model = Stack()
    offload_activations(model, ALL)
    model(INPUT).backward()
    assert not sent


def test_the_hosts_memory_is_used_again() -> None:
    model = Stack()
    offload_activations(model, ALL)
    for _ in range(3):
        model(INPUT).backward()
    model(INPUT)  # the graph is dropped
    gc.collect()
    (link,) = activation_offload._OFFLOADS[model]._links.values()
    assert link.slabs.sizes == [SLAB_BYTES]
    assert link.slabs.take(8).start == 0


def test_memory_is_taken_by_slabs() -> None:
    slabs = Slabs()
    assert slabs.take(SLAB_BYTES - 1).slab == 0
    assert slabs.take(512) == (1, 0, 512)
    assert slabs.take(1) == (1, 512, 1)
    assert slabs.take(3 * SLAB_BYTES) == (2, 0, 3 * SLAB_BYTES)
    assert slabs.sizes == [SLAB_BYTES, SLAB_BYTES, 4 * SLAB_BYTES]
    for _ in range(4):
        slabs.give_back()
    assert slabs.take(1).slab == 0


def test_a_failed_forward_pass_leaves_nothing_behind() -> None:
    model = Stack()
    offload_activations(model, ALL)
    with pytest.raises(RuntimeError):
        model(torch.ones(32, 3))
    with pytest.raises(RuntimeError):
        model.layers[2](torch.ones(32, 3))
    model(INPUT).backward()
    kept = (INPUT + nn.Parameter(torch.ones(64))).exp().grad_fn
    assert not isinstance(kept._raw_saved_result.data, tuple)  # type: ignore[union-attr]


def test_results_that_no_backward_pass_reaches_are_freed() -> None:
    """A pooler's result may be in no loss, and its own operator saves it."""
    model = Stack()
    unused = nn.Linear(64, 64)
    model.layers.register_forward_hook(
        lambda layers, given, out: setattr(unused, "last", unused(out).tanh().shape)
    )
    offload_activations(model, ALL)
    alive = []
    for _ in range(2):
        model(INPUT).backward()
        gc.collect()
        alive.append(sum(isinstance(one, Tensor) for one in gc.get_objects()))
    assert alive[0] == alive[1]


def test_a_graph_can_be_walked_twice() -> None:
    model, plain = Stack(), Stack()
    plain.load_state_dict(model.state_dict())
    offload_activations(model, ALL)
    for one in (model, plain):
        loss = one(INPUT)
        loss.backward(retain_graph=True)
        loss.backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(own.grad, other.grad) for own, other in pairs)  # type: ignore[arg-type]


def test_a_copy_of_the_model_has_no_hooks_that_do_anything(sent: list[list[int]]) -> None:
    model = Stack()
    offload_activations(model, ALL)
    copy.deepcopy(model)(INPUT).backward()
    assert not sent
    offload_activations(model, None)
    model(INPUT).backward()
    assert not sent


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"no stack of repeated layers.*'on_device'"):
        ActivationOffload("all").attach(nn.Linear(2, 2))
    with pytest.raises(RecipeError, match="no layer is recomputed"):
        Recipe.parse("host(checkpoints)").check(job("bert"))


# ---- simulation --------------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize(
    ("family", "recipe"),
    slow_but(
        [
            ("bert", "bf16 + host(all)"),
            ("gpt2", "every_nth_layer(2) + host(all) + micro_batches(2)"),
            (
                "llama",
                "lora + bf16_pure + selective(every_other_product) + host(checkpoints) + micro_batches(2)",
            ),
            ("t5", "every_layer + host(all)"),
            ("whisper", "fp16 + host(all)"),
        ],
        lambda case: case[0] == "gpt2",
    ),
)
def test_a_real_step_allocates_what_its_trace_says(family: str, recipe: str) -> None:
    hold_to_reports(job(family), Recipe.parse(recipe))


@pytest.mark.whole
@pytest.mark.parametrize("loop", slow_but(["trainer", "accelerate"], 1))
def test_other_loops_send_the_same(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("torch.optim.optimizer")  # torch.optim has a class of the same name
    monkeypatch.setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cpu", "meta"])
    hold(job("bert"), "bf16 + every_nth_layer(2) + host(all)", loop)


@pytest.mark.whole
def test_a_users_trainer_and_loop_train_as_our_own(sent: list[list[int]], tmp_path: Path) -> None:
    recipe = "every_nth_layer(2) + host(all)"
    for number, law in enumerate(
        (
            lambda folder: test_fit_law.test_the_trainer_fitted_equals_our_own_loop(
                "bert", (2, 2), recipe, folder
            ),
            lambda folder: test_accelerate.test_it_equals_our_own_loop("bert", recipe, folder),
        )
    ):
        sent.clear()
        folder = tmp_path / str(number)
        folder.mkdir()
        law(folder)
        ours = sum(map(len, sent)) // 2
        assert ours
        assert sent[: len(sent) // 2] == sent[len(sent) // 2 :]


def on_a_gpu(this: Job, recipe: str) -> Trace:
    return rehearse(this, Recipe.parse(recipe).setup(), CudaPolicy())


def deeper(**facts: Any) -> Job:
    """Return a job on BERT of six layers."""
    this = job("bert")
    config = this.model.config | {"num_hidden_layers": 6}
    return replace(this, model=Model.from_config(config, name="bert"), **facts)


def copies_of(trace: Trace, *operators: str) -> list[int]:
    return [kernel.nbytes // 2 for kernel in trace.kernels if kernel.operator in operators]


def test_less_is_on_the_device_and_all_of_it_comes_back() -> None:
    this = deeper(batch_size=64)
    plain, travelling = on_a_gpu(this, "bf16"), on_a_gpu(this, "bf16 + host(all)")
    assert travelling.peak().nbytes < plain.peak().nbytes
    out, back = copies_of(travelling, COPY_OUT), copies_of(travelling, COPY_BACK)
    assert out
    assert 0 < sum(back) < sum(out)  # the last layer's tensors stay
    assert not set(back) - set(out)
    assert pinned_bytes(travelling.kernels) == -(-sum(out) // SLAB_BYTES) * SLAB_BYTES
    assert not pinned_bytes(plain.kernels)
    # Each saved tensor passes through a hook when it is saved, and through one when it is used.
    hooks = [sum(kernel.intercepted for kernel in trace.kernels) for trace in (plain, travelling)]
    assert hooks[0] == 0
    assert hooks[1] >= 2 * len(out)


def test_micro_batches_share_the_hosts_memory() -> None:
    this = replace(job("bert"), batch_size=64)
    whole, halves = (on_a_gpu(this, f"host(all){more}") for more in ("", " + micro_batches(4)"))
    assert sum(copies_of(halves, COPY_OUT)) == pytest.approx(sum(copies_of(whole, COPY_OUT)), rel=0.1)
    big = [kernel._replace(nbytes=64 * kernel.nbytes) for kernel in halves.kernels]
    assert pinned_bytes(big) < 0.3 * 64 * sum(copies_of(halves, COPY_OUT)) + SLAB_BYTES


# ---- seconds ---------------------------------------------------------------------------------------------


def queue(roles: list[int], seconds: list[float]) -> float:
    """Return the seconds of a step whose host takes no time, and check them against `queue_moments`."""
    launches = [0.0] * len(roles)
    length = simulate_queue(seconds, launches, (), FREE, roles)
    moments = queue_moments(seconds, launches, (), FREE, roles)
    timed = zip(moments, seconds, roles, strict=True)
    ends = [start + kernel_seconds for (_, start), kernel_seconds, role in timed if role != TRAVELS]
    assert max(ends) - moments[0][1] == pytest.approx(length)
    return length


def test_a_copy_that_is_shorter_than_the_computation_costs_nothing() -> None:
    hidden = [COMPUTES, TRAVELS, COMPUTES, 0, COMPUTES]
    assert queue(hidden, [1.0, 1.5, 2.0, 0.0, 1.0]) == pytest.approx(4.0)


def test_the_device_waits_for_a_copy_that_is_longer() -> None:
    waits = [COMPUTES, TRAVELS, COMPUTES, 0, COMPUTES]
    assert queue(waits, [1.0, 3.0, 2.0, 0.0, 1.0]) == pytest.approx(5.0)


def test_copies_go_one_after_the_other_and_an_older_one_is_awaited_alone() -> None:
    two = [COMPUTES, TRAVELS, TRAVELS, 1, COMPUTES]
    assert queue(two, [1.0, 2.0, 2.0, 0.0, 1.0]) == pytest.approx(4.0)
    assert queue([*two[:3], 0, COMPUTES], [1.0, 2.0, 2.0, 0.0, 1.0]) == pytest.approx(6.0)


def test_a_copy_begins_when_what_it_copies_is_computed() -> None:
    assert queue([COMPUTES, TRAVELS, 0], [3.0, 1.0, 0.0]) == pytest.approx(4.0)


def test_a_slow_link_makes_the_step_longer_and_is_named() -> None:
    this, gpu = replace(job("bert"), batch_size=64), find_gpu("h200")
    trace, rates = on_a_gpu(this, "bf16 + host(all)"), rates_for(gpu)
    slow, fast = (
        step_seconds(trace, gpu, batch_size=64, rates=replace(rates, link=link)) for link in (1e8, 1e15)
    )
    assert slow.bound == "link"
    assert fast.bound != "link"
    assert slow.step_seconds > slow.link_seconds > 10 * fast.link_seconds
    assert any(kernel.operator == AWAIT_COPY for kernel in trace.kernels)
    assert not any(kernel.recomputed for kernel in trace.kernels if kernel.operator in COPIES)


# ---- planned ---------------------------------------------------------------------------------------------


def test_a_plan_knows_how_long_the_link_takes() -> None:
    """A candidate recipe is simulated with its copies to the host; its lower bound of seconds leaves them
    out.
    """
    gpu = find_gpu("h200")
    trace = on_a_gpu(deeper(batch_size=64), "bf16 + host(all)")
    slow = replace(gpu, key="no-rates-of-its-own", host_link={"bytes_per_second": 1e9})
    timer = GpuTimers([gpu, slow])
    work = Work(trace.kernels, trace.waits)
    judged = seconds_of(timer, [work])
    assert judged == timer(trace)
    predicted = [step_seconds(trace, one, batch_size=64).step_seconds for one in (gpu, slow)]
    assert judged == pytest.approx(predicted)
    least = timer.simulate(timer.segments(work)).tolist()
    assert least[0] <= judged[0]
    assert least[1] < judged[1] / 2


def test_where_nothing_fits_a_plan_names_it() -> None:
    this = job("bert")
    texts = [*cures(Recipe(), 2 << 30, this, 1 << 30, Fidelity.LEARNS, Kept())]
    assert any("--keep 'host(all)' plans with a technique that makes steps smaller" in text for text in texts)
    kept = Kept(slots={Slot.ACTIVATION_OFFLOAD: (roster.plain(Slot.ACTIVATION_OFFLOAD),)})
    assert not any(
        "host(all)" in text for text in cures(Recipe(), 2 << 30, this, 1 << 30, Fidelity.LEARNS, kept)
    )
    words = {kind.last_resort for kind in roster.techniques() if kind.last_resort}
    assert "host(all)" in words
    assert {str(Recipe.parse(word)) for word in words} == words


@pytest.mark.whole
@pytest.mark.slow
def test_a_plan_that_keeps_it_gives_what_a_prediction_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    this, gpu = deeper(batch_size=64), find_gpu("h200")
    found = plan(this, gpu=gpu, keep=kept("bf16 + host(all)", but="batching"), workers=1)
    assert found.best is not None
    assert found.verified
    predicted = predict(this, found.best.recipe, gpu=gpu)
    assert predicted.timing is not None
    assert found.best.step_seconds == pytest.approx(predicted.timing.step_seconds)
