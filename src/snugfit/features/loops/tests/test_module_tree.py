"""The cached list of a model's modules equals the model's own after each change."""

from __future__ import annotations

import contextlib
import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from fitted import classified, losses_of, quiet, trainer_of
from fitted import model_of as model_of_trainer
from small_models import small_job
from snugfit import fit
from snugfit.features.loops.trainer.fit_run import USED_BY, ModuleTree
from snugfit.step.build import build_model
from snugfit.techniques.setup import Setup


def model_of(family: str = "bert") -> Any:
    return build_model(small_job(family, 2), Setup(), torch.device("cpu"))


def same(tree: ModuleTree, model: Any) -> None:
    """Compare all results of the cached list with the model's own."""
    assert list(map(id, tree.parameters())) == list(map(id, model.parameters()))
    assert list(map(id, tree.parameters(recurse=False))) == list(map(id, model.parameters(recurse=False)))
    assert list(map(id, tree.modules())) == list(map(id, model.modules()))
    for excludes in (False, True):
        assert tree.num_parameters(exclude_embeddings=excludes) == model.num_parameters(
            exclude_embeddings=excludes
        )
    assert tree.num_parameters(only_trainable=True) == model.num_parameters(only_trainable=True)
    assert tree.train() is model
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "t5", "vit"])
def test_answers_are_the_models_own(family: str) -> None:
    model = model_of(family)
    same(ModuleTree(model), model)


def test_what_was_changed_since_is_seen() -> None:
    model = model_of()
    tree = ModuleTree(model)
    same(tree, model)
    dropout = next(module for module in model.modules() if isinstance(module, nn.Dropout))
    dropout.eval()
    same(tree, model)
    model.bert.pooler.dense = nn.Linear(3, 5, bias=False)  # replaced
    same(tree, model)
    model.bert.pooler.more = nn.ModuleList([nn.Linear(2, 2).eval()])  # added
    same(tree, model)
    model.bert.pooler.dense.weight = nn.Parameter(torch.zeros(7))  # a parameter replaced
    same(tree, model)
    model.classifier.weight.requires_grad_(False)
    same(tree, model)
    model.bert.encoder.layer[1] = model.bert.encoder.layer[0]  # shared by two layers; the old one is gone
    same(tree, model)
    del model.bert.pooler.more
    same(tree, model)


def test_evaluation_is_switched_on_and_off() -> None:
    model = model_of()
    tree = ModuleTree(model)
    assert tree.train(False) is model
    assert not any(module.training for module in model.modules())
    same(tree, model)


def test_a_method_of_the_models_own_is_called() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.calls = nn.BatchNorm1d(3), 0

        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.norm.eval()
            self.calls += 1
            return self

        def parameters(self, recurse: bool = True) -> Any:
            yield from list(super().parameters(recurse))[:1]

    model = nn.Sequential(Frozen(), nn.Linear(3, 3))
    tree = ModuleTree(model)
    tree.train()
    assert model[0].calls == 1
    model[0].norm.train()
    tree.train()
    assert model[0].calls == 2, "all modules are in training mode, and the model restores its norm"
    own = ModuleTree(model[0])
    for name in USED_BY:
        with own.use_cache(name):
            assert len(list(model[0].parameters())) == 1
            assert not set(USED_BY) & set(vars(model[0]))


def test_the_model_answers_from_it_only_within() -> None:
    model = model_of()
    tree = ModuleTree(model)
    for name in USED_BY:
        with tree.use_cache(name):
            assert vars(model)[name].__self__ is tree
            tree.withdraw()
            assert name not in vars(model)
        with pytest.raises(KeyError), tree.use_cache(name):
            raise KeyError
        assert name not in vars(model)
    model.train = "the user's"
    with tree.use_cache("train"):
        assert model.train == "the user's"
    assert model.train == "the user's"


def test_a_copy_that_is_made_meanwhile_is_a_model_of_its_own() -> None:
    model = model_of()
    with ModuleTree(model).use_cache("train"):
        twin = copy.deepcopy(model)
    twin.eval()
    assert all(module.training for module in model.modules())
    assert twin.train() is twin
    assert all(module.training for module in twin.modules())
    assert pickle.loads(pickle.dumps(model)).train() is not model


@pytest.mark.whole
def test_a_trainer_walks_through_its_modules_once_and_trains_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's callback may switch a module to evaluation after each step, as here."""
    counts = 0
    count = transformers.PreTrainedModel.num_parameters

    def counted(*arguments: Any, **keywords: Any) -> int:
        nonlocal counts
        counts += 1
        return count(*arguments, **keywords)

    class SwitchesOff(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            assert not set(USED_BY) & set(vars(model))
            model.bert.embeddings.dropout.eval()

    monkeypatch.setattr(transformers.PreTrainedModel, "num_parameters", counted)
    monkeypatch.setattr(counted, "__module__", "transformers.modeling_utils")
    seen = []
    for walks in (True, False):
        counts = 0
        torch.manual_seed(0)
        model = model_of_trainer("bert", dropout=0.3)
        trainer = trainer_of(tmp_path / str(walks), model, classified(24), micro=(4, 1), max_grad_norm=0.01)
        trainer.add_callback(SwitchesOff())
        fit(trainer, "plain", watch=quiet)
        asked_before = counts
        torch.manual_seed(1)
        with monkeypatch.context() as patched:
            if walks:
                patched.setattr(ModuleTree, "use_cache", lambda *_: contextlib.nullcontext())
            trainer.train()
        seen.append((losses_of(trainer), trainer.state.total_flos, counts - asked_before))
    (losses, operations, often), (same_losses, same_operations, seldom) = seen
    assert same_losses == losses
    assert same_operations == operations > 0
    assert often >= 4
    assert seldom == 1
