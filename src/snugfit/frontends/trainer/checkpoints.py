"""A fitted trainer's checkpoints: the store in place of the Trainer's own saving and loading.

    checkpoint-N/     config.json, model.safetensors (or the adapters'), the tokenizer's files
                      state.json, state.safetensors    optimizer, schedule, scaler, random generators
                      trainer_state.json               the Trainer's own: its log, the best metric, callbacks
                      fit.json                         what the Trainer forgets: losses since its last log

They are taken when the Trainer would save, whole or not at all, and written while the next steps run. Only
a whole one is resumed; those that are passed over are reported and kept aside. The data goes on where it was:
the order of an epoch is drawn from a seed that is kept, and the generators that the data draws from are kept
too (`data_rng.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError, UsageError
from snugfit.frontends.trainer.data_rng import Stream
from snugfit.frontends.trainer.out_of_memory import under
from snugfit.frontends.trainer.prefetch import Ahead
from snugfit.frontends.trainer.restore import running_of
from snugfit.techniques.recipe import Recipe
from snugfit.training.checkpoint.manifest import Checkpoint, verify
from snugfit.training.checkpoint.saver import Saver
from snugfit.training.checkpoint.staging import Staging
from snugfit.training.checkpoint.state import Snapshot, bytes_of, snapshot
from snugfit.training.checkpoint.store import Store
from snugfit.training.journal import Journal
from snugfit.versions import versions

if TYPE_CHECKING:
    from snugfit.training.interrupt import Interrupts

FORGOTTEN = "fit.json"


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A trainer between two steps, on the host."""

    run: Snapshot
    """Weights, and everything that the next step depends on."""

    files: Mapping[str, str]
    """Text by the name of its file."""

    processing: Any
    """Tokenizer or processor, or None."""

    @property
    def step(self) -> int:
        """The steps that are done."""
        return self.run.step

    @property
    def bytes(self) -> int:
        """How much the tensors are."""
        return self.run.bytes

    def write(self, folder: Path) -> None:
        """Puts the files into this folder."""
        self.run.write(folder)
        for name, text in self.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        if self.processing is not None:
            self.processing.save_pretrained(folder)


class Keeping:
    """The checkpoints of one call of `train()`; its folder is locked meanwhile."""

    def __init__(self, trainer: Any, store: Store, interrupts: Interrupts) -> None:
        self._trainer, self.store, self.interrupts = trainer, store, interrupts
        self.journal = Journal(store.root, trainer.snugfit.notices.watch)
        self._staging = Staging(trainer.args.device)
        self._seed = _order_seed(trainer)
        self._asked = str(trainer.snugfit.recipe)
        self._kept_step: int | None = None
        self._saver: Saver | None = None
        self._told: dict[str, Any] = {}
        self.resumed: Checkpoint | None = None
        """Where this run was taken up."""
        self.stream = Stream()
        """The generators of the data."""
        self.ahead = Ahead()
        """The next step's micro-batches."""

    def _about(self) -> dict[str, Any]:
        trainer, plan = self._trainer, self._trainer.snugfit
        data = trainer.train_dataset
        return {
            "trainer": type(trainer).__name__,
            "asked": self._asked,
            "recipe": str(plan.recipe),
            "batch_size": plan.job.batch_size,
            "samples": len(data) if hasattr(data, "__len__") else None,
            "order_seed": self._seed,
            "versions": versions(),
        }

    def open(self, asked: str | bool | None) -> None:
        """Finds what to resume from (`resumed`), as `train(resume_from_checkpoint=...)` asks for it. Without
        that, what stands there is put aside, for the next start must not meet an older run's."""
        if not asked:
            for moved in self.store.restart():
                self.journal.tell("warning", text=f"An earlier run's checkpoint is kept as {moved.name}.")
        else:
            self.resumed = self._newest() if asked is True else _named(Path(str(asked)))
            self._refuse_another(self.resumed)
            self._seed = self.resumed.about["order_seed"]
            self._goes_on_with_less(self.resumed)
        self._trainer.accelerator.dataloader_config.data_seed = self._seed
        limit = self._trainer.args.save_total_limit
        self._told = self._about()
        self._saver = Saver(self.store, self._told, self.journal, limit=limit)
        self._kept_step = self.resumed.step if self.resumed else None

    def prepare(self) -> None:
        """Takes the memory that a checkpoint is copied to, while the first steps run."""
        if self._trainer.args.save_strategy != "no":
            self._staging.prepare(bytes_of(running_of(self._trainer)))

    def _newest(self) -> Checkpoint:
        found = self.store.newest()
        for broken in self.store.broken:
            self.journal.tell("warning", text=f"passed over {broken}")
        if found is None:
            raise UsageError(
                f"resume_from_checkpoint is True, and {self.store.root} holds no checkpoint. Leave it out for"
                " the first start."
            )
        return found

    def _refuse_another(self, kept: Checkpoint) -> None:
        """Raises `UsageError` when a checkpoint is of another run; says what keeps numbers from being
        the same bit for bit."""
        now = self._about()
        wrong = [
            f"{name} was {kept.about.get(name)} and is {now[name]}"
            for name in ("batch_size", "samples")
            if kept.about.get(name) != now[name]
        ]
        if "order_seed" not in kept.about:
            wrong = ["it was not written by a fitted trainer"]
        if wrong:
            raise UsageError(f"{kept.folder} is a checkpoint of another run: {'; '.join(wrong)}.")
        for name in ("asked", "versions"):
            if kept.about.get(name) != now[name]:
                was = f"{name} was {kept.about.get(name)} and is {now[name]}"
                self.journal.tell("warning", text=f"{was}: the run goes on, and no longer bit for bit")

    def _goes_on_with_less(self, kept: Checkpoint) -> None:
        """A run whose memory ran out goes on under the recipe that it went on with."""
        if kept.about["asked"] == self._asked != kept.about["recipe"]:
            under(self._trainer, Recipe.parse(kept.about["recipe"]))

    def keep(self) -> None:
        """A checkpoint of this border, unless there is one."""
        trainer = self._trainer
        step = trainer.state.global_step
        if self._kept_step == step:
            return
        best = trainer.state.best_global_step or None
        if best is not None and (best == step or (self.store.root / f"checkpoint-{best}").is_dir()):
            trainer.state.best_model_checkpoint = str(self.store.root / f"checkpoint-{best}")
        _note_callbacks(trainer)
        assert self._saver is not None
        self._told["recipe"] = str(trainer.snugfit.recipe)
        self._saver.keep(self._taken, best=best)
        self._kept_step = step

    def _taken(self) -> Kept:
        trainer = self._trainer
        processing = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
        state = json.dumps(asdict(trainer.state), indent=2, sort_keys=True) + "\n"
        forgotten = {
            "loss": trainer._tr_loss.item(),
            "total_loss": trainer._total_loss_scalar,
            "last_logged": trainer._globalstep_last_logged,
            "data": self.stream.to_json(),
        }
        return Kept(
            run=snapshot(running_of(trainer), self._staging),
            files={"trainer_state.json": state, FORGOTTEN: json.dumps(forgotten) + "\n"},
            processing=processing if hasattr(processing, "save_pretrained") else None,
        )

    def remember(self, *, within: bool) -> None:
        """After a resume, what the Trainer's own state does not say."""
        assert self.resumed is not None
        trainer = self._trainer
        kept = json.loads((self.resumed.folder / FORGOTTEN).read_text(encoding="utf-8"))
        trainer._tr_loss += kept["loss"]
        trainer._total_loss_scalar = kept["total_loss"]
        trainer._globalstep_last_logged = kept["last_logged"]
        self.stream.resume(kept["data"], within=within)

    def wait(self) -> None:
        """Until nothing is being written; not beyond a signal's deadline."""
        if self._saver is not None:
            self._saver.wait(stop=lambda: self.interrupts.too_late)

    def refuse_a_lost_end(self) -> None:
        """Raises `SnugfitError` when the last checkpoint could not be kept."""
        self.wait()
        if self._saver is not None and self._saver.failure is not None:
            raise SnugfitError(f"The run is done, and its last checkpoint is not kept: {self._saver.failure}")


def _order_seed(trainer: Any) -> int:
    """What accelerate would draw an epoch's order from."""
    import torch

    given = trainer.args.data_seed
    return int(torch.random.initial_seed() if given is None else given)


def _named(folder: Path) -> Checkpoint:
    mark = re.fullmatch(r"checkpoint-([0-9]+)", folder.name)
    if mark is None or not folder.is_dir():
        raise UsageError(f"resume_from_checkpoint is {str(folder)!r}; it is True or a folder checkpoint-N.")
    return verify(folder, int(mark[1]))


def _note_callbacks(trainer: Any) -> None:
    """The state of callbacks that have one, into the Trainer's own, as the Trainer does it."""
    from transformers.trainer_callback import ExportableState

    known = trainer.state.stateful_callbacks
    found: dict[str, list[Any]] = {}
    for each in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(each, ExportableState):
            found.setdefault(type(each).__name__, []).append(each.state())
    for name, states in found.items():
        known[name] = states if len(states) > 1 else states[0]
