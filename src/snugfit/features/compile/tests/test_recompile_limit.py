"""Layers that fill a cache of keys and values: torch compiles as many as its limit, and runs the others
uncompiled.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch._dynamo
from compiled_on_cpu import idle_kernels, no_vectors  # noqa: F401
from torch._dynamo.utils import counters

from aligned import peak
from reported import foreseen, reports
from small_models import small_job
from snugfit.errors import RecipeError
from snugfit.features.exchange.check import check
from snugfit.features.exchange.read import read_arguments
from snugfit.rehearsal.device.policy import CpuPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe
from tiers import slow_but

LOSS_OUTSIDE = 512
"""Bytes of numbers that Python wraps, and of dropout seeds, which a trace does not hold."""

SCRIPT = """
model = AutoModelForCausalLM.from_pretrained("gpt2").cuda()
{line}
for layer in model.transformer.h:
    layer.compile()
optimizer = torch.optim.AdamW(model.parameters())
for batch in torch.utils.data.DataLoader(data, batch_size=4, shuffle=True):
    model(**batch).loss.backward()
    optimizer.step()
"""


@pytest.mark.whole
@pytest.mark.parametrize(("family", "limit"), slow_but([("gpt2", 1), ("llama", 2)], 1))
def test_layers_beyond_the_limit_run_uncompiled(
    family: str,
    limit: int,
    idle_kernels: list[str],  # noqa: F811
) -> None:
    job = small_job(family, layers=3)
    setup = Recipe.parse(f"compiled(cache=true, limit={limit})").setup()
    trace = rehearse(job, setup, CpuPolicy())
    blocks = {"gpt2": "transformer.h", "llama": "model.layers"}[family]
    compiled = {
        number
        for number in range(3)
        if all(
            kernel.compiled
            for kernel in trace.kernels
            if kernel.phase == "forward" and f"{blocks}.{number}" in kernel.module
        )
    }
    assert compiled == {*range(limit)}
    assert any("recompile_limit" in doubt for doubt in trace.doubts)
    torch._dynamo.reset()
    counters.clear()
    real = reports(job, setup)
    assert counters["stats"]["unique_graphs"] == limit
    assert 0 <= peak(real) - peak(foreseen(trace)) <= LOSS_OUTSIDE


@pytest.mark.whole
@pytest.mark.slow
def test_a_limit_above_the_layers_compiles_all_of_them() -> None:
    trace = rehearse(small_job("llama", layers=3), Recipe.parse("compiled(cache=true)").setup(), CpuPolicy())
    assert not any("recompile_limit" in doubt for doubt in trace.doubts)


@pytest.mark.parametrize(
    ("line", "recipe"),
    [
        ("", "compiled(cache=true)"),
        ("torch._dynamo.config.recompile_limit = 64", "compiled(cache=true, limit=64)"),
        ("torch._dynamo.config.cache_size_limit = 64", "compiled(cache=true, limit=64)"),
        ("model.config.use_cache = False", "compiled"),
    ],
)
def test_a_script_that_compiles_layers_is_read_with_its_cache(tmp_path: Path, line: str, recipe: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.format(line=line))
    reading = read_arguments(file)
    assert not reading.refused
    assert reading.settings["recipe"] == recipe
    warned = any("use_cache = False" in finding.says for finding in check(file).findings)
    assert warned == (recipe == "compiled(cache=true)")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("compiled(what=model, cache=true)", "use_cache = False"),
        ("compiled(what=model, limit=9)", "use_cache = False"),
        ("compiled(cache=true, limit=0)", "1 to 256|from 1"),
    ],
)
def test_a_cache_or_limit_without_meaning_is_refused(words: str, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        Recipe.parse(words)


def test_a_limit_is_one_of_layers_with_a_cache() -> None:
    assert Recipe.parse("compiled(limit=9)") == Recipe.parse("compiled(cache=true, limit=9)")
