"""Registration of the feature `trackers`: metrics of a training run for the trackers of transformers
(`report_to`).
"""

from __future__ import annotations

from typing import Any

from snugfit.techniques.feature import Feature


class Trackers(Feature):
    """The feature that passes the metrics of a training run to trackers such as TensorBoard."""

    def trackers(self) -> Any:
        """Return the module `reporting`, which passes metrics to trackers such as TensorBoard."""
        from snugfit.features.trackers import reporting

        return reporting
