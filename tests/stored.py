"""Small checkpoints for the tests of the store, and processes that may be killed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from snugfit.training.checkpoint.manifest import MANIFEST, Checkpoint
from snugfit.training.checkpoint.store import Store

NAMES = ("model.safetensors", "state.json", "templates/more.bin")


def content(name: str, step: int, run: int = 0) -> bytes:
    """Return different bytes for each file, step and run; two of the files have the same length."""
    return f"{name[:5]} {step} {run} ".encode() * (40 if name == "state.json" else 60)


def fill(step: int, run: int = 0) -> Callable[[Path], None]:
    """Return a function that writes each file in two halves, by calls that a test can count."""

    def write(folder: Path) -> None:
        (folder / "templates").mkdir()
        for name in NAMES:
            whole = content(name, step, run)
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                for part in (whole[:100], whole[100:]):
                    os.write(descriptor, part)
            finally:
                os.close(descriptor)

    return write


def stored(root: Path, *steps: int, run: int = 0) -> Store:
    """Return a store that holds these steps."""
    store = Store(root)
    store.prepare()
    for step in steps:
        store.save(step, fill(step, run), {"seed": 17, "run": run})
    return store


def visible(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))


def hidden(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith(".") and path.name != ".lock")


def assert_whole(found: Checkpoint | None, step: int, run: int = 0) -> None:
    """Assert that the checkpoint is that of this step, byte for byte."""
    assert found is not None
    assert (found.step, found.about) == (step, {"seed": 17, "run": run})
    assert sorted(found.files) == sorted(NAMES)
    for name in NAMES:
        assert (found.folder / name).read_bytes() == content(name, step, run)
    assert (found.folder / MANIFEST).is_file()


def in_child(act: Callable[[], None]) -> int:
    """Run `act` in a forked process that exits without cleanup; return its exit code, 1 for an error."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        except BaseException as fault:
            print(f"in the child: {fault!r}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
