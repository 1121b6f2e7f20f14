"""A process that is killed during a compilation leaves Inductor's and Triton's caches usable for the next
process.

DeepSpeed's builds are torch extensions; see `test_build_lock.py`.
"""

from __future__ import annotations

import os
import signal
import stat
import time
from pathlib import Path

import pytest

from clean_forks import Forks, forks_of
from ends_of_forks import compiles, end, until
from snugfit.features.compile.compiling import whole_files
from snugfit.step.applier import run_context
from snugfit.techniques.recipe import Recipe

SOURCE = 'extern "C" int answer() { return 42; }\n'


def forks() -> Forks:
    return forks_of("test_killed_builds")


def compile_answer(folder: str, compiler: str) -> Path:
    """Compile a library with Inductor's builder unless it exists, and return its path."""
    from torch._inductor.cpp_builder import BuildOptionsBase, CppBuilder

    source = Path(folder, "answer.cpp")
    source.write_text(SOURCE)
    options = BuildOptionsBase(compiler=compiler, cflags=["shared", "fPIC"])
    builder = CppBuilder("answer", [str(source)], options, folder)
    target = Path(builder.get_target_file_path())
    if not target.exists():  # as in torch._inductor.codecache
        builder.build()
    return target


def compile_for_long(folder: str) -> int:
    """Compile in a separate process group, which is killed together with its compiler."""
    os.setpgid(0, 0)
    with run_context(Recipe.parse("compiled").setup()):
        compile_answer(folder, f"{folder}/slow-g++")
    return 0


@compiles
@pytest.mark.whole
def test_a_compiler_that_is_killed_leaves_no_half_library(tmp_path: Path) -> None:
    import ctypes

    slow = tmp_path / "slow-g++"
    slow.write_text(
        '#!/bin/sh\nfor word in "$@"; do [ "$before" = -o ] && printf half > "$word"; before="$word"; done\n'
        f"touch {tmp_path}/begun\nsleep 60\n"
    )
    slow.chmod(slow.stat().st_mode | stat.S_IXUSR)
    pid = forks().start(compile_for_long, str(tmp_path))
    until((tmp_path / "begun").exists, 30)
    assert any(path.read_bytes() == b"half" for path in tmp_path.iterdir() if path.is_file())
    os.killpg(pid, signal.SIGKILL)
    assert forks().ended(pid) == -signal.SIGKILL
    with whole_files():
        assert ctypes.CDLL(str(compile_answer(str(tmp_path), "g++"))).answer() == 42


@compiles
def test_a_compiler_that_fails_leaves_nothing(tmp_path: Path) -> None:
    from torch._inductor.exc import CppCompileError

    (tmp_path / "bad.cpp").write_text("this is no C++")
    from torch._inductor.cpp_builder import BuildOptionsBase, CppBuilder

    options = BuildOptionsBase(compiler="g++", cflags=["shared", "fPIC"])
    builder = CppBuilder("bad", [str(tmp_path / "bad.cpp")], options, str(tmp_path))
    with whole_files(), pytest.raises(CppCompileError, match="this"):
        builder.build()
    assert not [path for path in tmp_path.iterdir() if path.is_file() and path.suffix != ".cpp"]


def put_half(folder: str) -> int:
    """Store a kernel in Triton's cache, and end the process before the file gets its name."""
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    knobs.cache.dir = folder
    os.replace = _end_here
    FileCacheManager("ab12").put(b"kernel", "answer.cubin")
    return 0


def _end_here(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.whole
def test_triton_has_no_half_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    assert forks().ended(forks().start(put_half, str(tmp_path))) == -signal.SIGKILL
    assert list(tmp_path.rglob("answer.cubin")), "the process was killed while it wrote"
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    cache = FileCacheManager("ab12")
    assert cache.get_file("answer.cubin") is None
    assert Path(cache.put(b"kernel", "answer.cubin")).read_bytes() == b"kernel"


def hold_lock(lock: str) -> int:
    from torch.utils._filelock import FileLock

    with FileLock(lock, timeout=1):
        Path(lock).with_name("held").touch()
        time.sleep(60)
    return 0


@pytest.mark.whole
def test_a_lock_of_inductor_ends_with_its_process(tmp_path: Path) -> None:
    from torch.utils._filelock import FileLock

    pid = forks().start(hold_lock, str(tmp_path / "key.lock"))
    until((tmp_path / "held").exists)
    end(forks, pid)
    with FileLock(str(tmp_path / "key.lock"), timeout=1):
        pass
