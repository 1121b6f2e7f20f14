"""A Trainer under `fit` saves as the plain Trainer does.

Its callbacks see complete checkpoints. Files of a Trainer subclass are part of a checkpoint, and written as
safely. The trainer pushes to the hub.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fitted import assert_same_run, classified, fitted, killed, model_of, trained, trainer_of
from snugfit.training.checkpoint.manifest import verify
from test_fit_keeping import At, Killed, die

pytestmark = pytest.mark.whole


class Sentences(transformers.Trainer):
    """Save as sentence-transformers does: a list of modules, and the weights under other names."""

    breaks_at = 0

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        assert folder.name in (f"checkpoint-{self.state.global_step}", Path(self.args.output_dir).name)
        (folder / "modules.json").write_text(json.dumps([{"idx": 0, "path": "0_Bert"}]))
        (folder / "0_Bert").mkdir(exist_ok=True)
        if self.state.global_step == self.breaks_at:
            raise Killed
        weights = {f"0.{name}": value.half() for name, value in self.model.state_dict().items()}
        save_file(weights, folder / "0_Bert" / "model.safetensors")
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")


class Cards(transformers.Trainer):
    """Save as TRL does: a card in the output folder, and further files before and after the checkpoint."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step, name = self.state.global_step, Path(self.args.output_dir).name
        (Path(self.args.output_dir) / "README.md").write_text(f"# {name} after step {step}\n")
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{step}"
        folder.mkdir(exist_ok=True)
        (folder / "before.txt").write_text(f"{step}")
        super()._save_checkpoint(model, trial)
        weights = load_file(Path(self.args.output_dir) / f"checkpoint-{step}" / "model.safetensors")
        (folder / "after.txt").write_text(f"{len(weights)} {(folder / 'trainer_state.json').is_file()}")


def run_of(folder: Path, kind: type[Any] = transformers.Trainer, *, at: At | None = None, **more: Any) -> Any:
    wanted: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, **more}
    data, evaluation = classified(22), {"eval_dataset": classified(8)}
    trainer = trainer_of(
        folder, model_of("bert", layers=1, dropout=0.2), data, kind=kind, more=evaluation, **wanted
    )
    if at is not None:
        trainer.add_callback(at)
    return fitted(trainer, "plain")


class Uploads(transformers.TrainerCallback):
    """Verify each checkpoint when `on_save` runs."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        step = state.global_step
        verify(Path(args.output_dir) / f"checkpoint-{step}", step)
        self.seen.append(step)


def test_a_callback_that_is_told_of_a_checkpoint_finds_it_whole(tmp_path: Path) -> None:
    trainer, uploads = run_of(tmp_path), Uploads()
    trainer.add_callback(uploads)
    trainer.train()
    assert uploads.seen == [2, 4, 6]


def test_a_callback_is_not_told_of_a_checkpoint_that_could_not_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from snugfit.training.checkpoint import store

    real = store.seal

    def seal(folder: Path, step: int, *rest: Any) -> Any:
        if step == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(folder, step, *rest)

    monkeypatch.setattr(store, "seal", seal)
    trainer, uploads = run_of(tmp_path), Uploads()
    trainer.add_callback(uploads)
    trainer.train()
    assert uploads.seen == [2, 6]
    assert any("checkpoint-4 could not be saved" in event.get("text", "") for event in trainer.told)


@pytest.mark.parametrize("kind", [Sentences, Cards])
def test_a_subclasss_files_are_in_the_checkpoint_and_it_resumes_bit_for_bit(
    kind: type[Any], tmp_path: Path
) -> None:
    whole = trained(run_of(tmp_path / "whole", kind))
    killed(run_of(tmp_path / "cut", kind, at=At(5, die)))
    files = verify(tmp_path / "cut" / "checkpoint-4", 4).files
    if kind is Sentences:
        assert {"modules.json", "0_Bert/model.safetensors", "model.safetensors"} <= files.keys()
        weights = load_file(tmp_path / "cut" / "checkpoint-4" / "model.safetensors")
        assert all(name.startswith("0.") for name in weights), "as the subclass wrote it"
    else:
        after = (tmp_path / "cut" / "checkpoint-4" / "after.txt").read_text()
        assert after == f"{len(load_file(tmp_path / 'cut' / 'checkpoint-4' / 'model.safetensors'))} True"
        assert {"before.txt", "after.txt", "model.safetensors"} <= files.keys()
        assert (tmp_path / "cut" / "README.md").read_text() == "# cut after step 4\n"
    resumed = trained(run_of(tmp_path / "cut", kind), True)
    assert_same_run(resumed, whole)
    assert not [path for path in (tmp_path / "cut").iterdir() if path.name.startswith(".draft")]


def test_damage_to_a_subclasss_file_is_found(tmp_path: Path) -> None:
    killed(run_of(tmp_path, Sentences, at=At(5, die)))
    (tmp_path / "checkpoint-4" / "modules.json").write_text("[]")
    resumed = trained(run_of(tmp_path, Sentences), True)
    assert any("ignored checkpoint-4: modules.json" in event.get("text", "") for event in resumed.told)


def test_a_run_that_dies_while_its_subclass_saves_leaves_nothing_half_done(tmp_path: Path) -> None:
    trainer = run_of(tmp_path, Sentences)
    trainer.breaks_at = 4
    killed(trainer)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2"]
    assert trainer.args.output_dir == str(tmp_path)
    trained(run_of(tmp_path, Sentences), True)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".draft")]


def test_the_best_model_of_a_subclass_that_writes_other_weights_is_the_exact_one(tmp_path: Path) -> None:
    more: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    more |= {"metric_for_best_model": "loss", "greater_is_better": True}
    trainer = run_of(tmp_path, Sentences, **more)
    kept: dict[int, Any] = {}

    def note() -> None:
        step = trainer.state.global_step
        kept[step] = {name: value.clone() for name, value in trainer.model.state_dict().items()}

    for step in (2, 4, 6):
        trainer.add_callback(At(step, note))
    trainer.train()
    best = trainer.state.best_global_step
    assert best < 6, "the highest loss counts as the best"
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, kept[best][name])


class FakeHub:
    """Accept uploads and record the files of their folders."""

    def __init__(self) -> None:
        self.uploads: list[tuple[str, list[str]]] = []

    def create_repo(self, name: str, **more: Any) -> Any:
        class Url:
            repo_id = "someone/model"

        return Url()

    def upload_folder(self, *, folder_path: str, commit_message: str, **more: Any) -> Any:
        self.uploads.append((commit_message, sorted(os.listdir(folder_path))))

        class Job:
            def done(self) -> bool:
                return True

        return Job()


def test_a_push_to_the_hub_follows_each_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub()
    monkeypatch.setattr("transformers.trainer.hf_api", lambda *_, **__: hub)
    trained(run_of(tmp_path, push_to_hub=True, hub_strategy="checkpoint", max_steps=4))
    assert [message for message, _ in hub.uploads] == [
        "Training in progress, step 2", "Training in progress, step 2, checkpoint",
        "Training in progress, step 4", "Training in progress, step 4, checkpoint",
    ]  # fmt: skip
    for message, files in hub.uploads:
        assert {"config.json", "model.safetensors"} <= set(files)
        assert ("manifest.json" in files) == message.endswith("checkpoint")
