"""For every test: one thread, and what the user of this machine has calibrated stays out.

Models in tests are tiny; threads would only wait for each other, and for those of the other worker.

The cyclic garbage collector comes as seldom as in the command (`cli/main.py`), and leaves out what the
tests' modules have made when they were imported: it walked through torch and transformers again and again,
for a fifteenth of all the time.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from snugfit.cli.main import FEW_COLLECTIONS

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, here and in children
gc.set_threshold(FEW_COLLECTIONS, 50, 50)


def pytest_collection_finish() -> None:
    """All modules of tests are imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def no_own_rates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Rates come from the package."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("rates")
        patch.setenv("SNUGFIT_RATES", str(folder))
        yield folder
