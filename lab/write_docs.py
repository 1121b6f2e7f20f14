"""Write the parts of the documentation that are generated from the code, or report that they are out of date.

    python lab/write_docs.py            # docs/techniques.md
    python lab/write_docs.py answers    # and the answers in README and docs, by running their commands

`docs/techniques.md` lists the roster. An answer is a fenced block of the language `console`, whose first line
is `$ snugfit ...`. A last line `...` replaces the rest of a long output.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from snugfit.techniques.counterpart import Setting
from snugfit.techniques.roster import SettingLine, setting_lines, techniques
from snugfit.techniques.technique import Technique

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def cell(text: str) -> str:
    """Return words in a cell of a table, in one line."""
    return " ".join(text.split()).replace("|", "\\|")


MEMORY_AND_SPEED = {
    "adapters": ("weights' gradients and optimizer states", "less to update"),
    "attention": ("the score matrix", "fused kernels are faster"),
    "precision": ("weights, activations, gradients", "tensor cores"),
    "matmul": ("nothing", "tensor cores for fp32"),
    "head": ("logits of a language model, their softmax and its gradient", "a head more often read"),
    "checkpointing": ("activations", "computes layers again"),
    "batching": ("activations", "more and smaller kernels"),
    "optimizer": ("optimizer states, temporaries of the update", "the update"),
    "allocator": ("memory lost in pieces", "nothing"),
    "loading": ("host memory", "waiting for batches"),
}
"""Changes by a slot's techniques: of the memory, and of the speed."""


def techniques_page() -> str:
    """Return the page of all techniques."""
    lines = [
        "# Techniques",
        "",
        "Written by `python lab/write_docs.py` from the roster, which `snugfit techniques` prints too."
        " A recipe names at most one technique of each slot: `bf16 + every_layer + micro_batches(4)`. What it"
        " does not name is the slot's default, which is plain PyTorch.",
        "",
        "**Fidelity**: `same` computes the same sums, `rounds` rounds differently, `learns` is another"
        " algorithm that also learns. `snugfit plan --fidelity` says how far a plan may go.",
        "",
        "| slot | its techniques change in memory | in speed |",
        "| --- | --- | --- |",
        *(
            f"| [{slot}](#{slot}) | {memory} | {speed} |"
            for slot, (memory, speed) in MEMORY_AND_SPEED.items()
        ),
    ]
    slot = ""
    for technique in techniques():
        if technique.slot != slot:
            slot = str(technique.slot)
            heads = ("technique", "what it does", "fidelity", "settings", "needs", "elsewhere")
            lines += ["", f"## {slot}", "", f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
        default = " (default)" if technique.plain else ""
        row = (
            f"`{technique.name}`{default}",
            technique.summary(),
            str(technique.fidelity),
            "<br>".join(setting_words(technique, line) for line in setting_lines(technique)),
            "<br>".join(needs(technique)),
            "<br>".join(elsewhere(technique)),
        )
        lines.append(f"| {' | '.join(map(cell, row))} |")
    lines += [
        "",
        "*elsewhere*: the argument of transformers' `TrainingArguments` (or of peft) that means the same, and"
        " words of other libraries that a recipe understands.",
    ]
    return "\n".join(lines) + "\n"


def setting_words(technique: type[Technique], line: SettingLine) -> str:
    """Return a setting with its type, range, default and sentence."""
    metadata = next(entry.metadata for entry in fields(technique) if entry.name == line.name)
    bounds = f" from {metadata['low']:,} to {metadata['high']:,}" if metadata else ""
    default = "must be given" if line.default is None else f"default {line.default}"
    return f"`{line.name}`: {line.kind}{bounds}, {default}. {line.sentence}"


def needs(technique: type[Technique]) -> Iterator[str]:
    """Return the required packages and the required abilities of the GPU."""
    if technique.needs:
        yield f'{", ".join(technique.needs)}: `pip install "snugfit[{technique.extra}]"`'
    if capability := technique.least_capability:
        yield f"compute capability {capability[0]}.{capability[1]}"


def elsewhere(technique: type[Technique]) -> Iterator[str]:
    """Return its names in transformers and other libraries."""
    for counterpart in technique.counterparts:
        if counterpart.used == "to read":  # these names are our own
            continue
        pairs = (f"{name}={argument_words(value)}" for name, value in counterpart.arguments.items())
        if words := ", ".join(pairs):
            yield f"`{words}`{' (' + counterpart.note + ')' if counterpart.note else ''}"
    if technique.elsewhere:
        yield ", ".join(f"`{word}`" for word in technique.elsewhere)


def argument_words(value: Any) -> str:
    """Return an argument's value in Python's notation, or the name of the technique's setting."""
    return value.name if isinstance(value, Setting) else repr(value)


CUT = "...\n"
"""The last line of a shown output that is cut."""

CONSOLE = re.compile(r"^```console\n\$ ((?:[^\n]*\\\n)*[^\n]+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def shown_answers() -> dict[str, str]:
    """Return the answers in README and docs, by their command."""
    return {command: shown for page in PAGES for command, shown in CONSOLE.findall(page.read_text())}


def answer(command: str, shown: str) -> str:
    """Return the output of a shown command: all of it, or as many lines as are `shown` before `...`."""
    words = [sys.executable, "-m", *shlex.split(command.replace("\\\n", " "))]
    with TemporaryDirectory() as folder:
        places = os.environ | {"XDG_CACHE_HOME": folder, "SNUGFIT_RATES": folder, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(words, capture_output=True, text=True, env=places, cwd=ROOT, check=False)
    if done.returncode not in (0, 3):
        raise SystemExit(f"{command}: {done.stderr}")
    return as_shown(done.stdout, shown)


def as_shown(output: str, shown: str) -> str:
    """Return an output without spaces at line ends, cut where the `shown` text is."""
    lines = [line.rstrip() for line in output.splitlines()]
    if shown.endswith(CUT):
        lines = [*lines[: shown.count("\n") - 1], CUT.strip()]
    return "\n".join(lines).strip("\n") + "\n"


def main() -> None:
    """Write the pages."""
    if sys.argv[1:] == ["answers"]:
        new = {command: answer(command, shown) for command, shown in shown_answers().items()}
        for page in PAGES:
            text = CONSOLE.sub(lambda one: f"```console\n$ {one[1]}\n{new[one[1]]}```", page.read_text())
            page.write_text(text)
    (ROOT / "docs" / "techniques.md").write_text(techniques_page())


if __name__ == "__main__":
    main()
