"""The peers of a verified plan: the choice of recipes of the plain Trainer, and the report about them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_up_accuracy import a_run

from made_up import footprint, job, measurement, prediction
from small_models import small_job
from snugfit.errors import RecipeError, UsageError
from snugfit.features.accuracy import peers
from snugfit.features.accuracy import verified_tables as report
from snugfit.features.accuracy.peers import NO_PEERS, Peers, measure_peers
from snugfit.features.accuracy.verify import Verification
from snugfit.job.gpu import find_gpu
from snugfit.measurement import child
from snugfit.measurement.experiment.request import MeasurementRequest
from snugfit.measurement.measure import measure
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot
from snugfit.units import GIB

H200, V100 = find_gpu("h200"), find_gpu("v100-16gb")


def predicted_sizes(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]) -> list[str]:
    """Fake predictions of these sizes by recipe, with 1 GiB for all other recipes. The returned list
    collects the predicted recipes."""
    asked: list[str] = []

    def predict(job: Any, recipe: Any, **how: Any) -> Any:
        assert how["loop"] == "trainer"
        asked.append(str(recipe))
        return prediction(
            sizes.get(str(recipe), GIB), job=job, recipe=recipe, memory_bytes=how["memory_bytes"]
        )

    monkeypatch.setattr(peers, "predict", predict)
    return asked


def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Fake measurements. The returned list collects jobs, recipes and the Trainer's arguments."""
    asked: list[Any] = []

    def measure(job: Any, recipe: Any, **how: Any) -> Any:
        asked.append((job, str(recipe), how["trainer_arguments"]))
        return measurement(job=job, recipe=recipe)

    monkeypatch.setattr("snugfit.measurement.measure.measure", measure)
    return asked


def test_the_first_recipe_that_fits_is_measured_as_it_is_and_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"bf16 + adamw_fused": 20 * GIB, "bf16 + every_layer + adamw_fused": 12 * GIB}
    predicted, runs = predicted_sizes(monkeypatch, sizes), measured(monkeypatch)
    found = measure_peers(job(), H200, Recipe(), memory_bytes=8 * GIB)
    best = "bf16 + every_layer + micro_batches(2) + adamw_fused"
    assert predicted == [*sizes, best]
    assert [(recipe, arguments) for _, recipe, arguments in runs] == [
        (best, {}),
        (best, {"torch_compile": True}),
    ]
    assert [peer.run.predicted is None for peer in found.runs] == [False, True]


def test_where_nothing_fits_the_smallest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest recipe may fit nevertheless, and a measured failure is useful, too."""
    measured(monkeypatch)
    asked = predicted_sizes(monkeypatch, {})
    measure_peers(job(), H200, Recipe(), memory_bytes=1)
    assert asked[-1] == "bf16 + every_layer + micro_batches(4) + adamw_fused"


@pytest.mark.parametrize(("gpu", "precision"), [(H200, "bf16"), (V100, "fp16")])
def test_a_peer_has_the_precision_of_the_gpu_and_what_the_plan_kept(
    gpu: Any, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted_sizes(monkeypatch, {})
    runs = measured(monkeypatch)
    chosen = Recipe.parse("lora(r=4) + bf16_pure + every_layer + lion")
    measure_peers(job(), gpu, chosen, kept_slots={Slot.OPTIMIZER})
    (_, recipe, _), _ = runs
    assert recipe == f"lora(r=4) + {precision} + lion", "adapters and kept slots, but not the rest"


def test_a_peer_clips_as_the_job_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer clips gradients at 1.0 by default, which would take time that the plan's runs do not
    need.
    """
    predicted_sizes(monkeypatch, {})
    runs = measured(monkeypatch)
    measure_peers(job(), H200, Recipe())
    measure_peers(replace(job(), clip=0.5), H200, Recipe())
    assert [one.clip for one, _, _ in runs] == [0.0, 0.0, 0.5, 0.5]


def test_a_job_that_the_trainer_cannot_do_has_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def predict(*_: Any, **__: Any) -> Any:
        raise RecipeError("The trainer loop does not support this part of the recipe:\nadapters: made up")

    monkeypatch.setattr(peers, "predict", predict)
    found = measure_peers(job(), H200, Recipe())
    assert (found.runs, found.best) == ((), None)
    verified = Verification(gpu="h200", device="H200", runs=(a_run(1, 1, 1),), versions={}, peers=found)
    assert (
        report.peer_line(verified)
        == "The plain Trainer was not measured: The trainer loop does not support this part of the "
        "recipe: adapters: made up"
    )


def verified(first: float | None, *peer_seconds: float | None) -> Verification:
    runs = tuple(
        peers.PeerRun(name=f"peer {number}", run=a_run(number, 1.0, seconds, measured=footprint(9 * GIB)))
        for number, seconds in enumerate(peer_seconds)
    )
    return Verification(
        gpu="h200", device="H200", runs=(a_run(1, 1.0, first),), versions={}, peers=Peers(runs=runs)
    )


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            verified(0.1, 0.3, 0.2),
            "2.00 times as fast as the best of the plain Trainer (peer 1), and takes 2.00",
        ),
        (verified(0.3, 0.3, 0.2), "50.0 % slower than the best of the plain Trainer (peer 1)"),
        (verified(0.3, None), "No run of the plain Trainer reached its end"),
        (verified(None, 0.3), ""),
        (replace(verified(0.3), peers=NO_PEERS), ""),
    ],
)
def test_what_is_said_of_the_best_peer(found: Verification, said: str) -> None:
    assert said in report.peer_line(found)
    assert bool(said) == bool(report.peer_line(found))


def test_arguments_reach_the_trainer(tmp_path: Path) -> None:
    """An unknown backend ends the run with an error that names it."""
    request = MeasurementRequest(
        job=small_job("gpt2", 2, batch_size=2), recipe=Recipe.parse("sgd"), loop="trainer",
        warmup=1, steps=1, deadline_seconds=60.0, history=None, trainer_arguments=compiled_by("made_up"),
    )  # fmt: skip
    target: Any = SimpleNamespace(torch_device="cpu", card=None)
    wrong = child.run(request.document(target, None), tmp_path)
    assert wrong.outcome != "ok"
    assert "made_up" in wrong.message.lower()


@pytest.mark.slow
def test_the_trainer_trains_with_such_arguments() -> None:
    """The backend compiles nothing."""
    right = measure(
        small_job("gpt2", 2, batch_size=2, sequence_length=16),
        "sgd",
        loop="trainer",
        device="cpu",
        ledger=None,
        steps=1,
        warmup=1,
        trainer_arguments=compiled_by("eager"),
    )
    assert right.outcome == "ok", right.message


def compiled_by(backend: str) -> dict[str, Any]:
    """Return the Trainer's arguments to compile with this backend."""
    return {"torch_compile": True, "torch_compile_backend": backend}


def test_arguments_without_the_trainer_are_refused() -> None:
    with pytest.raises(UsageError, match="loop='trainer'"):
        measure(job(), "plain", ledger=None, trainer_arguments={"torch_compile": True})
