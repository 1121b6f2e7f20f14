"""Registration of the feature `doctor`: the examination of a machine (versions, extras, driver and GPUs)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from snugfit.techniques.feature import Feature


class DoctorFeature(Feature):
    """Add the command `doctor`."""

    def commands(self) -> Sequence[Callable[..., Any]]:
        """Return the function of `snugfit doctor`."""
        from snugfit.features.doctor.command import doctor

        return (doctor,)

    def documents(self) -> Mapping[str, type]:
        """Return the class of the JSON document of `snugfit doctor`."""
        from snugfit.features.doctor.examine import Doctor

        return {"doctor --json": Doctor}
