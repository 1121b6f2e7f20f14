"""Compare counts with a committed table, which rises only with a reason."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Mapping
from pathlib import Path

Counts = Mapping[str, Mapping[str, int]]
"""Counts by row and name."""


def compare(table: Path, counts: Counts, *, what: str, update: bool, reason: str) -> int:
    """Print the differences from the table and return the exit code, 1 if a count rose.

    With `update` the table is written instead. `what` names the counts in messages. Raises `SystemExit` if
    the table is to be updated, a count rises and no reason is given.
    """
    document = json.loads(table.read_text()) if table.exists() else {"rows": {}, "reasons": []}
    changes = _changes(document["rows"], counts)
    rises = [line for line, rose in changes if rose]
    print("\n".join(line for line, _ in changes) or f"{what}: as in {table.name}.")
    if not update:
        if rises:
            print(f'{what} rose. Find the cause, or run it with --update --reason "..."', file=sys.stderr)
        return int(bool(rises))
    if rises and not reason:
        raise SystemExit(f"{what} rose, so --reason is needed.")
    if rises:
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        document["reasons"].append({"date": today, "reason": reason, "changes": rises})
    table.write_text(json.dumps({"rows": counts, "reasons": document["reasons"]}, indent=1) + "\n")
    return 0


def _changes(before: Counts, now: Counts) -> list[tuple[str, bool]]:
    """Return a line for each difference, each with a flag for a rise."""
    rows = dict.fromkeys([*now, *before])
    return [
        (f"{row}: {name} {old} -> {new}", new > old)
        for row in rows
        for name in dict.fromkeys([*now.get(row, {}), *before.get(row, {})])
        for old, new in ((before.get(row, {}).get(name, 0), now.get(row, {}).get(name, 0)),)
        if old != new
    ]


def read_arguments(description: str) -> argparse.Namespace:
    """Return the command's `--update` and `--reason`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--update", action="store_true", help="write the counts into the table")
    parser.add_argument("--reason", default="", help="the reason for counts that rise")
    return parser.parse_args()
