"""Law 6: the structure of the source. The tests read floors, sizes, names and docstrings from the source
itself."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import networkx
import pytest

from snugfit.feature_folders import feature_objects
from snugfit.job.inputs import added_tasks
from snugfit.techniques import roster
from snugfit.techniques.registry import features
from snugfit.techniques.setup import CoreSetup
from snugfit.techniques.wish import Wish, wishes
from source_trees import FILES, SOURCE, nodes_of, tree_of

HEAVY = {
    "torch",
    "transformers",
    "matplotlib",
    "pynvml",
    "accelerate",
    "peft",
    "bitsandbytes",
    "scipy",
    "pandas",
    "datasets",
    "pyarrow",
}
HEAVY_THEMSELVES = {
    "features/loops/trainer/callback.py",
    "rehearsal/record/accumulation.py",
    "rehearsal/record/allocations.py",
    "rehearsal/record/assumed.py",
    "rehearsal/record/effects.py",
    "rehearsal/record/kernels.py",
    "rehearsal/record/module_tracker.py",
    "rehearsal/record/questions.py",
    "rehearsal/record/recorder.py",
    "rehearsal/record/shadow.py",
    "rehearsal/record/shadows.py",
    "rehearsal/record/shape_cache.py",
    "rehearsal/device/shapes.py",
    "rehearsal/device/host_draws.py",
    "rehearsal/record/cuda_names.py",
    "features/guide/published_optimizer.py",
    "features/optimizers/updates/apollo.py",
    "features/optimizers/updates/four_bit.py",
    "features/optimizers/updates/galore.py",
    "features/optimizers/updates/host.py",
    "features/optimizers/updates/matrices.py",
    "features/optimizers/updates/pieces.py",
    "features/optimizers/updates/stochastic.py",
    "step/wishes/own_adamw.py",
    "features/engine/replay/recomputed.py",
    "features/kernels/head/chunked_loss.py",
    "features/kernels/head/deferred_logits.py",
    "features/engine/masters/adamw.py",
    "features/engine/masters/compact.py",
    "features/engine/masters/compact_adamw.py",
    "features/engine/masters/compact_kernel.py",
    "features/engine/masters/device_copy.py",
    "features/engine/masters/elements.py",
    "features/engine/masters/halves.py",
    "features/engine/masters/kernel.py",
    "features/engine/masters/launches.py",
    "features/engine/masters/one_weight.py",
    "features/engine/masters/table.py",
    "features/distributed/engine/optimizer.py",
    "features/distributed/simulate/accelerator.py",
    "features/distributed/simulate/allocations.py",
    "features/distributed/simulate/collectives.py",
    "features/distributed/simulate/engine.py",
    "features/distributed/simulate/host_tensors.py",
    "features/distributed/simulate/offloaded_shards.py",
    "features/distributed/simulate/ranks.py",
    "features/kernels/decoders/experts/activation.py",
    "features/kernels/decoders/experts/expert_mlp.py",
    "features/kernels/decoders/experts/grouped_linear.py",
    "features/kernels/decoders/experts/modules.py",
    "features/kernels/decoders/experts/mxfp4.py",
    "features/quantized/mxfp4.py",
    "features/kernels/decoders/experts/routing.py",
    "features/kernels/operations/programs/experts.py",
    "features/kernels/operations/attention_inputs.py",
    "features/kernels/operations/cross_entropy.py",
    "features/kernels/operations/join_slopes.py",
    "features/kernels/decoders/decomposed.py",
    "features/kernels/decoders/tiled_mlp.py",
    "features/kernels/operations/gated_mlp.py",
    "features/kernels/operations/projections.py",
    "features/kernels/operations/low_rank.py",
    "features/kernels/operations/four_bits.py",
    "features/kernels/operations/dropped_rows.py",
    "features/kernels/operations/adapted.py",
    "features/kernels/operations/programs/cross_entropy.py",
    "features/kernels/operations/programs/dropped_rows.py",
    "features/kernels/operations/products.py",
    "features/kernels/operations/programs/gated.py",
    "features/kernels/operations/programs/join_slopes.py",
    "features/kernels/operations/programs/rms_norm.py",
    "features/kernels/operations/programs/rotary.py",
    "features/kernels/operations/rms_norm.py",
    "features/kernels/operations/rotary.py",
    "features/kernels/decoders/modules.py",
    "features/kernels/operations/add_norm.py",
    "features/kernels/operations/bias_gelu.py",
    "features/kernels/operations/column_sums.py",
    "features/kernels/operations/joint_linear.py",
    "features/kernels/operations/philox.py",
    "features/kernels/operations/programs/add_norm.py",
    "features/kernels/operations/programs/bias_gelu.py",
    "features/kernels/operations/seeds.py",
    "features/kernels/encoders.py",
    "features/kernels/fused_model.py",
    "features/inference/offloaded.py",
}
"""Modules whose classes derive from torch's, or that run at every operator of a simulation."""

GROUND = {
    "errors", "units", "documents", "versions", "user_files", "hub_kernels", "deferred_imports",
    "feature_folders",
}  # fmt: skip
BELOW: dict[str, set[str]] = {
    "errors": set(),
    "units": {"errors"},
    "documents": {"errors"},
    "versions": {"errors", "feature_folders"},
    "hub_kernels": set(),
    "deferred_imports": {"hub_kernels"},
    "user_files": {"errors", "documents"},
    "feature_folders": {"errors"},
    "job": GROUND,
    "techniques": GROUND | {"job"},
}
BELOW["results"] = BELOW["techniques"] | {"techniques"}
BELOW["step"] = BELOW["results"] | {"results"}
BELOW["rehearsal"] = BELOW["measurement"] = BELOW["data"] = BELOW["step"] | {"step"}
BELOW["training"] = BELOW["data"] | {"data"}
BELOW["prediction"] = BELOW["rehearsal"] | {"rehearsal"}
BELOW["planning"] = BELOW["prediction"] | {"prediction", "data"}
BELOW["comparison"] = BELOW["prediction"] | {"prediction", "measurement"}
BELOW["report"] = set(BELOW)
BELOW["frontends"] = BELOW["report"] - {"comparison"} | {"report"}
BELOW["cli"] = BELOW["report"] | {"report", "frontends"}
BELOW["features"] = set(BELOW)
BELOW["__main__"] = BELOW["cli"] | {"cli"}
BELOW["__init__"] = BELOW["__main__"] | {"features"}
"""The rooms that each room may import. `prediction` and `measurement` meet only from `comparison` upwards."""

INNER = {
    "rehearsal": ("trace", "device", "record", ""),
    "planning": ("", "cost", "search", "fleet"),
    "training": ("", "checkpoint", "run"),
    "report": ("text", "plan", ""),
}
"""The folders of a room, the lowest first; folders of one line never import each other. An empty name is
the files outside these folders."""


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield every module that the file imports, also inside functions."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides which room it reaches"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run at the import of the module."""
    for statement in body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from at_import(statement.orelse)
            continue
        yield statement
        for part in ("body", "orelse", "finalbody"):
            if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from at_import(getattr(statement, part, []))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in nodes_of(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def marks_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> list[str]:
    return [ast.unparse(mark) for mark in node.decorator_list]


def offending(rule: Callable[[Path], Iterable[str]]) -> dict[str, list[str]]:
    """Return the files that break a rule, each with its faults. One test checks one rule, so that its
    failure lists every file."""
    by_file = {name_of(path): sorted(rule(path)) for path in FILES}
    return {name: wrong for name, wrong in by_file.items() if wrong}


def test_a_room_imports_only_rooms_below_it() -> None:
    rooms = {entry.stem for entry in SOURCE.iterdir()}
    assert {room_of(path) for path in FILES} <= set(BELOW), "a room without a floor"

    def above(path: Path) -> set[str]:
        modules = imported(tree_of(path))
        reached = {module.split(".")[1] for module in modules if module.startswith("snugfit.")} & rooms
        return reached - BELOW[room_of(path)] - {room_of(path)}

    assert not offending(above)


def test_folders_of_a_room_import_only_lower_ones() -> None:
    """A test below has the rule for `techniques`."""
    heights = {
        room: {folder: n for n, line in enumerate(lines) for folder in line.split(" ")}
        for room, lines in INNER.items()
    }

    def above(path: Path) -> Iterator[str]:
        room, *inner = path.relative_to(SOURCE).parts[:-1] or ("",)
        if room not in heights:
            return
        folder = inner[0] if inner else ""
        for module in imported(tree_of(path)):
            parts = module.split(".")
            if parts[:2] != ["snugfit", room] or len(parts) < 3:
                continue
            target = parts[2] if (SOURCE / room / parts[2]).is_dir() else ""
            floors = heights[room]
            if target != folder and floors.get(target, 0) >= floors.get(folder, len(floors)):
                yield module

    assert not offending(above)


def test_no_files_import_each_other_in_a_circle() -> None:
    """The rule includes imports inside functions and for types alone: a circle is one room that was cut in
    two."""
    known = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in FILES}
    arrows = {
        name: {module.removeprefix("snugfit.") for module in imported(tree_of(path))} & known.keys()
        for name, path in known.items()
    }
    graph = networkx.DiGraph((name, target) for name, targets in arrows.items() for target in targets)
    circles = [circle for circle in networkx.strongly_connected_components(graph) if len(circle) > 1]
    assert not circles


def test_folders_stay_small() -> None:
    folders = {path.parent for path in FILES} - {SOURCE}
    entries = {
        name_of(folder): len({entry.name for entry in folder.iterdir()} - {"__init__.py", "__pycache__"})
        for folder in folders
    }
    slots = [entry for entry in (SOURCE / "techniques").iterdir() if (entry / "__init__.py").is_file()]
    entries["techniques"] -= len(slots)  # the folder exists to hold one package per slot
    del entries["features"]  # and this one a package per feature
    assert not {name: count for name, count in entries.items() if count > 22}


def test_nobody_imports_a_technique_by_name() -> None:
    slots = {entry.name for entry in (SOURCE / "techniques").iterdir() if (entry / "__init__.py").is_file()}

    def named(path: Path) -> set[str]:
        return {
            module
            for module in imported(tree_of(path))
            if module.startswith("snugfit.techniques.") and module.split(".")[2] in slots
        }

    assert not offending(lambda path: named(path) if room_of(path) != "techniques" else ())


def test_the_core_names_no_feature() -> None:
    """The core imports no module of a feature and uses none of its fields of `Setup`."""
    fields = {wish.name for wish in wishes()}

    def named(path: Path) -> Iterator[str]:
        tree = tree_of(path)
        # The package lists public names of features for type checkers alone.
        modules = imported_at_import(path) if room_of(path) == "__init__" else set(imported(tree))
        yield from (module for module in modules if module.startswith("snugfit.features."))
        for node in nodes_of(tree):
            is_used = isinstance(node, ast.Attribute) and node.attr in fields
            if is_used and ast.unparse(node.value) not in modules:
                yield ast.unparse(node)
            if isinstance(node, ast.keyword) and node.arg in fields:
                yield f"{node.arg}="

    assert not offending(lambda path: named(path) if room_of(path) != "features" else ())


MOST_USERS = 8
"""Largest number of core files that use one of the core's fields of `Setup`."""


def used_fields(path: Path) -> set[str]:
    """Return the names that a file reads from a `setup`, or changes in one."""
    found: set[str] = set()
    for node in nodes_of(tree_of(path)):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).lower().removesuffix("()")
            found |= {node.attr} if owner.endswith("setup") else set()
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("replace", "with_fields"):
            found |= {str(keyword.arg) for keyword in node.keywords}
    return found


def test_few_core_files_use_a_field_of_setup() -> None:
    """At most `MOST_USERS` core files read or write one of the core's fields of `Setup`."""
    fields = {field.name for field in dataclasses.fields(CoreSetup)}
    core = [path for path in FILES if room_of(path) != "features"]
    users = Counter(field for path in core for field in used_fields(path) & fields)
    assert users["micro_batches"] > 1
    assert not {name: n for name, n in users.items() if n > MOST_USERS}


def test_no_feature_uses_a_field_of_another() -> None:
    """A feature reads and writes its own fields of `Setup` alone, and those of the core."""
    folders = {path.parent for path in FILES if path.name == "fields.py"}
    owners = {
        wish.name: folder
        for folder in folders
        for wish in feature_objects("fields", Wish, feature_name=folder.name)
    }
    assert owners.keys() == {wish.name for wish in wishes()}
    assert not offending(
        lambda path: (name for name in used_fields(path) & owners.keys() if owners[name] not in path.parents)
    )


ENGLISH = {
    "budget", "captured", "compiled", "context", "expert", "flash", "flex", "frozen", "fused", "host",
    "pipeline", "released", "tensor",
}  # fmt: skip
"""Names of features' techniques that are words of the core too."""

TENSOR_PARTS = {"DTensor", "device_mesh", "full_tensor"}
"""Attributes of torch's tensors that are parts of others."""

MAY_NAME = {
    # Examples in help and in errors.
    "cli/arguments.py": {"fsdp"},
    "cli/plan.py": {"lora"},
    "planning/keep.py": {"lora"},
    "techniques/several_gpus.py": {"ddp", "fsdp"},
    # Modules, packages and arguments of other libraries, and parts of models' names.
    "deferred_imports.py": {"fsdp"},
    "job/names.py": {"fp8"},
    "prediction/profile.py": {"liger"},
    "techniques/adapters/full.py": {"lora"},
    "versions.py": {"liger"},
    # Precisions of a GPU.
    "job/gpu.py": {"fp8"},
    "prediction/rates.py": {"fp8"},
}
"""Names of features that files of the core may use."""


def test_the_core_names_no_technique_or_task_of_a_feature() -> None:
    """Texts and code of the core name them in examples, and as other libraries' keys, alone."""
    named = {
        technique.name
        for technique in roster.techniques()
        if technique.__module__.startswith("snugfit.features.")
    }
    names = named.union(task.name for task in added_tasks()) - ENGLISH | TENSOR_PARTS

    def used(path: Path) -> Iterator[str]:
        tree, source = tree_of(path), path.read_text(encoding="utf-8")
        # A pattern of all names takes seconds.
        pattern = re.compile(rf"\b({'|'.join(sorted(name for name in names if name in source)) or '(?!)'})\b")
        docs = {id(node.value) for node in nodes_of(tree) if isinstance(node, ast.Expr)}
        for node in nodes_of(tree):
            text = getattr(node, "attr", getattr(node, "id", ""))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                text = node.value
            allowed = MAY_NAME.get(path.relative_to(SOURCE).as_posix(), set())
            yield from (name for name in pattern.findall(text) if name not in allowed)

    assert not offending(lambda path: used(path) if room_of(path) != "features" else ())


def test_the_contract_of_features_is_one_short_file() -> None:
    assert len((SOURCE / "techniques" / "feature.py").read_text().splitlines()) <= 250


def test_a_feature_imports_another_where_it_says_so() -> None:
    """The deletion of a feature may only remove the techniques that depend on it."""
    needs = {feature.name: feature.needs for feature in features()}

    def undeclared(path: Path) -> Iterator[str]:
        folder, *inner = path.relative_to(SOURCE / "features").parts
        known = {folder, needs[folder].get(path.stem)} if inner else set()
        for module in imported(tree_of(path)):
            if module.startswith("snugfit.features.") and module.split(".")[2] not in known:
                yield module

    assert not offending(lambda path: undeclared(path) if room_of(path) == "features" else ())


def imported_at_import(path: Path) -> set[str]:
    return {
        module
        for statement in at_import(tree_of(path).body)
        if isinstance(statement, ast.Import | ast.ImportFrom)
        for module in imported(statement)
    }


def test_nothing_heavy_is_imported_at_import() -> None:
    """A module whose classes derive from torch's must import torch. Other modules import such a module only
    inside functions."""
    heavy = {f"snugfit.{name.removesuffix('.py').replace('/', '.')}" for name in HEAVY_THEMSELVES}

    def heavy_imports(path: Path) -> set[str]:
        modules = imported_at_import(path)
        return (modules & heavy) | {module for module in modules if module.split(".")[0] in HEAVY}

    assert not offending(lambda path: heavy_imports(path) if name_of(path) not in HEAVY_THEMSELVES else ())


def test_files_and_functions_stay_small() -> None:
    def large(path: Path) -> Iterator[str]:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > 800:
            yield f"{lines} lines"
        for one in functions(tree_of(path)):
            if (one.end_lineno or 0) - one.lineno + 1 >= 60:
                yield one.name

    assert not offending(large)


def test_most_functions_are_short() -> None:
    lengths = [(f.end_lineno or 0) - f.lineno + 1 for path in FILES for f in functions(tree_of(path))]
    assert statistics.median(lengths) < 10


def test_no_room_without_a_name_of_its_own() -> None:
    nameless = {"util", "utils", "common", "helper", "helpers", "misc"}
    assert not offending(
        lambda path: {part.removesuffix(".py") for part in path.relative_to(SOURCE).parts} & nameless
    )


IRREGULAR = {
    "told", "seen", "met", "found", "kept", "made", "taken", "held", "left", "lost", "born", "begun", "drawn",
    "given", "written", "shown", "known", "said", "sent", "done", "gone", "grown", "worn", "chosen", "spoken",
    "broken", "torn", "laid", "paid", "brought", "thought", "built", "meant", "felt", "dealt", "bound", "won",
    "sought", "taught", "caught", "forgotten", "hidden", "driven", "beaten", "fallen", "woken", "frozen",
}  # fmt: skip
NO_PARTICIPLES = {"need", "feed", "seed", "speed", "embed", "exceed", "proceed", "succeed", "red"}
SAYS_NOTHING = {
    "each", "found", "place", "told", "there", "wanted", "theirs", "mine", "ours", "others", "made", "seen",
    "kept", "those", "these", "whose", "here",
}  # fmt: skip
"""Names of variables that do not describe their values."""

WORDS_LEFT: set[str] = {
    "planning/plan.py", "planning/fleet/gpu_plans.py",
}  # fmt: skip
"""Files that break the rules below for a reason: their fields are keys of a plan's JSON."""


def is_bare_participle(name: str) -> bool:
    """Detect names like `built` or `_cached`; `build_batches` has a verb, and `batch_of` has a noun."""
    word = name.strip("_")
    regular = word.endswith("ed") and len(word) > 4 and word not in NO_PARTICIPLES
    return "_" not in word and (regular or word in IRREGULAR)


def vague_names(tree: ast.Module) -> Iterator[str]:
    for node in nodes_of(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if is_bare_participle(node.name) and not any("property" in m for m in marks_of(node)):
                yield f"line {node.lineno}: the function {node.name}"
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            yield from (f"line {a.lineno}: the parameter {a.arg}" for a in arguments if a.arg in SAYS_NOTHING)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in SAYS_NOTHING:
            yield f"line {node.lineno}: the variable {node.id}"


def short_docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield docstrings of at most three words, of functions, classes and fields."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            if isinstance(text, str) and len(text.split()) <= 3:
                yield f"line {node.lineno}: {text!r}"


def test_names_and_docstrings_say_what_they_mean() -> None:
    """Functions are verbs or nouns, variables describe their values, and docstrings are full sentences."""
    wrong = offending(lambda path: [*vague_names(tree_of(path)), *short_docstrings(tree_of(path))])
    assert not {name: breaks for name, breaks in wrong.items() if name not in WORDS_LEFT}
    assert wrong.keys() >= WORDS_LEFT, "these are clean now; take them off the list"


def test_no_two_classes_share_a_name() -> None:
    """The rule includes private classes: a search for the name would find the wrong one first."""
    homes: dict[str, list[str]] = {}
    for path in FILES:
        for node in nodes_of(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.strip("_"), []).append(name_of(path))
    assert not {name: files for name, files in homes.items() if len(files) > 1}


def test_everything_public_has_a_docstring() -> None:
    def silent(path: Path) -> Iterator[str]:
        tree = tree_of(path)
        if tree.body and not ast.get_docstring(tree):
            yield "the file's head"
        for node in public(tree):
            inherits = any("overload" in mark or "override" in mark for mark in marks_of(node))
            if not inherits and not ast.get_docstring(node):
                yield node.name

    assert not offending(silent)


def public(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Yield public functions and classes of the file, and public methods of its public classes."""
    for scope in nodes_of(tree):
        if isinstance(scope, ast.Module | ast.ClassDef) and not getattr(scope, "name", "").startswith("_"):
            named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            yield from (node for node in scope.body if isinstance(node, named) and node.name[0] != "_")


def test_the_public_names_are_true() -> None:
    """`snugfit.__all__` is sorted and complete, and every name in it exists."""
    package = importlib.import_module("snugfit")
    listed = getattr(package, "__all__", None)
    if listed is None:
        pytest.skip("snugfit exports nothing yet: __init__ has no __all__")
    assert list(listed) == sorted(listed, key=str.casefold)
    for name in listed:
        assert getattr(package, name) is not None
    public_names = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("snugfit")
    }
    assert public_names <= set(listed), f"public and not listed: {public_names - set(listed)}"


@pytest.mark.whole
def test_importing_the_command_imports_nothing_heavy() -> None:
    import subprocess

    code = "import sys, snugfit, snugfit.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert not {name.split(".")[0] for name in modules} & (HEAVY | {"numpy", "yaml"})
    assert not modules & {"snugfit.job.job", "snugfit.techniques.recipe", "importlib.metadata"}


def test_the_documented_example_is_the_real_file() -> None:
    """dev/add-a-technique.md shows a complete technique, which must be an existing file."""
    text = (SOURCE.parents[1] / "dev" / "add-a-technique.md").read_text(encoding="utf-8")
    example = text.split("```python\n")[1].split("```")[0]
    assert example == (SOURCE / "techniques" / "optimizer" / "sgd.py").read_text(encoding="utf-8")


def test_links_in_the_documentation_lead_somewhere() -> None:
    import re

    root = SOURCE.parents[1]
    for page in [*root.glob("*.md"), *(root / "docs").glob("*.md"), *(root / "dev").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.whole
def test_what_no_unit_test_does_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`conftest.py` enforces the marker `whole`, and this test checks `conftest.py`. A simulation needs no
    marker."""
    import os
    import subprocess

    import torch
    from conftest import NOT_OF_A_UNIT

    from snugfit.planning.cost import parts_pool
    from snugfit.planning.search.plan_request import PlanRequest

    def step(device: str) -> None:
        weight = torch.nn.Parameter(torch.ones(1, device=device))
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=0.1).step()

    def fork() -> None:
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)

    def search() -> None:
        monkeypatch.setattr(parts_pool, "parts_pool", lambda *_, **__: nullcontext())
        request: Any = SimpleNamespace(job=None, gpus=[], workers=1, run=None)
        PlanRequest.with_pool(request, lambda _: 0, None)  # type: ignore[arg-type]

    for act, seen in (
        (lambda: step("meta"), set()),
        (lambda: subprocess.run(["true"], check=True), set()),
        (lambda: step("cpu"), {"trains"}),
        (lambda: subprocess.run([sys.executable, "-S", "-c", ""], check=True), {"starts a process"}),
        (fork, {"starts a process"}),
        (search, {"searches for a plan"}),
    ):
        NOT_OF_A_UNIT.clear()
        act()
        assert seen == NOT_OF_A_UNIT
