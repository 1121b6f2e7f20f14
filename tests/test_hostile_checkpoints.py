"""Hostile checkpoints with valid checksums: a read runs no code, uses bounded memory and raises one error."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from fitted import classified, model_of, quiet, trainer_of
from small_runs import small_run
from snugfit import fit
from snugfit.documents import read_document
from snugfit.errors import SnugfitError
from snugfit.training.checkpoint import manifest
from snugfit.training.checkpoint.manifest import BrokenCheckpoint, check_sizes, seal
from snugfit.training.run.train import train


class RunsCode:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def test_json_of_gigabytes_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "LARGEST_JSON", 1000)
    (tmp_path / "state.json").write_text("[" + "1," * 1000 + "1]")
    seal(tmp_path, 1, {}, lambda: False)
    with pytest.raises(BrokenCheckpoint, match=r"state\.json has 2,003 bytes, and at most 1,000 are read"):
        check_sizes(tmp_path, 1)


def longer_header(content: bytes) -> bytes:
    """Return the content with a header length of 2^62 bytes."""
    return struct.pack("<Q", 1 << 62) + content[8:]


def larger_tensor(content: bytes) -> bytes:
    """Return the content with a header that declares a tensor of terabytes."""
    header = b'{"0":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}'
    return struct.pack("<Q", len(header)) + header + content[-16:]


@pytest.mark.whole
@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "state.json"])
def test_absurd_files_end_in_one_error(tmp_path: Path, name: str) -> None:
    """The files have impossible sizes, or a tree that nests without end."""
    train(small_run(tmp_path, max_steps=1))
    folder = tmp_path / "checkpoint-1"
    written = read_document(folder / "manifest.json")
    before = (folder / name).read_bytes()
    changes: list[Callable[[bytes], bytes]] = [longer_header, larger_tensor]
    if name.endswith(".json"):
        changes = [lambda content: b"[" * 200_000 + b"]" * 200_000]
    for change in changes:
        (folder / name).write_bytes(change(before))
        (folder / "manifest.json").unlink()
        seal(folder, 1, written["about"], lambda: False)
        with pytest.raises(SnugfitError, match="checkpoint-1 has") as refused:
            train(small_run(tmp_path, max_steps=2))
        assert "\n" not in str(refused.value)


@pytest.mark.whole
def test_a_fitted_trainer_reads_no_pickle_and_no_absurd_state(tmp_path: Path) -> None:
    """The folder has files with valid checksums that the plain Trainer would unpickle."""

    def resumed() -> None:
        shutil.rmtree(tmp_path / "run" / "checkpoint-2", ignore_errors=True)
        (tmp_path / "run" / "finished.json").unlink(missing_ok=True)
        often: dict[str, Any] = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
        trainer = trainer_of(tmp_path / "run", model_of("bert"), classified(8), **often)
        fit(trainer, "plain", watch=quiet).train(resume_from_checkpoint=(folder.exists() or None))

    folder = tmp_path / "run" / "checkpoint-1"
    resumed()
    written = read_document(folder / "manifest.json")
    state = folder / "trainer_state.json"
    for name in ("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "pytorch_model.bin"):
        torch.save({"a": RunsCode(tmp_path / "marker")}, folder / name)
    for content in (state.read_text(), "[" * 200_000, "[]", "{"):
        state.write_text(content)
        (folder / "manifest.json").unlink()
        seal(folder, 1, written["about"], lambda: False)
        is_whole = content.startswith("{\n")
        with nullcontext() if is_whole else pytest.raises(SnugfitError, match="checkpoint-1 has correct"):
            resumed()
    assert not (tmp_path / "marker").exists()
