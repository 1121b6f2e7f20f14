"""The fork server is a copy of the command's process, and its workers compute the same bytes."""

from __future__ import annotations

import faulthandler
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from small_models import small_job
from snugfit.features.ways_out import early_server
from snugfit.features.ways_out.lighter import timer_of
from snugfit.job.gpu import find_gpu
from snugfit.planning.cost.parts_pool import parts_pool
from snugfit.prediction.predict import predict
from snugfit.prediction.worker_pool import Question
from snugfit.techniques.recipe import Recipe

pytestmark = pytest.mark.whole

WITHIN = 120.0
"""Seconds after which the process prints its stack and ends. On a quiet machine it takes eight seconds."""


SCRIPT = f"""
import sys
sys.path[:0] = {sys.path!r}
import test_early_server
test_early_server.evaluate_in_copies()
"""


def evaluate_in_copies() -> None:
    """Compare what two workers of a copied fork server compute with predictions."""
    early_server.NVIDIA_DRIVER = "/no/such/file"
    job, gpu = small_job("gpt2", 2), find_gpu("t4")
    early_server.start_as_copy(job, 2)
    # A process that does not end prints its stack. The printing thread must not exist in the copy.
    faulthandler.dump_traceback_later(WITHIN, exit=True)
    server: Any = vars(forkserver)["_forkserver"]
    command = Path(f"/proc/{server._forkserver_pid}/cmdline").read_bytes()
    assert command == Path("/proc/self/cmdline").read_bytes()
    with parts_pool(job, [gpu], timer_of(gpu), workers=2, shallow=True) as pool:
        setups = [Recipe.parse(text).setup() for text in ("plain", "bf16")]
        asked = [Question(number, "evaluate", ([setup],)) for number, setup in enumerate(setups)]
        found = {number: answer[0][0].needed_bytes for number, answer in pool.answers_to(asked)}
        [(_, whole)] = pool.answers_to([Question(0, "predict", (Recipe(), {"memory_bytes": 1 << 30}))])
    predicted = [predict(job, text, gpu=gpu) for text in ("plain", "bf16")]
    assert found == {number: one.needed_bytes for number, one in enumerate(predicted)}
    assert (whole.needed_bytes, whole.memory_bytes) == (predicted[0].needed_bytes, 1 << 30)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the fork server is copied on Linux only")
def test_workers_of_a_copied_process_compute_the_same_bytes() -> None:
    # The tests' clean process may have run operators, after which a copy is not safe. So a fresh one is used.
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
