"""Rehearsals on disk: a stored one gives the same prediction, and its key contains all of its inputs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from small_models import small_job
from snugfit.job.gpu import find_gpu
from snugfit.prediction import predict as room
from snugfit.prediction.device import policy_for
from snugfit.prediction.profile import Software
from snugfit.rehearsal.device.policy import ComparedPolicy, CpuPolicy, CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe
from stored_rehearsals import MARKER, PACKAGE, ROOMS, SIZES, RehearsalStore, describe, source_hash, sources

JOB = small_job("gpt2", 1, batch_size=1)
PLAIN = Recipe().setup()


class Running:
    """A running test, with the marker."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.funcargs = {"monkeypatch": patch}

    def get_closest_marker(self, name: str) -> object:
        return name == MARKER


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RehearsalStore]:
    """An empty folder, for a test that patches nothing."""
    store = RehearsalStore(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        store.begin(Running(patch))  # type: ignore[arg-type]
        yield store


def test_a_stored_trace_gives_the_same_prediction(
    store: RehearsalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces: list[Any] = []

    def counted(job: Any, setup: Any, policy: Any, **how: Any) -> Any:
        traces.append(rehearse(job, setup, policy, **how))
        return traces[-1]

    monkeypatch.setattr(room, "rehearse", store.wrap(counted))
    recipe = "bf16 + every_layer + micro_batches(2)"
    answers = [room.predict(small_job("bert", 2), recipe, gpu="h200").to_json() for _ in range(2)]
    assert json.dumps(answers[0]) == json.dumps(answers[1])
    assert len(traces) == 1


def test_sizes_that_a_rehearsal_compares_are_stored_with_it(store: RehearsalStore) -> None:
    first, other = (policy_for(find_gpu(name), Software()) for name in ("rtx 3060", "rtx 4090"))
    stored = store.wrap(rehearse)
    policies = [ComparedPolicy.of(first, [other]) for _ in range(2)]
    traces = [stored(JOB, PLAIN, policy) for policy in policies]
    assert traces[0] == traces[1]
    assert policies[0].sizes == policies[1].sizes != ComparedPolicy.of(first, [other]).sizes


def test_a_damaged_file_is_rehearsed_again(store: RehearsalStore) -> None:
    stored = store.wrap(rehearse)
    trace = stored(JOB, PLAIN, CudaPolicy())
    [file] = store.source.iterdir()
    for damage in (b"", b"no pickle", file.read_bytes()[:-9]):
        file.write_bytes(damage)
        assert stored(JOB, PLAIN, CudaPolicy()) == trace


# ---- the key ---------------------------------------------------------------------------------------------


def key(store: RehearsalStore, **changes: Any) -> Path | None:
    arguments = {"job": JOB, "setup": PLAIN, "policy": CudaPolicy(), "steps": 3} | changes
    return store.file_of("rehearse", arguments)


def test_each_argument_is_part_of_the_key(store: RehearsalStore) -> None:
    keys = [
        key(store),
        key(store, job=replace(JOB, sequence_length=8)),
        key(store, job=replace(JOB, mixes_samples="it was found with data")),
        key(store, setup=Recipe.parse("bf16").setup()),
        key(store, policy=CudaPolicy(capability=(8, 0))),
        key(store, policy=replace(CudaPolicy(), free_bytes=1)),
        key(store, steps=2),
        store.file_of("record_passes", {"job": JOB, "setup": PLAIN, "policy": CudaPolicy(), "steps": 3}),
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert key(store) == keys[0]


def test_source_and_versions_are_part_of_the_key(tmp_path: Path) -> None:
    package = tmp_path / "snugfit"
    for file in sources():
        copy = package / file.relative_to(PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    versions = {"torch": "2.13.0"}
    hashes = [source_hash(package, versions), source_hash(package, {"torch": "2.14.0"})]
    assert hashes[0] == source_hash(package, versions)
    for changed in ("units.py", "rehearsal/rehearse.py", "step/loss.py", SIZES):
        with (package / changed).open("a") as file:
            file.write("\n")
        hashes.append(source_hash(package, versions))
    assert len(set(hashes)) == len(hashes)


def test_what_a_rehearsal_imports_is_part_of_the_key() -> None:
    imported = re.compile(r"^ *(?:from|import) snugfit\.(\w+)", re.MULTILINE)
    assert {name for file in sources() for name in imported.findall(file.read_text())} <= {*ROOMS}


def test_values_that_differ_have_other_descriptions() -> None:
    values = [
        None, True, 1, 1.0, "1", b"1", (1,), [1], {1: 2}, {2: 1}, frozenset({1}), ("1, 2",), ("1", "2"),
        CudaPolicy(),
    ]  # fmt: skip
    assert len({describe(value) for value in values}) == len(values)


# ---- rehearsals that are not stored ----------------------------------------------------------------------


def test_without_the_marker_nothing_is_stored(store: RehearsalStore) -> None:
    store.begin(SimpleNamespace(get_closest_marker=lambda name: None))  # type: ignore[arg-type]
    assert key(store) is None


def test_compiled_layers_modules_and_steps_of_the_cpu_are_not_stored(store: RehearsalStore) -> None:
    assert key(store, setup=Recipe.parse("compiled").setup()) is None
    assert key(store, policy=CpuPolicy()) is None
    assert key(store, trainer_class=object) is None


@pytest.mark.parametrize(
    ("target", "stored"),
    [
        ("snugfit.rehearsal.rehearse.STEPS", False),
        ("snugfit.rehearsal.device.policy.CudaPolicy.fuses_dropout", False),
        ("torch.nn.Linear.forward", False),
        ("snugfit.planning.search.auto.link_of", True),
    ],
)
def test_a_patched_simulation_is_not_stored(target: str, stored: bool, store: RehearsalStore) -> None:
    with pytest.MonkeyPatch.context() as patch:
        store.begin(Running(patch))  # type: ignore[arg-type]
        patch.setattr(target, 4)
        assert (key(store) is not None) is stored
