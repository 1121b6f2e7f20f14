"""Registration of the feature `calibration`: rates of a GPU and its host from small training jobs that run
there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from snugfit.techniques.feature import Feature


class CalibrationFeature(Feature):
    """Add the command `calibrate`."""

    def commands(self) -> Sequence[Callable[..., Any]]:
        """Return the function of `snugfit calibrate`."""
        from snugfit.features.calibration.command import calibrate

        return (calibrate,)

    def documents(self) -> Mapping[str, type]:
        """Return the document of `snugfit calibrate`."""
        from snugfit.features.calibration.calibrate import Calibration

        return {"calibrate --json": Calibration}
