"""Registration of the feature `doctor`: the examination of a machine (versions, extras, driver and GPUs)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from snugfit.techniques.feature import Feature


class DoctorFeature(Feature):
    """Add the commands `doctor` and `env`."""

    def commands(self) -> Sequence[Callable[..., Any]]:
        """Return the functions of `snugfit doctor` and `snugfit env`."""
        from snugfit.features.doctor.command import doctor, env

        return (doctor, env)

    def documents(self) -> Mapping[str, type]:
        """Return the classes of the JSON documents of both commands."""
        from snugfit.features.doctor.environment import Environment
        from snugfit.features.doctor.examine import Doctor

        return {"doctor --json": Doctor, "env --json": Environment}
