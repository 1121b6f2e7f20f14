"""Record which lines of snugfit each test runs, children included (a pytest plugin, Python 3.12 or newer).

    PYTHONPATH=lab python -m pytest -p lines_by_test --lines-by-test FOLDER [...]
    python lab/lines_by_test.py FOLDER OUT.xz

`sys.monitoring` reports each line once per test, so that a suite takes about a quarter longer. A process that
a test forks or starts appends its lines to a file of that test. The second command merges the workers' files
into one: test ids with seconds and outcome, lines, and a packed matrix of tests by lines. `mutants.py` reads
that.
"""

from __future__ import annotations

import json
import lzma
import os
import pickle
import resource
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = str(Path(__file__).resolve().parents[1] / "src" / "snugfit") + os.sep
TOOL = 4
"""Identifier in `sys.monitoring` that no debugger, profiler or coverage tool uses."""

Line = tuple[str, int]


@dataclass
class Record:
    """Lines of the running test in this process."""

    folder: Path
    pid: int
    """The process of the worker. Lines of another process go to `file`."""

    lines: set[Line] | None = None
    file: int | None = None

    def note(self, name: str, line: int) -> None:
        """Store one line of snugfit."""
        if os.getpid() == self.pid and self.lines is not None:
            self.lines.add((name, line))
            return
        if self.file is None:
            self.file = os.open(self.of_children(), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(self.file, f"{name}:{line}\n".encode())

    def of_children(self) -> Path:
        """Return the file for lines of the running test's children."""
        current = self.folder / f"{worker()}.current"
        number = current.read_text() if current.exists() else "none"
        return self.folder / f"{worker()}.{number}.children"


def worker() -> str:
    """Return the name of this xdist worker; children inherit it."""
    return os.environ.get("PYTEST_XDIST_WORKER", "main")


def start(folder: Path) -> Record:
    """Report lines of this process and its forks to a new record."""
    record = Record(folder, os.getpid())
    monitoring = sys.monitoring  # type: ignore[attr-defined, unused-ignore]  # Python 3.12

    def on_line(code: Any, line: int) -> Any:
        if code.co_filename.startswith(ROOT):
            try:
                record.note(code.co_filename[len(ROOT) :], line)
            except OSError:  # a test closed the file or filled the disk
                record.file = None
        return monitoring.DISABLE

    def after_fork() -> None:
        record.pid, record.file = -1, None
        monitoring.restart_events()

    monitoring.use_tool_id(TOOL, "lines_by_test")
    monitoring.register_callback(TOOL, monitoring.events.LINE, on_line)
    monitoring.set_events(TOOL, monitoring.events.LINE)
    os.register_at_fork(after_in_child=after_fork)
    return record


class Plugin:
    """Write a row of JSON per test."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.record = start(folder)
        self.pid = os.getpid()
        self.numbers: dict[Line, int] = {}
        self.tests = 0
        # Line by line: a forked child that ends writes its copy of the buffer once more.
        self.rows = (folder / f"{worker()}.jsonl").open("w", buffering=1)
        # Python imports a module of this name by itself; it starts the record in fresh children.
        (folder / "sitecustomize.py").write_text(
            "import pathlib, lines_by_test\nlines_by_test.start(pathlib.Path(__file__).parent)\n"
        )
        paths = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.tests += 1
        (self.record.folder / f"{worker()}.current").write_text(str(self.tests))
        self.record.pid, self.record.lines = os.getpid(), set()
        sys.monitoring.restart_events()  # type: ignore[attr-defined, unused-ignore]
        wall, cpu = time.monotonic(), _cpu_seconds()
        try:
            return (yield)
        finally:
            lines = {*self.record.lines, *_read_lines(self.record.of_children())}
            row = {
                "id": item.nodeid,
                "wall": round(time.monotonic() - wall, 3),
                "cpu": round(_cpu_seconds() - cpu, 3),
                "marks": sorted({mark.name for mark in item.iter_markers()}),
                "lines": [self.numbers.setdefault(line, len(self.numbers)) for line in lines],
            }
            print(json.dumps(row), file=self.rows)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            print(json.dumps({"id": report.nodeid, "failed": str(report.longrepr)[-400:]}), file=self.rows)

    def pytest_unconfigure(self) -> None:
        if os.getpid() == self.pid:
            print(json.dumps({"numbers": [list(line) for line in self.numbers]}), file=self.rows)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines-by-test", type=Path, metavar="FOLDER", help="write which lines each test runs")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--lines-by-test")
    if folder and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(Plugin(folder.resolve()))


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _read_lines(path: Path) -> set[Line]:
    """Read the lines of a test's children, and remove the file. A killed child may leave half a line."""
    if not path.exists():
        return set()
    parts = [text.rpartition(":") for text in path.read_text().splitlines()]
    path.unlink()
    return {(name, int(line)) for name, _, line in parts if name and line.isdigit()}


def merge(folder: Path, out: Path) -> None:
    """Merge the workers' files into one."""
    import numpy as np

    numbers: dict[Line, int] = {}
    tests: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for path in sorted(folder.glob("*.jsonl")):
        rows = [json.loads(text) for text in path.read_text().splitlines()]
        lines = [(name, line) for name, line in rows.pop()["numbers"]]
        for row in rows:
            if "failed" in row:
                failed[row["id"]] = row["failed"]
                continue
            row["lines"] = [numbers.setdefault(lines[number], len(numbers)) for number in row["lines"]]
            tests[row.pop("id")] = row
    matrix = np.zeros((len(tests), len(numbers)), dtype=bool)
    for index, row in enumerate(tests.values()):
        matrix[index, row.pop("lines")] = True
    document = {
        "tests": tests,
        "failed": failed,
        "lines": list(numbers),
        "matrix": np.packbits(matrix, axis=1),
    }
    out.write_bytes(lzma.compress(pickle.dumps(document), preset=1))
    print(f"{len(tests)} tests, {len(failed)} failed, {len(numbers)} lines")


def main() -> None:
    """Merge the files of a folder that the command line names."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    merge(Path(sys.argv[1]), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
