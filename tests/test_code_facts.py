"""The code of a user's loss, collator and forward passes belongs to a run: Python's compiled code is
compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fitted import classified, model_of, padded, quiet, trainer_of
from snugfit import accelerate, fit, train
from snugfit.errors import UsageError
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.training.checkpoint.code_facts import code_facts

LOSS = """
GAMMA = 2.0
step = 1
def weigh(x):
    return x ** GAMMA
def loss(model, batch, alpha=0.5):
    names = [name for name in batch if name in {"a", "b", "c"}]
    return weigh(model(**batch).loss) * alpha
"""


def written(source: str, name: str = "loss", file: str = "one.py", **names: Any) -> Any:
    """Return the function of this name from a file with this text."""
    namespace: dict[str, Any] = {"__name__": "users", **names}
    exec(compile(source, file, "exec"), namespace)
    return namespace[name]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    return weigh", "    # as in the paper\n\n    return weigh"),
        ("alpha=0.5):", 'alpha=0.5):\n    "Weighed."'),
        ("step = 1", "step = 2"),
    ],
)
def test_a_moved_file_comments_and_docstrings_are_the_same_code(old: str, new: str) -> None:
    before, now = written(LOSS), written(f"import math\n\n{LOSS.replace(old, new)}", file="moved.py")
    assert code_facts({"loss": before}) == code_facts({"loss": now})


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("* alpha", "+ alpha", "code of loss"),
        ("x ** GAMMA", "x * GAMMA", "code of loss"),
        ("alpha=0.5", "alpha=0.25", "code of loss: alpha"),
        ("GAMMA = 2.0", "GAMMA = 3.0", "code of loss: GAMMA"),
        ('"c"', '"d"', "code of loss"),
        ("def loss", "def other", "code of loss"),
    ],
)
def test_other_code_is_another(old: str, new: str, named: str) -> None:
    name = "other" if "other" in new else "loss"
    before, now = (
        code_facts({"loss": written(LOSS)}),
        code_facts({"loss": written(LOSS.replace(old, new), name)}),
    )
    assert [key for key in before if before[key] != now[key]] == [named]


def test_what_a_closure_and_a_loss_of_torch_hold_is_compared_and_counters_are_not() -> None:
    def made(beta: float, smoothing: float) -> Any:
        criterion, calls = torch.nn.CrossEntropyLoss(label_smoothing=smoothing), 0

        def loss(model: Any, batch: Any) -> Any:
            nonlocal calls
            calls += 1
            return criterion(model(**batch), batch["labels"]) * beta

        return loss

    facts = code_facts({"loss": made(1.0, 0.1), "items": None, "sum": sum, "relu": torch.nn.functional.relu})
    other = code_facts({"loss": made(2.0, 0.2), "items": None, "sum": sum, "relu": torch.nn.functional.relu})
    differing = [name for name in facts if facts[name] != other[name]]
    assert sorted(differing) == ["code of loss: beta", "code of loss: criterion.label_smoothing"]
    assert (facts["code of items"], facts["code of relu"]) == (None, "relu")
    assert not any("calls" in name for name in facts)


# ---- the three ways to train ------------------------------------------------------------------------------


def mean(model: Any, batch: Any) -> Any:
    return model(**batch).loss


def half(model: Any, batch: Any) -> Any:
    return model(**batch).loss / 2


def padded_otherwise(samples: Any) -> Any:
    batch = padded(samples)
    return {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}


@pytest.mark.whole
def test_accelerate_refuses_another_loss_collator_and_seed(tmp_path: Path) -> None:
    def made(loss: Any = mean, collate: Any = padded, seed: int = 5, **more: Any) -> Any:
        model = model_of("bert").train()
        loader: Any = DataLoader(classified(8), batch_size=4, collate_fn=collate)
        torch.manual_seed(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return accelerate(
            model, optimizer, loader, "plain", loss=loss, output_dir=tmp_path, watch=quiet, **more
        )

    with made() as run:
        run.step(next(iter(run)))
        run.save()
    changed: list[tuple[dict[str, Any], str]] = [
        ({"loss": half}, r"code of loss was 'mean .*and is now 'half .*compare_code=False"),
        ({"collate": padded_otherwise}, r"code of collate_fn was 'padded"),
        ({"seed": 6}, r"seed was 5 and is now 6"),
    ]
    for what, named in changed:
        with made(**what) as run, pytest.raises(UsageError, match=named):
            run.resume()
    with made(loss=half, compare_code=False) as run:
        assert run.resume()


@pytest.mark.whole
def test_fit_refuses_another_loss_and_collator(tmp_path: Path) -> None:
    def loss_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return torch.nn.functional.cross_entropy(outputs.logits, labels)

    def other_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return torch.nn.functional.cross_entropy(outputs.logits, labels, label_smoothing=0.2)

    def made(loss: Any = loss_of, collate: Any = padded, **more: Any) -> Any:
        wanted: dict[str, Any] = {"more": {"compute_loss_func": loss}, "max_steps": 2}
        saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
        trainer = trainer_of(tmp_path, model_of("bert"), classified(8), **wanted, **saving)
        trainer.data_collator = collate
        return fit(trainer, "plain", watch=quiet, **more)

    made().train()
    named = str(tmp_path / "checkpoint-1")
    for what, text in (
        ({"loss": other_loss}, r"code of compute_loss_func was '.*loss_of"),
        ({"loss": None}, r"code of compute_loss_func was '.*loss_of .* and is now null"),
        ({"collate": padded_otherwise}, r"code of data_collator was 'padded"),
    ):
        with pytest.raises(UsageError, match=text):
            made(**what).train(resume_from_checkpoint=named)
    assert made(other_loss, compare_code=False).train(resume_from_checkpoint=named).global_step == 2


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).mean()}


class Squared(Line):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


@pytest.mark.whole
def test_train_refuses_another_forward_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(steps: int, **more: Any) -> Any:
        job = Job(model=Model.from_module(Line(), {"x": torch.ones(2, 2)}), task=Task.CUSTOM, batch_size=2)
        length: dict[str, Any] = {"max_steps": steps, "lr_scheduler_type": "constant"}
        return train(job, "plain", [{"x": torch.ones(2)}] * 4, output_dir=tmp_path, **length, **more)

    trained(1)
    trained(2)
    Squared.forward.__qualname__ = "Line.forward"
    monkeypatch.setattr(Line, "forward", Squared.forward)
    with pytest.raises(UsageError, match=r"code of Line.forward was 'Line.forward \("):
        trained(3)
    assert trained(3, compare_code=False).step == 3
