"""Imports that are put off: the same predictions, and real modules as soon as anybody wants them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.whole

PREDICTS = """
import json, sys
from small_models import small_job
from snugfit.prediction.predict import predict
from snugfit.deferred_imports import defer_imports
if {puts_off}:
    defer_imports()
found = []
for family, recipe, how in (
    ("bert", "bf16", {{}}),
    ("gpt2", "fp16 + micro_batches(4)", {{}}),
    ("llama", "bf16", {{}}),
    ("t5", "bf16_pure + adafactor", {{}}),
    ("mixtral", "bf16", {{}}),
    ("llama", "bf16 + every_layer", {{}}),
    ("bert", "ddp", {{"gpus": 2}}),
    ("llama", "fsdp", {{"gpus": 2}}),
    ("gpt2", "bf16", {{"loop": "accelerate"}}),
):
    found.append(predict(small_job(family, 2, batch_size=4), recipe, gpu="h200", **how).to_json())
    found.append(sorted({{"torch._dynamo", "torch.distributed.tensor"}} & set(sys.modules)))
print("FOUND", json.dumps(found))
"""


def found(code: str) -> list[object]:
    command = [sys.executable, "-W", "ignore", "-c", code]
    ran = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    answer: list[object] = json.loads(ran.stdout.rpartition("FOUND ")[2])
    return answer


def test_predictions_are_the_same_and_simple_ones_import_little() -> None:
    light, full = found(PREDICTS.format(puts_off=True)), found(PREDICTS.format(puts_off=False))
    assert light[::2] == full[::2]
    assert light[1:7:2] == [[]] * 3, "of one GPU"
    assert full[1] == ["torch._dynamo", "torch.distributed.tensor"]


REAL = """
import builtins, json, sys
importing = builtins.__import__
from snugfit.deferred_imports import _DEFERRAL, PutOffName, defer_imports
defer_imports()
import torch
import transformers.modeling_utils
from transformers.distributed import sharding_utils, parallel_utils
put_off = isinstance(vars(sharding_utils)["DTensor"], PutOffName), _DEFERRAL.active
isinstance(torch.zeros(1), sharding_utils.DTensor)
with torch.device("meta"):
    {wants}
from torch.distributed.tensor import DTensor
names = [
    (module.__name__, name) for module in list(sys.modules.values())
    for name, value in list((getattr(module, "__dict__", None) or {{}}).items()) if type(value) is PutOffName
    if not module.__name__.startswith("snugfit")
]
import torch._dynamo
print("FOUND", json.dumps([
    put_off, _DEFERRAL.active, sharding_utils.DTensor is DTensor, names, builtins.__import__ is importing,
    type(torch._dynamo).__name__, callable(torch.compiler.disable(len)),
]))
"""


@pytest.mark.parametrize(
    "wants",
    [
        "import torch.distributed.tensor",
        "import torch._dynamo",
        "sharding_utils.DTensor.from_local",
        "torch._dynamo.config",
        "torch.compile(lambda x: x, backend='eager')(1)",
    ],
)
def test_whoever_wants_the_real_thing_gets_it(wants: str) -> None:
    expected = [[True, True], False, True, [], True, "module", True]
    assert found(REAL.format(wants=wants)) == expected
