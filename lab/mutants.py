"""Plant faults in snugfit and count the faults that each of two test suites detects.

    python lab/mutants.py choose LINES.xz MUTANTS.json [--count 60] [--seed 46]
    python lab/mutants.py locate MUTANTS.json LOCATED.json
    python lab/mutants.py run MUTANTS.json LINES.xz TREE OUT.json [--only SURVIVORS_OF.json]

`LINES.xz` is the file of `lines_by_test.py` for a suite. A mutant changes one operator, constant or condition
on a line that a test of that suite runs. The seed draws the lines, from each room of `src/snugfit` in turn.
`locate` finds the same expressions in another state of the code, by the text of their lines.

For each mutant only the tests that run its line start, the cheapest first, until one fails. Tests that fail
without any mutant are left out. `--only` runs the mutants that survived another suite. If the larger suite
contains the tests of the smaller one, a mutant killed by the smaller suite needs no second run.
"""

from __future__ import annotations

import argparse
import ast
import json
import lzma
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src" / "snugfit"

CHUNK_SECONDS = 40.0
"""Seconds of tests that one process runs for a mutant."""

SECONDS_PER_CHUNK = 200.0
"""A chunk that takes longer counts as killed: the mutant loops."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One fault: an expression of a file and its replacement."""

    file: str
    line: int
    start: int
    end: int
    """Offsets of the expression in the file, in bytes."""

    before: str
    after: str
    text: str = ""
    """The text of the line."""

    def apply(self, tree: Path) -> None:
        """Write the fault into a copy of the repository."""
        path = tree / "src" / "snugfit" / self.file
        source = path.read_bytes()
        assert source[self.start : self.end].decode() == self.before
        path.unlink()  # it is a hard link to the repository's file
        path.write_bytes(source[: self.start] + self.after.encode() + source[self.end :])


@dataclass
class Suite:
    """Tests and the lines that they run."""

    tests: dict[str, dict[str, Any]]
    failed: dict[str, str]
    lines: dict[tuple[str, int], int]
    matrix: Any

    @classmethod
    def read(cls, path: Path) -> Suite:
        """Read a file of `lines_by_test.py`."""
        import numpy as np

        document = pickle.loads(lzma.decompress(path.read_bytes()))
        lines = {(name, line): number for number, (name, line) in enumerate(document["lines"])}
        matrix = np.unpackbits(document["matrix"], axis=1, count=len(lines)).astype(bool)
        return cls(document["tests"], document["failed"], lines, matrix)

    def covering(self, file: str, line: int) -> list[str]:
        """Return the passing tests that run a line, the cheapest first."""
        if (number := self.lines.get((file, line))) is None:
            return []
        names = list(self.tests)
        found = [names[row] for row in self.matrix[:, number].nonzero()[0] if names[row] not in self.failed]
        return sorted(found, key=lambda name: self.tests[name]["wall"])


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a file's function bodies."""
    starts = [0]
    for text in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(text))
    encoded = source.encode()
    for node in _expressions(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        before = encoded[start:end].decode()
        for changed in _changes(node):
            after = ast.unparse(ast.fix_missing_locations(changed))
            text = source.splitlines()[node.lineno - 1].strip()
            yield Mutant(file, node.lineno, start, end, before, f"({after})", text)


def _expressions(tree: ast.AST, inside: bool = False) -> Iterator[ast.expr]:
    """Yield the expressions of function bodies: no decorators, annotations, raised messages or texts."""
    if isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef):
        for statement in tree.body:
            yield from _expressions(statement, inside=True)
        return
    if isinstance(tree, ast.Raise | ast.Assert | ast.JoinedStr | ast.AnnAssign | ast.match_case):
        return
    if inside and isinstance(tree, ast.expr):
        yield tree
    for child in ast.iter_child_nodes(tree):
        yield from _expressions(child, inside)


def _changes(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.Compare(ops=[operator], left=left, comparators=right) if type(operator) in COMPARISONS:
            yield ast.Compare(left, [COMPARISONS[type(operator)]()], right)
        case ast.BinOp(op=operator, left=left, right=other) if type(operator) in ARITHMETIC:
            if not any(isinstance(side, ast.Constant | ast.JoinedStr) and not _is_number(side)
                       for side in (left, other)):  # fmt: skip
                yield ast.BinOp(left, ARITHMETIC[type(operator)](), other)
        case ast.BoolOp(op=ast.And(), values=values):
            yield ast.BoolOp(ast.Or(), values)
        case ast.BoolOp(op=ast.Or(), values=values):
            yield ast.BoolOp(ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield ast.Constant(value + 1)


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def choose(suite: Suite, count: int, seed: int) -> list[Mutant]:
    """Draw mutants of lines that the suite runs, from each room in turn."""
    rooms: dict[str, list[Mutant]] = defaultdict(list)
    for path in sorted(SOURCES.rglob("*.py")):
        file = str(path.relative_to(SOURCES))
        room = file.split("/", 1)[0] if "/" in file else "snugfit"
        for mutant in mutants_of(file, path.read_text()):
            if (file, mutant.line) in suite.lines:
                rooms[room].append(mutant)
    draw = random.Random(seed)
    for found in rooms.values():
        draw.shuffle(found)
    order = [found for _, found in sorted(rooms.items())]
    chosen = [found[turn] for turn in range(count) for found in order if turn < len(found)]
    return chosen[:count]


def locate(mutants: Sequence[Mutant]) -> list[Mutant]:
    """Return the mutants in this state of the code, without those whose lines changed."""
    located = []
    for mutant in mutants:
        path = SOURCES / mutant.file
        same = [
            other
            for other in mutants_of(mutant.file, path.read_text() if path.exists() else "")
            if (other.text, other.before, other.after) == (mutant.text, mutant.before, mutant.after)
        ]
        if same:
            located.append(min(same, key=lambda other: abs(other.line - mutant.line)))
        else:
            print(f"{mutant.file}:{mutant.line} {mutant.text!r} is gone.")
    return located


@dataclass
class Trial:
    """A mutant and its result under a suite."""

    mutant: Mutant
    tests: int
    seconds: float
    killed_by: str = ""
    chunks: int = 0
    unfinished: int = 0
    over: threading.Event = field(default_factory=threading.Event, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the row of the results file."""
        shown = {name: getattr(self, name) for name in ("tests", "seconds", "killed_by", "unfinished")}
        return asdict(self.mutant) | shown

    def line(self) -> str:
        """Return the printed row."""
        mutant = self.mutant
        end = self.killed_by[:90] or f"survived {self.tests} tests, {self.unfinished} chunks unfinished"
        return f"{mutant.file}:{mutant.line} {mutant.before[:40]!r} -> {mutant.after[:40]!r}: {end}"


def run(mutants: Sequence[Mutant], suite: Suite, tree: Path, *, jobs: int, deadline: float) -> list[Trial]:
    """Run the covering tests of each mutant in copies of `tree`; chunks of tests run side by side."""
    trials, work = [], []
    for mutant in mutants:
        tests = suite.covering(mutant.file, mutant.line)
        trial = Trial(mutant, len(tests), round(sum(suite.tests[test]["wall"] for test in tests), 1))
        trials.append(trial)
        work += [(number, trial, chunk) for number, chunk in enumerate(_chunks(tests, suite))]
    work.sort(key=lambda one: one[0])  # run the cheapest tests of all mutants first
    for _, trial, _ in work:
        trial.chunks += 1
        trial.unfinished += 1
    with ThreadPoolExecutor(jobs) as pool:
        for _, trial, chunk in work:
            pool.submit(_run_chunk, trial, chunk, tree, deadline)
    return trials


def _chunks(tests: Sequence[str], suite: Suite) -> list[list[str]]:
    chunks: list[list[str]] = []
    left = 0.0
    for test in tests:
        if left <= 0:
            chunks.append([])
            left = CHUNK_SECONDS
        chunks[-1].append(test)
        left -= suite.tests[test]["wall"]
    return chunks


def _run_chunk(trial: Trial, tests: Sequence[str], tree: Path, deadline: float) -> None:
    left = deadline - time.monotonic()
    if trial.over.is_set() or left < 20:
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(tree, copy, copy_function=os.link, ignore=shutil.ignore_patterns(".*"), symlinks=True)
        trial.mutant.apply(copy)
        (copy / "tests.txt").write_text("\n".join(_by_file(tests)))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--tb=no",
            "@tests.txt",
        ]
        paths = os.pathsep.join([str(copy / "src"), os.environ.get("PYTHONPATH", "")])
        with (copy / "out.txt").open("w") as out:
            process = subprocess.Popen(
                command, cwd=copy, stdout=out, stderr=out, env=os.environ | {"PYTHONPATH": paths},
                start_new_session=True,
            )  # fmt: skip
            code = _wait(process, min(SECONDS_PER_CHUNK, left), trial.over)
        text = (copy / "out.txt").read_text(errors="replace")
    trial.unfinished -= code is not None
    if code == "timeout" or (isinstance(code, int) and code not in (0, 5)):
        failed = [row for row in text.splitlines() if row.startswith(("FAILED", "ERROR"))]
        trial.killed_by = trial.killed_by or (failed[0] if failed else f"exit {code}: {text[-200:]}")
        trial.over.set()


def _by_file(tests: Sequence[str]) -> list[str]:
    """Return the tests with those of one file together, since fixtures of a module are dear."""
    order = {name: place for place, name in enumerate(dict.fromkeys(test.split("::")[0] for test in tests))}
    return sorted(tests, key=lambda test: order[test.split("::")[0]])


def _wait(process: subprocess.Popen[bytes], seconds: float, over: threading.Event) -> int | str | None:
    """Return the exit code, or "timeout" for a loop.

    Return None if another chunk killed the mutant already.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end and not over.is_set():
        if (code := process.poll()) is not None:
            return code
        time.sleep(0.2)
    os.killpg(process.pid, 9)
    process.wait()
    return None if over.is_set() or seconds < SECONDS_PER_CHUNK else "timeout"


def _write(path: Path, mutants: Sequence[Mutant]) -> None:
    path.write_text(json.dumps([asdict(mutant) for mutant in mutants], indent=1) + "\n")


def main() -> None:
    """Run the command that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    chooser = commands.add_parser("choose")
    chooser.add_argument("lines", type=Path)
    chooser.add_argument("output", type=Path)
    chooser.add_argument("--count", type=int, default=60)
    chooser.add_argument("--seed", type=int, default=46)
    locator = commands.add_parser("locate")
    locator.add_argument("mutants", type=Path)
    locator.add_argument("output", type=Path)
    runner = commands.add_parser("run")
    for name in ("mutants", "lines", "tree", "output"):
        runner.add_argument(name, type=Path)
    runner.add_argument("--only", type=Path)
    runner.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    runner.add_argument("--seconds", type=float, default=3600.0)
    given = parser.parse_args()
    if given.command == "choose":
        _write(given.output, choose(Suite.read(given.lines), given.count, given.seed))
        return
    mutants = [Mutant(**row) for row in json.loads(given.mutants.read_text())]
    if given.command == "locate":
        _write(given.output, locate(mutants))
        return
    suite = Suite.read(given.lines)
    if given.only:
        rows = json.loads(given.only.read_text())["mutants"]
        alive = {(row["file"], row["start"], row["after"]) for row in rows if not row["killed_by"]}
        mutants = [mutant for mutant in mutants if (mutant.file, mutant.start, mutant.after) in alive]
    trials = run(mutants, suite, given.tree, jobs=given.jobs, deadline=time.monotonic() + given.seconds)
    killed = sum(bool(trial.killed_by) for trial in trials)
    rows = [trial.to_json() for trial in trials]
    given.output.write_text(json.dumps({"killed": killed, "mutants": rows}, indent=1) + "\n")
    print(f"{killed} of {len(trials)} mutants killed.")
    for trial in trials:
        print(trial.line())


if __name__ == "__main__":
    main()
