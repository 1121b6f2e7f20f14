"""Optimizers with more state than torch expects, or that update inside the backward pass.

snugfit keeps all of their state, or refuses them by name before a state is lost.
"""

from __future__ import annotations

import functools
import sys
import types
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers

from fitted import classified, killed, model_of, quiet, trained, trainer_of
from small_runs import Killed, assert_same_weights, losses, small_run
from snugfit import accelerate, fit
from snugfit.errors import SnugfitError, UsageError
from snugfit.training.checkpoint.packed_state import pack, unpack
from snugfit.training.run import active_run
from snugfit.training.run.train import train
from test_accelerate import loader_of
from tiers import slow_but

CPU = torch.device("cpu")


# ---- look-alikes of packages ------------------------------------------------------------------------------


class Projector:
    """An object inside a state, as in GaLore and APOLLO."""


class GaLoreAdamW(torch.optim.SGD):
    """An optimizer like galore_torch's: its groups have extra numbers, and each parameter's state has an
    object."""

    def __init__(self, params: Any, lr: float = 1e-3, **numbers: Any) -> None:
        super().__init__(params, lr=lr)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["projector"] = Projector()


class GrokAdamW(torch.optim.Optimizer):
    """An optimizer like grokadamw's: its states are entries of its groups, with parameters as keys."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.99), **numbers: Any) -> None:
        super().__init__(params, {"lr": lr, "beta": betas[0]})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                states = group.setdefault("state", {})
                state = states.setdefault(weight, {"step": 0, "ema": torch.zeros_like(weight)})
                state["step"] += 1
                state["ema"].mul_(group["beta"]).add_(weight.grad)
                weight.add_(state["ema"], alpha=-group["lr"] / state["step"])


class Counting(torch.optim.SGD):
    """An optimizer with a counter in an attribute and a rate in a shared state, both used in each step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.taken = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.taken += 1
        shared: Any = self.state
        shared["shared"] = {"rate": shared.get("shared", {"rate": 1.0})["rate"] * 0.9}
        for group in self.param_groups:
            group["lr"] = shared["shared"]["rate"] / (1 + self.taken)
        super().step()


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install substitutes for the packages from which transformers imports these optimizers."""
    names = ("GaLoreAdamW", "GaLoreAdafactor", "GaLoreAdamW8bit")
    galore = types.SimpleNamespace(**dict.fromkeys(names, GaLoreAdamW))
    monkeypatch.setitem(sys.modules, "galore_torch", galore)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "apollo_torch", types.SimpleNamespace(APOLLOAdamW=GaLoreAdamW))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "grokadamw", types.SimpleNamespace(GrokAdamW=GrokAdamW))  # type: ignore[arg-type]
    for name in ("galore_torch", "apollo_torch", "grokadamw"):
        monkeypatch.setattr(f"transformers.trainer_optimizer.is_{name}_available", lambda: True)


def trainer_under(folder: Path, optim: str = "adamw_torch", **more: Any) -> Any:
    wanted: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "optim": optim}
    return trainer_of(folder, model_of("bert"), classified(22), **{**wanted, **more})


# ---- fit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optim", "why"),
    slow_but(
        [
            ("galore_adamw_layerwise", "during the backward pass"),
            ("apollo_adamw_layerwise", "during the backward pass"),
            ("lomo", "during the backward pass"),
            ("galore_adamw", "objects in its state"),
            ("apollo_adamw", "objects in its state"),
            ("adamw_torch_8bit", "objects in its state"),
        ],
        2,
    ),
)
def test_fit_refuses_these_names_and_changes_nothing(optim: str, why: str, tmp_path: Path) -> None:
    trainer = trainer_under(tmp_path, optim)
    with pytest.raises(UsageError, match=f"{optim}.*{why}"):
        fit(trainer, watch=quiet)
    assert type(trainer) is transformers.Trainer


def test_a_recipe_brings_another_optimizer_and_says_so(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    fit(trainer_under(tmp_path, "galore_adamw"), "plain", watch=told.append)
    assert any("optim was galore_adamw and is now adamw_torch" in event.get("text", "") for event in told)


@pytest.mark.whole
def test_an_optimizer_that_keeps_objects_is_refused_after_the_first_update(tmp_path: Path) -> None:
    """A refusal at the first save would lose many steps."""
    model = model_of("bert")
    given = {"optimizers": (GaLoreAdamW(model.parameters()), None)}
    wanted: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5, "max_steps": 6}
    trainer = fit(trainer_of(tmp_path, model, classified(22), more=given, **wanted), watch=quiet)
    with pytest.raises(SnugfitError, match=r"with the optimizer GaLoreAdamW: .*contains a .*Projector"):
        trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.whole
def test_grokadamw_is_resumed_with_its_states(packages: None, tmp_path: Path) -> None:
    """Its groups have the states by parameter, and a resumed run assigns each one to its parameter."""

    class Dies(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 5:
                raise Killed

    whole = trained(fit(trainer_under(tmp_path / "whole", "grokadamw"), watch=quiet))
    cut = fit(trainer_under(tmp_path / "cut", "grokadamw"), watch=quiet)
    cut.add_callback(Dies())
    killed(cut)
    resumed = trained(fit(trainer_under(tmp_path / "cut", "grokadamw"), watch=quiet), True)
    assert_same_weights(resumed.model, whole.model)


def hooked(model: Any) -> None:
    """Attach the optimizer of torch's tutorial, which updates inside the backward pass."""
    made = {weight: torch.optim.SGD([weight], lr=0.1) for weight in model.parameters()}
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda weight: made[weight].step())


@pytest.mark.whole
@pytest.mark.parametrize("number", ["a number", "no number"])
@pytest.mark.parametrize("front_end", ["fit", "accelerate"])
def test_updates_in_the_backward_pass_are_found_out_in_the_first_step(
    front_end: str, number: str, tmp_path: Path
) -> None:
    """The check also runs for a NaN loss, whose message «no weight was changed» would be false."""
    model = model_of("bert")
    hooked(model)
    if number == "no number":
        model.classifier.register_forward_hook(lambda module, given, out: out * float("nan"))
    if front_end == "fit":
        take_step = fit(trainer_of(tmp_path, model, classified(8)), "plain", watch=quiet).train
    else:
        made = run_by_hand(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.0))
        take_step = functools.partial(made.train, 1)
    with pytest.raises(UsageError, match="backward pass has changed weights"):
        take_step()


@pytest.mark.whole
def test_a_hook_that_only_looks_is_left_alone(tmp_path: Path) -> None:
    model, seen = model_of("bert"), []
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.norm()))
    fit(trainer_of(tmp_path, model, classified(8), max_steps=1), "plain", watch=quiet).train()
    assert seen


# ---- the user's own loop ---------------------------------------------------------------------------------


class ByHand:
    def __init__(self, run: Any) -> None:
        self.run = run

    def train(self, steps: int) -> Any:
        batches = iter(self.run)
        for _ in range(steps):
            self.run.step(next(batches))
        return self.run


def run_by_hand(folder: Path, model: Any, optimizer: Any, **more: Any) -> ByHand:
    return ByHand(accelerate(model, optimizer, loader_of(), "plain", output_dir=folder, watch=quiet, **more))


def test_lbfgs_is_refused_by_name(tmp_path: Path) -> None:
    model = model_of("bert")
    with pytest.raises(UsageError, match=r"LBFGS.step\(\) needs 'closure'"):
        run_by_hand(tmp_path, model, torch.optim.LBFGS(model.parameters()))
    given = {"optimizers": (torch.optim.LBFGS(model.parameters()), None)}
    with pytest.raises(UsageError, match=r"LBFGS.step\(\) needs 'closure'"):
        fit(trainer_of(tmp_path, model, classified(8), more=given), watch=quiet)


@pytest.mark.parametrize("made", ["given", "a function"])
def test_a_schedule_that_needs_a_metric_is_refused_by_name(made: str, tmp_path: Path) -> None:
    model = model_of("bert")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    schedule = plateau(optimizer) if made == "given" else plateau
    with pytest.raises(UsageError, match=r"ReduceLROnPlateau.step\(\) needs 'metrics'"):
        run_by_hand(tmp_path, model, optimizer, scheduler=schedule)


def test_an_optimizer_that_holds_others_is_refused_where_checkpoints_are_kept(tmp_path: Path) -> None:
    model = model_of("bert")
    outer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer.base = torch.optim.SGD(model.parameters(), lr=0.1)  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="contains other optimizers \\(base\\)"):
        run_by_hand(tmp_path, model, outer)
    accelerate(model, outer, loader_of(), "plain", watch=quiet).close()


class Table:
    """A schedule function that contains an array."""

    def __init__(self) -> None:
        self.rates = numpy.linspace(1.0, 0.1, 10)

    def __call__(self, step: int) -> float:
        return float(self.rates[min(step, 9)])


@pytest.mark.whole
def test_numbers_of_numpy_dtypes_arrays_and_own_attributes_are_kept(tmp_path: Path) -> None:
    def made(folder: Path) -> ByHand:
        model = model_of("bert")
        optimizer = Counting(model.parameters(), lr=0.1)
        optimizer.param_groups[0].update(weight_decay=numpy.float32(0.01), kept_in=torch.bfloat16)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, Table())
        return run_by_hand(folder, model, optimizer, scheduler=schedule)

    whole = made(tmp_path / "whole").train(5)
    cut = made(tmp_path / "cut").train(3)
    cut.save()
    cut.close()
    again = made(tmp_path / "cut")
    assert again.run.resume()
    kept = again.run.optimizer.param_groups[0]
    assert type(kept["weight_decay"]) is numpy.float32
    assert kept["kept_in"] is torch.bfloat16
    resumed = again.train(2)
    assert resumed.optimizer.taken == 5
    assert_same_weights(resumed.model, whole.model)
    assert resumed.scheduler.get_last_lr() == whole.scheduler.get_last_lr()
    for run in (whole, resumed):
        run.close()


def test_what_cannot_be_kept_is_refused_before_the_first_step(tmp_path: Path) -> None:
    model = model_of("bert")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["signal"] = lambda: 0.0
    with pytest.raises(SnugfitError, match=r"could be saved with the optimizer SGD: .*function"):
        run_by_hand(tmp_path, model, optimizer)


def test_a_packed_state_names_parameters_and_no_other_tensor_as_a_key() -> None:
    weight, other = torch.nn.Parameter(torch.ones(2)), torch.ones(2)
    tree, tensors = pack({"ema": {weight: 1}, "of": weight, "table": numpy.arange(3)}, [weight])
    again = unpack(tree, tensors, CPU, [weight])
    assert again["of"] is weight
    assert again["ema"][weight] == 1
    assert isinstance(again["table"], numpy.ndarray)
    assert again["table"].tolist() == [0, 1, 2]
    with pytest.raises(SnugfitError, match="a tensor as a key"):
        pack({other: 1}, [weight])
    with pytest.raises(SnugfitError, match="parameter 0"):
        unpack(tree, tensors, CPU)


@pytest.mark.whole
def test_our_own_loop_looks_after_its_first_update_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = active_run.open_run

    def with_objects(*arguments: Any) -> Any:
        state = made(*arguments)
        state.optimizer = GaLoreAdamW(state.model.parameters())
        return state

    monkeypatch.setattr(active_run, "open_run", with_objects)
    with pytest.raises(SnugfitError, match="with the optimizer GaLoreAdamW"):
        train(small_run(tmp_path))
    assert len(losses(tmp_path)) == 0
