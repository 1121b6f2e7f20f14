"""Count how `--arguments` reads the configurations of public repositories.

    python lab/read_public.py OUT.json NAME=FOLDER [NAME=FOLDER ...]

Each folder is a checkout, or a part of one. Scripts and notebooks count if they train: they name a Trainer,
an Accelerator or an optimizer's step. Shell files count if they start training. The output has counts only:
files read in full, files read except for listed parts, refusals, and crashes. A refusal names an unsupported
job or method, or another reason: a launcher's file that is missing, a value that a script computes.
`read or named` is the share of files that are read, or refused by the name of their job.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from snugfit.errors import SnugfitError
from snugfit.features.exchange.account import UnsupportedJobError
from snugfit.features.exchange.read import read_arguments

KINDS = (".py", ".ipynb", ".sh", ".slurm", ".yaml", ".yml", ".json")
TRAINS = re.compile(r"Trainer\(|Accelerator\(|optimizer\.step")
NAMED = "refused by the name of the job"
STARTS = re.compile(r"accelerate launch|torchrun|deepspeed|python .*train|trl sft|llamafactory-cli train")
COUNTED = ("read", "read except for parts", NAMED)


def counts_as_a_run(path: Path) -> bool:
    """Return True for a file that describes or starts a training run."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix in (".py", ".ipynb"):
        return bool(TRAINS.search(text))
    return path.suffix not in (".sh", ".slurm") or bool(STARTS.search(text))


def outcome(path: Path) -> tuple[str, str]:
    """Return how a file was read, and the reason if it was not read in full."""
    try:
        reading = read_arguments(path, bfloat16=True)
    except SnugfitError as error:
        text = str(error).rpartition(f"{path}")[2].partition(": ")[2]
        kind = NAMED if isinstance(error, UnsupportedJobError) else "refused"
        return kind, re.sub(r"[0-9,]+|It loads \S+", "", text)[:80]
    except Exception as error:
        return "crashed", type(error).__name__
    refused = [line for line in reading.refused if line.instead != "gpus"]
    if named := [line for line in refused if line.job]:
        return NAMED, f"{named[0].job} ({named[0].key})"
    if refused:
        return "refused", refused[0].key.partition("=")[0].partition(", ")[2] or refused[0].key
    return ("read except for parts", reading.unread[0].key) if reading.unread else ("read", "")


def main() -> None:
    """Count the outcomes by collection, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("collections", nargs="+", metavar="NAME=FOLDER")
    asked = parser.parse_args()
    collections = {}
    for pair in asked.collections:
        name, _, folder = pair.partition("=")
        files = sorted(path for path in Path(folder).rglob("*") if path.suffix in KINDS and path.is_file())
        outcomes = [outcome(path) for path in files if counts_as_a_run(path)]
        reasons = Counter(f"{kind}: {why}" for kind, why in outcomes if why)
        collections[name] = {
            "files": len(outcomes),
            "read or named": round(sum(kind in COUNTED for kind, _ in outcomes) / max(1, len(outcomes)), 3),
            **Counter(kind for kind, _ in outcomes),
            "reasons": dict(reasons.most_common(20)),
        }
    document = {
        "what": "public files read",
        "date": datetime.now(UTC).date().isoformat(),
        "collections": collections,
    }
    asked.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
