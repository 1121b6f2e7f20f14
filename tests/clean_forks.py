"""Fork processes from one that has imported everything and run nothing.

Importing torch, transformers and DeepSpeed takes ten seconds; a fork takes some milliseconds. `prepare` forks
one clean process per pytest process. The fork happens after the import of the test modules and before the
first test (conftest). All tests fork from it. A fork of the pytest process itself would inherit locks of
tokenizers and thread pools that no thread opens any more.

A second process is forked before any test module is imported. It is bare: neither torch nor an optional
package is loaded in it. It imports only the modules that its children need.

A module may define a function `warm` for further imports. It runs once, when the first child of that module
starts.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MOST_SECONDS = 120.0
"""Default time limit for one process."""


class Forks:
    """Forks of the clean or the bare process, after the `warm` function of a module has run there."""

    def __init__(self, module: str, *, bare: bool = False) -> None:
        self._module = module
        self._bare = bare

    def start(
        self,
        work: Callable[..., int],
        *arguments: Any,
        streams: Mapping[int, int | None] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> int:
        """Start a process that calls this function of a module and exits with its result; return its id.

        `streams` are its standard streams: a descriptor, or None for a closed one; the rest are opened on
        /dev/null. `environment` replaces the whole environment.
        """
        streams = streams or {}
        sent = [each for each in streams.values() if each is not None]
        request = {
            "warm": self._module,
            "work": [work.__module__, work.__qualname__],
            "arguments": arguments,
            "folder": os.getcwd(),
            "environment": dict(os.environ if environment is None else environment),
            "streams": {
                number: None if each is None else sent.index(each) for number, each in streams.items()
            },
        }
        return int(self._answer(request, sent)["pid"])

    def ended(self, child: int, within: float = MOST_SECONDS) -> int:
        """Return its exit code, or minus the signal that ended it; kill it after so many seconds."""
        code = self._answer({"wait": child, "seconds": within})["code"]
        assert code is not None, "the process did not end"
        return int(code)

    def _answer(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        connection = prepare(bare=self._bare)
        socket.send_fds(connection, [json.dumps(request).encode()], list(descriptors))
        answer: dict[str, Any] = json.loads(connection.recv(1 << 17))
        assert "failed" not in answer, answer["failed"]
        return answer


@functools.cache
def forks_of(module: str, *, bare: bool = False) -> Forks:
    """Return forks that have run the function `warm` of this module."""
    return Forks(module, bare=bare)


@functools.cache
def prepare(*, bare: bool = False) -> socket.socket:
    """Fork the clean process, or the bare one, and return the connection to it.

    The process ends when the connection does.
    """
    assert not bare or "torch" not in sys.modules, "torch is imported: too late for a bare process"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a thread of xdist waits for messages
        server = os.fork()
    if server:
        theirs.close()
        atexit.register(_end, ours, server, os.getpid())
        return ours
    try:
        ours.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        serve(theirs)
    finally:
        os._exit(0)


def _end(ours: socket.socket, server: int, parent: int) -> None:
    if os.getpid() == parent:
        ours.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(server, 0)


def serve(connection: socket.socket) -> None:
    """Fork and wait for children, one request after the other, until the connection ends."""
    while True:
        message, descriptors, *_ = socket.recv_fds(connection, 1 << 17, 8)
        if not message:
            return
        request = json.loads(message)
        try:
            answer: dict[str, Any] = (
                {"code": _waited(request["wait"], request["seconds"])}
                if "wait" in request
                else {"pid": _forked(request, descriptors)}
            )
        except Exception:
            answer = {"failed": traceback.format_exc()[-(1 << 16) :]}
        for each in descriptors:
            os.close(each)
        connection.send(json.dumps(answer).encode())


@functools.cache
def _warm(module: str) -> None:
    getattr(importlib.import_module(module), "warm", lambda: None)()
    gc.collect()
    gc.freeze()  # a collection in a fork then visits only the fork's own objects, and copies no other page


def _waited(child: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _forked(request: dict[str, Any], descriptors: Sequence[int]) -> int:
    _warm(request["warm"])
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        _stream(request["streams"], descriptors)
        module, name = request["work"]
        code = getattr(importlib.import_module(module), name)(*request["arguments"])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception:
        if sys.stderr is not None:
            traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _stream(streams: Mapping[str, int | None], descriptors: Sequence[int]) -> None:
    """Open the standard streams as Python itself begins with them, also for handlers of messages."""
    nothing = os.open(os.devnull, os.O_RDWR)
    made = []
    for number in (1, 2):
        place = streams.get(str(number), -1)
        if place is None:
            os.close(number)
        else:
            os.dup2(nothing if place < 0 else descriptors[place], number)
        made.append(None if place is None else os.fdopen(number, "w", closefd=False))
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = made  # type: ignore[misc, assignment]
    for handler in [one for each in logging.Logger.manager.loggerDict.values() for one in _handlers(each)]:
        if type(handler) is logging.StreamHandler:
            handler.stream = sys.stderr


def _handlers(logger: Any) -> Sequence[logging.Handler]:
    return getattr(logger, "handlers", ())


sys.path[:0] = [str(Path(__file__).parent)] * (str(Path(__file__).parent) not in sys.path)
