"""The plain loop with DeepSpeed's engine: the same calls as accelerate's `prepare` and `backward`.

The model is built on the host, moved, and passed to `deepspeed.initialize` with its optimizer. A micro-batch
goes through `engine(**batch)` and `engine.backward(loss)`; `engine.step()` clips, updates and drops the
gradients. Several processes are a group already, and one is a group of its own, with no launcher.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from snugfit.errors import UsageError
from snugfit.features.distributed.engine.build_lock import dead_locks_removed, print_line
from snugfit.features.distributed.engine.config import (
    engine_config,
    refuse_without_file_operator,
    remove_swap_folder,
    width_of,
)
from snugfit.features.distributed.fields import SHARDING
from snugfit.features.distributed.techniques.deepspeed_zero import PACKED_ELSEWHERE
from snugfit.step.applier import run_context
from snugfit.step.build import build_model, build_optimizer
from snugfit.step.plain_loop import Built, PlainStep
from snugfit.techniques.registry import tensors_beside

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.step.step import Observer
    from snugfit.techniques.setup import Setup

ACCELERATOR = "DS_ACCELERATOR"
"""Environment variable with the device type for DeepSpeed, such as `cuda`."""


class EngineStep(PlainStep):
    """snugfit's plain training loop for one job and Setup, in which DeepSpeed's engine runs the steps."""

    def run(self, steps: int, observer: Observer) -> list[float]:
        """Build model and engine, run `steps` optimizer steps, and return their losses."""
        if not self.job.trains:
            raise UsageError("DeepSpeed's engine only trains. Evaluate without it.")
        with run_context(self.setup), in_process_group(self.device):
            return self._train(steps, observer)

    def _train(self, steps: int, observer: Observer) -> list[float]:
        observer.phase("build")
        model = built_for_engine(self.job, self.setup, self.device)
        engine = self._engine(model)
        observer.build_ends(engine.module, engine.optimizer.optimizer)
        losses: list[torch.Tensor] = []
        with contextlib.closing(self._batches()) as batches:
            built = Built(model, engine, engine.optimizer.optimizer, None, batches, observer)
            for index in range(steps):
                observer.step_begins(index)
                loss = self._accumulate(built)
                observer.phase("update")
                engine.step()
                observer.step_ends(index)
                if loss is not None:
                    losses.append(loss)
        self.model, self.optimizer = engine.module, engine.optimizer.optimizer
        # Losses are read after the last step, because each read waits for the device.
        answers = [float(loss) for loss in losses]
        engine.destroy()
        return answers

    def _engine(self, model: torch.nn.Module) -> Any:
        return make_engine(self.job, self.setup, model, build_optimizer(self.job, self.setup, model))

    def backward(self, built: Built, loss: torch.Tensor, *, is_last: bool) -> None:
        """Run the backward pass of a micro-batch in the engine."""
        engine: Any = built.runs
        # snugfit's loop decides which micro-batch is the last, so the engine must not count them itself.
        engine.set_gradient_accumulation_boundary(is_boundary=is_last)
        # The loss is already this micro-batch's share of the step's loss.
        engine.backward(loss, scale_wrt_gas=False)


def make_engine(job: Job, setup: Setup, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return DeepSpeed's engine around this model and optimizer. `job` has the batch of one process. If
    states are on the host, the optimizer is replaced by DeepSpeed's CPU Adam.
    """
    import deepspeed

    wish = SHARDING.of(setup)
    assert wish is not None
    if wish.states != "none":  # `accelerate.utils.deepspeed.map_pytorch_optim_to_deepspeed`
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        numbers = {name: optimizer.defaults[name] for name in ("lr", "weight_decay")}
        optimizer = DeepSpeedCPUAdam(optimizer.param_groups, adamw_mode=True, **numbers)
    config = engine_config(setup, batch_size=job.batch_size, clip=job.clip, width=width_of(model.config))
    return deepspeed.initialize(model=model, optimizer=optimizer, config_params=config)[0]


def built_for_engine(
    job: Job, setup: Setup, device: torch.device, *, on_host: bool = True
) -> torch.nn.Module:
    """Return the model, built on the host by default, in the dtype to which the engine would cast it there.
    Raises `UsageError` if DeepSpeed cannot keep optimizer states on the chosen device.
    """
    wish = SHARDING.of(setup)
    assert wish is not None
    if device.type != "meta":
        refuse_without_file_operator(wish)
    # Without a dtype, weights keep fp32, in which the model is built.
    dtype = None if wish.dtype == "float32" else wish.dtype
    return build_model(job, replace(setup, weights_dtype=dtype), device, on_host=on_host)


def built_by_transformers(job: Job, setup: Setup, device: torch.device) -> torch.nn.Module:
    """Return the model, built after accelerate or the Trainer has passed the engine's configuration to
    transformers.

    A model under ZeRO stage 3 is built within `deepspeed.zero.Init`. Each module's weights are made on the
    device and moved away before the next module's are made. So neither the device nor the host ever holds all
    of them twice. Raises `UsageError` for packed weights.
    """
    wish = SHARDING.of(setup)
    assert wish is not None
    within = wish.stage == 3
    job = replace(job, build_on="device") if within else job
    model = built_for_engine(job, setup, device, on_host=not within)
    if any(tensors_beside(weight) for weight in model.parameters()):
        raise UsageError(f"{PACKED_ELSEWHERE}. Take --loop plain, or try lora.")
    return model


VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def in_numbers(visible: str) -> str:
    """Return CUDA_VISIBLE_DEVICES with NVML's index of each GPU in place of its UUID. DeepSpeed queries NVML
    for free memory and reads only indices. Raises `UsageError` for entries without an index."""
    import pynvml

    entries = [entry.strip() for entry in visible.split(",")]
    if all(entry.lstrip("-").isdigit() for entry in entries):
        return visible
    try:
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByUUID(entry) for entry in entries]
            return ",".join(str(pynvml.nvmlDeviceGetIndex(handle)) for handle in handles)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as failure:
        raise UsageError(
            f"{VISIBLE_DEVICES}={visible!r} names what NVML has no number for ({failure}), and DeepSpeed "
            f"knows GPUs by numbers only. Set {VISIBLE_DEVICES} to a number, as nvidia-smi shows it."
        ) from None


def import_for(device: torch.device) -> None:
    """Import DeepSpeed so that it computes on this device.

    It reads `DS_ACCELERATOR` when it is first imported, and without it uses a GPU if there is one. Raises
    `UsageError` if DeepSpeed was imported before for another device.
    """
    if device.type in ("cpu", "cuda"):  # a simulation has an accelerator object of its own
        os.environ[ACCELERATOR] = device.type
    from deepspeed.accelerator import get_accelerator

    if device.type in ("cpu", "cuda") and (chosen := get_accelerator().device_name()) != device.type:
        raise UsageError(
            f"DeepSpeed was imported before and computes on {chosen} in this process, but this run is on "
            f"{device.type}. Start a new process, or set {ACCELERATOR}={device.type} before DeepSpeed is "
            "imported."
        )


@contextlib.contextmanager
def in_process_group(device: torch.device, tell: Callable[[str], None] = print_line) -> Iterator[None]:
    """Context in which DeepSpeed uses torch's default process group, as under a launcher. Without a group,
    this process becomes a group of one.

    Afterwards DeepSpeed's changes to this process are undone. `tell` receives a message if DeepSpeed waits
    for a build of another process.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore
    from torch.nn import functional

    # DeepSpeed's first import decides on which device it computes.
    import_for(device)
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    several = dist.is_initialized()
    environment = {
        "RANK": str(dist.get_rank() if several else 0),
        "LOCAL_RANK": str(device.index or 0),
        "WORLD_SIZE": str(dist.get_world_size() if several else 1),
    }
    if device.type == "cuda" and (visible := os.environ.get(VISIBLE_DEVICES)):
        environment[VISIBLE_DEVICES] = in_numbers(visible)
    with contextlib.ExitStack() as stack:
        # Registered first, so that it runs last, when the engine no longer uses the folder.
        stack.callback(remove_swap_folder)
        stack.enter_context(dead_locks_removed(tell))
        stack.enter_context(patch.dict(os.environ, environment))
        # These modules of DeepSpeed have process groups in global variables.
        stack.enter_context(patch.dict(vars(comm)))
        stack.enter_context(patch.dict(vars(groups)))
        # ZeRO stage 3 replaces this function.
        stack.enter_context(patch.object(functional, "linear", functional.linear))
        if device.type == "cpu":  # DeepSpeed would compile an operator for communication between CPUs
            exchanges = importlib.import_module("deepspeed.comm.torch")
            stack.enter_context(patch.object(exchanges, "build_shm_op", lambda: None))
        if several:
            yield
            return
        backend = "nccl" if device.type == "cuda" else "gloo"
        # A group of one process needs no address; its store is in memory.
        dist.init_process_group(backend, rank=0, world_size=1, store=HashStore())
        try:
            yield
        finally:
            dist.destroy_process_group()
