"""The command `snugfit techniques`: the words of a recipe."""

from __future__ import annotations

from typing import Annotated

import typer

from snugfit.cli import arguments as given

Word = Annotated[
    str | None,
    typer.Argument(help="Only techniques of this slot (such as optimizer), or with this word in the name."),
]


def techniques(word: Word = None, as_json: given.AsJson = False) -> None:
    """List the techniques by slot (a choice of the recipe, such as the optimizer), with settings, fidelity
    and requirements.
    """
    from snugfit.report.techniques import TechniqueList, render
    from snugfit.report.text.terminal import show, show_json
    from snugfit.techniques.roster import find
    from snugfit.techniques.roster import techniques as everyone

    roster = list(everyone())
    if word is not None:
        roster = [
            one for one in roster if word.lower() in (one.name, str(one.slot)) or word.lower() in one.name
        ]
        # The word may be another library's name for a technique, or a misspelled technique.
        roster = roster or [find(word)]
    if as_json:
        show_json(TechniqueList.of(roster).to_json())
    else:
        show(render(roster))
