"""`snugfit techniques`: the techniques of the recipe notation."""

from __future__ import annotations

from snugfit.cli import arguments as given


def techniques(as_json: given.AsJson = False) -> None:
    """List the techniques by slot, each with its settings, its fidelity and its requirements."""
    from snugfit.report.techniques import document, render
    from snugfit.report.text.terminal import show, show_json
    from snugfit.techniques.roster import techniques as everyone

    roster = list(everyone())
    if as_json:
        show_json(document(roster))
    else:
        show(render(roster))
