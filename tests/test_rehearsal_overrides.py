"""A rehearsal's overrides end with it, affect nothing else in the process, and fail loudly.

The tests run in a process that imported torch and transformers long before any rehearsal.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.utils._foreach_utils as foreach
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import generic

from snugfit.errors import RehearsalError
from snugfit.job.config import check_facts
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.rehearsal.device import overrides
from snugfit.rehearsal.device.overrides import in_force
from snugfit.rehearsal.device.policy import CpuPolicy, CudaPolicy, Policy
from snugfit.rehearsal.record import accumulation
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe
from tiers import crossed, slow_but

FACTS = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 64,
}
REPLACED = (
    generic.maybe_autocast,
    foreach._get_foreach_kernels_supported_devices,
    foreach._get_fused_kernels_supported_devices,
)
"""Functions whose result depends on a device's name, as they are outside a rehearsal."""

POLICIES = [CudaPolicy(), CpuPolicy()]


def job(**changes: Any) -> Job:
    model = Model.from_config(check_facts(FACTS, where="test"), name="bert")
    fields: dict[str, Any] = {"batch_size": 2, "sequence_length": 8} | changes
    return Job(model=model, task=Task.SEQUENCE_CLASSIFICATION, **fields)


def rehearsed(recipe: str = "plain", loop: str = "plain", policy: Policy | None = None) -> None:
    rehearse(job(), Recipe.parse(recipe).setup(), policy or CudaPolicy(), loop=loop)


def bound() -> dict[tuple[str, str], int]:
    """Return every binding of a function of torch or transformers in every loaded module, by identity."""
    return {
        (module_name, name): id(value)
        for module_name, module in list(sys.modules.items())
        if module_name.startswith(("torch", "transformers", "accelerate"))
        for name, value in list(getattr(module, "__dict__", {}).items())
        if isinstance(value, types.FunctionType)
    }


# ---- Python's bindings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", slow_but(["trainer", "plain", "accelerate"], 1))
def test_every_binding_is_what_it_was(loop: str) -> None:
    rehearsed(loop=loop)  # imports the lazy modules
    before, autocast = bound(), torch.autocast.__init__
    rehearsed("bf16 + every_layer", loop=loop)
    after = bound()
    assert {key: after.get(key) for key in before} == before
    assert torch.autocast.__init__ is autocast


def test_a_name_that_held_something_else_for_a_while_is_replaced_afterwards() -> None:
    """A temporary patch of torch must not break later rehearsals of the process."""
    early = types.ModuleType("patched_for_a_while")
    sys.modules[early.__name__] = early
    early.maybe_autocast = lambda *given: None  # type: ignore[attr-defined]
    try:
        with in_force(CudaPolicy()):
            assert early.maybe_autocast("meta") is None
        early.maybe_autocast = generic.maybe_autocast  # type: ignore[attr-defined]
        with in_force(CudaPolicy()):
            assert early.maybe_autocast not in REPLACED
        assert early.maybe_autocast is generic.maybe_autocast
    finally:
        sys.modules.pop(early.__name__, None)


def test_bindings_of_modules_imported_before_and_during_are_replaced_and_put_back() -> None:
    early, late = types.ModuleType("imported_long_before"), types.ModuleType("imported_during")
    early.ours, sys.modules[early.__name__] = generic.maybe_autocast, early  # type: ignore[attr-defined]
    try:
        with in_force(CudaPolicy()):
            assert early.ours not in REPLACED
            late.ours, sys.modules[late.__name__] = generic.maybe_autocast, late  # type: ignore[attr-defined]
            assert foreach._get_foreach_kernels_supported_devices() == ["cuda", "xpu", "meta"]
            replaced = {id(value) for value in vars(early).values()}
        assert early.ours is late.ours is generic.maybe_autocast is REPLACED[0]
        assert not replaced & set(bound().values())
    finally:
        sys.modules.pop(early.__name__, None)
        sys.modules.pop(late.__name__, None)


def test_who_asks_whether_autocast_is_on_is_answered_for_the_gpu() -> None:
    """peft decides by this call to cast its adapters' inputs itself."""
    own = torch.is_autocast_enabled
    with in_force(CudaPolicy()):
        assert not torch.is_autocast_enabled()
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.is_autocast_enabled()
            assert torch.is_autocast_enabled("cuda")
    with in_force(CpuPolicy()), torch.autocast("cpu", torch.bfloat16):
        assert not torch.is_autocast_enabled()
    assert torch.is_autocast_enabled is own


def test_an_error_inside_puts_everything_back() -> None:
    before, linear = bound(), meta_linear_dtype()
    with pytest.raises(ZeroDivisionError), in_force(CudaPolicy()), torch.autocast("cuda", torch.bfloat16):
        _ = 1 / 0
    assert bound() == before
    assert meta_linear_dtype() == linear
    rehearsed()


def test_a_step_that_fails_puts_everything_back() -> None:
    class Fails(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError

    model = Model.from_module(Fails(), {"x": torch.ones(2, 3)})
    before, hooks = bound(), global_hooks()
    with pytest.raises(RehearsalError, match="could not be simulated"):
        rehearse(Job(model=model, task=Task.CUSTOM, batch_size=2), Recipe().setup(), CudaPolicy())
    assert bound() == before
    assert global_hooks() == hooks
    assert gc.isenabled()
    rehearsed()


def meta_linear_dtype() -> torch.dtype:
    x = torch.empty(2, 4, device="meta")
    with torch.autocast("cpu", torch.bfloat16):
        return torch.nn.functional.linear(x, torch.empty(4, 4, device="meta")).dtype


def global_hooks() -> int:
    from torch.nn.modules import module

    return len(module._global_forward_hooks) + len(module._global_forward_pre_hooks)


def test_rehearsals_do_not_nest() -> None:
    with in_force(CudaPolicy()):
        with pytest.raises(RehearsalError, match="Only one can run"), in_force(CudaPolicy()):
            pass
        with pytest.raises(RehearsalError, match="Only one can run"):
            rehearsed()
    rehearsed()


# ---- other work of the process -------------------------------------------------------------------------


def on_the_cpu() -> list[torch.Tensor]:
    """Run real work on the CPU, with gradients, through everything that a rehearsal overrides."""
    torch.manual_seed(3)
    x = torch.randn(2, 2, 8, 16, requires_grad=True)
    weight = torch.randn(16, 16, requires_grad=True)
    attention = torch.nn.functional.scaled_dot_product_attention
    with torch.autocast("cpu", torch.bfloat16):
        low = torch.nn.functional.linear(x, weight)
        cached = torch.nn.functional.linear(x, weight)
        wide = torch.softmax(low, -1)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    results = [
        low,
        cached,
        wide,
        torch.dropout(x, 0.5, True),
        attention(x, x, x),
        attention(x, x, x, attn_mask=mask),
        attention(x, x, x, dropout_p=0.5),
        torch.log_softmax(x.half(), -1, dtype=torch.float32),
        torch.nn.functional.rms_norm(x, (16,)),
        torch.nn.functional.layer_norm(x, (16,)),
    ]
    sum(result.float().sum() for result in results).backward()  # type: ignore[union-attr]
    assert x.grad is not None
    assert weight.grad is not None
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    return [result.detach() for result in (*results, x.grad, weight.grad, weight)]


@pytest.mark.whole
@pytest.mark.parametrize("policy", POLICIES, ids=["cuda", "cpu"])
def test_real_work_on_the_cpu_is_the_same_bit_for_bit_during_and_after(policy: Policy) -> None:
    before = on_the_cpu()
    with in_force(policy):
        during = on_the_cpu()
    after = on_the_cpu()
    for others in (during, after):
        assert [one.dtype for one in others] == [one.dtype for one in before]
        assert all(torch.equal(one, other) for one, other in zip(before, others, strict=True))


def test_meta_tensors_behave_as_before_afterwards() -> None:
    def kinds() -> list[str]:
        x = torch.empty(2, 2, 8, 16, device="meta", requires_grad=True)
        attention = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        return [str(type(one.grad_fn)) for one in (torch.dropout(x, 0.5, True), attention)]

    before = kinds()
    with in_force(CudaPolicy()):
        assert kinds() != before
    assert kinds() == before
    assert meta_linear_dtype() in (torch.float32, torch.bfloat16)


def generators() -> Iterator[Any]:
    """Return the states of every random generator that a rehearsal could reach."""
    yield torch.get_rng_state().tolist()
    yield random.getstate()
    name, keys, *rest = numpy.random.get_state()
    yield (name, keys.tolist(), *rest)


@pytest.mark.parametrize("loop", slow_but(["trainer", "plain", "accelerate"], 1))
def test_random_numbers_go_on_as_if_nothing_had_been(loop: str) -> None:
    torch.manual_seed(11)
    random.seed(12)
    numpy.random.seed(13)
    before = list(generators())
    rehearsed("every_layer", loop=loop)
    assert list(generators()) == before


def settings() -> dict[str, Any]:
    """Return the process-wide switches of torch."""
    return {
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "gradients": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "tf32": torch.backends.cuda.matmul.fp32_precision,
        "collector": gc.isenabled(),
        "warnings": list(warnings.filters),
        "hooks": global_hooks(),
        "environment": dict(os.environ),
        "modes": torch._C._len_torch_dispatch_stack(),
    }


@pytest.mark.parametrize(
    ("loop", "recipe"),
    crossed(["plain", "accelerate", "trainer"], ["plain", "fp16 + tf32", "bf16 + every_layer + adafactor"]),
)
def test_switches_of_the_process_are_left_as_they_were(recipe: str, loop: str) -> None:
    rehearsed(recipe, loop)
    before = settings()
    rehearsed(recipe, loop)
    assert settings() == before


def test_the_collector_stays_off_where_it_was_off() -> None:
    gc.disable()
    try:
        rehearsed()
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.whole
@pytest.mark.parametrize("loop", slow_but(["trainer", "accelerate"], 1))
def test_a_live_accelerator_is_what_it_was(loop: str) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    classes = (PartialState, AcceleratorState, GradientState)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    before = [dict(each._shared_state) for each in classes]
    try:
        rehearsed("bf16", loop)
        assert [dict(each._shared_state) for each in classes] == before
        assert accelerator.device == torch.device("cpu")
        assert accelerator.gradient_accumulation_steps == 3
        model, optimizer = accelerator.prepare(
            model := torch.nn.Linear(2, 2), torch.optim.SGD(model.parameters(), lr=0.1)
        )
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
    finally:
        for each in classes:
            each._shared_state.clear()


@pytest.mark.parametrize("value", [None, "cpu"])
def test_the_environment_is_what_it_was(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
    else:
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", value)
    rehearsed(loop="accelerate")
    assert os.environ.get("ACCELERATE_TORCH_DEVICE") == value


class Own(torch.nn.Module):
    """A user's own model."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.drop = torch.nn.Dropout(0.1)
        self.second = torch.nn.Linear(16, 1)
        self.register_buffer("steps", torch.zeros(3))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.second(self.drop(torch.relu(self.first(x)))).mean()
        return out


@pytest.mark.parametrize("recipe", ["plain", "bf16_pure", "lora(targets=first|second)"])
def test_a_user_s_own_model_is_not_touched(recipe: str) -> None:
    module = Own().eval()
    module(torch.ones(1, 8)).backward()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    gradients = {name: value.grad for name, value in module.named_parameters()}
    identities = {name: id(value) for name, value in module.named_parameters()}
    model = Model.from_module(module, {"x": torch.ones(2, 8)})
    this = Job(model=model, task=Task.CUSTOM, batch_size=4)
    trace = rehearse(this, Recipe.parse(recipe).setup(), CudaPolicy())
    assert trace.peak()[0] > 0
    assert module.calls == 1
    assert not module.training
    assert {name: id(value) for name, value in module.named_parameters()} == identities
    assert all(value.device.type == "cpu" for value in module.state_dict().values())
    assert all(torch.equal(state[name], value) for name, value in module.state_dict().items())
    assert all(value.grad is gradients[name] for name, value in module.named_parameters())
    assert all(value.requires_grad for value in module.parameters())


# ---- a torch that breaks an assumption -----------------------------------------------------------------


def broken(breaks: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the error of a rehearsal under a changed torch, and check that all bindings are restored."""
    before = bound()
    with monkeypatch.context() as patch:
        patch.setattr(overrides, "_PROBED", set())  # as in a new process
        breaks(patch)
        with pytest.raises(RehearsalError) as told:
            rehearsed()
    assert bound() == before
    rehearsed()
    return str(told.value)


def no_get_kernel(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(torch.library, "get_kernel")


def deaf_get_kernel(patch: pytest.MonkeyPatch) -> None:
    def refuses(*arguments: Any) -> Any:
        raise RuntimeError("no kernel")

    patch.setattr(torch.library, "get_kernel", refuses)


def deaf_library(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.library.Library, "impl", lambda *arguments, **keywords: None)


def no_foreach_list(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(foreach, "_get_foreach_kernels_supported_devices")


def deaf_bindings(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(overrides, "_rebind", lambda replacements: None)


def no_maybe_autocast(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(generic, "maybe_autocast")


def other_counts(patch: pytest.MonkeyPatch) -> None:
    accumulation.sole_owner.cache_clear()
    patch.setattr(accumulation, "_use_counts", lambda arguments: accumulation.UseCounts(1, 1, 1))


def no_counts(patch: pytest.MonkeyPatch) -> None:
    accumulation.sole_owner.cache_clear()
    patch.delattr(torch._C, "_storage_Use_Count")


@pytest.mark.parametrize(
    "breaks",
    [
        no_get_kernel,
        deaf_get_kernel,
        deaf_library,
        no_foreach_list,
        deaf_bindings,
        no_maybe_autocast,
        other_counts,
        no_counts,
    ],
    ids=lambda breaks: breaks.__name__,
)
def test_an_assumption_that_breaks_is_told(
    breaks: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = broken(breaks, monkeypatch)
    assert f"torch {torch.__version__}" in told


def test_a_gradient_that_python_holds_is_not_written_to() -> None:
    """A backward in Python that adds out of place creates a new tensor, also in the trace."""

    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            first = gradient * 1
            both = first + gradient * 3
            return both * first

    class Uses(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = Doubles.apply(self.weight * x.sum()).sum()
            return out

    model = Model.from_module(Uses(), {"x": torch.ones(2, 3)})
    trace = rehearse(Job(model=model, task=Task.CUSTOM, batch_size=2), Recipe().setup(), CudaPolicy())
    added = [block for block in trace.blocks if block.operator == "aten::add" and block.phase == "backward"]
    assert [block.nbytes for block in added if block.nbytes == 4000]


def test_the_probe_runs_for_every_policy() -> None:
    for policy in POLICIES:
        with in_force(policy):
            overrides._probe(policy)


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_math_attention_repeats_heads_only_where_several_share_one() -> None:
    """`pre_process_group_query_attention_input` returns early when all have the same number of heads."""
    attention = torch.nn.functional.scaled_dot_product_attention

    def operators(heads: int, *, grouped: bool) -> list[str]:
        query, key = (torch.empty(2, each, 8, 6, device="meta") for each in (4, heads))
        with in_force(CudaPolicy()) as notes, _Names() as names:
            attention(query, key, key, enable_gqa=grouped)
        assert notes.attention == ["math"]
        return names.seen

    assert operators(4, grouped=True) == operators(4, grouped=False)
    assert len(operators(2, grouped=True)) > len(operators(4, grouped=True))
