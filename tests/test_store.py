"""The store of checkpoints: saved ones are restored, and damaged ones are reported and never resumed from."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fitted import model_of
from snugfit.errors import SnugfitError, UsageError
from snugfit.training.checkpoint import manifest
from snugfit.training.checkpoint.manifest import MANIFEST, NewerCheckpoint, SaveStopped
from snugfit.training.checkpoint.save_failed import SaveFailed
from snugfit.training.checkpoint.staging import Staging
from snugfit.training.checkpoint.state import TrainState, snapshot
from snugfit.training.checkpoint.store import NoIntactCheckpoint, Store
from stored import NAMES, assert_whole, content, fill, hidden, in_child, stored, visible

MODEL = "model.safetensors"


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of steps 10 and 20, as a template for copies."""
    return stored(tmp_path_factory.mktemp("two") / "out", 10, 20).root


@pytest.fixture
def out(two_steps: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_steps, tmp_path / "out", symlinks=True))


def test_what_is_kept_is_found(tmp_path: Path) -> None:
    store = stored(tmp_path / "new" / "out", 5, 10)
    assert_whole(store.newest(), 10)
    assert visible(store.root) == ["checkpoint-10", "checkpoint-5"]
    assert not hidden(store.root)
    assert not store.broken
    written = store.save(12, fill(12), {"rates": (1e-5, 0.1), 3: None})
    assert Store(store.root).newest() == written
    assert written.about == {"rates": [1e-5, 0.1], "3": None}


def test_an_empty_or_absent_folder_holds_none(tmp_path: Path) -> None:
    assert Store(tmp_path).newest() is None
    assert Store(tmp_path / "nowhere").newest() is None


def test_a_folder_that_is_named_relatively_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = stored(Path("out"), 1)
    monkeypatch.chdir("/")
    store.save(2, fill(2), {"seed": 17, "run": 0})
    assert_whole(Store(tmp_path / "out").newest(), 2)


def test_the_same_step_is_kept_anew(out: Path) -> None:
    store = stored(out, 20, run=1)
    assert_whole(store.newest(), 20, run=1)
    assert visible(out) == ["checkpoint-10", "checkpoint-20"]
    assert not hidden(out)


def test_what_is_said_of_a_checkpoint_must_be_something_that_json_can_hold(out: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        Store(out).save(30, fill(30), {"loss": float("nan")})
    with pytest.raises(SnugfitError, match=r"manifest\.json would have more than"):
        Store(out).save(30, fill(30), {"ids": "7" * (9 << 20)})
    assert visible(out) == ["checkpoint-10", "checkpoint-20"]
    assert not hidden(out)


# Damages: each to a file of the newest checkpoint, each detected, reported by name, and skipped.


def _linked(path: Path, _: Path) -> None:
    elsewhere = path.rename(path.parents[2] / ".elsewhere")
    path.symlink_to(elsewhere)


def _swapped(path: Path, other: Path) -> None:
    mine, its = path.read_bytes(), other.read_bytes()
    path.write_bytes(its)
    other.write_bytes(mine)


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "truncated": lambda path, _: os.truncate(path, path.stat().st_size - 2),
    "empty": lambda path, _: os.truncate(path, 0),
    "zeros": lambda path, _: path.write_bytes(bytes(path.stat().st_size)),
    "missing": lambda path, _: path.unlink(),
    "longer": lambda path, _: path.write_bytes(path.read_bytes() + b"x"),
    "a folder": lambda path, _: (path.unlink(), path.mkdir()),
    "a link to its own bytes": _linked,
    "a dangling link": lambda path, _: (path.unlink(), path.symlink_to("nowhere")),
    "a pipe": lambda path, _: (path.unlink(), os.mkfifo(path)),
    "of another step": lambda path, _: shutil.copy(str(path).replace("point-20", "point-10"), path),
    "swapped with another": _swapped,
}


@pytest.mark.parametrize("name", [*NAMES, MANIFEST])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_told_and_the_one_before_is_taken(out: Path, damage: str, name: str) -> None:
    folder = out / "checkpoint-20"
    DAMAGES[damage](folder / name, folder / next(other for other in NAMES if other != name))
    store = Store(out)
    assert_whole(store.newest(), 10)
    (broken,) = store.broken
    assert broken.folder == folder
    named = [each for each in (*NAMES, MANIFEST) if each in broken.fault]
    assert name in named or damage == "swapped with another"
    assert named
    assert broken.moved_to == out / "checkpoint-20.broken"
    assert broken.moved_to.is_dir()
    assert visible(out) == ["checkpoint-10", "checkpoint-20.broken"]


def test_a_folder_on_the_way_that_is_a_link(out: Path) -> None:
    inner = out / "checkpoint-20" / "templates"
    inner.rename(out / "elsewhere")
    inner.symlink_to(out / "elsewhere")
    store = Store(out)
    assert_whole(store.newest(), 10)
    assert "templates, which is a link" in store.broken[0].fault


BAD_MANIFESTS = {
    "half": lambda text: text[: len(text) // 2],
    "not JSON": lambda _: "PK\x03\x04",
    "a list": lambda _: "[]",
    "NaN": lambda _: '{"schema": NaN}',
    "nested": lambda _: '{"schema":' + "[" * 100_000,
    "huge": lambda text: text + " " * (9 << 20),
    "no schema": lambda text: text.replace('"schema": 1', '"schema": null'),
    "another schema": lambda text: text.replace('"schema": 1', '"schema": 3'),
    "something else": lambda text: text.replace('"checkpoint"', '"measurement"'),
    "other words": lambda text: text.replace('"seed": 17', '"seed": 16'),
}


@pytest.mark.parametrize("damage", BAD_MANIFESTS)
def test_a_damaged_manifest(out: Path, damage: str) -> None:
    path = out / "checkpoint-20" / MANIFEST
    before = path.read_text()
    path.write_text(BAD_MANIFESTS[damage](before))
    assert path.read_text() != before
    store = Store(out)
    assert_whole(store.newest(), 10)
    assert MANIFEST in store.broken[0].fault


def resealed(out: Path, **changes: object) -> None:
    """Change the newest manifest as its own writer would."""
    path = out / "checkpoint-20" / MANIFEST
    document = json.loads(path.read_text()) | changes
    del document["sha256"]
    path.write_text(json.dumps(document | {"sha256": manifest.checksum(document)}))


FOREIGN = {
    "outside": {"../outside": {"bytes": 1, "sha256": "0"}},
    "absolute": {"/etc/hostname": {"bytes": 1, "sha256": "0"}},
    "above itself": {"templates/../../outside": {"bytes": 1, "sha256": "0"}},
    "itself": {".": {"bytes": 1, "sha256": "0"}},
    "nothing": {"": {"bytes": 1, "sha256": "0"}},
    "no name": {"a\0b": {"bytes": 1, "sha256": "0"}},
    "no bytes": {"\ud800": {"bytes": 1, "sha256": "0"}},
    "no size": {MODEL: {"sha256": "0"}},
    "size in words": {MODEL: {"bytes": "1", "sha256": "0"}},
    "a list": [MODEL],
}


@pytest.mark.parametrize("names", FOREIGN)
def test_a_manifest_that_names_what_is_no_file_of_its_folder(out: Path, names: str) -> None:
    (out / "outside").write_bytes(b"x")
    resealed(out, files=FOREIGN[names])
    store = Store(out)
    assert_whole(store.newest(), 10)
    assert MANIFEST in store.broken[0].fault


def test_a_copy_of_another_step_under_this_name(out: Path) -> None:
    shutil.copytree(out / "checkpoint-10", out / "checkpoint-30")
    store = Store(out)
    assert_whole(store.newest(), 20)
    assert store.broken[0].fault == "manifest.json is of step 10"


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("checkpoint-20"), Path.mkdir])
def test_a_file_a_link_and_an_empty_folder_are_broken(out: Path, make: Callable[[Path], None]) -> None:
    make(out / "checkpoint-30")
    store = Store(out)
    assert_whole(store.newest(), 20)
    assert os.path.lexists(out / "checkpoint-30.broken")


def test_a_checkpoint_of_another_program_is_told_as_one(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-500").mkdir()
    fill(500)(tmp_path / "checkpoint-500")
    with pytest.raises(
        NoIntactCheckpoint, match=r"checkpoint-500: manifest\.json is missing .*snugfit did not write"
    ):
        Store(tmp_path).newest()


def test_bits_that_flip(two_steps: Path, tmp_path: Path) -> None:
    """The test flips one bit at a time, anywhere in weights, state or manifest."""
    draw = random.Random(20261122)
    for turn in range(50):
        out = Path(shutil.copytree(two_steps, tmp_path / str(turn)))
        path = out / "checkpoint-20" / draw.choice([*NAMES, MANIFEST])
        held = bytearray(path.read_bytes())
        held[draw.randrange(len(held))] ^= 1 << draw.randrange(8)
        path.write_bytes(held)
        store = Store(out)
        assert_whole(store.newest(), 10)
        assert path.name in store.broken[0].fault


def test_a_checkpoint_of_a_newer_snugfit_is_not_broken(out: Path) -> None:
    """Its version is refused, and nothing of it is renamed or removed."""
    resealed(out, schema=2, snugfit="9.1.0", files="whatever it may mean then")
    store = Store(out)
    with pytest.raises(NewerCheckpoint, match=r"snugfit 9\.1\.0 \(schema 2\).*Upgrade"):
        store.newest()
    assert visible(out) == ["checkpoint-10", "checkpoint-20"]
    assert not store.broken
    assert store.retain(1) == []


def test_all_broken_is_no_fresh_start_and_stays_so(out: Path) -> None:
    """A second start fails like the first until the user chooses how to continue."""
    for step in (10, 20):
        os.truncate(out / f"checkpoint-{step}" / MODEL, 3)
    for _ in range(2):
        with pytest.raises(
            NoIntactCheckpoint, match=r"checkpoint-20: model\.safetensors has 3 bytes.*--restart"
        ) as told:
            Store(out).newest()
    assert told.value.exit_code == 1
    kept = Store(out).restart()
    assert [path.name for path in kept] == ["checkpoint-10.before-restart", "checkpoint-20.before-restart"]
    assert Store(out).newest() is None


def test_a_restart_meets_nothing_of_before(out: Path) -> None:
    store = Store(out)
    store.restart()
    store.save(10, fill(10, run=1), {"seed": 17, "run": 1})
    assert_whole(store.newest(), 10, run=1)
    store.restart()
    assert store.newest() is None
    assert visible(out) == [
        "checkpoint-10.before-restart",
        "checkpoint-10.before-restart-2",
        "checkpoint-20.before-restart",
    ]


def test_broken_ones_are_kept_aside_under_names_of_their_own(out: Path) -> None:
    for _ in range(3):
        os.truncate(out / "checkpoint-20" / MODEL, 3)
        store = Store(out)
        assert_whole(store.newest(), 10)
        store.save(20, fill(20), {"seed": 17, "run": 0})
    asides = ["checkpoint-20.broken", "checkpoint-20.broken-2", "checkpoint-20.broken-3"]
    assert visible(out) == ["checkpoint-10", "checkpoint-20", *asides]


def test_names_that_are_no_checkpoint_are_left_alone(out: Path) -> None:
    """Folders with names similar to a checkpoint's are ignored."""
    names = ["checkpoint-٣٠", "checkpoint-007", "checkpoint-5.bak", "checkpoint--1", "checkpoint-1e3"]
    names += [
        "Checkpoint-99",
        "checkpoint-99 ",
        "checkpoint-",
        "checkpoint-+7",
        ".draft-30",
        ".gone-x-00000000",
    ]
    for name in names:
        shutil.copytree(out / "checkpoint-20", out / name)
    store = Store(out)
    assert store.sweep() == []
    assert_whole(store.newest(), 20)
    assert store.retain(1) == [10]
    assert {path.name for path in out.iterdir()} == {*names, "checkpoint-20"}


def test_a_checkpoint_that_cannot_be_read_now_is_not_called_broken(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_many(path: object, *_: object) -> int:
        raise OSError(24, "Too many open files", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", too_many)
        with pytest.raises(SnugfitError, match=r"checkpoint-20/.* cannot be read: Too many open files"):
            Store(out).newest()
    assert visible(out) == ["checkpoint-10", "checkpoint-20"]


def test_in_a_folder_that_can_only_be_read_a_broken_one_is_told(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    os.truncate(out / "checkpoint-20" / MODEL, 3)
    monkeypatch.setattr(os, "rename", refuse)
    store = Store(out)
    assert_whole(store.newest(), 10)
    assert str(store.broken[0]).startswith("checkpoint-20: model.safetensors has 3 bytes")
    assert store.broken[0].moved_to == store.broken[0].folder
    with pytest.raises(SnugfitError, match="Read-only file system"):
        store.restart()


# Retention.


@pytest.mark.parametrize(
    ("limit", "keep", "left"),
    [
        (None, [], [1, 2, 3, 9, 10]),
        (0, [], [1, 2, 3, 9, 10]),
        (7, [], [1, 2, 3, 9, 10]),
        (2, [], [9, 10]),
        (1, [], [10]),
        (1, [2], [2, 10]),
        (2, [2], [2, 10]),
        (3, [2], [2, 9, 10]),
        (2, [10], [9, 10]),
        (1, [1, 2, 3], [1, 2, 3, 10]),
        (2, [77], [9, 10]),
    ],
)
def test_the_oldest_go(tmp_path: Path, limit: int | None, keep: list[int], left: list[int]) -> None:
    store = stored(tmp_path, 1, 2, 3, 9, 10)
    gone = store.retain(limit, frozenset(keep))
    assert visible(tmp_path) == sorted(f"checkpoint-{step}" for step in left)
    assert sorted(gone + left) == [1, 2, 3, 9, 10]
    assert not hidden(tmp_path)


def test_a_broken_one_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    store = stored(tmp_path, 1, 2, 3)
    (tmp_path / "checkpoint-2" / MODEL).unlink()
    assert store.retain(2) == []
    assert store.retain(1) == [1]
    assert visible(tmp_path) == ["checkpoint-2", "checkpoint-3"]


def test_a_removal_that_the_system_refuses_is_told(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(SnugfitError, match=r"could not be removed \(Operation not permitted"):
        Store(out).retain(1)
    assert visible(out) == ["checkpoint-10", "checkpoint-20"]


# Places that cannot hold checkpoints, before the first step.


def test_a_place_that_can_is_left_as_it_was(tmp_path: Path) -> None:
    Store(tmp_path / "a" / "b").prepare()
    Store(tmp_path / "a" / "b").prepare()
    assert list((tmp_path / "a").iterdir()) == [tmp_path / "a" / "b"]
    assert not list((tmp_path / "a" / "b").iterdir())


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_in_the_place(tmp_path: Path, below: str) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UsageError, match=r"cannot be saved there \(it is not a folder"):
        Store(tmp_path / "out" / below).prepare()
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="Requires: [Linux's /proc]")
def test_a_place_that_takes_no_folder_from_anyone() -> None:
    for place in ("/proc", "/proc/out"):
        with pytest.raises(UsageError, match="cannot be saved there"):
            Store(Path(place)).prepare()


@pytest.fixture
def foreign() -> Iterator[Path]:
    """Return a folder that every user may read and only its owner may write."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.whole
def test_a_place_of_somebody_else(foreign: Path) -> None:
    """Become another user for the test, since the superuser may write everywhere."""

    def act() -> None:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        for place in (foreign, foreign / "out"):
            with pytest.raises(UsageError, match="Permission denied") as told:
                Store(place).prepare()
            assert told.value.exit_code == 2

    assert in_child(act) == 0
    assert not list(foreign.iterdir())


@pytest.mark.parametrize("call", ["mkdir", "fsync", "rename"])
def test_a_place_that_refuses_a_part_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(UsageError, match="Invalid cross-device link"):
        Store(tmp_path / "out").prepare()
    assert call == "mkdir" or not list((tmp_path / "out").iterdir())


def test_a_file_system_that_cannot_sync_folders_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def files_alone(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(22, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", files_alone)
    assert_whole(stored(tmp_path, 1).newest(), 1)


# Contents of a save, and its interruption.


@pytest.mark.parametrize(
    "odd",
    [
        lambda folder: (folder / "odd").symlink_to(folder / "state.json"),
        lambda folder: os.mkfifo(folder / "odd"),
        lambda folder: (folder / MANIFEST).write_text("{}"),
    ],
)
def test_what_is_no_plain_file_cannot_be_kept(out: Path, odd: Callable[[Path], None]) -> None:
    def filled(folder: Path) -> None:
        fill(30)(folder)
        odd(folder)

    with pytest.raises(SnugfitError, match=r"odd is a|manifest\.json is the name"):
        Store(out).save(30, filled, {})
    assert visible(out) == ["checkpoint-10", "checkpoint-20"]
    assert not hidden(out)


def test_a_fault_of_the_writer_is_its_own(out: Path) -> None:
    def fail(folder: Path) -> None:
        fill(30)(folder)
        raise KeyError("optimizer")

    with pytest.raises(KeyError, match="optimizer"):
        Store(out).save(30, fail, {})
    assert visible(out) == ["checkpoint-10", "checkpoint-20"]
    assert not hidden(out)


def test_no_room_for_a_name_is_not_told_in_bytes(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename needs a directory entry, a file quota or an inode, so the message omits free bytes."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(SaveFailed, match=r"No space left on device \(there is room.*df -i\)") as told:
        Store(out).save(30, lambda folder: None, {}, needed_bytes=10)
    assert "free" not in str(told.value)


def test_a_library_that_tells_the_systems_refusal_in_words(out: Path) -> None:
    """safetensors' error is no OSError."""

    def fail(folder: Path) -> None:
        (folder / MODEL).write_bytes(b"half")
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(
        SaveFailed, match=r"checkpoint-30 could not be saved: model\.safetensors: No space"
    ) as told:
        Store(out).save(30, fail, {}, needed_bytes=3 << 60)
    assert "3221225472.00 GiB are needed, " in str(told.value)
    assert " are free). Earlier checkpoints are unchanged." in str(told.value)


def test_a_save_that_is_told_to_stop_leaves_nothing(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save checks `stop` between the pieces of a file, and once more before the checkpoint becomes
    visible."""
    monkeypatch.setattr(manifest, "CHUNK_BYTES", 100)
    asked = 0

    def counting() -> bool:
        nonlocal asked
        asked += 1
        return False

    Store(out).save(20, fill(20), {"seed": 17, "run": 0}, stop=counting)
    pieces = sum(-(-len(content(name, 20)) // 100) + 1 for name in NAMES)
    assert asked == pieces + 1
    for last in range(asked):
        answers = iter([False] * last + [True])
        with pytest.raises(SaveStopped):
            Store(out).save(20, fill(20, run=1), {}, stop=answers.__next__)
        assert not hidden(out)
    assert_whole(Store(out).newest(), 20)


# ---- messages to the user --------------------------------------------------------------------------------


@pytest.mark.whole
def test_the_room_that_a_checkpoint_takes_counts_its_text_too(tmp_path: Path) -> None:
    """The generators' states, as JSON, are most of a small model's checkpoint."""
    model, device = model_of("bert"), torch.device("cpu")
    optimizer = torch.optim.SGD(model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    state = TrainState(model=model, optimizer=optimizer, scheduler=schedule, scaler=None, device=device)
    taken = snapshot(state, Staging(device), files={"more.json": "x" * 50_000})
    taken.write(tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert 0.93 * size < taken.bytes <= size


def test_none_that_is_whole_says_how_this_front_end_begins_anew(out: Path) -> None:
    for folder in out.iterdir():
        (folder / MANIFEST).unlink(missing_ok=True)
    for begin_anew in ("with --restart", "without resume()"):
        with pytest.raises(
            NoIntactCheckpoint, match=re.escape(f"or start again {begin_anew}, which renames these")
        ):
            Store(out, begin_anew=begin_anew).newest()
