"""Build the wheel and the sdist of the last commit, and test the wheel in an empty environment.

    python lab/build_dist.py

`make dist` runs it. Each file is built twice, from two copies of the commit in different folders. The script
fails if the bytes differ or the wheel is too large.

The script installs the wheel without extras, and runs the commands that need none. With extras it runs the
demo, and the tests that call each command in README and docs. These tests import the installed package, since
`src` is not on their path.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from email import message_from_bytes
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"

LARGEST_WHEEL = 3_000_000
"""Bytes that a wheel may have."""

MOST_DEPENDENCIES = 9
"""Number of packages that an installation without extras may require."""

TORCH = "torch==2.13.0"
"""The torch of `constraints.txt`. pip installs it first, so that a local build of it stays."""

EXTRAS = "train,plots,peft,bnb"
"""Extras of the second installation, as for `make demo`."""

LIGHT = (
    "env",
    "gpus h100",
    "predict bert-large-uncased --task sequence-classification --gpu v100-16gb --no-cache",
    "plan distilbert-base-uncased --task sequence-classification --gpu v100-16gb --no-cache",
    "check examples/trainer_script.py",
    "why-oom examples/oom.log",
)
"""Commands that an installation without extras must run."""

HEAVY = ("measure bert-base-uncased", "predict bert-base-uncased --plot bytes.png")
"""Commands that must name their extra there."""


def run(words: Sequence[str | Path], allowed: Sequence[int] = (0,)) -> str:
    """Run a command in the repository and return its output. Raises `SystemExit` for an exit code that is not
    allowed.
    """
    # A PYTHONPATH could replace the installed package by the repository's.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode not in allowed:
        raise SystemExit(f"{' '.join(map(str, words))}\nended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def build(folder: Path) -> dict[str, bytes]:
    """Return the files that hatchling builds from the last commit in this folder, by name. Their dates are
    that of the commit.
    """
    run(["git", "archive", "--format=tar", f"--output={folder}.tar", "HEAD"])
    shutil.unpack_archive(f"{folder}.tar", folder, filter="data")
    os.environ["SOURCE_DATE_EPOCH"] = run(["git", "log", "-1", "--format=%ct"]).strip()
    subprocess.run([sys.executable, "-m", "hatchling", "build"], cwd=folder, check=True, capture_output=True)
    return {path.name: path.read_bytes() for path in sorted((folder / "dist").iterdir())}


def write(files: dict[str, bytes]) -> Path:
    """Write the files to `dist`, print their sizes and SHA-256, and return the path of the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    for name, content in files.items():
        (DIST / name).write_bytes(content)
        print(f"{name}: {len(content):,} bytes, SHA-256 {hashlib.sha256(content).hexdigest()}")
    [wheel] = DIST.glob("*.whl")
    if wheel.stat().st_size > LARGEST_WHEEL:
        raise SystemExit(f"{wheel.name} has more than {LARGEST_WHEEL:,} bytes.")
    with ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(archive.read(name))
    needs = [one for one in metadata.get_all("Requires-Dist", []) if "extra ==" not in one]
    if len(needs) > MOST_DEPENDENCIES:
        raise SystemExit(f"The wheel requires {len(needs)} packages: {', '.join(needs)}.")
    if not metadata.get_all("Project-URL"):
        print("Not ready for a release: no project.urls in pyproject.toml (dev/release.md, Owner).")
    return wheel


def check_light(wheel: Path, folder: Path) -> None:
    """Install the wheel without extras into a new environment in this folder, and run its commands there."""
    begin = time.monotonic()
    venv.create(folder, with_pip=True)
    snugfit = folder / "bin" / "snugfit"
    install(folder, TORCH)
    install(folder, str(wheel))
    print(f"{time.monotonic() - begin:3.0f} s  installed", flush=True)
    for command in LIGHT:
        output = run([snugfit, *command.split()], allowed=(0, 3))  # 3: `check` has findings
        print(f"{time.monotonic() - begin:3.0f} s  snugfit {command}: {output.splitlines()[-1]}", flush=True)
    for command in HEAVY:
        output = run([snugfit, *command.split()], allowed=(2,))
        if "pip install" not in output.splitlines()[-1]:
            raise SystemExit(f"snugfit {command} does not name its extra:\n{output}")


def check_whole(wheel: Path, folder: Path) -> None:
    """Add the extras, and run the demo and the tests of the commands in README and docs."""
    python = folder / "bin" / "python"
    install(folder, f"{wheel}[{EXTRAS}]", "pytest", "networkx")
    print(run([python, "examples/demo.py"]).splitlines()[-1])
    tests = [*ROOT.glob("tests/test_*.py"), *ROOT.glob("src/snugfit/features/*/tests/test_*.py")]
    calling = [path for path in sorted(tests) if "from test_docs import" in path.read_text()]
    chosen = "of_the_docs or shown_answer or shown_error"
    files = [ROOT / "tests/test_docs.py", ROOT / "tests/test_reference.py", *calling]
    print(run([python, "-m", "pytest", "-m", "not slow", "-k", chosen, *files]).splitlines()[-1])
    if not (place := run([python, "-c", "import snugfit; print(snugfit.__file__)"])).startswith(str(folder)):
        raise SystemExit(f"The tests ran with another snugfit: {place}")


def install(folder: Path, *what: str) -> None:
    """Install packages into the environment, with the versions of `constraints.txt`."""
    run([folder / "bin" / "python", "-m", "pip", "install", "-q", "-c", "constraints.txt", *what])


def main() -> None:
    """Build, compare and test. The files remain in `dist`."""
    if run(["git", "status", "--porcelain"]):
        print("Uncommitted changes are left out.")
    with TemporaryDirectory() as place:
        first, again = (build(Path(place, name)) for name in ("first", "again"))
        if first != again:
            raise SystemExit("Two builds of the same commit differ. Compare them with diffoscope.")
        wheel = write(first)
        check_light(wheel, Path(place, "environment"))
        check_whole(wheel, Path(place, "environment"))


if __name__ == "__main__":
    main()
