"""`snugfit gpus`: the GPUs that can be predicted for, with the sources of their figures."""

from __future__ import annotations

from typing import Annotated

import typer

Name = Annotated[
    str | None, typer.Argument(help="Show one GPU with its sources: h200, v100-16gb, 'rtx 4090'.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def gpus(name: Name = None, as_json: AsJson = False) -> None:
    """List the GPUs that snugfit knows, or show one with the sources of its figures."""
    from snugfit.job.gpu import all_gpus, find_gpu
    from snugfit.report.gpus import render, render_one
    from snugfit.report.terminal import show, show_json

    found = [find_gpu(name)] if name else list(all_gpus())
    if as_json:
        show_json({"schema": 1, "what": "gpus", "gpus": [gpu.to_json() for gpu in found]})
    else:
        show(render_one(found[0]) if name else render(found))
