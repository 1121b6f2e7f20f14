"""Run shell scripts whose `snugfit` and `python` commands run in the test's own process.

A process of its own would take seconds for each command. So PATH begins with two stubs. A stub sends its
words and streams over a socket to the test, and exits with the code that the test returns.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import transformers  # noqa: F401  # its log keeps the stderr that it finds when it is imported

from snugfit.cli.main import run

STUB = """#!{python} -IS
import json, os, socket, sys
if sys.argv[1] == "-c":
    os.execv({python!r}, ["python", *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as test:
    test.connect("commands")
    words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
    socket.send_fds(test, [json.dumps(words).encode()], [1, 2])
    sys.exit(test.recv(1)[0])
"""


def run_script(script: Path, **settings: str) -> tuple[int, str]:
    """Run a script in this (writable) folder; return its exit code and its output on both streams."""
    stubs = Path("stubs")
    stubs.mkdir(exist_ok=True)
    for name in ("snugfit", "python"):
        (stubs / name).write_text(STUB.format(python=sys.executable))
        (stubs / name).chmod(0o755)
    path = f"{stubs.absolute()}{os.pathsep}{os.environ['PATH']}"
    Path("commands").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener, Path("printed").open("w+") as printed:
        listener.bind("commands")
        listener.listen()
        listener.settimeout(0.05)
        with subprocess.Popen(
            ["bash", str(script)],
            env=os.environ | settings | {"PATH": path},
            stdout=printed,
            stderr=subprocess.STDOUT,
        ) as shell:
            while shell.poll() is None:
                try:
                    stub, _ = listener.accept()
                except TimeoutError:
                    continue
                with stub:
                    words, streams, *_ = socket.recv_fds(stub, 1 << 16, 2)
                    stub.send(bytes([_run_here(json.loads(words), streams)]))
        printed.seek(0)
        return shell.returncode, printed.read()


def _run_here(words: Sequence[str], streams: Sequence[int]) -> int:
    """Run one command with its output on these descriptors, close them, and return the exit code."""
    with os.fdopen(streams[0], "w") as out, os.fdopen(streams[1], "w") as messages:
        with redirect_stdout(out), redirect_stderr(messages):
            if words[0] == "snugfit":
                return run(words[1:])
            runpy.run_path(words[1], run_name="__main__")
            return 0
