"""For every test: what the user of this machine has calibrated stays out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_own_rates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Rates come from the package."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("rates")
        patch.setenv("SNUGFIT_RATES", str(folder))
        yield folder
