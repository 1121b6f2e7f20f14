"""For every test: one thread, and what the user of this machine has calibrated stays out.

Models in tests are tiny; threads would only wait for each other, and for those of the other worker.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, here and in children


@pytest.fixture(autouse=True, scope="session")
def no_own_rates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Rates come from the package."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("rates")
        patch.setenv("SNUGFIT_RATES", str(folder))
        yield folder
