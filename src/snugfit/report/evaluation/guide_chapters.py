"""The guide's chapters on torch.compile and DeepSpeed as a table: they name techniques and give no figures.

What is still to be had is said, and what took the place of the rest; a technique that is not predicted gets
a reason and never a number.
"""

from __future__ import annotations

from snugfit.evaluation.guide_result import GuideResult
from snugfit.report.text.grid import Grid


def without_figures_grid(result: GuideResult) -> Grid:
    """One row a technique; the reason stands in it where its experiment could not be predicted."""
    refused = {row.name: row.why_refused for row in result.rows if row.refused}
    rows = tuple(
        (
            f"{line.chapter}: {line.name}",
            "not predicted" if line.experiment in refused else line.status,
            line.guide,
            refused.get(line.experiment, line.today),
            line.instead,
        )
        for line in result.without_figures
    )
    return Grid(
        title="What the guide names and gives no figure of",
        heads=("Named", "Here", "The guide", "Today", "Recipes today<"),
        rows=rows,
        note="What is predicted is one of the experiments above, or with --modern a large model. No figure "
        "is made up for the rest.",
    )
