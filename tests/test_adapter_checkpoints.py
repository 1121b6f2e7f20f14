"""Checkpoints of models with adapters hold every adapter and every trained weight, in every front-end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from fitted import killed, losses_of, model_of, padded, quiet, spoken, trained, trainer_of
from small_runs import CPU, small_run
from snugfit import accelerate, fit
from snugfit.errors import SnugfitError
from snugfit.training.checkpoint.staging import Staging
from snugfit.training.checkpoint.weights import load_weights, weights_of
from snugfit.training.run.train import train
from test_accelerate import go
from test_fit_keeping import At, die
from tiers import slow_but

pytestmark = pytest.mark.whole

TARGETS = {"target_modules": ["q_proj", "v_proj"]}
PROMPT = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}

Adapt = Callable[[Any], Any]


def lora(**more: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, **TARGETS, **more})


def with_peft(config: Callable[[], Any], **more: Any) -> Adapt:
    return lambda model: peft.get_peft_model(model, config(), **more)


def second_is_active(model: Any) -> Any:
    model = peft.get_peft_model(model, lora())
    model.add_adapter("second", lora(r=2))
    model.set_adapter("second")
    return model


def base_trains_too(model: Any) -> Any:
    model = peft.get_peft_model(model, lora())
    for name, weight in model.named_parameters():
        if "norm" in name or "embed_tokens" in name:
            weight.requires_grad_(True)
    return model


def by_transformers(model: Any) -> Any:
    model.add_adapter(lora())
    return model


def two_by_transformers(model: Any) -> Any:
    model.add_adapter(lora(r=2), adapter_name="one")
    model.add_adapter(lora(), adapter_name="two")
    model.set_adapter(["one", "two"])
    model.model.norm.weight.requires_grad_(True)
    return model


KINDS: dict[str, Adapt] = {
    "second is active": second_is_active,
    "base trains too": base_trains_too,
    "two by transformers": two_by_transformers,
}
MORE_KINDS: dict[str, Adapt] = {
    "by transformers": by_transformers,
    "another name": with_peft(lora, adapter_name="mine"),
    "dora and a head": with_peft(lambda: lora(use_dora=True, lora_dropout=0.2, modules_to_save=["lm_head"])),
    "pissa": with_peft(lambda: lora(init_lora_weights="pissa")),
    "biases": with_peft(lambda: lora(bias="all")),
    "tokens": with_peft(lambda: lora(trainable_token_indices=[1, 2])),
    "vera": with_peft(lambda: peft.VeraConfig(r=4, target_modules=["q_proj"], save_projection=False)),
    "ia3": with_peft(lambda: peft.IA3Config(target_modules=["v_proj"], feedforward_modules=[])),
    "prompt": with_peft(lambda: peft.PromptTuningConfig(**PROMPT)),
    "prompt encoder": with_peft(lambda: peft.PromptEncoderConfig(encoder_hidden_size=32, **PROMPT)),
    "prefix": with_peft(lambda: peft.PrefixTuningConfig(**PROMPT)),
    "oft": with_peft(lambda: peft.OFTConfig(r=0, oft_block_size=4, **TARGETS)),
    "norms": with_peft(lambda: peft.LNTuningConfig(target_modules=["input_layernorm"])),
}


def adapted(adapt: Adapt, seed: int = 1) -> Any:
    """Return the same base with adapters that another seed initialises differently."""
    model = model_of("llama")
    torch.manual_seed(seed)
    return adapt(model)


def fitted(adapt: Adapt, folder: Path, *, seed: int = 1, dies: bool = False, **more: Any) -> Any:
    trainer = trainer_of(
        folder,
        adapted(adapt, seed),
        spoken(22),
        save_strategy="steps",
        save_steps=2,
        learning_rate=1e-2,
        **more,
    )
    if dies:
        trainer.add_callback(At(3, die))
    return fit(trainer, "micro_batches(2)", watch=quiet)


def by_hand(adapt: Adapt, folder: Path, *, seed: int = 1, stop: int = 0, resume: bool = False) -> Any:
    model = adapted(adapt, seed).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    torch.manual_seed(5)
    loader = torch.utils.data.DataLoader(spoken(12), batch_size=4, shuffle=True, collate_fn=padded)
    run = accelerate(model, optimizer, loader, "plain", output_dir=folder, watch=quiet)
    assert not resume or run.resume()
    go(run, 1, save=2, stop=stop)
    return model


def keep(model: Any, folder: Path) -> None:
    """Write the weights of this model as a checkpoint does."""
    weights_of(model).with_copies(Staging(CPU).copy).write(folder)


def assert_same(one: Any, another: Any) -> None:
    """Assert equality of every parameter and buffer, also of those without an entry in `state_dict`."""
    ours = {**dict(one.named_parameters()), **dict(one.named_buffers())}
    theirs = {**dict(another.named_parameters()), **dict(another.named_buffers())}
    assert ours.keys() == theirs.keys()
    assert not [name for name, value in ours.items() if not torch.equal(value, theirs[name])]


@pytest.mark.parametrize("kind", slow_but([*KINDS, *MORE_KINDS], lambda kind: kind == "two by transformers"))
def test_a_killed_run_with_adapters_goes_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """The resumed run starts with differently initialised adapters. peft can load each saved adapter."""
    adapt = (KINDS | MORE_KINDS)[kind]
    whole = trained(fitted(adapt, tmp_path / "whole"))
    killed(fitted(adapt, tmp_path / "cut", dies=True))
    resumed = trained(fitted(adapt, tmp_path / "cut", seed=2), True)
    assert_same(whole.model, resumed.model)
    assert losses_of(whole) == losses_of(resumed)
    assert_peft_loads(tmp_path / "cut" / "checkpoint-4", resumed.model)


def assert_peft_loads(folder: Path, model: Any) -> None:
    """Assert that `from_pretrained` loads each adapter, and the base weights that were trained with it. For a
    prompt encoder, peft saves only the resulting prompt."""
    prefix = "" if hasattr(model, "get_base_model") else "base_model.model."
    ours = {f"{prefix}{name}": weight for name, weight in model.named_parameters()}
    for name in model.peft_config:
        inner = folder if name == "default" else folder / name
        again = peft.PeftModel.from_pretrained(model_of("llama"), inner, adapter_name=name)
        theirs = dict(again.named_parameters())
        wrong = [
            key
            for key, value in theirs.items()
            if key in ours and not torch.equal(value, ours[key]) and not key.startswith("prompt_encoder")
        ]
        assert not [key for key in wrong if name in key or model.peft_config.keys() <= {name}]


@pytest.mark.parametrize(
    "kind", slow_but(["second is active", "another name", "base trains too", "two by transformers"], 1)
)
def test_by_hand_too(kind: str, tmp_path: Path) -> None:
    adapt = (KINDS | MORE_KINDS)[kind]
    whole = by_hand(adapt, tmp_path / "whole")
    by_hand(adapt, tmp_path / "cut", stop=2)
    assert_same(whole, by_hand(adapt, tmp_path / "cut", seed=2, resume=True))


def test_the_best_model_is_all_of_it(tmp_path: Path) -> None:
    """The Trainer would load one adapter, and leave the trained base at the last step."""
    trainer = fitted(base_trains_too, tmp_path)
    trainer.eval_dataset = spoken(8)
    for name, value in {
        "load_best_model_at_end": True, "eval_strategy": transformers.IntervalStrategy.STEPS, "eval_steps": 2,
        "metric_for_best_model": "loss", "greater_is_better": True,
    }.items():  # fmt: skip
        setattr(trainer.args, name, value)
    trainer.train()
    best = adapted(base_trains_too, 3)
    load_weights(best, Path(trainer.state.best_model_checkpoint))
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2"), "the loss falls"
    assert_same(best, trainer.model)


class Normed(torch.nn.Module):
    """A running mean beside a matrix, and a temperature that is not in `state_dict`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4)
        self.register_buffer("temperature", torch.ones(()), persistent=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.temperature += 1
        return {"loss": (self.linear(self.norm(x)) * self.temperature).square().mean()}


def test_buffers_of_the_base_are_kept_when_they_change(tmp_path: Path) -> None:
    def adapted_norm(seed: int) -> Any:
        torch.manual_seed(0)
        model = Normed()
        torch.manual_seed(seed)
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["linear"]))

    first, again = adapted_norm(1), adapted_norm(2)
    weights_of(first)
    first(x=torch.randn(8, 4))
    keep(first, tmp_path)
    load_weights(again, tmp_path)
    assert_same(first, again)


def test_what_adalora_has_seen_of_its_ranks_is_kept(tmp_path: Path) -> None:
    """AdaLoRA stores the importance of each rank outside of the model, and masks by it."""

    def ranked(seed: int) -> Any:
        config = peft.AdaLoraConfig(
            init_r=6, target_r=2, tinit=0, tfinal=1, deltaT=1, total_step=6, **TARGETS
        )
        return adapted(lambda model: peft.get_peft_model(model, config), seed)

    def step(model: Any, number: int) -> None:
        model(**padded(spoken(4))).loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.grad is not None:
                    weight.sub_(0.1 * weight.grad)
        model.base_model.update_and_allocate(number)
        model.zero_grad()

    first, again = ranked(1), ranked(2)
    keep(first, tmp_path)  # the state at the start of a run
    keep(again, tmp_path)
    for number in (1, 2, 3):
        step(first, number)
    keep(first, tmp_path)
    load_weights(again, tmp_path)
    for number in (4, 5):
        step(first, number)
        step(again, number)
    assert_same(first, again)


def test_what_no_checkpoint_can_hold_is_refused_at_the_start(tmp_path: Path) -> None:
    def prompts(model: Any) -> Any:
        config = peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=1, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
        model.add_adapter("second", config)
        return model

    with pytest.raises(SnugfitError, match="several adapters, one of them an adaption prompt"):
        by_hand(prompts, tmp_path / "hand")
    trainer = fitted(prompts, tmp_path / "fit")
    with pytest.raises(SnugfitError, match="several adapters, one of them an adaption prompt"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_frozen_weights_of_any_kind_are_told_apart(tmp_path: Path) -> None:
    """Half precision, an odd number of bytes, complex numbers; a tensor without readable bits is skipped."""

    class Odd(torch.nn.Module):
        """Frozen tensors of several dtypes beside a matrix that is adapted."""

        def __init__(self, value: float) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            for number, dtype in enumerate((torch.bfloat16, torch.uint8, torch.complex64, torch.bool)):
                self.register_buffer(f"odd_{number}", torch.full((3,), value).to(dtype))
            sparse = torch.eye(3).to_sparse()
            self.sparse = torch.nn.Parameter(sparse, requires_grad=False)

    def odd(value: float) -> Any:
        torch.manual_seed(0)
        return peft.get_peft_model(Odd(value), peft.LoraConfig(r=2, target_modules=["linear"]))

    keep(odd(1.0), tmp_path)
    load_weights(odd(1.0), tmp_path)
    with pytest.raises(SnugfitError, match=r"other frozen weights: .*odd_0 and 3 more"):
        load_weights(odd(0.0), tmp_path)


def another_base(model: Any) -> Any:
    model.model.layers[1].mlp.up_proj.weight.data *= 2
    return peft.get_peft_model(model, lora())


REFUSALS: list[tuple[Adapt, Adapt, str]] = [
    (with_peft(lora), another_base, "started with other frozen weights: .*up_proj"),
    (second_is_active, with_peft(lora), "contains .*second.* which this model does not have"),
    (with_peft(lora), second_is_active, "does not contain .*second"),
    (with_peft(lora), base_trains_too, "does not contain .*embed_tokens.* and 5 more, which train"),
]


@pytest.mark.parametrize(("before", "now", "told"), REFUSALS)
def test_another_models_weights_are_refused_by_name(
    before: Adapt, now: Adapt, told: str, tmp_path: Path
) -> None:
    keep(adapted(before), tmp_path)
    with pytest.raises(SnugfitError, match=told):
        load_weights(adapted(now), tmp_path)


def test_a_folder_of_peft_alone_is_no_checkpoint(tmp_path: Path) -> None:
    """It may lack other weights that train."""
    adapted(with_peft(lora)).save_pretrained(tmp_path)
    with pytest.raises(SnugfitError, match=r"has adapters and no model_state\.json"):
        load_weights(adapted(with_peft(lora), 2), tmp_path)


def test_our_own_loop_keeps_the_same_files(tmp_path: Path) -> None:
    train(small_run(tmp_path, "lora", max_steps=1))
    files = {path.name for path in (tmp_path / "checkpoint-1").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "model_state.json"} <= files
