"""Several processes that train one small model together, on the CPU with gloo."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from clean_forks import Forks
from small_models import small_job
from small_runs import layers_of, rows
from snugfit.errors import SnugfitError
from snugfit.frontends import own
from snugfit.frontends.own import train
from snugfit.step import plain_loop
from snugfit.techniques import roster
from snugfit.training.run.loop import TrainingStep
from snugfit.training.run.trained import Trained
from snugfit.versions import versions


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


LAST = 6
"""Last step of a run: two steps after its first epoch."""

NO_DROPOUT: dict[str, dict[str, float]] = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "llama": {"attention_dropout": 0.0},
    "mixtral": {"attention_dropout": 0.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def run_of(
    folder: str,
    *,
    job: str = "bert",
    layers: int | None = None,
    recipe: str = "plain",
    samples: int = 25,
    dropout: bool = False,
    facts: dict[str, Any] | None = None,
    dtype: str = "float32",
    **options: Any,
) -> Trained:
    """Train in this process, which may be one of several, a model with these `facts` in its config. Samples
    are padded unevenly; those of Llama have 128 tokens each. The last batch of an epoch has one of the 25
    samples."""
    attention = {"attention_dropout": 0.1} if "attention_dropout" in NO_DROPOUT[job] else {}
    small = small_job(
        job,
        layers or layers_of(recipe),
        {**(attention if dropout else NO_DROPOUT[job]), **(facts or {})},
        batch_size=8,
        clip=1.0,
        dtype=dtype,
    )
    data = [row if job == "bert" else {"input_ids": row["input_ids"]} for row in rows(samples)]
    if job == "llama":
        small = replace(small, sequence_length=128)
        data = [{"input_ids": (row["input_ids"] * 32)[:128]} for row in rows(samples)]
    how = {"max_steps": LAST, "save_steps": 500, **options}
    return train(
        small, recipe, data, output_dir=folder, device="cpu", foresee=False, weights="random",
        evaluation=data, **how,
    )  # fmt: skip


def one_rank(rank: int, size: int, port: int, folder: str, asked: dict[str, Any]) -> int:
    """Run one of several processes, as torchrun starts them."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    asked = dict(asked)
    faults = asked.pop("fault", {}).get(str(rank), "").split()
    try:
        with contextlib.ExitStack() as stack:
            for name in faults:
                stack.enter_context(FAULTS[name]())
            return run_of(folder, **asked).exit_code
    except SnugfitError as error:
        Path(f"{folder}.rank-{rank}").write_text(f"{type(error).__name__}: {error}")
        return error.exit_code


def fault_told(folder: Path, rank: int) -> str:
    """Return the error that ended a process: its kind and text."""
    return Path(f"{folder}.rank-{rank}").read_text()


@contextlib.contextmanager
def exhausted() -> Iterator[None]:
    """Exhaust memory in the third step."""
    plain = TrainingStep.take

    def take(self: TrainingStep, state: Any, *given: Any, **more: Any) -> Any:
        if state.progress.step == 2:
            raise MemoryError("no memory")
        return plain(self, state, *given, **more)

    TrainingStep.take = take  # type: ignore[method-assign]
    yield


@contextlib.contextmanager
def short_of_memory() -> Iterator[None]:
    """From the third step on, leave memory for half of a process's samples at once."""
    plain, take = plain_loop._loss, TrainingStep.take
    step, room = 0, 4 // int(os.environ["WORLD_SIZE"])

    def take_step(self: TrainingStep, state: Any, *given: Any, **more: Any) -> Any:
        nonlocal step
        step = state.progress.step + 1
        return take(self, state, *given, **more)

    def loss(model: Any, batch: Any) -> Any:
        if step >= 3 and len(batch["input_ids"]) > room:
            torch.empty(1 << 50, dtype=torch.uint8)  # more than any machine has
        return plain(model, batch)

    TrainingStep.take, plain_loop._loss = take_step, loss  # type: ignore[method-assign]
    yield


@contextlib.contextmanager
def mixing() -> Iterator[None]:
    """Make the loss of a few samples differ from that of their halves."""

    def compare(job: Any, *given: Any) -> Any:
        return replace(job, mixes_samples="it compares samples")

    own.compare_cut = compare
    yield


@contextlib.contextmanager
def slow() -> Iterator[None]:
    """Slow down each forward pass."""
    plain = plain_loop._loss

    def loss(model: Any, batch: Any) -> Any:
        computed = plain(model, batch)
        time.sleep(0.03)
        return computed

    plain_loop._loss = loss
    yield


@contextlib.contextmanager
def no_number() -> Iterator[None]:
    """Make the loss of the fourth forward pass NaN."""
    plain, passes = plain_loop._loss, iter(range(1000))

    def loss(model: Any, batch: Any) -> Any:
        return plain(model, batch) * (float("nan") if next(passes) == 3 else 1.0)

    plain_loop._loss = loss
    yield


@contextlib.contextmanager
def no_gradient() -> Iterator[None]:
    """Make the gradients of the fourth forward pass NaN, with a finite loss."""
    plain, passes = plain_loop._loss, iter(range(1000))

    def loss(model: Any, batch: Any) -> Any:
        computed = plain(model, batch)
        return computed + (computed * 0).sqrt() if next(passes) == 3 else computed

    plain_loop._loss = loss
    yield


@contextlib.contextmanager
def spike() -> Iterator[None]:
    """Multiply the loss of the eleventh forward pass by fifty."""
    plain, passes = plain_loop._loss, iter(range(1000))

    def loss(model: Any, batch: Any) -> Any:
        return plain(model, batch) * (50.0 if next(passes) == 10 else 1.0)

    plain_loop._loss = loss
    yield


@contextlib.contextmanager
def dies_writing() -> Iterator[None]:
    """Kill the process in the middle of its part of the third checkpoint."""
    from snugfit.features.distributed.checkpoint.shards import ShardedSnapshot

    plain = ShardedSnapshot._write_parts

    def write(self: ShardedSnapshot, folder: Path) -> None:
        if self.step == 3:
            (folder / "shards").mkdir(exist_ok=True)
            (folder / "shards" / f"__{self.ranks.rank}_0.distcp").write_bytes(bytes(1000))
            os.kill(os.getpid(), signal.SIGKILL)
        plain(self, folder)

    ShardedSnapshot._write_parts = write  # type: ignore[method-assign]
    yield


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """Refuse each file of this process that grows beyond a few bytes."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, most))
    yield


@contextlib.contextmanager
def read_only() -> Iterator[None]:
    """Refuse each new or opened file and folder of a checkpoint after the second step."""
    plain, step = TrainingStep.take, 0

    def take(self: TrainingStep, state: Any, *given: Any, **more: Any) -> Any:
        nonlocal step
        step = state.progress.step + 1
        return plain(self, state, *given, **more)

    def refused(real: Any) -> Any:
        def call(path: Any, *given: Any, **more: Any) -> Any:
            writes = real is os.mkdir or (given and isinstance(given[0], int) and given[0] & os.O_CREAT)
            if step >= 3 and writes:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(path))
            return real(path, *given, **more)

        return call

    TrainingStep.take = take  # type: ignore[method-assign]
    os.mkdir, os.open = refused(os.mkdir), refused(os.open)
    yield


FAULTS = {
    "no_number": no_number, "exhausted": exhausted, "slow": slow, "short": short_of_memory, "mixing": mixing,
    "dies_writing": dies_writing, "spike": spike, "no_gradient": no_gradient,
    "no_room": no_room, "read_only": read_only,
}  # fmt: skip
"""Faults of a process, by the names that `fault` lists."""


def start(forks: Forks, folder: Path, size: int, asked: dict[str, Any]) -> list[int]:
    """Start processes that train together; return their ids."""
    port = free_port()
    return [forks.start(one_rank, rank, size, port, str(folder), asked) for rank in range(size)]


def trained(forks: Forks, folder: Path, size: int, **asked: Any) -> list[int]:
    """Return the exit codes of processes that have trained together."""
    children = start(forks, folder, size, asked)
    return [forks.ended(child) for child in children]


def weights_in(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the model of a checkpoint, or its adapters, as libraries read them."""
    from safetensors.torch import load_file

    files = (folder / f"checkpoint-{step}" / f"{name}.safetensors" for name in ("model", "adapter_model"))
    return load_file(next(file for file in files if file.is_file()))


def warm() -> None:
    """Import the dependencies of the forks and read transformers' table of models and tasks. Each fork would
    take seconds for that."""
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.optim
    import torch.distributed.pipelining
    import torch.nn.parallel  # noqa: F401
    import transformers.models.bert.modeling_bert
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama
    import transformers.models.mixtral.modeling_mixtral
    import transformers.optimization  # noqa: F401
    from packaging import requirements, tags  # noqa: F401
    from torch.utils import serialization  # noqa: F401

    from snugfit.features.kernels.head import deferred_logits  # noqa: F401
    from snugfit.features.kernels.without_padding import flash_attn  # noqa: F401
    from snugfit.features.offload import activations  # noqa: F401

    if importlib.util.find_spec("deepspeed"):  # accelerate imports it for the first checkpoint
        with contextlib.redirect_stdout(sys.stderr):
            importlib.import_module("deepspeed")
    fill_caches()
    for family in NO_DROPOUT:
        small_job(family, 1)


def fill_caches() -> None:
    """Fill caches that each fork would fill in half a second: the techniques, the installed versions, and
    transformers' patterns of renamed weights, which peft reads."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    roster.techniques()
    versions()
    get_checkpoint_conversion_mapping("llama")
