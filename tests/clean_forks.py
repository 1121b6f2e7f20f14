"""Processes that are forked from a clean one.

A test's own process has a past: a tokenizer that was used, or a pool of threads, is in its forks a lock that
nobody opens any more; and by then it is large, so that each fork takes its while. So one process is started
that has imported what it needs and done nothing else, and it forks when it is told.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

MOST_SECONDS = 60.0
"""That a process may take, unless one says otherwise."""


class Forks:
    """A clean process, and what it has forked. It has imported this module, and called its `warm` if there
    is one."""

    def __init__(self, module: str) -> None:
        self._ours, theirs = socket.socketpair()
        words = [sys.executable, __file__, str(theirs.fileno()), module]
        self._server = subprocess.Popen(words, pass_fds=[theirs.fileno()])
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.close()
        self._server.wait(MOST_SECONDS)

    def start(
        self, work: Callable[..., int], *arguments: Any, streams: Mapping[int, int | None] | None = None
    ) -> int:
        """A process that does this work, a function of a module, and ends with the code that it gives; its
        id. `streams` are its standard ones: a descriptor, or None for one that is closed; the others are open
        on nothing."""
        streams = streams or {}
        sent = [each for each in streams.values() if each is not None]
        told = {
            "work": [work.__module__, work.__qualname__],
            "arguments": arguments,
            "folder": os.getcwd(),
            "streams": {
                number: None if each is None else sent.index(each) for number, each in streams.items()
            },
        }
        return int(self._asked(told, sent)["pid"])

    def ended(self, child: int, within: float = MOST_SECONDS) -> int:
        """Its exit code, or minus the signal that ended it; it is ended after so many seconds."""
        code = self._asked({"wait": child, "seconds": within})["code"]
        assert code is not None, "the process did not end"
        return int(code)

    def _asked(self, told: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        socket.send_fds(self._ours, [json.dumps(told).encode()], list(descriptors))
        answer: dict[str, Any] = json.loads(self._ours.recv(1 << 16))
        return answer


@functools.cache
def forks_of(module: str) -> Forks:
    """Forks of a process that has imported this module, for all tests of this process, with which it ends:
    starting it takes ten seconds."""
    forks = Forks(module)
    atexit.register(forks.__exit__)
    return forks


def serve(connection: socket.socket) -> None:
    while True:
        told, descriptors, *_ = socket.recv_fds(connection, 1 << 16, 8)
        if not told:
            return
        asked = json.loads(told)
        answer = (
            {"code": _waited(asked["wait"], asked["seconds"])}
            if "wait" in asked
            else {"pid": _forked(asked, descriptors)}
        )
        for each in descriptors:
            os.close(each)
        connection.send(json.dumps(answer).encode())


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


def _forked(asked: dict[str, Any], descriptors: Sequence[int]) -> int:
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        os.chdir(asked["folder"])
        _stream(asked["streams"], descriptors)
        module, name = asked["work"]
        code = getattr(importlib.import_module(module), name)(*asked["arguments"])
    except Exception:
        if sys.stderr is not None:
            traceback.print_exc()
    finally:
        os._exit(code)


def _stream(streams: Mapping[str, int | None], descriptors: Sequence[int]) -> None:
    """The standard streams, as Python itself begins with them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    made = []
    for number in (1, 2):
        place = streams.get(str(number), -1)
        if place is None:
            os.close(number)
        else:
            os.dup2(nothing if place < 0 else descriptors[place], number)
        made.append(None if place is None else os.fdopen(number, "w", closefd=False))
    sys.stdout, sys.stderr = made  # type: ignore[assignment]


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent)]
    getattr(importlib.import_module(sys.argv[2]), "warm", lambda: None)()
    gc.collect()
    gc.freeze()  # a collection in a fork walks through what the fork has made, and copies no other page
    serve(socket.socket(fileno=int(sys.argv[1])))
