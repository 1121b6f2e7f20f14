"""Settings of every test: one thread, no GPU, no calibration of the user's, and short garbage collections.

Models in tests are tiny. Threads would only wait for each other, and for those of the other worker.

Tests are the same on every machine. So a GPU is hidden from them, and from DeepSpeed, which would choose it.
`SNUGFIT_TEST_GPU=1` compares kernels with their references on one (CONTRIBUTING.md).

The cyclic garbage collector runs as seldom as in the command (`cli/main.py`). It leaves out the objects that
the tests' modules made at import. Repeated walks through torch and transformers took a fifteenth of all the
time. After each module the garbage is collected, and the remaining objects are frozen too. So a collection
within a run stays short after any number of tests, and so does a fork. Between the two a clean process is
forked, from which processes of tests are forked (`clean_forks.py`).

A test that starts a process, trains or searches for a plan is no unit test. It carries the marker `whole` or
`slow`. A test without either fails here if it does so (`NOT_OF_A_UNIT`).
"""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import multiprocessing.process
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

import clean_forks
from in_roster import imports_deleted, lacks_feature
from snugfit.cli.main import FEW_COLLECTIONS
from stored_rehearsals import STORE

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it at import, here and in children
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # else g++ tries each kind of vectors for ten seconds
if "SNUGFIT_TEST_GPU" not in os.environ:
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads it at import; no test reaches the hub
os.environ.setdefault(
    "MPLCONFIGDIR", str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "matplotlib"))
)  # it takes seconds to fill, and would follow XDG_CACHE_HOME (`own_answers`)
os.fsync = lambda descriptor: None  # writes to a disk are slow, and no test cuts the power
gc.set_threshold(FEW_COLLECTIONS, 50, 50)
gc.get_freeze_count = lambda: 1  # each rehearsal would count the frozen objects, in a walk through the heap

COLLECTS_BACKWARDS = os.environ.get("PYTEST_XDIST_WORKER", "gw0")[-1] in "13579"
"""True for every second worker. It begins with the last file of a folder. So in a bare clone each worker
rewrites the assertions of one half of the tests, and reads the other half from disk."""

NOT_OF_A_UNIT: set[str] = set()
"""Actions of the running test that no unit test takes."""


def pytest_configure() -> None:
    """Prepare forks and stores before any test imports the rehearsal."""
    if hasattr(os, "fork"):
        clean_forks.prepare(bare=True)
    STORE.install()


def pytest_collection_finish() -> None:
    """Freeze the objects of imported test modules, and fork the clean process. Modules leave little garbage,
    so a collection before would only take time."""
    gc.freeze()
    if hasattr(os, "fork"):
        clean_forks.prepare(bare=False)  # its cache has the same key as for callers
    _watch()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo is not None and (why := lacks_feature(item, call.excinfo.value)):
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1] or 0, why)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.failed and (why := imports_deleted(str(report.longrepr))):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, why)
    if COLLECTS_BACKWARDS and isinstance(collector, pytest.Directory):
        report.result = report.result[::-1]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by file. xdist requires the same order from all workers."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.path)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    NOT_OF_A_UNIT.clear()
    STORE.begin(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    yield
    if NOT_OF_A_UNIT and not (item.get_closest_marker("whole") or item.get_closest_marker("slow")):
        pytest.fail(f"This test {' and '.join(sorted(NOT_OF_A_UNIT))}: mark it with pytest.mark.whole.")


def _watch() -> None:
    """Record actions that no unit test takes. Called once, after the modules of tests have imported torch."""
    os.register_at_fork(before=lambda: NOT_OF_A_UNIT.add("starts a process"))
    _note_calls(subprocess.Popen, "__init__", "starts a process", _is_python)
    _note_calls(multiprocessing.process.BaseProcess, "start", "starts a process")
    _note_calls(clean_forks.Forks, "start", "starts a process")
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from snugfit.planning.search.plan_request import PlanRequest

    _note_calls(PlanRequest, "with_pool", "searches for a plan")
    register_optimizer_step_post_hook(_note_training)


def _note_calls(owner: Any, name: str, what: str, when: Callable[..., bool] = lambda *_, **__: True) -> None:
    real: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(real)
    def noted(*arguments: Any, **keywords: Any) -> Any:
        if when(*arguments, **keywords):
            NOT_OF_A_UNIT.add(what)
        return real(*arguments, **keywords)

    setattr(owner, name, noted)


def _is_python(_process: Any, command: Any, *_: Any, **__: Any) -> bool:
    """Return True for commands of Python. Imported libraries also run small programs of the system."""
    return not isinstance(command, str) and sys.executable in command


def _note_training(optimizer: Any, *_: Any) -> None:
    """Record an optimizer step. The parameters of a rehearsal are on `meta`."""
    if any(parameter.device.type != "meta" for parameter in optimizer.param_groups[0]["params"]):
        NOT_OF_A_UNIT.add("trains")


@pytest.fixture(autouse=True)
def no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove COLUMNS, so that reports are as wide as in a pipe."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True, scope="session")
def no_own_rates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Hide the user's rates, so that rates come from the package."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("rates")
        patch.setenv("SNUGFIT_RATES", str(folder))
        yield folder


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Yield the list of messages that snugfit logs during the test.

    pytest's own plugin is off (`pyproject.toml`): it walks all loggers of torch and transformers six times a
    test.
    """
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("snugfit")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


@pytest.fixture(scope="session")
def forks() -> clean_forks.Forks:
    """Return forks that have imported the modules of training."""
    return clean_forks.forks_of("test_train_faults")


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Replace the compiler of torch.compile: Dynamo's graphs run unchanged.

    The yielded list grows with each graph.
    """
    import torch
    import torch._dynamo

    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    compile = torch.compile

    def with_backend(model: Any = None, **keywords: Any) -> Any:
        keywords.pop("mode", None)  # only Inductor has modes
        return compile(model, **{**keywords, "backend": backend})

    monkeypatch.setattr(torch, "compile", with_backend)
    torch._dynamo.reset()
    yield graphs
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def own_answers(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give each test a cache of its own, so that no command reads another's stored result, and no defaults of
    the user.
    """
    own = tmp_path_factory.getbasetemp() / f"answers-{next(_NUMBERS)}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(own))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(own / "config"))
    for name in ("SNUGFIT_GPU", "SNUGFIT_HEADROOM"):
        monkeypatch.delenv(name, raising=False)


_NUMBERS = itertools.count()
