"""Train with exported scripts in several processes; the first process writes the losses.

    python -m torch.distributed.run --nproc-per-node 2 tests/exported_processes.py FOLDER...
    accelerate launch --config_file FOLDER/accelerate_config.yaml tests/exported_processes.py FOLDER

Each folder holds the files of an export and `samples.pt`, the dataset. On the CPU accelerate supports only
DDP. So these processes report GPUs to it, and compute on the CPU with gloo between them.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

STEPS = 3


def train(folder: Path) -> list[float]:
    """Return the losses of a few steps by the script in this folder."""
    samples = torch.load(folder / "samples.pt")
    if (folder / "training_arguments.py").exists():
        return by_the_trainer(folder, samples)
    script = runpy.run_path(str(folder / "train.py"))
    if any((folder / name).exists() for name in ("accelerate_config.yaml", "ds_config.json")):
        return list(script["train"](samples, STEPS, shuffle=False)[1])
    return list(script["train"](samples, STEPS, device="cpu", shuffle=False)[1])


@contextmanager
def taken_for_gpus() -> Iterator[None]:
    """Make accelerate take these processes for ones that have a GPU each."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_BYPASS_DEVICE_MAP": "true"}
    answer = lambda *given: ("gloo", DistributedType.MULTI_GPU)  # noqa: E731
    with patch.object(PartialState, "_prepare_backend", answer):
        yield


def by_the_trainer(folder: Path, samples: Any) -> list[float]:
    """Return the losses of the exported `build_trainer`, patched to run a few steps on the CPU."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    losses: list[float] = []
    more = {"max_steps": STEPS, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    more |= {"output_dir": str(folder / "out"), "dataloader_pin_memory": False}
    plain_init, plain_step = TrainingArguments.__init__, Trainer.training_step

    def on_the_cpu(self: Any, **arguments: Any) -> None:
        plain_init(self, **arguments | more)

    def seen(self: Any, *given: Any, **keywords: Any) -> Any:
        loss = plain_step(self, *given, **keywords)
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
        return loss

    in_order = lambda self, *given: SequentialSampler(self.train_dataset)  # noqa: E731
    with (
        patch.object(TrainingArguments, "__init__", on_the_cpu),
        patch.object(Trainer, "training_step", seen),
        patch.object(Trainer, "_get_train_sampler", in_order),
    ):
        trainer = runpy.run_path(str(folder / "training_arguments.py"))["build_trainer"](samples)
        trainer.train()
    pieces = trainer.args.gradient_accumulation_steps
    return [sum(losses[start : start + pieces]) for start in range(0, len(losses), pieces)]


def train_all(folders: Sequence[str]) -> None:
    """Train with each script in turn; the first process writes the losses."""
    torch.set_num_threads(1)
    for name in folders:
        with taken_for_gpus():
            told = train(Path(name))
        if os.environ["RANK"] == "0":
            (Path(name) / "losses.json").write_text(json.dumps(told))
    if dist.is_initialized():
        dist.destroy_process_group()


def one_rank(rank: int, size: int, port: int, folders: Sequence[str]) -> int:
    """Run `train_all` in a fork of a warm process (`clean_forks.py`) instead of under torchrun. A traceback
    is written into the first folder."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo",
        DS_ACCELERATOR="cpu",
    )  # fmt: skip
    try:
        train_all(folders)
    except Exception:
        (Path(folders[0]) / f"said{rank}").write_text(traceback.format_exc())
        return 1
    return 0


if __name__ == "__main__":
    train_all(sys.argv[1:])
    # A thread of gloo may still hold a tensor. If Python exits while the thread releases it, the process
    # aborts (pytorch/pytorch#190489).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
