"""Run the unit tests and a plan on a copy of the tree without one feature.

    python lab/without_feature.py offload [another ...] [--quick]

A feature can be deleted when both pass. A test that itself names a technique or an option of it, or needs a
task of it, is skipped there (`tests/in_roster.py`). `--quick` imports every test and leaves the plan out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from snugfit.feature_folders import feature_objects
from snugfit.job.inputs import AddedTask
from snugfit.job.phases import AddedPhase
from snugfit.techniques import roster
from snugfit.techniques.registry import features

ROOT = Path(__file__).parent.parent
PLAN = ["plan", "bert-large-uncased", "--task", "sequence-classification", "--gpu", "h200", "--no-cache"]


def technique_words(feature: str) -> str:
    """Return the words of recipes, tasks, phases and options that are unknown without this feature."""
    tasks = [one.name for one in feature_objects("tasks", AddedTask, feature_name=feature)]
    tasks += [one.name for one in feature_objects("phases", AddedPhase, feature_name=feature)]
    gone = [
        roster.find(module.rpartition(".")[2])
        for one in features()
        for modules in one.techniques.values()
        for module in modules
        if feature in (one.name, one.needs.get(module))
    ]
    words = [word for one in gone for word in (one.name, *one.elsewhere, *one.advice)]
    own = next(one for one in features() if one.name == feature)
    names = [
        name
        for one in features()
        for module, defined in one.public_names.items()
        if feature in (one.name, one.needs.get(module.rpartition(".")[2]))
        for name in defined
    ]
    declared = [one for call in ("plan", "predict", "measure", "train") for one in own.options(call)]
    options = [f"--{one.name.replace('_', '-')}" for one in declared]
    # typer takes the first name of an annotated option for its default.
    notes = [note for one in declared for note in getattr(one.annotation, "__metadata__", ())]
    names += [name for note in notes for name in (note.default, *note.param_decls) if isinstance(name, str)]
    folder = ROOT / "src/snugfit/features" / feature
    names += [file.stem for file in folder.glob("software/*.json")]
    return " ".join(dict.fromkeys([*tasks, *words, *names, *options, f"snugfit.features.{feature}"]))


def check(feature: str, *, quick: bool) -> bool:
    """Return whether a tree without this feature passes."""
    words = technique_words(feature)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        # Tests of the site resolve links, so nothing is linked to the original tree.
        # Tests with the marker `stored_rehearsals` read the folder `.rehearsals`.
        hidden = (".github", ".rehearsals")
        kept = [entry for entry in ROOT.iterdir() if entry.name in hidden or entry.name[0] != "."]
        subprocess.run(["cp", "-r", *map(str, kept), str(tree)], check=True)
        shutil.rmtree(tree / "src" / "snugfit" / "features" / feature)
        set_here = {"PYTHONPATH": str(tree / "src"), "XDG_CACHE_HOME": folder, "SNUGFIT_WITHOUT": words}
        environment = os.environ | set_here
        unit = ["-m", "pytest", "-n", "2", "-m", "not whole and not slow", "--no-header"]
        commands = [[*unit, *(["--collect-only"] if quick else ["--maxfail=20"])]]
        commands = [["lab/write_docs.py"], *commands] + ([] if quick else [["-m", "snugfit", *PLAN]])
        for command in commands:
            began = time.monotonic()
            ended = subprocess.run(
                [sys.executable, *command],
                cwd=tree,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            seconds = round(time.monotonic() - began)
            # pytest's last line has the numbers of passed and skipped tests.
            last = ended.stdout.rstrip().rpartition("\n")[2]
            print(f"{feature}: {' '.join(command[:2])} took {seconds} s: {last}", flush=True)
            if ended.returncode:
                print(ended.stdout[-6000:], ended.stderr[-3000:])
                return False
    return True


def main() -> int:
    """Check each feature. Return 1 if one cannot be deleted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("features", nargs="+")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    passed = {feature: check(feature, quick=asked.quick) for feature in asked.features}
    print({feature: "can be deleted" if ok else "cannot be deleted" for feature, ok in passed.items()})
    return int(not all(passed.values()))


if __name__ == "__main__":
    sys.exit(main())
