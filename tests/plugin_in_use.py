"""Predict, plan and train one step with the plugin of `test_plugins.py`, and print the outcome as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from snugfit.cli.plugins import named_plugins
from snugfit.feature_folders import use_plugins


def main(plugin: str, folder: str) -> None:
    """Load the plugin before the first import of a module that reads fields of `Setup`."""
    use_plugins(named_plugins(["predict", "--plugin", plugin]))
    from small_models import small_job
    from small_runs import small_run
    from snugfit.planning.search.search import plan
    from snugfit.prediction.predict import predict
    from snugfit.training.run.train import train

    job = small_job("bert", 2)
    plain, thin = (predict(job, recipe, gpu="h200") for recipe in ("plain", "thin"))
    keep = "thin + sdpa + bf16 + adamw + keep_all + uncompiled"
    planned = plan(job, gpu="h200", keep=keep, workers=1)
    trained = train(small_run(Path(folder), "thin", max_steps=1))
    assert plain.startup is not None
    assert thin.startup is not None
    assert planned.best is not None
    outcome = {
        "seconds": thin.startup.total_seconds(0) - plain.startup.total_seconds(0),
        "bytes": (plain.footprint.requested_bytes or 0) - (thin.footprint.requested_bytes or 0),
        "version": thin.versions["plugin thin_biases"],
        "planned": [planned.best.recipe, planned.versions["plugin thin_biases"]],
        "frozen": [name for name, weight in trained.model.named_parameters() if not weight.requires_grad],
    }
    print(json.dumps(outcome))
