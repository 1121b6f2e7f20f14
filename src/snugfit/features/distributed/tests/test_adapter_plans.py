"""Plans of adapters on several GPUs: `plan --gpus 2` and `gpus --for MODEL --gpus 2` with `--keep`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from small_models import small_job
from snugfit.cli.main import run
from snugfit.features.distributed.plan.search import plan_cards
from snugfit.prediction.predict import predict

pytestmark = [pytest.mark.stored_rehearsals, pytest.mark.whole]

JOB = small_job("llama", 2, {"vocab_size": 512, "hidden_size": 128}, batch_size=8, sequence_length=64)
OTHERS = (
    "bf16_pure + adamw_fused + sdpa + uncompiled + ieee + on_device + all_gradients + default + inline"
    " + whole_batch + keep_all"
)


@pytest.mark.slow
def test_the_fewest_gpus_of_each_model_keep_adapters() -> None:
    plans = plan_cards(JOB, ["h200", "l4"], gpus=2, keep="lora(r=16)", workers=1)
    for kind in plans.answers:
        assert kind.fewest is not None
        assert (kind.fewest.gpus, kind.fewest.recipe.split(" + ")[0]) == (2, "lora(r=16)")


def test_the_command_keeps_adapters_and_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its bytes are those of a prediction of the same recipe."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(JOB.model.config))
    command = f"plan {config} --task causal-lm --gpu h200 --gpus 2 --batch-size 8 --sequence-length 64"
    assert run([*command.split(), "--keep", f"lora(r=16) + fused + chunked_loss + {OTHERS}", "--json"]) == 0
    [answer] = json.loads(capsys.readouterr().out)["answers"]
    assert answer["recipe"].startswith("lora(r=16) + ")
    assert "fused + chunked_loss" in answer["recipe"]
    footprint = predict(JOB, answer["recipe"], gpu="h200", gpus=2).footprint
    assert answer["needed_bytes"] == pytest.approx(footprint.nvml_bytes, rel=0.02)
