"""The recorded histories of an H200's allocator, and rehearsals of the same runs.

`data/history-h200` holds the third training step of seven small models, recorded by `torch.cuda.memory`. The
GPU was one NVIDIA H200 (torch 2.11.0+cu130, transformers 5.17.0). A file holds every allocation and free in
order, and the construction of model and batch (`source`). Models were built on the host and moved; AdamW is
fused.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import json
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import _disable_current_modes

from aligned import Event
from snugfit.rehearsal.device.notes import PolicyNotes
from snugfit.rehearsal.device.overrides import in_force
from snugfit.rehearsal.device.policy import Policy
from snugfit.rehearsal.record.recorder import Recorder
from snugfit.rehearsal.trace.trace import Trace

FOLDER = Path(__file__).parent / "data" / "history-h200"
CASES = tuple(sorted(file.stem for file in FOLDER.glob("*.json")))
STEPS = 3
AUTOCAST = {
    "bert_bf16": "bfloat16",
    "bert_pad_fp16": "float16",
    "gpt2_bf16": "bfloat16",
    "t5_bf16": "bfloat16",
}
"""Cases that ran under autocast; the rest ran in their weights' dtype."""


@dataclass(frozen=True)
class History:
    """The recording of one case."""

    torch: str
    transformers: str
    requested_peak: int
    allocated_peak: int
    reserved_peak: int
    source: str
    events: tuple[Event, ...]
    """Births and deaths of the third step, without growth of the pool."""


@cache
def history(case: str) -> History:
    """Return the recorded case."""
    document = json.loads((FOLDER / f"{case}.json").read_text())
    living: dict[int, Event] = {}
    events: list[Event] = []
    for what, place, nbytes, *words in document["events"]:
        if what == "+":
            event = living[place] = Event(len(events), nbytes, tuple(reversed(words[:2])))
            events.append(event)
        elif what == "-":
            born = living.pop(place, None)
            block = born.block if born else -1
            events.append(Event(block, -nbytes, born.operators if born else ()))
    known = {name: document[name] for name in History.__dataclass_fields__ if name != "events"}
    return History(**known, events=tuple(events))


def rehearsed(case: str, policy: Policy, *, a_mask_too_many: bool = False) -> Trace:
    """Return the trace of the recorded run."""
    padded = "pad" in case or a_mask_too_many
    recorder = Recorder(policy, STEPS, hides_masks=padded)
    dtype = AUTOCAST.get(case)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(_without_collector())
        stack.enter_context(_biases_as_recorded())
        notes = PolicyNotes(recorder.claim)
        stack.enter_context(in_force(policy, notes))
        stack.enter_context(recorder)
        model, batch = _moved(*_built(case))
        if a_mask_too_many:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        if case.endswith("ckpt"):
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        recorder.build_ends(model, optimizer)
        for index in range(STEPS):
            recorder.step_begins(index)
            recorder.phase("forward")
            with torch.autocast("cuda", getattr(torch, dtype)) if dtype else contextlib.nullcontext():
                loss = model(**batch).loss
            recorder.phase("backward")
            loss.backward()
            recorder.phase("update")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            del loss
            recorder.step_ends(index)
        recorder.phase("end")
    return recorder.recording(notes.attention).trace


def _built(case: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Build on the host, which a rehearsal does not record."""
    names: dict[str, Any] = {"tf": transformers, "torch": torch, "case": case}
    source = history(case).source.replace("; k[:, 384:] = 0", "")  # placeholders for the weights' values
    with _disable_current_modes(), torch.device("meta"):
        exec(source, names)
    return names["m"].train(), names["b"]


def _moved(
    model: torch.nn.Module, batch: dict[str, torch.Tensor]
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Imitate `.cuda()`: a tied weight is moved once."""
    there: set[int] = set()

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata in there:
            return tensor
        new = torch.empty_like(tensor)
        there.add(new.untyped_storage()._cdata)
        return new

    return model._apply(moved), {name: torch.empty_like(value) for name, value in batch.items()}


@contextlib.contextmanager
def _biases_as_recorded() -> Any:
    """Remove a copy that newer transformers add: they make a learnt bias contiguous before attention.
    Attention then runs in another kernel than in the recording."""
    module = importlib.import_module("transformers.integrations.sdpa_attention")
    later = getattr(module, "create_position_bias_mask", None)
    if later is None or "return position_bias_mask.contiguous()" not in (source := inspect.getsource(later)):
        yield
        return
    exec(source.replace("position_bias_mask.contiguous()", "position_bias_mask"), vars(module))
    try:
        yield
    finally:
        vars(module)["create_position_bias_mask"] = later


@contextlib.contextmanager
def _without_collector() -> Any:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def third_step(trace: Trace) -> list[Event]:
    """Return births and deaths of the trace's last step."""
    start = next(mark.event for mark in trace.marks if mark.step == STEPS - 1)
    return [
        Event(
            abs(event),
            (1 if event > 0 else -1) * trace.blocks[abs(event) - 1].nbytes,
            (trace.blocks[abs(event) - 1].module, trace.blocks[abs(event) - 1].operator),
        )
        for event in trace.events[start:]
    ]
