"""Print the dependencies of pyproject.toml as lines for pip, so that an image caches their layer.

python dependencies.py pyproject.toml [EXTRA ...]
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def requirements(project: Mapping[str, Any], extras: list[str]) -> Iterator[str]:
    """Yield the requirements of a project and of its extras. Exits with an error for an unknown extra."""
    known = project.get("optional-dependencies", {})
    for extra in extras:
        if extra not in known:
            sys.exit(f"{extra!r} is no extra of {project['name']}. Extras: {', '.join(sorted(known))}.")
    for line in [*project["dependencies"], *(line for extra in extras for line in known[extra])]:
        # An extra may contain other extras of its own project.
        own = re.fullmatch(rf"{project['name']}\[(.*)\]", line)
        yield from requirements({**project, "dependencies": []}, own[1].split(",")) if own else (line,)


if __name__ == "__main__":
    read = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
    print(*dict.fromkeys(requirements(read, sys.argv[2:])), sep="\n")
