"""Deferred imports: predictions do not change, and modules become real at their first use."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from clean_forks import forks_of
from small_models import small_job
from snugfit.deferred_imports import READS_LIST, of_last_list
from snugfit.prediction.predict import predict
from tiers import slow_but

pytestmark = pytest.mark.whole

FEW = [
    ("bert", "bf16", {}),
    ("llama", "lora(r=4) + bf16 + every_layer", {}),
    ("bert", "ddp", {"gpus": 2}),
]
"""Models, recipes and options of predictions. The first two import little."""

ALL = [
    *FEW[:2],
    ("mixtral", "bf16", {}),
    ("gpt2", "fp16 + micro_batches(4)", {}),
    ("llama", "bf16 + every_layer", {}),
    FEW[2],
    ("llama", "bf16", {}),
    ("t5", "bf16_pure + adafactor", {}),
    ("llama", "fsdp", {"gpus": 2}),
    ("gpt2", "bf16", {"loop": "accelerate"}),
]

PREDICTS = """
import json, sys
from small_models import small_job
from snugfit.prediction.predict import predict
from snugfit.deferred_imports import defer_imports
if {puts_off}:
    defer_imports()
found = []
for family, recipe, how in {jobs}:
    found.append(predict(small_job(family, 2, batch_size=4), recipe, gpu="h200", **how).to_json())
    found.append(sorted({{"torch._dynamo", "torch.distributed.tensor"}} & set(sys.modules)))
print("FOUND", json.dumps(found))
"""


def found(code: str, folder: Path) -> Any:
    """Return the printed result of this code in a process that has imported nothing."""
    with (folder / "printed").open("w+") as printed:
        forks = forks_of(__name__, bare=True)
        process = forks.start(run, code, streams={1: printed.fileno(), 2: printed.fileno()})
        code_of_exit = forks.ended(process)
        printed.seek(0)
        text = printed.read()
    assert code_of_exit == 0, text
    return json.loads(text.rpartition("FOUND ")[2])


def run(code: str) -> int:
    """Run this code as a script."""
    warnings.simplefilter("ignore")
    exec(code, {"__name__": "__main__"})
    return 0


@pytest.mark.parametrize("jobs", slow_but([FEW, ALL], 1), ids=len)
def test_predictions_are_the_same_and_simple_ones_import_little(jobs: list[Any], tmp_path: Path) -> None:
    """`make test` compares with predictions of this process, which has imported all. `make test-all` compares
    with another process that defers nothing."""
    light = found(PREDICTS.format(puts_off=True, jobs=jobs), tmp_path)
    alone = 2 if jobs == FEW else 5
    assert light[1 : 2 * alone : 2] == [[]] * alone, "of one GPU"
    if jobs == FEW:
        predicted = [
            predict(small_job(family, 2, batch_size=4), recipe, gpu="h200", **how).to_json()
            for family, recipe, how in jobs
        ]
        assert light[::2] == json.loads(json.dumps(predicted))
        assert "torch.distributed.tensor" in light[5], "the third prediction has the real module"
        return
    full = found(PREDICTS.format(puts_off=False, jobs=jobs), tmp_path)
    assert light[::2] == full[::2]
    assert full[1] == ["torch._dynamo", "torch.distributed.tensor"]


REAL = """
import builtins, json, sys
if not {triton}:
    sys.modules["triton"] = None
importing = builtins.__import__
from snugfit.deferred_imports import _DEFERRAL, PutOffName, are_put_off, defer_imports
defer_imports()
import torch
import torch.utils.flop_counter
from torch import nn
from transformers import TrainingArguments, trainer_utils
before = "peft" in sys.modules
from peft import LoraConfig, get_peft_model
plain = nn.Sequential(nn.Linear(2, 2))
model = get_peft_model(nn.Sequential(nn.Linear(2, 2)), LoraConfig(target_modules=["0"]))
adapters = [before, are_put_off(), *map(trainer_utils._is_peft_model, (plain, model))]
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
    type(torch._dynamo).__name__, callable(torch.compiler.disable(len)), adapters,
]))
"""


HASTENED = """
import json
from snugfit.deferred_imports import READS_LIST, hasten_import
hasten_import()
from transformers.utils import import_utils
print("FOUND", json.dumps([vars(import_utils)[READS_LIST].__qualname__.partition(".")[0]]))
"""


@pytest.mark.parametrize(
    ("wants", "triton"),
    slow_but(
        [
            # The CPU build of torch has no Triton.
            ("torch.compile(lambda x: x, backend='eager')(1)", False),
            ("import torch.distributed.tensor", True),
            ("import torch._dynamo", True),
            ("sharding_utils.DTensor.from_local", True),
            ("torch._dynamo.config", True),
        ],
        0,
    ),
)
def test_whoever_wants_the_real_thing_gets_it(wants: str, triton: bool, tmp_path: Path) -> None:
    """Training arguments import no peft, and find its models once it is imported."""
    expected = [[True, True], False, True, [], True, "module", True, [False, True, False, True]]
    assert found(REAL.format(wants=wants, triton=triton), tmp_path) == expected


def test_lists_of_transformers_are_the_same_from_their_last_list_on(tmp_path: Path) -> None:
    """The faster search finds the same names in each of transformers' files, and is in force in commands."""
    from transformers.utils import import_utils

    read = vars(import_utils)[READS_LIST]
    texts = [path.read_text() for path in Path(import_utils.__file__).parents[1].glob("models/b*/*.py")]
    assert sum(map(bool, map(read, texts))) > 50
    assert [*map(of_last_list(read), texts)] == [*map(read, texts)]
    assert found(HASTENED, tmp_path) == ["of_last_list"]
