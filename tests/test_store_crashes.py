"""A whole checkpoint exists at every instant.

The tests cover death at every call to the file system, a refusal of every call, a full disk, and kill -9.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dying_files import dies, watch
from snugfit.training.checkpoint.manifest import MANIFEST, verify
from snugfit.training.checkpoint.save_failed import SaveFailed
from snugfit.training.checkpoint.store import Store
from stored import NAMES, assert_whole, fill, hidden, in_child, stored, visible


def saved_and_retained(root: Path) -> None:
    store = Store(root)
    store.save(30, fill(30), {"seed": 17, "run": 0})
    store.retain(2)


def replaced(root: Path) -> None:
    Store(root).save(20, fill(20, run=1), {"seed": 17, "run": 1})


def opened(root: Path) -> None:
    """Open a store after three deaths: a draft, a half removal, an unfinished replacement, and a damaged
    checkpoint."""
    store = Store(root)
    store.prepare()
    store.sweep()
    store.newest()


def ruins(root: Path) -> None:
    shutil.copytree(root / "checkpoint-10", root / ".draft-30-00000000")
    (root / "checkpoint-20").rename(root / ".replaced-20-00000000")
    (root / ".gone-5-00000000").mkdir()
    (root / ".gone-5-00000000" / "state.json").write_text("{")
    shutil.copytree(root / "checkpoint-10", root / "checkpoint-25")


ACTS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object], list[tuple[int, int]]]] = {
    "save and retain": (lambda _: None, saved_and_retained, [(20, 0), (30, 0)]),
    "replace": (lambda _: None, replaced, [(20, 0), (20, 1)]),
    "replace the only one": (
        lambda root: shutil.rmtree(root / "checkpoint-10"),
        replaced,
        [(20, 0), (20, 1)],
    ),
    "open": (ruins, opened, [(20, 0)]),
}
"""The initial store, the interrupted action, and the steps and runs that may be the newest after a death."""


@pytest.mark.parametrize("act", ACTS)
def test_death_at_any_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    prepare, work, newest = ACTS[act]
    stored(tmp_path / "model", 10, 20)
    prepare(tmp_path / "model")
    seen = []
    for at in itertools.count(1):
        root = Path(shutil.copytree(tmp_path / "model", tmp_path / f"at-{at}"))
        died = dies(lambda: work(root), at=at)  # noqa: B023
        seen.append(whole_at(root))
        assert seen[-1] in newest
        goes_on(root)
        shutil.rmtree(root)
        if not died:
            break
    assert at > 10
    assert seen == sorted(seen), "a saved checkpoint was lost again"
    assert seen[-1] == newest[-1]


def whole_at(root: Path) -> tuple[int, int]:
    """Return step and run of the newest checkpoint, as the next process loads it before its clean-up."""
    for name in visible(root):
        if not name.startswith("checkpoint-25"):  # the damaged one
            verify(root / name, int(name.split("-")[1]))
    found = Store(root).newest()
    assert found is not None
    assert_whole(found, found.step, found.about["run"])
    return found.step, found.about["run"]


def goes_on(root: Path) -> None:
    """Assert that the next process sweeps, loads the same checkpoint as before, and saves."""
    before = whole_at(root)
    store = Store(root)
    store.prepare()
    store.sweep()
    assert not hidden(root)
    assert whole_at(root) == before
    store.save(40, fill(40), {"seed": 17, "run": 0})
    store.retain(1)
    assert_whole(store.newest(), 40)
    assert [name for name in visible(root) if "broken" not in name] == ["checkpoint-40"]


@pytest.mark.whole
def test_kill_9_in_the_middle_of_a_file(tmp_path: Path) -> None:
    """The test sends the real signal in the middle of a file."""
    store = stored(tmp_path, 10)
    ready, tell = os.pipe()

    def slow(folder: Path) -> None:
        fill(20)(folder)
        with open(folder / "model.safetensors", "wb") as file:
            file.write(b"half")
            file.flush()
            os.write(tell, b".")
            time.sleep(60)

    child = os.fork()
    if child == 0:
        store.save(20, slow, {})
        os._exit(0)
    assert os.read(ready, 1) == b"."
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    os.close(ready)
    os.close(tell)
    assert len(hidden(tmp_path)) == 1
    assert_whole(store.newest(), 10)
    goes_on(tmp_path)


def test_everything_is_on_the_disk_before_it_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a power cut.

    Each renamed entry was synced before the rename. Older entries stay untouched until the store's own
    entries are synced after it.
    """
    store = stored(tmp_path, 10, 20)
    synced: set[int] = set()
    log: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        number = os.fstat(descriptor).st_ino
        synced.add(number)
        log.append("synced the store" if number == tmp_path.stat().st_ino else "synced")

    def rename(old: Path, new: Path) -> None:
        log.append(f"{old.name.split('-')[0]} -> {new.name.split('-')[0]}")
        if old.name.startswith(".draft"):
            held = [old, *old.rglob("*")]
            assert len(held) == len(NAMES) + 3  # itself, its folder, its manifest
            assert {path.stat().st_ino for path in held} <= synced
        real_rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "rename", rename)
        store.save(20, fill(20, run=1), {"seed": 17, "run": 1})
        store.retain(1)
    assert [each for each in log if each != "synced"] == [
        "checkpoint -> .replaced",
        ".draft -> checkpoint",
        "synced the store",
        "checkpoint -> .gone",
        "synced the store",
    ]


@pytest.mark.parametrize(
    ("number", "lasting", "run"),
    [
        (errno.ENOSPC, False, 0),
        (errno.ENOSPC, True, 1),
        (errno.EIO, True, 0),
        (errno.EIO, False, 1),
    ],
    ids=["no space, once", "no space, for good", "a bad disk, for good", "a bad disk, once"],
)
def test_a_refusal_of_any_call(tmp_path: Path, number: int, lasting: bool, run: int) -> None:
    """The save of a new or an existing step raises and leaves nothing visible.

    Earlier checkpoints remain, and the next save succeeds.
    """
    store = stored(tmp_path, 10, 20)
    step = 20 if run else 30
    for at in itertools.count(1):
        count = itertools.count(1)

        def meet(real: Callable[[], object], name: str) -> object:
            turn = next(count)  # noqa: B023
            if turn == at or (lasting and turn > at):  # noqa: B023
                raise OSError(number, os.strerror(number))
            return None if name == "fsync" else real()

        told = None
        with pytest.MonkeyPatch.context() as patch:
            watch(patch, meet)
            try:
                store.save(step, fill(step, run), {"seed": 17, "run": run})
            except SaveFailed as failed:
                told = failed
        if told is None:
            break
        assert os.strerror(number) in str(told)
        assert f"checkpoint-{step} could not be saved" in str(told)
        refused_to_undo = lasting and whole_at(tmp_path) == (step, run)
        if not refused_to_undo:
            assert whole_at(tmp_path) == (20, 0)
            assert lasting or visible(tmp_path) == ["checkpoint-10", "checkpoint-20"]
            assert lasting or not hidden(tmp_path)
        store.sweep()
        assert not hidden(tmp_path)
        if refused_to_undo:
            break
    assert at > 10
    assert whole_at(tmp_path) == (step, run)
    goes_on(tmp_path)


def test_a_failing_fsync_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It covers the fsync of each file, of the manifest, and of the folders."""
    store = stored(tmp_path, 10)
    named = []
    for at in range(1, 8):
        left = at
        real = os.fsync

        def fail(descriptor: int) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(descriptor)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(SaveFailed, match="Input/output error") as told:
                store.save(20, fill(20), {})
        named.append(str(told.value).split("saved: ")[1].split(": Input")[0])
        assert_whole(store.newest(), 10)
        assert visible(tmp_path) == ["checkpoint-10"]
        assert not hidden(tmp_path)
    own, root = "Input/output error. Earlier checkpoints are unchanged.", str(tmp_path)
    assert named == [*NAMES, MANIFEST, "templates", own, root]
    store.save(20, fill(20), {"seed": 17, "run": 0})
    assert_whole(store.newest(), 20)


@pytest.mark.parametrize("call", ["mkdir", "open", "rename"])
@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EXDEV])
def test_other_refusals_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    """One refused call is a rename to another file system. It cannot happen to siblings, but it does on
    overlays."""
    store = stored(tmp_path, 10)

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(SaveFailed, match=rf"checkpoint-20 could not be saved: .*{os.strerror(number)}"):
            store.save(20, fill(20), {})
    assert visible(tmp_path) == ["checkpoint-10"]
    assert not hidden(tmp_path) or call == "open"  # without permission to open, it cannot be removed
    goes_on(tmp_path)


# Tests of a full disk. It is a small mounted one if the kernel permits it, else files that may
# not grow. Either way the kernel refuses a write in the middle of a file.

LARGE = 3 << 20


def large(folder: Path) -> None:
    fill(20)(folder)
    (folder / "optimizer.safetensors").write_bytes(bytes(LARGE))


def a_small_disk(at: Path) -> bool:
    """Mount 2 MiB of memory at `at`, in a namespace of this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, new_user, private = 0x00020000, 0x10000000, 0x44000
    if libc.unshare(new_mounts | (0 if os.geteuid() == 0 else new_user)):
        return False
    if libc.mount(b"none", b"/", None, private, None):
        return False
    return not libc.mount(b"tmpfs", os.fsencode(at), b"tmpfs", 0, b"size=2m")


@pytest.mark.whole
def test_a_full_disk(tmp_path: Path) -> None:
    def act() -> None:
        if a_small_disk(tmp_path):
            reason = r"No space left on device \(3.0 MiB are needed, \d"
        else:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, resource.RLIM_INFINITY))
            reason = r"File too large \(3.0 MiB are needed, \d"
        store = stored(tmp_path, 10)
        for _ in range(2):
            with pytest.raises(SaveFailed, match=rf"saved: optimizer\.safetensors: {reason}"):
                store.save(20, large, {}, needed_bytes=LARGE)
            assert visible(tmp_path) == ["checkpoint-10"]
            assert not hidden(tmp_path)
        store.save(20, fill(20), {"seed": 17, "run": 0})
        assert_whole(store.newest(), 20)

    assert in_child(act) == 0


@pytest.mark.whole
def test_safetensors_on_a_full_disk(tmp_path: Path) -> None:
    """Its error is no `OSError`, but is reported as one."""
    store = stored(tmp_path, 10)

    def written(folder: Path) -> None:
        import numpy
        from safetensors.numpy import save_file

        save_file({"weight": numpy.zeros(1 << 18)}, folder / "model.safetensors")

    def act() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        with pytest.raises(SaveFailed, match=r"saved: (model.*: )?File too large \(\d.* are free"):
            store.save(20, written, {})

    assert in_child(act) == 0
    assert_whole(store.newest(), 10)
    assert visible(tmp_path) == ["checkpoint-10"]
    store.save(20, written, {})
    assert store.newest() == verify(tmp_path / "checkpoint-20", 20)
