"""The process that measures this machine's power and host: `python -m ...machine_probe RESULT.json PARENT`.

It runs the probes of `host_probe.py` and `power_probe.py`, one after the other. A probe that fails leaves its
reason in the result. The calibration then keeps the rates that the probe would correct.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from snugfit.documents import read_document, write_document
from snugfit.errors import one_line

POWER_SECONDS = 2.0
"""Seconds for which each mix of kernels is measured. The counter of energy changes every 100 ms."""

DEADLINE_SECONDS = 120.0


def measure_machine() -> dict[str, Any]:
    """Run the probes in a process of their own. Return its result: `host` and `power`, or a reason `why`."""
    from snugfit.measurement.process import Child

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "machine.json"
        module = "snugfit.features.calibration.machine_probe"
        command = [sys.executable, "-m", module, str(file), str(os.getpid())]
        with Child(command, environment=os.environ) as child:
            ended = child.wait(DEADLINE_SECONDS)
        if file.exists():
            return dict(read_document(file))
    reason = "it took too long" if ended.timed_out else ended.tail.strip().rsplit("\n", 1)[-1]
    return {"why": reason or f"its process ended with code {ended.returncode}"}


def main() -> None:
    """Measure host and power and write the file of the first argument."""
    from snugfit.measurement.process import die_with_parent

    die_with_parent(int(sys.argv[2]))
    import torch

    from snugfit.features.calibration import host_probe, power_probe

    result: dict[str, Any] = {}
    try:
        torch.ones(1, device="cuda")
        result["host"] = host_probe.measure_prices()
        write_document(Path(sys.argv[1]), result)
        readings = power_probe.PowerReadings()
        rows = list(power_probe.measure_mixes(power_probe.calibration_mixes(), readings, POWER_SECONDS))
        result["power"] = {"limit_watts": readings.limit_watts, "rows": rows}
    except Exception as error:  # NVML and CUDA raise many types; the other probes remain possible
        result["why"] = one_line(error)
    write_document(Path(sys.argv[1]), result)


if __name__ == "__main__":
    main()
