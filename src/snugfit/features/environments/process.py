"""Runs of this snugfit in the interpreter of another environment."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import snugfit
from snugfit.features.environments.environment import PythonEnvironment


def run_module(environment: PythonEnvironment, module: str, arguments: Sequence[str]) -> int:
    """Run a module of this snugfit with another environment's packages, and return its exit code.

    The process writes to this one's stdout and stderr.
    """
    package = Path(snugfit.__file__).parent
    with tempfile.TemporaryDirectory(prefix="snugfit-source-") as folder:
        # The folder of the package may be a site-packages, whose other packages must stay hidden.
        os.symlink(package, Path(folder, package.name), target_is_directory=True)
        variables = {**os.environ, "PYTHONPATH": folder}
        variables.pop("PYTHONHOME", None)
        sys.stdout.flush()
        command = [str(environment.python), "-m", module, *arguments]
        return subprocess.run(command, env=variables, check=False).returncode
