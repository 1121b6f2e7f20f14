"""Python environments: their installed versions, the choice of one by a user's file, and their creation.

An environment is named by its folder, by its interpreter, or by a requirements file. For a file, the first
environment with exactly its versions is used: the present one, a `.venv` beside it, or one in the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import typer

from snugfit.cli.plan_cache import folder as answers_folder
from snugfit.errors import UsageError
from snugfit.features.environments.pins import NAMES, Pins, mismatches, own_requirements
from snugfit.user_files import user_path

_FOLDERS = (".venv", "venv")
"""Usual names of a virtual environment's folder beside a requirements file."""

_LIST_VERSIONS = (
    "import json, re; from importlib import metadata; "
    "print(json.dumps({re.sub('[-_.]+', '-', one.name).lower(): one.version "
    "for one in reversed([*metadata.distributions()]) if one.name}))"
)
"""Program that prints versions by canonical name. The first distribution on the path is the imported one."""

LONGEST_LISTING = 60.0
"""Seconds that an interpreter may take to list its packages."""


@dataclass(frozen=True)
class PythonEnvironment:
    """A Python environment, by the path of its interpreter."""

    python: Path

    @cached_property
    def installed(self) -> Mapping[str, str]:
        """Versions of the installed packages by canonical name. Raises `UsageError` for a file that is not a
        Python interpreter.
        """
        try:
            run = subprocess.run(
                [str(self.python), "-c", _LIST_VERSIONS],
                env=_without_python_path(),
                capture_output=True,
                text=True,
                check=True,
                timeout=LONGEST_LISTING,
            )
            versions: dict[str, str] = json.loads(run.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise UsageError(
                f"{self.python} is not a working Python interpreter ({error}). {_ALLOWED}"
            ) from None
        return versions

    def refuse_incomplete(self) -> None:
        """Raise `UsageError` if a package that snugfit requires is missing or has an unsupported version."""
        needed = own_requirements()
        if faults := mismatches(needed, self.installed):
            command = [str(self.python), "-m", "pip", "install", *map(_plain, needed)]
            raise UsageError(
                f"snugfit cannot run in {self.python}: {', '.join(faults)}. Try: {shlex.join(command)}"
            )


_ALLOWED = "Give a folder with a Python environment, a Python interpreter, or a requirements file."


def find_environment(name: str, *, install: bool = False) -> PythonEnvironment:
    """Return the environment that the user named. With `install`, it may be created in the cache folder.

    Raises `UsageError` if it does not exist, if its versions differ from the file's, or if snugfit cannot run
    in it.
    """
    path = user_path(name)
    if not path.exists():
        raise UsageError(f"{name}: no such file or folder. {_ALLOWED}")
    if path.is_dir():
        selected = _in_folder(path)
        if selected is None:
            raise UsageError(f"{name}: this folder has no Python environment (bin/python). {_ALLOWED}")
        _refuse_other_versions(path, selected)
    elif os.access(path, os.X_OK):
        # The link of a virtual environment's interpreter selects its packages, so it is not resolved.
        selected = PythonEnvironment(path.absolute())
    else:
        selected = _with_versions_of(Pins.read(path), install=install)
    selected.refuse_incomplete()
    return selected


def _in_folder(path: Path) -> PythonEnvironment | None:
    for inner in ("bin/python", "Scripts/python.exe"):
        if (path / inner).exists():
            return PythonEnvironment((path / inner).absolute())
    return None


def _refuse_other_versions(path: Path, selected: PythonEnvironment) -> None:
    """Raise `UsageError` if a requirements file beside the environment has other versions."""
    file = next(
        (path.absolute().parent / one for one in NAMES if (path.absolute().parent / one).is_file()), None
    )
    if file is not None and (faults := Pins.read(file).mismatches(selected.installed)):
        python = shlex.quote(str(selected.python))
        raise UsageError(
            f"{path} differs from {file}: {', '.join(faults)}. Try: {python} -m pip install -r "
            f"{shlex.quote(str(file))}. To use it as it is, name its interpreter {python}."
        )


def _with_versions_of(pins: Pins, *, install: bool) -> PythonEnvironment:
    present = PythonEnvironment(Path(sys.executable))
    own = cached_folder(pins)
    known = [_in_folder(one) for one in (*(pins.file.absolute().parent / name for name in _FOLDERS), own)]
    for one in (present, *filter(None, known)):
        if not pins.mismatches(one.installed):
            return one
    if install:
        return _create(pins, own)
    faults = ", ".join(pins.mismatches(present.installed))
    commands = "\n".join(map(shlex.join, _commands(pins, own)))
    raise UsageError(
        f"{pins.file}: no environment has these versions. In the present one, {faults}. Add --install, which "
        f"runs these commands, or run them yourself:\n{commands}"
    )


def cached_folder(pins: Pins) -> Path:
    """Return the folder in the cache for an environment with these versions."""
    question = f"{sys.version_info[:2]}\n{pins.text}"
    return answers_folder().parent / "environments" / hashlib.sha256(question.encode()).hexdigest()[:16]


def _commands(pins: Pins, folder: Path) -> list[list[str]]:
    """Return the commands that create an environment with these versions and snugfit's requirements."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    return [
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(python), "-m", "pip", "install", "-r", str(pins.file), *map(_plain, own_requirements())],
    ]


def _create(pins: Pins, folder: Path) -> PythonEnvironment:
    """Create an environment in the cache, and print each command. Raises `UsageError` if one fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for command in _commands(pins, folder):
        typer.echo(shlex.join(command), err=True)
        # pip's output must not be mixed with an answer on stdout.
        done = subprocess.run(command, env=_without_python_path(), stdout=sys.__stderr__, check=False)
        if done.returncode:
            raise UsageError(
                f"{pins.file}: this command failed with exit code {done.returncode}: {shlex.join(command)}. "
                "Check the versions in the file."
            )
    selected = _in_folder(folder)
    assert selected is not None, "venv creates an interpreter"
    if faults := pins.mismatches(selected.installed):
        raise UsageError(f"{pins.file}: pip installed other versions: {', '.join(faults)}. Check the file.")
    return selected


def _plain(requirement: object) -> str:
    """Return a requirement without its marker, which holds here."""
    return str(requirement).partition(";")[0].strip()


def _without_python_path() -> dict[str, str]:
    """Return this process's environment variables without the folders of its own packages."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
