"""The output folder of a run in a hand-written loop: it is created before any change, and removed if the run
does not start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fitted import model_of, quiet
from snugfit import accelerate
from snugfit.errors import SnugfitError
from test_accelerate import loader_of

CHANGES = "bf16_pure + adafactor_torch + every_layer"


def begun(model: Any, folder: Path, **more: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    return accelerate(model, optimizer, loader_of(), CHANGES, output_dir=folder, watch=quiet, **more)


@pytest.mark.parametrize("taken", ["locked", "a file"])
def test_what_cannot_be_had_is_found_out_before_the_model_is_changed(taken: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    model = model_of("bert")
    if taken == "a file":
        folder.write_text("")
        other = None
    else:
        other = begun(model_of("bert"), folder)
    with pytest.raises(SnugfitError, match=str(folder)):
        begun(model, folder)
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert not any("forward" in vars(module) for module in model.modules())
    if other is not None:
        other.close()


def test_a_run_that_does_not_begin_gives_its_folder_back(tmp_path: Path) -> None:
    def fails(optimizer: Any) -> Any:
        raise RuntimeError("no such schedule")

    with pytest.raises(RuntimeError, match="no such schedule"):
        begun(model_of("bert"), tmp_path, scheduler=fails)
    begun(model_of("bert"), tmp_path).close()


@pytest.mark.whole
def test_a_run_that_cannot_write_its_journal_at_the_end_gives_its_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(why: str, steps: int) -> None:
        raise SnugfitError("no room")

    run = begun(model_of("bert"), tmp_path)
    run.step(next(iter(loader_of())))
    monkeypatch.setattr(run._logger, "end", fails)
    with pytest.raises(SnugfitError, match="no room"):
        run.close()
    begun(model_of("bert"), tmp_path).close()
