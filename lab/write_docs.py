"""Write the parts of the documentation that are generated from the code, or report that they are out of date.

    python lab/write_docs.py            # docs/techniques.md, docs/accuracy.md, dev/accuracy.md
    python lab/write_docs.py answers    # and the answers in README and docs, by running their commands

`docs/techniques.md` lists the roster, and both `accuracy.md` the committed results. An answer is a fenced
block of the language `console`, whose first line is `$ snugfit ...`. A last line `...` replaces the rest of a
long output.
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

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))  # an installed snugfit may be another checkout's

import accuracy_table  # noqa: E402

from snugfit.techniques.counterpart import Setting  # noqa: E402
from snugfit.techniques.roster import SettingLine, setting_lines, techniques  # noqa: E402
from snugfit.techniques.technique import Technique  # noqa: E402

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


MOST_NAMES = 2
"""Further names of a technique on the page. `snugfit techniques --json` has all of them."""


def techniques_page() -> str:
    """Return the page of all techniques."""
    lines = [
        "# Techniques",
        "",
        "This page is written by `python lab/write_docs.py`. `snugfit techniques` prints the same list, and"
        " `--json` all names in other libraries. A recipe has at most one technique of each slot:"
        " `bf16 + every_layer + micro_batches(4)`. Other slots have their default, which is plain PyTorch.",
        "",
        "**Fidelity**: `same` computes the same sums, `rounds` rounds differently, and `learns` is another"
        " algorithm. `snugfit plan --fidelity` limits a plan.",
        "",
        "| slot | change in memory | change in speed |",
        "|---|---|---|",
        *(
            f"| [{slot}](#{slot}) | {memory} | {speed} |"
            for slot, (memory, speed) in MEMORY_AND_SPEED.items()
        ),
        "",
        "*Elsewhere*: an argument of transformers, peft or another library with the same meaning, and further"
        " names that a recipe accepts.",
    ]
    slot, described = "", dict[str, str]()
    for technique in techniques():
        if technique.slot != slot:
            slot = str(technique.slot)
            lines += [
                "",
                f"## {slot}",
                "",
                "| technique | fidelity | settings | elsewhere |",
                "|---|---|---|---|",
            ]
        default = " (default)" if technique.plain else ""
        row = (
            f"`{technique.name}`{default}: {' '.join([technique.summary(), *needs(technique)])}",
            str(technique.fidelity),
            settings_words(technique, described),
            "" if technique.plain else "<br>".join(elsewhere(technique)),
        )
        lines.append(f"| {' | '.join(map(cell, row))} |")
    return "\n".join(lines) + "\n"


def settings_words(technique: type[Technique], described: dict[str, str]) -> str:
    """Return the settings of a technique. Those that an earlier technique has described refer to it."""
    words = {setting_words(technique, line): line.name for line in setting_lines(technique)}
    lines = [text for text in words if text not in described]
    for name in sorted({described[text] for text in words if text in described}):
        same = ", ".join(f"`{setting}`" for text, setting in words.items() if described.get(text) == name)
        lines.append(f"{same}: as for `{name}`.")
    described.update({text: technique.name for text in words if text not in described})
    return "<br>".join(lines)


def setting_words(technique: type[Technique], line: SettingLine) -> str:
    """Return a setting with its range or its words, its default and its sentence."""
    metadata = next(entry.metadata for entry in fields(technique) if entry.name == line.name)
    notes = [f"{metadata['low']:,} to {metadata['high']:,}"] if metadata else []
    notes += [str(line.kind)] if " or " in line.kind and line.kind != "true or false" else []
    notes += ["required"] if line.default is None else []
    is_none = line.default == "none" and "none" not in str(line.kind).split()
    notes += [f"default {line.default}"] if line.default is not None and not is_none else []
    return f"`{line.name}`" + (f" ({', '.join(notes)})" if notes else "") + f": {line.sentence}"


def needs(technique: type[Technique]) -> Iterator[str]:
    """Yield the extra with the required packages and the required compute capability."""
    if technique.needs:
        yield f"Needs `snugfit[{technique.extra}]`."
    if capability := technique.least_capability:
        yield f"Needs compute capability {capability[0]}.{capability[1]}."


def elsewhere(technique: type[Technique]) -> Iterator[str]:
    """Yield its names in transformers and other libraries."""
    readable = (one for one in technique.counterparts if one.arguments and one.used != "to read")
    if first := next(readable, None):
        pairs = (f"{name}={argument_words(value)}" for name, value in first.arguments.items())
        yield f"`{', '.join(pairs)}`{' (' + first.note + ')' if first.note else ''}"
    if technique.elsewhere:
        yield ", ".join(f"`{word}`" for word in technique.elsewhere[:MOST_NAMES])


def argument_words(value: Any) -> str:
    """Return an argument's value in Python's notation, or the name of the technique's setting."""
    return value.name if isinstance(value, Setting) else repr(value)


CUT = "...\n"
"""The last line of a shown output that is cut."""

CONSOLE = re.compile(r"^```console\n\$ ((?:[^\n]*\\\n)*[^\n]+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def shown_answers() -> list[tuple[str, str]]:
    """Return the commands in README and docs with their answers."""
    return [found for page in PAGES for found in CONSOLE.findall(page.read_text())]


def answer(command: str, shown: str) -> str:
    """Return the output of a shown command: all of it, or as many lines as are `shown` before `...`."""
    words = [sys.executable, "-m", *shlex.split(command.replace("\\\n", " "))]
    with TemporaryDirectory() as folder:
        places = {"XDG_CACHE_HOME": folder, "SNUGFIT_RATES": folder, "PYTHONPATH": str(ROOT / "src")}
        places = os.environ | places | {"HF_HUB_OFFLINE": "1"}
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
        for page in PAGES:
            text = CONSOLE.sub(
                lambda one: f"```console\n$ {one[1]}\n{answer(*one.groups())}```", page.read_text()
            )
            page.write_text(text)
    (ROOT / "docs" / "techniques.md").write_text(techniques_page())
    for path, text in accuracy_table.pages().items():
        (ROOT / path).write_text(text)


if __name__ == "__main__":
    main()
