"""Registration of the feature `page`: results of commands as HTML pages, plots and output of notebook
cells.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from snugfit.techniques.feature import Feature


class PageFeature(Feature):
    """The feature that adds the options `--html`, `--open` and `--plot`, and the charts of results in
    notebooks.
    """

    def options(self, command: str) -> Sequence[inspect.Parameter]:
        """Return the options `--html`, `--open` and `--plot` of a command whose result has charts; none for
        others.
        """
        from snugfit.features.page.options import options

        return options(command)

    def prepare(self, command: str, request: Any) -> Any:
        """Return the command's parsed options unchanged. Raises `UsageError` for a page of a plan for several
        GPUs.
        """
        from snugfit.features.page.options import check_options

        check_options(command, request.flags, request.gpus)
        return request

    def take_answer(self, flags: Mapping[str, Any], answer: Any) -> None:
        """Write the page and the plot of a command's result, if the options request them."""
        from snugfit.features.page.options import write_pictures

        write_pictures(flags, answer)

    def picture(self, answer: Any, form: str) -> bytes | None:
        """Return a result and its charts as the bytes of a file, or as HTML for a notebook cell. `form` is
        the format.
        """
        from snugfit.features.page.document import fragment
        from snugfit.features.page.pictures import parts_of
        from snugfit.features.page.static import draw

        if (parts := parts_of(answer)) is None:
            return None
        return fragment(parts).encode() if form == "html" else draw(parts, form)
