"""What single techniques ask for, and that what they ask for does on shapes what it does on data."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from awkward_autograd import CallsOneBlockOften
from awkward_modules import numbers
from small_models import small_job
from snugfit.errors import RecipeError
from snugfit.hub_kernels import no_hub_kernels
from snugfit.job.config import check_facts
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.prediction.predict import predict
from snugfit.rehearsal.device.policy import CpuPolicy, CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import PREFETCH
from snugfit.step.bitsandbytes_optimizers import keep_embeddings
from snugfit.step.build import build_model
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Call, OptimizerWish, Setup
from snugfit.techniques.technique import Slot

QMAP_BYTES = 256 * 4
"""bitsandbytes' code book: 256 fp32 values."""


def callables(setup: Setup) -> list[Call]:
    wish = setup.optimizer
    fields = (*vars(setup).values(), wish.factory, wish.prepare, wish.shapes)
    return [call for call in fields if isinstance(call, Call)]


def resolve(call: Call) -> Callable[..., Any]:
    module, _, name = call.path.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def optimizers() -> list[str]:
    """Every optimizer of the roster, at each setting that a planner may try."""
    found = [technique for technique in roster.techniques() if technique.slot is Slot.OPTIMIZER]
    return [str(setting) for technique in found for setting in technique.settings(small_job("bert", 2))]


@pytest.mark.parametrize("technique", roster.techniques(), ids=lambda technique: technique.name)
def test_wished_callables_exist_and_take_their_arguments_by_name(technique: type) -> None:
    if lacking := technique.missing_package():
        pytest.skip(lacking)
    setup = any_setting(technique).install(Setup())
    for call in callables(setup):
        assert callable(resolve(call))
        assert all(isinstance(name, str) for name in call.arguments)


def any_setting(technique: type) -> Any:
    import random

    from any_recipe import any_technique

    return any_technique(technique, random.Random(0))


@pytest.mark.parametrize("name", optimizers())
def test_the_hf_trainer_means_the_same_optimizer_by_its_name(name: str) -> None:
    """A wish's `trainer_name` gives, in transformers, a class and arguments equal to the factory's."""
    from transformers import TrainingArguments
    from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS, OptimizerContext

    wish = Recipe.parse(name).setup().optimizer
    if wish.trainer_name is None:
        pytest.skip(f"the HF Trainer has no name for {name}")
    if lacking := Recipe.parse(name)["optimizer"].missing_package():
        pytest.skip(lacking)
    import inspect

    known = set(inspect.signature(OptimizerContext).parameters)
    values = {
        "args": TrainingArguments(output_dir="unused", optim=wish.trainer_name, report_to=[]),
        "model": None,
        "optimizer_kwargs": {},
        "adam_kwargs": {},
        "optim_args": {},
    }
    context = OptimizerContext(**{key: value for key, value in values.items() if key in known})
    cls, theirs = _OPTIMIZER_HANDLERS[wish.trainer_name](context)
    parameter = torch.nn.Parameter(torch.ones(64, 64))
    ours = resolve(wish.factory)([parameter], lr=1e-3, **wish.factory.arguments)
    named = cls([parameter], lr=1e-3, **theirs)
    assert ours.__class__.__name__.startswith(cls.__name__)
    ignored = {"params", "foreach", "betas", "weight_decay"}
    left, right = ours.param_groups[0], named.param_groups[0]
    assert {k: v for k, v in left.items() if k not in ignored} == {
        k: v for k, v in right.items() if k not in ignored
    }
    for key in ("optim_bits", "min_8bit_size"):
        assert getattr(getattr(ours, "args", None), key, None) == getattr(
            getattr(named, "args", None), key, None
        )


class Births(TorchDispatchMode):
    """Storages that operators give birth to, as (operator, bytes), in order; reads of a value give 1."""

    def __init__(self) -> None:
        super().__init__()
        self.born: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        known = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in known:
                self.born.append((str(func), leaf.untyped_storage().nbytes()))
        if func.namespace == "bitsandbytes":
            self.born.append((str(func), 0))
        return out


@contextmanager
def shapes_of(wish: OptimizerWish) -> Iterator[None]:
    if wish.shapes is None:
        yield
        return
    with resolve(wish.shapes)(**wish.shapes.arguments):
        yield


def small_model(device: str) -> torch.nn.Module:
    """Tables and matrices on both sides of bitsandbytes' 4,096 elements, with blocks that are not full."""
    torch.manual_seed(0)
    with torch.device(device):
        return torch.nn.ModuleDict(
            {
                "table": torch.nn.Embedding(101, 67),
                "small_table": torch.nn.Embedding(4, 8),
                "wide": torch.nn.Linear(67, 129),
                "edge": torch.nn.Linear(64, 64),
                "below": torch.nn.Linear(63, 65),
                "norm": torch.nn.LayerNorm(67),
            }
        )


def three_steps(text: str, device: str) -> tuple[list[list[tuple[str, int]]], dict[str, Any]]:
    """Births of three optimizer steps, and the state afterwards: shape and dtype by parameter and name."""
    wish = Recipe.parse(text).setup().optimizer
    model = small_model(device)
    if wish.prepare:
        resolve(wish.prepare)(model, **wish.prepare.arguments)
    optimizer = resolve(wish.factory)(list(model.parameters()), lr=1e-3, **wish.factory.arguments)
    steps = []
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with Births() as births:
            optimizer.step()
        steps.append(births.born)
    state = {
        f"{name}.{key}": (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    return steps, state


@pytest.mark.whole
@pytest.mark.parametrize("text", [name for name in optimizers() if name != "adamw_fused"])
def test_an_optimizer_on_shapes_keeps_the_state_it_keeps_on_data(text: str) -> None:
    if lacking := Recipe.parse(text)["optimizer"].missing_package():
        pytest.skip(lacking)
    _, real = three_steps(text, "cpu")
    with shapes_of(Recipe.parse(text).setup().optimizer):
        _, on_shapes = three_steps(text, "meta")
    assert on_shapes == real
    assert real or text.startswith("sgd")


@pytest.mark.whole
@pytest.mark.parametrize("embeddings", [32, 8])
def test_adamw_8bit_on_shapes_gives_birth_as_on_data(embeddings: int) -> None:
    """Step by step and in order. A device gets its code books by a copy; a CPU has them there already."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    text = f"adamw_8bit({embeddings})"
    real, state = three_steps(text, "cpu")
    with shapes_of(Recipe.parse(text).setup().optimizer):
        on_shapes, _ = three_steps(text, "meta")
    copies = [("aten._to_copy.default", QMAP_BYTES)] * 2
    first = [birth for birth in on_shapes[0] if birth != copies[0]]
    assert [birth for birth in on_shapes[0] if birth == copies[0]] == copies
    assert [first, *on_shapes[1:]] == real
    assert all(size == 0 for step in real[1:] for _, size in step), "later steps give birth to nothing"
    table = torch.float32 if embeddings == 32 else torch.uint8
    assert state["table.weight.state1"] == ((101, 67), table)
    assert state["wide.weight.state2"] == ((129, 67), torch.uint8)
    assert state["wide.weight.absmax1"] == ((-(-129 * 67 // 256),), torch.float32)
    assert state["edge.weight.state1"] == ((64, 64), torch.uint8)
    assert state["below.weight.state1"] == ((65, 63), torch.float32)
    assert state["small_table.weight.state1"] == ((4, 8), torch.float32)


def test_adamw_8bit_waits_for_the_device_after_each_parameter() -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    job = small_job("bert", layers=1)
    trace = rehearse(job, Recipe.parse("adamw_8bit").setup(), CudaPolicy())
    updates = [kernel for kernel in trace.kernels if kernel.operator.startswith("bitsandbytes::")]
    assert trace.syncs == len(updates) > 20
    assert all(kernel.views < 2 for kernel in updates[1:]), "waiting costs the host no views"
    assert rehearse(job, Recipe.parse("adamw").setup(), CudaPolicy()).syncs == 0


@pytest.mark.parametrize("bits", [32, 8])
def test_paged_states_are_no_part_of_a_gpu_s_trace_and_are_told(bits: int) -> None:
    """On a CPU bitsandbytes makes ordinary ones of them."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    job = small_job("bert", layers=1, facts={"hidden_size": 320, "intermediate_size": 320})
    large = 4 * 320 * 320  # attention's four matrices have 102,400 elements each
    plain, paged = (
        rehearse(job, Recipe.parse(name).setup(), CudaPolicy())
        for name in ("adamw" if bits == 32 else "adamw_8bit", f"paged_adamw({bits})")
    )
    [sentence] = [doubt for doubt in paged.doubts if "managed memory" in doubt]
    told = int(sentence.split()[0].replace(",", ""))
    assert told >= 2 * large * bits // 8
    assert states(plain) - states(paged) == pytest.approx(told, abs=4096)
    pages = [
        len([block for block in trace.blocks if block.kind == "optimizer states"]) for trace in (plain, paged)
    ]
    asked_for = [kernel.operator for trace in (plain, paged) for kernel in trace.kernels].count(PREFETCH)
    assert asked_for == pages[0] - pages[1] >= 8
    on_cpu = rehearse(job, Recipe.parse(f"paged_adamw({bits})").setup(), CpuPolicy())
    assert states(on_cpu) == pytest.approx(states(plain), abs=4096)
    assert not [doubt for doubt in on_cpu.doubts if "managed memory" in doubt]


def test_paged_states_count_on_the_gpu_while_there_is_room_and_never_against_it() -> None:
    """NVML has them in steps of 128 MiB (results/accuracy-seed2611.json)."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    job = small_job("bert", layers=2, facts={"hidden_size": 1280, "intermediate_size": 5120})
    with_room = predict(job, "paged_adamw", gpu="h200")
    shape = with_room.footprint
    assert shape.managed_bytes == 3 * (128 << 20), "329 MB of moments"
    assert shape.nvml_bytes == shape.reserved_bytes + shape.context_bytes + shape.managed_bytes
    assert with_room.needed_bytes == shape.nvml_bytes - shape.managed_bytes
    little = with_room.needed_bytes + 5
    without = predict(job, "paged_adamw", gpu="h200", memory_bytes=little)
    assert (without.fits, without.footprint.managed_bytes) == (True, 5)
    assert not predict(job, "adamw", gpu="h200").footprint.managed_bytes


def states(trace: Any) -> int:
    return sum(block.nbytes for block in trace.blocks if block.kind == "optimizer states")


@pytest.mark.whole
def test_adamw_8bit_leaves_nothing_behind() -> None:
    """Overrides of one run do not reach the next, and a rehearsal's none of the process's own."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from bitsandbytes.optim import GlobalOptimManager

    three_steps("adamw_8bit", "cpu")
    _, state = three_steps("adamw_8bit(8)", "cpu")
    assert state["table.weight.state1"][1] is torch.uint8
    own = GlobalOptimManager.get_instance()
    with shapes_of(Recipe.parse("adamw_8bit").setup().optimizer):
        three_steps("adamw_8bit", "meta")
        assert GlobalOptimManager.get_instance() is not own
    assert GlobalOptimManager.get_instance() is own
    with pytest.raises(ZeroDivisionError), shapes_of(Recipe.parse("adamw_8bit").setup().optimizer):
        raise ZeroDivisionError
    assert GlobalOptimManager.get_instance() is own


def test_what_bitsandbytes_holds_goes_with_the_model() -> None:
    """Its manager would keep an embedding table and its gradient on the GPU when training is over."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from bitsandbytes.functional import GlobalPageManager
    from bitsandbytes.optim import GlobalOptimManager

    model = torch.nn.Sequential(torch.nn.Embedding(4, 2))
    table = weakref.ref(model[0])
    keep_embeddings(model, bits=32)
    manager, pages = GlobalOptimManager._instance, GlobalPageManager._instance
    assert manager.module_weight_config_triple[0][0] is table()
    del model, manager
    gc.collect()
    assert table() is None
    assert GlobalOptimManager._instance is GlobalPageManager._instance is None
    other = torch.nn.Linear(2, 2)
    keep_embeddings(other, bits=32)
    assert GlobalPageManager._instance is not pages


def test_no_hub_kernels_hides_the_package_and_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    marker = object()
    monkeypatch.setitem(sys.modules, "kernels", marker)
    with no_hub_kernels(), pytest.raises(ImportError):
        import kernels  # noqa: F401
    assert sys.modules["kernels"] is marker
    monkeypatch.delitem(sys.modules, "kernels")
    with no_hub_kernels():
        pass
    assert "kernels" not in sys.modules


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("targets", [None, ("all-linear",), ("query", "key")])
def test_lora_trains_the_adapters_and_the_head_alone(device: str, targets: tuple[str, ...] | None) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    model = adapted("BertForSequenceClassification", device, r=4, targets=targets)
    training = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert {parameter.device.type for parameter in model.parameters()} == {device}
    assert [name for name in training if "lora_" not in name and "classifier" not in name] == []
    assert any("classifier" in name for name in training)
    layers, hidden, wide, rank = 2, 32, 48, 4
    square, up = rank * 2 * hidden, rank * (hidden + wide)
    per_layer = {None: 2 * square, ("query", "key"): 2 * square, ("all-linear",): 4 * square + 2 * up}[
        targets
    ]
    pooler = square if targets == ("all-linear",) else 0
    adapters = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and "lora_" in name
    )
    assert adapters == layers * per_layer + pooler


_SMALL = {
    "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 48,
    "vocab_size": 96, "num_hidden_layers": 2,
}  # fmt: skip
MIXTRAL = {"model_type": "mixtral", **_SMALL, "num_local_experts": 4}
GEMMA3 = {
    "model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **_SMALL, "head_dim": 16},
    "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 1},
}  # fmt: skip


@pytest.mark.parametrize("facts", [MIXTRAL, GEMMA3], ids=lambda facts: facts["model_type"])
def test_lora_finds_pefts_targets_where_peft_itself_does_not_look(facts: dict[str, Any]) -> None:
    """Mixtral's experts are stored in another shape, and Gemma 3 stands in the table by its text part."""
    pytest.importorskip("peft", reason="peft is not installed")
    model = Model.from_config(check_facts(facts, where="test"), name=facts["model_type"])
    job = Job(model=model, task=Task.CAUSAL_LM, sequence_length=16)
    assert not Recipe.parse("lora").check(job)
    built = build_model(job, Recipe.parse("lora").setup(), torch.device("meta"))
    trained = {
        name.split(".lora_")[0].split(".")[-1] for name, p in built.named_parameters() if p.requires_grad
    }
    assert trained == {"q_proj", "v_proj"}
    assert "q_proj" in " ".join(roster.find("lora")().code(job))


def test_lora_adapts_all_linear_layers_of_a_module_of_ones_own() -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    job = Job(model=Model.from_module(CallsOneBlockOften(), numbers()), task=Task.CUSTOM)
    prediction = predict(job, "lora")
    assert any("a module of your own, so all linear layers" in doubt for doubt in prediction.doubts)
    built = build_model(job, Recipe.parse("lora").setup(), torch.device("meta"))
    trained = [name for name, p in built.named_parameters() if p.requires_grad]
    assert len(trained) == 4
    assert all("lora_" in name for name in trained)


def test_lora_says_when_there_is_nothing_to_adapt() -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    with pytest.raises(RecipeError, match=r"^peft finds nothing to adapt in BertForSeq"):
        adapted("BertForSequenceClassification", "meta", r=4, targets=("nothing",))
    with pytest.raises(RecipeError, match="BertForSequenceClassification"):
        adapted("BertForSequenceClassification", "meta", r=4, targets=("q_proj",))


def adapted(class_name: str, device: str, *, r: int, targets: tuple[str, ...] | None) -> torch.nn.Module:
    import transformers

    cls = getattr(transformers, class_name)
    config = cls.config_class(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, vocab_size=100
    )
    lora: Any = roster.find("lora")
    call = lora(r=r, targets=targets).install(Setup()).adapt
    with torch.device(device):
        return resolve(call)(cls(config), **call.arguments)  # type: ignore[no-any-return]
