"""Handlers of the Setup's fields about batches: micro-batches, the loader, and the allocator."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from snugfit.step.wishes.handler import Handler, ScriptContext
from snugfit.techniques.feature import InstallStage
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.techniques.setup import LoaderWish


class MicroBatchesHandler(Handler):
    """Handler of gradient accumulation: the global batch is computed in micro-batches, one
    after the other.
    """

    wish, slot, stage = "micro_batches", Slot.BATCHING, InstallStage.LOOP
    read_by_loops = True

    def training_arguments(self, value: int, job: Job, device: torch.device) -> dict[str, Any]:
        """Return the Trainer's batch sizes; the global batch stays the job's."""
        return {
            "per_device_train_batch_size": job.batch_size // value,
            "gradient_accumulation_steps": value,
        }

    def script(self, value: int, context: ScriptContext) -> dict[str, Any]:
        """Return the number of micro-batches as a value for an exported script's template."""
        return {"pieces": value}


class LoaderHandler(Handler):
    """Handler of the DataLoader's workers and pinned memory. A simulation never copies batches, and needs no
    workers.
    """

    wish, slot, stage = "loader", Slot.LOADING, InstallStage.LOAD

    def loader_arguments(self, value: LoaderWish, device: torch.device) -> dict[str, Any]:
        """Return the keyword arguments of torch's `DataLoader`, as a dict."""
        return {
            "num_workers": 0 if device.type == "meta" else value.workers,
            "pin_memory": value.pinned and device.type == "cuda",
        }

    def training_arguments(self, value: LoaderWish, job: Job, device: torch.device) -> dict[str, Any]:
        """Return the Trainer's loader arguments; without workers their options are reset."""
        arguments = self.loader_arguments(value, device)
        loader_settings: dict[str, Any] = {"dataloader_num_workers": arguments["num_workers"]}
        if arguments["pin_memory"]:
            loader_settings["dataloader_pin_memory"] = True
        if not arguments["num_workers"]:
            loader_settings |= {"dataloader_prefetch_factor": None, "dataloader_persistent_workers": False}
        return loader_settings

    def script(self, value: LoaderWish, context: ScriptContext) -> dict[str, Any]:
        """Return the number of workers and the pinning of a `DataLoader`, as values for an exported script's
        template.
        """
        return {"workers": value.workers, "pinned": value.pinned}


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Names of the allocator's environment variable: the present one, and the one before torch 2.9, which torch
still reads.
"""

EXPANDABLE = "expandable_segments:True"


def allocator_options() -> tuple[str, str]:
    """Return the variable that sets options of CUDA's allocator in this process, and the options; empty texts
    without any.
    """
    return next(((name, os.environ[name]) for name in ALLOCATOR_VARIABLES if os.environ.get(name)), ("", ""))


class ExpandableSegmentsHandler(Handler):
    """Handler of the CUDA allocator's expandable segments. An exported script sets an environment variable,
    which the technique's counterparts name.
    """

    wish, slot, stage = "expandable_segments", Slot.ALLOCATOR, InstallStage.PROCESS

    def set_process(self, value: bool, device: torch.device) -> None:
        """Set the options of CUDA's allocator in this process, even after it has allocated memory. Warn of
        other options in the environment.
        """
        if device.type != "cuda":
            return
        name, options = allocator_options()
        if options not in ("", EXPANDABLE if value else ""):
            remedy = "" if value else ", or add expandable to the recipe"
            logging.getLogger("snugfit").warning(
                "%s is %s, and the recipe has %s expandable: the allocator's reserve may differ from the "
                "prediction. Unset the variable%s.",
                name, options, "" if value else "no", remedy if EXPANDABLE in options else "",
            )  # fmt: skip
        if value:
            import torch

            torch.cuda.memory._set_allocator_settings(EXPANDABLE)

    def environment(self, value: bool) -> Mapping[str, str | None]:
        """Return the allocator's environment variables for the recipe; those of the user's shell have no
        effect."""
        return dict.fromkeys(ALLOCATOR_VARIABLES, EXPANDABLE if value else None)
