"""Options of single techniques, with equal effects on shapes and on data."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch

from awkward_autograd import CallsOneBlockOften
from awkward_modules import numbers
from optimizer_steps import resolve, shapes_of, three_steps
from small_models import small_job
from snugfit.errors import RecipeError
from snugfit.hub_kernels import no_hub_kernels
from snugfit.job.config import check_facts
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.prediction.predict import predict
from snugfit.step.build import build_model
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Call, Setup
from snugfit.techniques.technique import Slot


def callables(setup: Setup) -> list[Call]:
    wish = setup.optimizer
    fields = (*vars(setup).values(), wish.factory, wish.prepare, wish.shapes)
    return [call for call in fields if isinstance(call, Call)]


def optimizers() -> list[str]:
    """Return every optimizer of the roster, with each setting that a planner may try."""
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
    if setup.optimizer.weight_decay:
        assert "weight_decay" in inspect.signature(resolve(setup.optimizer.factory)).parameters


def any_setting(technique: type) -> Any:
    import random

    from any_recipe import any_technique

    return any_technique(technique, random.Random(0))


@pytest.mark.parametrize("name", optimizers())
def test_the_hf_trainer_means_the_same_optimizer_by_its_name(name: str) -> None:
    """transformers maps `trainer_name` to a class and arguments that equal the factory's."""
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
    """Mixtral stores its experts in another shape, and peft's table lists Gemma 3 by its text part."""
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
