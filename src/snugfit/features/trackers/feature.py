"""Registration of the feature `trackers`: metrics of a run for the trackers of transformers (`report_to`)."""

from __future__ import annotations

from typing import Any

from snugfit.techniques.feature import Feature


class Trackers(Feature):
    """The feature that passes the events of a run to trackers."""

    def trackers(self) -> Any:
        """Return the module with the callbacks of trackers."""
        from snugfit.features.trackers import reporting

        return reporting
