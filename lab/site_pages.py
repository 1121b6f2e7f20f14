"""Write the Markdown pages from which MkDocs builds the documentation site.

    python lab/site_pages.py    # build/pages, the source of mkdocs.yml; `make docs` calls it

Pages come from README.md, `docs`, the notebooks of `examples`, the newest `results/models-*.json` and
`snugfit.__all__`. A link to another file of the repository becomes one to `repo_url` of mkdocs.yml.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))  # an installed snugfit may be another checkout's

import snugfit  # noqa: E402
from snugfit.units import GIB, show_seconds  # noqa: E402

FOLDER = ROOT / "build" / "pages"

HOME = "index.md"
"""The site's first page, made of README.md. The site's menu replaces docs/README.md."""

ASSETS = {"lab/site.css": "site.css"}
"""Files besides pages, and their places on the site."""

LINK = re.compile(r"\]\(([^)#:\s]*)(#[^)\s]*)?\)")
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)

REFERENCE = {
    "jobs": (
        "Jobs, GPUs and recipes",
        "Model Job Task Phase Lengths ServingRequest Gpu find_gpu all_gpus Recipe",
    ),
    "predict": (
        "Predict and plan",
        "predict rehearse predict_serving predict_session compare plan plan_gpus plan_several_gpus "
        "plan_lengths ways_out SnugfitError",
    ),
    "train": ("Train and measure", "train fit accelerate HandRun Trained measure watch SnugfitCallback"),
    "results": (
        "Results",
        "Prediction Footprint Timing Comparison Plan GpuPlans LengthPlan Measurement ServingAnswer "
        "SessionPrediction",
    ),
}  # fmt: skip
"""Pages of the reference: the title, and the public names in order."""

FULL = {"plan": "snugfit.planning.search.search.plan"}
"""Functions with the arguments that a public one passes on, by its name."""


def pages() -> dict[str, str]:
    """Return the text of each page, by its path on the site."""
    made = {HOME: on_site(ROOT / "README.md", HOME)}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        place = path.relative_to(ROOT / "docs").as_posix()
        if place != "README.md":
            made[place] = on_site(path, place)
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        place = f"notebooks/{path.stem}.md"
        made[place] = on_site(path, place, notebook(json.loads(path.read_text())))
    made["models.md"] = models_page(json.loads(max((ROOT / "results").glob("models-*.json")).read_text()))
    made |= reference_pages()
    return made


# ---- links -------------------------------------------------------------------------------------------------


def on_site(path: Path, place: str, text: str | None = None) -> str:
    """Return the text of a file of the repository with links that are valid at its place on the site."""

    def rewrite(link: re.Match[str]) -> str:
        return f"]({target(path, place, link[1], link[2] or '')})"

    pieces = FENCED.split(path.read_text() if text is None else text)
    return "".join(one if one.startswith("```") else LINK.sub(rewrite, one) for one in pieces)


def target(path: Path, place: str, linked: str, anchor: str) -> str:
    """Return the target of a link on the site. Raises `FileNotFoundError` for a missing file."""
    if not linked:
        return anchor
    file = (path.parent / linked).resolve()
    if not file.exists():
        raise FileNotFoundError(f"{path.relative_to(ROOT)}: the link {linked} leads nowhere. Correct it.")
    name = file.relative_to(ROOT).as_posix()
    if name in ("README.md", "docs/README.md"):
        found = HOME
    elif file.suffix == ".ipynb":
        found = f"notebooks/{file.stem}.md"
    elif name.startswith("docs/"):
        found = name.removeprefix("docs/")
    else:
        return f"{repository()}/{'tree' if file.is_dir() else 'blob'}/main/{name}{anchor}"
    return os.path.relpath(found, PurePosixPath(place).parent) + anchor


def repository() -> str:
    """Return the owner's address of the repository, which mkdocs.yml has."""
    found = re.search(r"^repo_url: (\S+)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert found, "mkdocs.yml has a line `repo_url: ADDRESS`"
    return found[1].rstrip("/")


# ---- notebooks ---------------------------------------------------------------------------------------------


def notebook(document: dict[str, Any]) -> str:
    """Return an executed notebook as Markdown, with the outputs of its cells."""
    blocks = []
    for cell in document["cells"]:
        source = "".join(cell["source"])
        blocks.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        blocks += [shown for output in cell.get("outputs", ()) if (shown := output_block(output))]
    return "\n\n".join(blocks) + "\n"


def output_block(output: dict[str, Any]) -> str:
    """Return an output of a cell as one block of HTML: the HTML of a result, or its text."""
    data = output.get("data", {})
    text = "".join(output.get("text", data.get("text/plain", "")))
    shown = "".join(data.get("text/html", "")) or (f"<pre>{html.escape(text)}</pre>" if text else "")
    # The search would index each number of an output.
    return f'<div class="output" data-search-exclude>{shown}</div>' if shown else ""


# ---- models ------------------------------------------------------------------------------------------------


def models_page(document: dict[str, Any]) -> str:
    """Return the table of models, ways of fine-tuning and GPUs. Each cell links to its command."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for one in document["predictions"]:
        rows[one["model"], one["method"]].append(one)
    heads = (f"{gpu.upper()}<br>{memory / GIB:.0f} GiB" for gpu, memory in document["gpus"].items())
    used = ", ".join(f"{name} {document['versions'][name]}" for name in ("snugfit", "torch", "transformers"))
    lines = [
        "# Which model fits which GPU?",
        "",
        "GPU memory in GiB of a training step. A **bold** number fits the GPU. Each number leads to its"
        " command and its seconds. Language models train 4 samples of 2,048 tokens (GPT-2: 1,024), BERT 32 of"
        " 512. The batch has four micro-batches, and all layers are computed again in the backward pass.",
        "",
        f"| model | method | {' | '.join(heads)} |",
        "|---|---|" + "---:|" * len(document["gpus"]),
        *(
            f"| {model} | {method} | {' | '.join(map(cell, found))} |"
            for (model, method), found in rows.items()
        ),
        "",
        "`snugfit plan` searches for a faster or smaller recipe, and [Techniques](techniques.md) lists them."
        " GPUs other than H100 and H200 [are not measured](accuracy.md).",
        "",
        f"Predicted on {document['date']} with {used} by `lab/predict_models.py`.",
    ]
    for (model, method), found in rows.items():
        if f"## {model}" not in lines:
            lines += ["", f"## {model}"]
        lines += ["", f"### {method}, {model}", *(line for one in found for line in command_lines(one))]
    return "\n".join(lines) + "\n"


def cell(one: dict[str, Any]) -> str:
    """Return the memory of a prediction as a link to its command, which is also its tooltip."""
    size = f"{one['needed_bytes'] / GIB:.1f}"
    title = html.escape(one["command"])
    return f'<a href="#{anchor_of(one)}" title="{title}">{f"<b>{size}</b>" if one["fits"] else size}</a>'


def command_lines(one: dict[str, Any]) -> Iterator[str]:
    """Yield the verdict of a prediction with its anchor, and its command."""
    verdict = "fits" if one["fits"] else "does not fit"
    pace = (
        f", about {show_seconds(one['step_seconds'])} a step" if one["fits"] and one["step_seconds"] else ""
    )
    needed, memory = one["needed_bytes"] / GIB, one["memory_bytes"] / GIB
    yield ""
    yield f"**{one['gpu'].upper()}**: {verdict}, {needed:.1f} GiB of {memory:.1f} GiB{pace}."
    yield f"{{ #{anchor_of(one)} }}"
    yield f"\n```text\n{one['command']}\n```"


def anchor_of(one: dict[str, Any]) -> str:
    """Return the anchor of a prediction on the page."""
    return re.sub(r"[^a-z0-9]+", "-", f"{one['model']} {one['method']} {one['gpu']}".lower())


# ---- reference ---------------------------------------------------------------------------------------------


def reference_pages() -> dict[str, str]:
    """Return the pages of all public names, whose docstrings mkdocstrings inserts. Raises `ValueError` if
    `REFERENCE` lacks one. Names of a deleted feature are left out.
    """
    public = {*snugfit.__all__}
    if missing := public - {name for _, names in REFERENCE.values() for name in names.split()}:
        raise ValueError(f"REFERENCE lacks {', '.join(sorted(missing))} of snugfit.__all__. Add it.")
    made = {}
    for page, (title, names) in REFERENCE.items():
        lines = [f"# {title}", ""]
        for name in filter(public.__contains__, names.split()):
            value = getattr(snugfit, name)
            home = getattr(value, "__module__", None) if hasattr(value, "__qualname__") else None
            lines += inserted(f"{home or home_of(name)}.{name}", f"snugfit.{name}")
            if name in FULL:
                lines += inserted(FULL[name], f"Arguments of snugfit.{name}")
        made[f"reference/{page}.md"] = "\n".join(lines)
    return made


def inserted(path: str, heading: str) -> list[str]:
    """Return the lines that insert the docstring and the signature of a definition."""
    label = heading.replace("snugfit.", "")
    return [f"::: {path}", "    options:", f"      heading: {heading}", f"      toc_label: {label}", ""]


def home_of(name: str) -> str:
    """Return the module of a public name that is neither a class nor a function."""
    return f"snugfit.{snugfit._HOMES[name]}"


def main() -> None:
    """Write all pages and their pictures to `FOLDER`, and remove earlier ones."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    for place, text in pages().items():
        (FOLDER / place).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / place).write_text(text)
    for file, place in ASSETS.items():
        shutil.copy(ROOT / file, FOLDER / place)
    shutil.copytree(ROOT / "docs" / "pictures", FOLDER / "pictures")


if __name__ == "__main__":
    main()
