"""Registration of the feature `diagnosis`: the explanation of a run that ended out of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from snugfit.techniques.feature import Feature


class DiagnosisFeature(Feature):
    """The feature that adds the command `why-oom`."""

    def commands(self) -> Sequence[Callable[..., Any]]:
        """Return the function of `snugfit why-oom`."""
        from snugfit.features.diagnosis.command import why_oom

        return (why_oom,)

    def documents(self) -> Mapping[str, type]:
        """Return the class of the JSON document of `snugfit why-oom`."""
        from snugfit.features.diagnosis.result import Diagnosis

        return {"why-oom --json": Diagnosis}
