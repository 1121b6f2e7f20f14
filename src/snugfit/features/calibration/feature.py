"""Registration of the feature `calibration`: hardware rates of a GPU and its host, measured by small training
jobs.
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
        """Return the class of the JSON document of `snugfit calibrate`."""
        from snugfit.features.calibration.calibrate import Calibration

        return {"calibrate --json": Calibration}
