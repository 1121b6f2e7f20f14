"""`snugfit.SnugfitCallback` logs the predicted step of any Trainer beside the measured one, and changes no
training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import snugfit
from fitted import classified, losses_of, model_of, quiet, trainer_of
from snugfit.errors import UsageError
from snugfit.features.loops.trainer import callback as callback_module
from snugfit.features.loops.trainer.callback import PREFIX, WARM_UP, SnugfitCallback

watching = pytest.importorskip("snugfit.features.watch.watch")


class Received(transformers.TrainerCallback):
    """A tracker that stores the log lines which it receives."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        self.lines.append(dict(logs))


def trainer_with(folder: Path, *, gpu: str | None = "h200", **arguments: Any) -> tuple[Any, SnugfitCallback]:
    trainer = trainer_of(folder, model_of("bert"), classified(), **arguments)
    callback = snugfit.SnugfitCallback(trainer, gpu=gpu)
    trainer.add_callback(callback)
    return trainer, callback


@pytest.mark.whole
def test_prediction_and_measurement_reach_every_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A run of an earlier test may have set it, and a Trainer's recipe follows it.
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    plain = trainer_of(tmp_path, model_of("bert"), classified(), micro=(2, 2))
    plain.train()
    trainer, callback = trainer_with(tmp_path, micro=(2, 2))
    received = Received()
    trainer.callback_handler.callbacks.insert(0, received)  # as the trackers of `report_to`
    trainer.train()
    assert losses_of(trainer) == losses_of(plain), "the prediction draws no random number of the training"
    lines = [line for line in received.lines if any(name.startswith(PREFIX) for name in line)]
    assert len(lines) == 5, "four steps and the totals"
    assert all(f"{PREFIX}measured_step_seconds" not in line for line in lines[:WARM_UP])
    last = lines[-1]
    same = snugfit.predict(
        callback.prediction.job, "adamw_fused + micro_batches(2)", gpu="h200", loop="trainer"
    )
    assert last[f"{PREFIX}predicted_reserved_bytes"] == same.footprint.reserved_bytes
    assert last[f"{PREFIX}predicted_step_seconds"] == same.timing.step_seconds
    assert 0 < last[f"{PREFIX}measured_step_seconds"] < callback.measured.seconds
    assert last[f"{PREFIX}measured_host_bytes"] <= callback.measured.host_bytes
    assert f"{PREFIX}measured_reserved_bytes" not in last, "a CPU has no caching allocator"


@pytest.mark.whole
def test_readings_of_a_gpu_are_logged_and_a_fitted_recipe_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, callback = trainer_with(tmp_path, max_steps=1)
    snugfit.fit(trainer, "bf16 + every_layer", watch=quiet)
    gpu = watching.WatchedGpu(index=0, allocated_bytes=5, reserved_bytes=7, nvml_bytes=13, process_bytes=11)
    monkeypatch.setattr(watching.Watch, "readings", lambda watch, fault=None: ((gpu,), 17))
    trainer.train()
    assert str(callback.prediction.recipe) == "bf16 + every_layer"
    line = next(line for line in trainer.state.log_history if f"{PREFIX}measured_nvml_bytes" in line)
    names = ("allocated", "reserved", "nvml", "host")
    assert [line[f"{PREFIX}measured_{name}_bytes"] for name in names] == [5, 7, 11, 17]


@pytest.mark.whole
def test_a_failed_prediction_is_one_warning_and_training_goes_on(tmp_path: Path, logged: list[str]) -> None:
    trainer, callback = trainer_with(tmp_path, gpu="rtx 9999", max_steps=WARM_UP + 1)
    trainer.train()
    (message,) = logged
    assert "not predicted" in message
    assert "rtx 9999" in message
    assert callback.prediction is None
    last = trainer.state.log_history[-1]
    assert last[f"{PREFIX}measured_step_seconds"] > 0
    assert not any("predicted" in name for name in last)


def test_it_needs_its_trainer() -> None:
    with pytest.raises(UsageError, match=r"add_callback\(snugfit.SnugfitCallback\(trainer\)\)"):
        snugfit.SnugfitCallback()


def test_the_seconds_of_a_step_leave_out_first_steps_and_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(callback_module.time, "perf_counter", lambda: now)
    clock = callback_module._StepClock(torch.device("cpu"))
    for seconds, evaluation in ((100, 0), (50, 30), (3, 0), (5, 40), (4, 7)):
        clock.resume()
        now += seconds
        clock.count(stops=evaluation > 0)
        now += evaluation
    assert clock.step_seconds() == pytest.approx((3 + 5 + 4) / 3)
