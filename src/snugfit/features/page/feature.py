"""Registration of the feature `page`: results as HTML pages, pictures and output of notebook cells."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from snugfit.techniques.feature import Feature


class PageFeature(Feature):
    """Add the options `--html`, `--open` and `--plot`, and the pictures of results in notebooks."""

    def options(self, command: str) -> Sequence[inspect.Parameter]:
        """Return the options of commands whose answers have charts."""
        from snugfit.features.page.options import options

        return options(command)

    def prepare(self, command: str, request: Any) -> Any:
        """Return the request. Raises `UsageError` for a page of a plan for several GPUs."""
        from snugfit.features.page.options import check_options

        check_options(command, request.flags, request.gpus)
        return request

    def take_answer(self, flags: Mapping[str, Any], answer: Any) -> None:
        """Write the page and the plot."""
        from snugfit.features.page.options import write_pictures

        write_pictures(flags, answer)

    def picture(self, answer: Any, form: str) -> bytes | None:
        """Return the answer and its charts as a file, or the cell of a notebook."""
        from snugfit.features.page.document import fragment
        from snugfit.features.page.pictures import parts_of
        from snugfit.features.page.static import draw

        if (parts := parts_of(answer)) is None:
            return None
        return fragment(parts).encode() if form == "html" else draw(parts, form)
