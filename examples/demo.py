"""`make demo`: one prediction, one plan, and a training run that is killed and resumed. Needs no GPU.

The training is real: a small ViT learns the handwritten digits that come with the package, on the CPU. It
runs twice: once it is killed and resumed, once it is left alone. Both must end alike.
"""

import contextlib
import hashlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from snugfit import Job, Model, Plan, Prediction, Recipe, SnugfitError, plan, predict, train
from snugfit.features.digits import digits, digits_job
from snugfit.features.page.chart import BarFigure, BarGroup, PageParts
from snugfit.features.page.pictures import draw_bars, draw_front, draw_prediction
from snugfit.hub_kernels import import_peft
from snugfit.rehearsal.device.policy import CpuPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.report.text.files import writable_folder, write_atomically
from snugfit.techniques.registry import picture
from snugfit.units import show_bytes, show_seconds

STEPS, KILLED_AFTER, SAVED_EVERY, PROFILED = 100, 50, 20, 8

KEPT = "sdpa + torch_kernels + whole_logits + uncompiled + keep_all + adamw_fused + default + inline"
"""Slots that the plan leaves alone, so that it takes seconds."""


# ---- the prediction and the plan -------------------------------------------------------------------------


def predict_bert() -> Prediction:
    """Print the prediction of BERT-large on a V100."""
    print("1. Predict BERT-large, batch 4 x 512, on a Tesla V100 with 16 GB (snugfit predict)", flush=True)
    model = Model.find("bert-large-uncased")
    job = Job(model=model, task="sequence-classification", batch_size=4, sequence_length=512)
    prediction = predict(job, "fp16 + every_layer", gpu="v100-16gb")
    footprint, speed = prediction.footprint, prediction.speed
    spare, memory = show_bytes(prediction.spare_bytes), show_bytes(prediction.memory_bytes)
    likely = f"{show_seconds(speed.low_seconds)} to {show_seconds(speed.high_seconds)}"
    print(f"   recipe            {prediction.recipe}")
    print(f"   tensors ask for   {show_bytes(footprint.requested_bytes)}")
    print(f"   on the GPU        {show_bytes(footprint.nvml_bytes)} with the CUDA context, as NVML counts")
    print(f"   to spare          {spare} of {memory}")
    print(f"   a step takes      about {show_seconds(speed.step_seconds)}, likely {likely}\n")
    return prediction


def plan_distilbert() -> Plan:
    """Print the fastest recipes with which DistilBERT fits an RTX 2060."""
    print("2. Plan DistilBERT, batch 64 x 512, on an RTX 2060 with 6 GB (snugfit plan)", flush=True)
    model = Model.find("distilbert-base-uncased")
    job = Job(model=model, task="sequence-classification", batch_size=64, sequence_length=512)
    found = plan(job, gpu="rtx 2060", keep=KEPT, workers=1, tell=lambda line: None)
    print(f"   {found.counts.recipes} recipes searched; those that fit, the fastest first")
    for choice in found.fitting_first[:3]:
        size, seconds = show_bytes(choice.needed_bytes), show_seconds(choice.step_seconds)
        remark = "   recommended" if choice == found.best else ""
        print(f"   {choice.recipe!s:<38}{size:>10}{seconds:>10} a step{remark}")
    print()
    return found


# ---- the training runs -----------------------------------------------------------------------------------


class Process:
    """A copy of this process that works and sends answers. This one must not have computed anything before:
    a copy lacks the threads that computing starts."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._answers, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_work_or_send_error, args=(work, theirs, *arguments))
        self._process.start()
        theirs.close()
        self.pid = self._process.pid

    def answer(self) -> Any:
        """Wait for the next answer, and raise the error that comes in its place."""
        try:
            answer = self._answers.recv()
        except EOFError:
            self._process.join()
            raise SnugfitError(f"Process {self.pid} ended with {self._process.exitcode}.") from None
        if isinstance(answer, SnugfitError):
            raise answer
        return answer

    def kill(self) -> None:
        """Send SIGKILL, which no process can catch."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.join()
        if self._process.exitcode != -signal.SIGKILL:
            raise SnugfitError(
                f"Process {self.pid} ended with {self._process.exitcode} before it was killed."
            )


def _work_or_send_error(work: Callable[..., None], answers: Connection, *arguments: Any) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        try:
            work(answers, *arguments)
        except SnugfitError as error:
            answers.send(error)


class Finished(NamedTuple):
    """The end of a training run."""

    accuracy: float
    """Share of right answers among 599 pictures that the model never saw."""
    digest: str
    """SHA-256 of all weights."""


def train_digits(answers: Connection, folder: Path, pause: bool, trace: Path | None) -> None:
    """Train in this process and send how it ended. With `pause`, wait in the middle for the signal that ends
    it; with `trace`, write there what torch's profiler records of the first steps."""
    torch.set_num_threads(1)
    data, evaluation = digits()
    activities = [torch.profiler.ProfilerActivity.CPU]
    profiler = torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True)

    def watch(event: dict[str, Any]) -> None:
        step = event["step"] if event["event"] == "step" else None
        if pause and step == KILLED_AFTER:
            answers.send(step)
            time.sleep(60)
        if trace and step == PROFILED:
            profiler.stop()
            profiler.export_chrome_trace(str(trace))

    if trace:
        profiler.start()
    trained = train(
        digits_job(), "plain", data, evaluation=evaluation, output_dir=folder, device="cpu", max_steps=STEPS,
        warmup_steps=0.1, save_steps=SAVED_EVERY, eval_strategy="steps", eval_steps=STEPS, watch=watch,
    )  # fmt: skip
    if trained.exit_code:  # Ctrl-C
        return
    digest = hashlib.sha256()
    for tensor in trained.model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    answers.send(Finished(trained.evaluated.accuracy, digest.hexdigest()))


def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind in the journal of a run."""
    events = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == kind]


def losses_of(folder: Path) -> dict[int, float]:
    """Return the loss of each step. A step that was lost and taken again counts with its later loss."""
    return {event["step"]: event["loss"] for event in events_of(folder, "step")}


def measured_peak(trace: Path) -> int:
    """Return the most bytes that the run took from torch's CPU allocator, as the profiler recorded."""
    events = [e["args"] for e in json.loads(trace.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    before = events[0]["Total Allocated"] - events[0]["Bytes"]
    return max(event["Total Allocated"] for event in events) - before


class Runs(NamedTuple):
    """A run that was killed and resumed, and the same run left alone."""

    pids: tuple[int, int, int]
    """Processes: the killed one, the one that resumed, the one left alone."""
    killed_after: int
    """The last step of the killed process."""
    resumed_from: int
    """The step of the checkpoint that the second process began with."""
    resumed: Finished
    alone: Finished
    losses: dict[int, float]
    """By step, of the resumed run."""
    losses_alone: dict[int, float]
    measured_bytes: int
    """At the peak."""

    @property
    def equal(self) -> bool:
        """Compare the losses, weights and answers of both runs."""
        return (self.losses, self.resumed) == (self.losses_alone, self.alone)


def train_twice(answers: Connection) -> None:
    """Train with a kill and without, and send both results."""
    with tempfile.TemporaryDirectory() as folder:
        answers.send(train_in(Path(folder)))


def train_in(folder: Path) -> Runs:
    """Train with a kill and without in folders of their own. Each process is a copy of this one."""
    killed, alone, trace = folder / "killed", folder / "alone", folder / "trace.json"
    first = Process(train_digits, killed, True, None)
    killed_after = first.answer()
    first.kill()
    second = Process(train_digits, killed, False, None)
    resumed = second.answer()
    third = Process(train_digits, alone, False, trace)
    return Runs(
        pids=(first.pid, second.pid, third.pid),
        killed_after=killed_after,
        resumed_from=events_of(killed, "started")[-1]["resumed_from"],
        resumed=resumed,
        alone=third.answer(),
        losses=losses_of(killed),
        losses_alone=losses_of(alone),
        measured_bytes=measured_peak(trace),
    )


def print_runs(runs: Runs) -> None:
    """Print both runs. Raise `SnugfitError` where their ends differ."""
    killed, resumed, alone = runs.pids
    print(f"   process {killed} was killed with SIGKILL after step {runs.killed_after} of {STEPS}")
    print(f"   process {resumed} resumed at the checkpoint of step {runs.resumed_from} and finished")
    print(f"   process {alone} took the same {STEPS} steps without a stop\n")
    print(f"   {'':<20}{'last loss':<22}{'right answers':<16}SHA-256 of all weights")
    for name, run, losses in (
        ("killed and resumed", runs.resumed, runs.losses),
        ("left alone", runs.alone, runs.losses_alone),
    ):
        print(f"   {name:<20}{losses[STEPS]:<22}{f'{run.accuracy:.2%}':<16}{run.digest[:32]}")
    if not runs.equal:
        raise SnugfitError("The resumed run ended otherwise than the run that was left alone.")
    print(f"   All {STEPS} losses are equal, and so are the weights, bit for bit.\n")


def compare_peak(measured: int) -> int:
    """Print the predicted peak of the training step beside the measured one, and return it."""
    predicted = rehearse(digits_job(), Recipe.parse("plain").setup(), CpuPolicy()).peak().nbytes
    error = predicted / measured - 1
    print("   Bytes that the tensors of this run ask for at the peak")
    print(f"   predicted {predicted:>11,}   the step simulated without data, as torch computes it on a CPU")
    print(f"   measured  {measured:>11,}   by torch's profiler; the prediction differs by {error:+.2%}")
    print("   Buffers inside the CPU's kernels are not predicted. Reserved bytes and seconds are predicted")
    print("   for GPUs alone: docs/accuracy.md has them beside measurements.\n")
    return predicted


# ---- all of it -------------------------------------------------------------------------------------------


def main() -> None:
    """Run the three parts and draw their picture."""
    logging.disable(logging.WARNING)  # libraries' advice would break the screen
    os.environ["KINETO_LOG_LEVEL"] = "99"  # and so would torch's profiler, which logs its start and its end
    folder = writable_folder(Path("snugfit-examples"))
    import_peft()  # once for all processes; transformers imports it in a step
    trainings = Process(train_twice)  # trains in the background
    prediction = predict_bert()
    found = plan_distilbert()
    print("3. Train a small ViT on handwritten digits, here on the CPU (snugfit train)", flush=True)
    runs = trainings.answer()
    print_runs(runs)
    predicted = compare_peak(runs.measured_bytes)
    losses = [
        BarGroup(
            f"step {step}",
            [BarFigure(loss, f"{loss:.4f}") for loss in (runs.losses[step], runs.losses_alone[step])],
        )
        for step in range(SAVED_EVERY, STEPS + 1, SAVED_EVERY)
    ]
    sizes = (predicted, runs.measured_bytes)
    peak = [BarGroup("requested", [BarFigure(size, f"{size:,.0f}") for size in sizes])]
    charts = [
        *draw_prediction(prediction)[:1],
        draw_front(found),
        draw_bars("Loss of the digits run", losses, ["killed and resumed", "left alone"]),
        draw_bars("Bytes at the peak of the digits run", peak, ["predicted", "measured"]),
    ]
    lines = ["BERT-large predicted, DistilBERT planned, a training run killed and resumed"]
    parts = PageParts("make demo", lines, charts, "")
    file = write_atomically(folder / "demo.png", picture(parts, "png"))
    print(f"The picture of all this: {file.absolute()}")


if __name__ == "__main__":
    try:
        main()
    except SnugfitError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
