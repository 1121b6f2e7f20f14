"""Registration of the feature `traces`: a predicted step as a file for other viewers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from snugfit.techniques.feature import Feature


class TracesFeature(Feature):
    """The feature that adds the option `--trace` to `snugfit predict`."""

    def options(self, command: str) -> Sequence[inspect.Parameter]:
        """Return the option `--trace` for `predict`; none for other commands."""
        from snugfit.features.traces.options import OPTIONS

        return OPTIONS if command == "predict" else ()

    def prepare(self, command: str, request: Any) -> Any:
        """Return a command's parsed options unchanged. Raises `UsageError` for a trace that cannot be
        written.
        """
        from snugfit.features.traces.options import check_trace

        check_trace(request.flags, request.gpu)
        return request

    def take_answer(self, flags: Mapping[str, Any], answer: Any) -> None:
        """Write the trace of a prediction, if the option requests one."""
        from snugfit.features.traces.options import write_trace

        write_trace(flags, answer)
