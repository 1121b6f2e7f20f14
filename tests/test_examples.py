"""Run the stories of `examples/` as a user types them, and check their answers and files.

`make test` runs most stories with a tiny model; the slow tier runs each at its own size.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kept import REST
from scripts_here import run_script
from tiers import slow_but

pytestmark = pytest.mark.stored_rehearsals

EXAMPLES = Path(__file__).parents[1] / "examples"
LITTLE = f"lora + eager + bf16 + keep_all + default + inline + adamw + {REST}"
"""A recipe that fixes all slots but the batching."""

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with an empty cache of plans."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # a plan starts no other processes
    return tmp_path


def tiny_model(folder: Path, **changes: Any) -> str:
    """A folder with the config of a two-layer Llama."""
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text(json.dumps(TINY | changes))
    return str(folder / "tiny")


def answer(script: str, **settings: str) -> str:
    """Run an example with bash and return its output, messages included; require exit code 0 at the end."""
    ran = subprocess.run(
        ["bash", str(EXAMPLES / script)],
        check=False,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return checked(ran.returncode, ran.stdout)


def small_answer(script: str, **settings: str) -> str:
    """Return the same for commands that run in this process."""
    return checked(*run_script(EXAMPLES / script, **settings))


def checked(code: int, said: str) -> str:
    assert code == 0, said
    assert "Traceback" not in said, said
    assert "No such option" not in said, said
    return said


def check_lora_on_24gb(folder: Path, said: str) -> None:
    """Check that the plain step does not fit, and that the plan fits with recomputation and micro-batches.

    The plan keeps AdamW and leaves its headroom.
    """
    assert said.index("exit code 3") < said.index("exit code 0")
    plan = json.loads((folder / "snugfit-examples" / "plan.json").read_text())
    techniques = plan["best"]["recipe"].split(" + ")
    assert "lora" in techniques
    assert not any(name.startswith(("sgd", "adafactor", "adamw_8bit")) for name in techniques)
    assert plan["headroom_bytes"] >= 0.02 * plan["memory_bytes"]
    nvml_bytes = plan["best"]["reserved_bytes"] + plan["best"]["context_bytes"]
    assert nvml_bytes <= plan["memory_bytes"] - plan["headroom_bytes"]
    assert not plan["tight"]
    assert f"under {plan['best']['recipe']} on" in said
    assert "dry run" in said.lower()
    assert not (folder / "snugfit-examples" / "adapters").exists()


@pytest.mark.slow
@pytest.mark.whole
def test_lora_of_a_small_model_on_a_small_card(folder: Path) -> None:
    model = tiny_model(folder, dtype="bfloat16")
    check_lora_on_24gb(folder, small_answer("lora_on_24gb.sh", MODEL=model, GPU="rtx 2060", KEEP=LITTLE))


@pytest.mark.slow
def test_lora_of_an_8b_model_on_24_gb(folder: Path) -> None:
    check_lora_on_24gb(folder, answer("lora_on_24gb.sh"))


def check_trainer_script(said: str) -> None:
    """Check that the script was read, its faults were named, and the plan kept the settings that train."""
    assert "renamed" in said
    assert "eval_strategy" in said
    assert "conflict" in said
    assert "precision: bf16, kept from your own recipe" in said
    assert re.search(r"optimizer: adamw_fused, .*kept from your own recipe", said)
    assert "steps taken: 20" in said


@pytest.mark.slow
@pytest.mark.whole
def test_a_trainer_script_of_a_small_model(folder: Path) -> None:
    lines = (EXAMPLES / "trainer_script.py").read_text()
    script = lines.replace("answerdotai/ModernBERT-base", tiny_model(folder))
    assert script != lines
    (folder / "mine.py").write_text(script.replace("=64,", "=4,"))
    keep = f"sdpa + keep_all + default + inline + {REST}"
    check_trainer_script(small_answer("trainer_script.sh", SCRIPT="mine.py", GPU="rtx 2060", KEEP=keep))


@pytest.mark.slow
def test_a_trainer_script(folder: Path) -> None:
    said = answer("trainer_script.sh")
    assert said.index("exit code 3") < said.index("Changes to your recipe")
    check_trainer_script(said)


def check_rented(folder: Path, said: str) -> None:
    """Check that the report names the smallest, the fastest and the cheapest GPU, each with its recipe."""
    pytest.importorskip("snugfit.features.page", reason="the feature page is not there")
    for headline in ("The smallest GPU", "The fastest: ", "The cheapest: "):
        assert said.count(headline) == 2  # of one recipe, and of the best of each GPU
    results = folder / "snugfit-examples"
    assert '<div class="chart' in (results / "gpus.html").read_text()
    compile((results / "rented" / "training_arguments.py").read_text(), "rented", "exec")


@pytest.mark.whole
@pytest.mark.slow
def test_gpus_to_rent_for_a_small_model(folder: Path) -> None:
    model = tiny_model(folder, dtype="bfloat16")
    check_rented(folder, small_answer("rent_a_gpu.sh", MODEL=model, GPUS="l4 rtx4090", KEEP=LITTLE))


@pytest.mark.slow
def test_gpus_to_rent(folder: Path) -> None:
    check_rented(folder, answer("rent_a_gpu.sh"))


def check_where_the_bytes_go(folder: Path, said: str) -> None:
    """Check the pages with pictures, the timeline, the comparison, and a predicted and observed loop."""
    pytest.importorskip("snugfit.features.page", reason="the feature page is not there")
    results = folder / "snugfit-examples"
    for page in ("step.html", "techniques.html"):
        assert '<div class="chart' in (results / page).read_text()
    assert json.loads((results / "step.json").read_text())["traceEvents"]
    assert "\n adafactor  " in said
    assert "loss over all logits" in said
    predicted = said.partition("predicted, by kind:")[2].partition("loss")[0]
    bytes_of = {line[:20].strip(): float(line[20:].split()[0]) for line in predicted.splitlines() if line}
    assert bytes_of["optimizer states"] == pytest.approx(2 * bytes_of["weights"], rel=0.01)
    assert bytes_of["gradients"] == pytest.approx(bytes_of["weights"], rel=0.01)
    assert "host memory" in said


@pytest.mark.whole
def test_where_the_bytes_of_a_small_model_go(folder: Path) -> None:
    check_where_the_bytes_go(folder, small_answer("where_the_bytes_go.sh", MODEL=tiny_model(folder)))


@pytest.mark.slow
def test_where_the_bytes_go(folder: Path) -> None:
    check_where_the_bytes_go(folder, answer("where_the_bytes_go.sh"))


NOTEBOOKS = ("will_it_fit", "where_do_the_bytes_go", "plan_and_train")


def run_cell(source: str, names: dict[str, Any]) -> tuple[str, Any]:
    """Return the printed text of a cell and the value of its last line, if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    value, printed = None, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return printed.getvalue(), value


def figures(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.?\d*(?:e[+-]\d+)?", text)]


def stored(cell: dict[str, Any], kind: str) -> str:
    """Return the stored output of a notebook's cell: printed text (`stream`) or a value's text
    (`execute_result`)."""
    outputs = [output for output in cell["outputs"] if output["output_type"] == kind]
    return "".join("".join(output.get("text") or output["data"]["text/plain"]) for output in outputs)


@pytest.mark.whole
@pytest.mark.parametrize("name", slow_but(NOTEBOOKS, 0))
def test_a_notebook_says_what_its_cells_compute(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare printed figures and tables of a DataFrame with the stored ones; pictures are stored as SVG."""
    pandas = pytest.importorskip("pandas", reason="Requires: [pandas]")
    (folder / "examples").mkdir()
    (folder / "results").symlink_to(EXAMPLES.parent / "results")
    monkeypatch.chdir(folder / "examples")
    notebook = json.loads((EXAMPLES / f"{name}.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {"__name__": "__main__"}
    tables = 0
    for cell in cells:
        printed, value = run_cell("".join(cell["source"]), names)
        assert figures(printed) == figures(stored(cell, "stream"))
        if isinstance(value, pandas.DataFrame):
            now = repr(value)
            assert figures(now) == pytest.approx(figures(stored(cell, "execute_result")), rel=1e-6)
            tables += 1
    assert tables
    content = json.dumps(notebook)
    assert "data:image/svg+xml" in content
    assert not re.search(r"/(home|tmp|work|root|Users)/", content)
