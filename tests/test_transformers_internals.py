"""Private names of transformers and accelerate in the installed versions.

Each name exists, takes the passed arguments, and is called at the expected places.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import accelerate
import pytest
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState, PartialState
from packaging.version import Version

import snugfit
from fitted import classified, model_of, trainer_of
from snugfit.features.loops.trainer import live_trainer, trainer_class, trainer_hooks
from snugfit.step import transformers_internals as internals

Trainer = transformers.Trainer

METHODS: dict[str, tuple[tuple[str, ...], str]] = {
    "_clip_grad_norm": (("model",), "_run_epoch"),
    "_get_grad_norm": (("model", "grad_norm"), "_run_epoch"),
    "_init_training_state": (("max_steps", "num_update_steps_per_epoch"), "_inner_training_loop"),
    "_run_epoch": (("model", "epoch", "train_dataloader"), "_inner_training_loop"),
    "_maybe_log_save_evaluate": (("tr_loss", "grad_norm", "model"), "_run_epoch"),
    "_save_checkpoint": (("model", "trial"), "_maybe_log_save_evaluate"),
    "_evaluate": (("trial", "ignore_keys_for_eval"), "_maybe_log_save_evaluate"),
    "_load_best_model": ((), "_finalize_training"),
    "_push_from_checkpoint": (("checkpoint_folder",), "_save_checkpoint"),
    "save_model": (("output_dir", "_internal_call"), "_save_checkpoint"),
    "_load_from_checkpoint": (("resume_from_checkpoint", "model"), "train"),
    "_load_optimizer_and_scheduler": (("checkpoint",), "_prepare_for_training"),
    "_load_scaler": (("checkpoint",), "_prepare_for_training"),
    "_load_callback_state": ((), "_init_training_state"),
    "_load_rng_state": (("checkpoint",), "_run_epoch"),
    "_finalize_training": (("trial", "num_train_samples", "start_time"), "_inner_training_loop"),
    "get_batch_samples": (("epoch_iterator", "num_batches", "device"), "_run_epoch"),
    "training_step": (("model", "inputs", "num_items_in_batch"), "_run_epoch"),
    "compute_loss": (("model", "inputs", "return_outputs", "num_items_in_batch"), "training_step"),
    "create_optimizer": (("model",), "create_optimizer_and_scheduler"),
    "get_decay_parameter_names": (("model",), "create_optimizer"),
    "create_accelerator_and_postprocess": ((), "__init__"),
    "store_flos": ((), "_save_checkpoint"),
}
"""Overridden or called methods of `Trainer`, with their parameters and their caller."""

PASSED_BY_NAME = {
    "_run_epoch": {"epoch", "epochs_trained", "steps_trained_in_current_epoch", "train_dataloader"},
    "_maybe_log_save_evaluate": {"learning_rate"},
}
"""Keywords that an override reads from its arguments."""

FIELDS = {
    "_tr_loss": "_inner_training_loop",
    "_total_loss_scalar": "_inner_training_loop",
    "_globalstep_last_logged": "_inner_training_loop",
    "_initial_global_step": "_inner_training_loop",
    "_created_lr_scheduler": "__init__",
    "current_gradient_accumulation_steps": "_run_epoch",
    "_signature_columns": "__init__",
    "_train_batch_size": "__init__",
    "_loss_shifts_labels": "__init__",
}
"""Fields of a trainer that are read or set, and the method that creates each."""

SINCE = {"_initial_global_step": "5.19"}
"""Optional fields that older versions of transformers lack, with the first version that has each."""


@cache
def calls(method: str) -> list[ast.Call]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(Trainer, method))))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_takes_what_we_pass_and_is_called_where_we_rely_on_it(name: str) -> None:
    parameters, caller = METHODS[name]
    taken = list(inspect.signature(getattr(Trainer, name)).parameters)[1:]
    assert tuple(taken[: len(parameters)]) == parameters
    made = [call for call in calls(caller) if ast.unparse(call.func) == f"self.{name}"]
    assert made, f"{caller} no longer calls it"
    keywords = PASSED_BY_NAME.get(name, set())
    assert all(keywords <= {given.arg for given in call.keywords} for call in made)


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_made_where_we_rely_on_it(name: str) -> None:
    if Version(transformers.__version__) < Version(SINCE.get(name, "0")):
        pytest.skip(f"transformers {transformers.__version__} has it not; {SINCE[name]} made it")
    tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(Trainer, FIELDS[name]))))
    targets = [
        ast.unparse(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    assert f"self.{name}" in targets


def test_every_override_and_every_private_field_stands_in_these_tables() -> None:
    """The source of the adapter uses no other private names of a trainer."""
    overridden = {name for name in vars(trainer_class.FittedTrainer) if hasattr(Trainer, name)} - set(
        dir(object)
    )
    assert {name for name in overridden if name[0] == "_" and name[:2] != "__"} <= METHODS.keys()
    private = {
        node.attr
        for module in (internals, live_trainer, trainer_hooks, trainer_class)
        for node in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and ast.unparse(node.value) in ("trainer", "super()")
    }
    assert private | set(live_trainer.LOGGED.values()) <= METHODS.keys() | FIELDS.keys()


def test_an_epoch_skips_batches_by_a_function_of_its_module() -> None:
    """A fitted trainer replaces that function during its epoch."""
    made = [call for call in calls("_run_epoch") if ast.unparse(call.func) == "skip_first_batches"]
    assert [ast.unparse(call.args[0]) for call in made] == ["train_dataloader"]
    assert callable(transformers.trainer.skip_first_batches)


def test_nothing_private_of_a_trainer_is_used_elsewhere() -> None:
    root = Path(snugfit.__file__).parent
    own = {Path(module.__file__) for module in (internals, live_trainer, trainer_hooks, trainer_class)}
    rooms = [root / room for room in ("features/loops", "frontends", "step")]
    for path in (path for room in rooms for path in room.rglob("*.py")):
        if path in own or "tests" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr[0] == "_" != node.attr[1:2]:
                holder = ast.unparse(node.value)
                private = holder.split(".")[-1].lstrip("_") in ("trainer", "accelerator", "AcceleratorState")
                assert not private, f"{path.name}:{node.lineno} {holder}.{node.attr}"


def test_accelerates_state_is_where_we_substitute_it(tmp_path: Path) -> None:
    for kind in (PartialState, AcceleratorState, GradientState):
        assert isinstance(kind._shared_state, dict)
    assert callable(AcceleratorState._reset_state)
    assert "device" in vars(PartialState()) or "device" in PartialState._shared_state
    assert hasattr(transformers.training_args, "is_torch_bf16_gpu_available")
    assert hasattr(accelerate.accelerator, "is_bf16_available")
    assert hasattr(transformers.TrainingArguments, "_setup_devices")
    assert "keep_fp32_wrapper" in inspect.signature(accelerate.Accelerator.unwrap_model).parameters
    assert "accelerator_state" in inspect.getsource(AcceleratedOptimizer.__init__)
    trainer: Any = trainer_of(tmp_path, model_of("bert"), classified(4))
    assert isinstance(trainer.accelerator._dataloaders, list)
    assert trainer.accelerator.dataloader_config.data_seed is None
    assert not trainer.accelerator.gradient_state.end_of_dataloader
    assert isinstance(trainer.accelerator.optimizer_step_was_skipped, bool)
