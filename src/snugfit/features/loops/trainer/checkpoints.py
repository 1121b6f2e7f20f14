"""Checkpoints of a Trainer under `fit`, which replace the Trainer's own saving and loading.

checkpoint-N/ config.json, model.safetensors (or the adapters'), the tokenizer's files. state.json,
state.safetensors optimizer, schedule, scaler, random generators. trainer_state.json the Trainer's own: its
log, the best metric, callbacks. fit.json missing in the Trainer's: losses since its last log.

If weights are sharded, all processes write one checkpoint. Each writes its shards of weights and optimizer
states (`sharded.py`).

Checkpoints are saved when the Trainer would save, atomically, while the next steps run. Only a complete
checkpoint is resumed; damaged ones are reported and renamed. The loader continues at the next batch. The
order of an epoch is drawn from a saved seed, and the data's generators are saved too
(`features/loops/loader.py`). Weights are loaded into the existing model, because it is the user's and other
objects refer to it.

A cluster scheduler may restart a finished script in the same folder. The script would train again, or take
one step too many. So at the end of training `finished.json` is written into the run's folder. It contains the
run's facts, the result of `train()`, the Trainer's state, and the checkpoint with the final weights. The file
is valid only for the same run. A run that continues or starts again removes it first.

`TrainingArguments` and the additions of a subclass (a DPO's `beta`) are compared, except `FREE`. Arguments in
`FREE` concern logs, evaluation, saving, names, uploads and loader workers. Others are free because the recipe
or the global batch replaces them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.documents import BadDocument, read_document, write_document
from snugfit.errors import SnugfitError, UsageError
from snugfit.features.loops.data_facts import dataset_facts
from snugfit.features.loops.loader import DataPosition, count_of
from snugfit.features.loops.same_run import refuse_another_run
from snugfit.features.loops.trainer.live_trainer import has_users_schedule, restore_callbacks
from snugfit.features.loops.trainer.parts import trainer_parts
from snugfit.features.loops.trainer.setup import brings_optimizer, change_recipe
from snugfit.features.loops.trainer.state_files import StateFiles, check_trainer_state
from snugfit.features.loops.trainer.trainer_hooks import calls_on_save, push_checkpoint
from snugfit.features.loops.trainer.users_files import UsersFiles
from snugfit.features.loops.users_optimizer import (
    optimizer_facts,
    refuse_optimizer,
    schedule_facts,
    settings_of,
)
from snugfit.techniques.recipe import Recipe
from snugfit.training.checkpoint.code_facts import code_facts
from snugfit.training.checkpoint.facts import FACTS, Facts, compare_facts, flatten, forward_facts, model_facts
from snugfit.training.checkpoint.manager import CheckpointManager, Writable, differences, named_step
from snugfit.training.checkpoint.manifest import Checkpoint, verify
from snugfit.training.checkpoint.packed_state import pack, unpack
from snugfit.training.checkpoint.state import RunProgress, Snapshot, TrainState
from snugfit.training.ranks import ALONE, Ranks
from snugfit.training.rng import all_rng_states
from snugfit.training.run.run import LENGTH_OPTIONS, depends_on_length
from snugfit.versions import versions

if TYPE_CHECKING:
    from collections.abc import Callable

    from snugfit.training.checkpoint.staging import Staging
    from snugfit.training.checkpoint.store import Store
    from snugfit.training.interrupt import StopSignals
    from snugfit.training.journal import Journal

FINISHED_TEXT = (
    "Nothing is left to train: this run finished after step {step:,}. Its result is returned. "
    "trainer.train(resume_from_checkpoint=False) trains from the start."
)

CURE = (
    " Undo these changes to continue that run, or leave resume_from_checkpoint out: then its checkpoints "
    "are renamed and a new run starts."
)


SHARDING = "sharding"
"""Entry of a checkpoint that describes the sharding of the model over processes."""


def train_state_of(trainer: Any) -> TrainState:
    """Return the `TrainState` of a trainer: the model, optimizer and other objects that its steps use and
    change.
    """
    optimizer = trainer.optimizer
    return TrainState(
        model=trainer.model,
        # accelerate wraps torch's optimizer, which has the states.
        optimizer=getattr(optimizer, "optimizer", optimizer),
        scheduler=trainer.lr_scheduler,
        scaler=trainer.accelerator.scaler,
        device=trainer.args.device,
        progress=RunProgress(step=trainer.state.global_step),
    )


class TrainerCheckpoints:
    """Saves and resumes one call of `train()`, whose output folder is locked meanwhile."""

    def __init__(
        self,
        trainer: Any,
        store: Store,
        journal: Journal,
        interrupts: StopSignals,
        data: DataPosition,
        ranks: Ranks = ALONE,
    ) -> None:
        self._trainer, self.interrupts, self._journal = trainer, interrupts, journal
        self._ranks = ranks
        self.state = StateFiles(trainer, data, ranks)
        """Object that saves and restores all state besides weights and optimizer."""
        self._store, self.root = store, store.root
        self.users_files = UsersFiles(trainer, store.root)
        """Object that collects the files that the user's subclass of the trainer writes into checkpoints."""
        limit = trainer.args.save_total_limit
        self._manager = CheckpointManager(store, journal, trainer.args.device, limit=limit, ranks=ranks)
        # Every process must draw the same order, so the first one chooses the seed.
        self._seed = ranks.first_answers(lambda: _order_seed(trainer))
        self._facts: Facts = {}
        # The recipe may change when memory runs out, so runs are compared by the requested recipe.
        self._asked = str(trainer.snugfit.recipe)
        self._parts = trainer_parts(trainer)
        self._begun = self._is_data_noted = False
        self._manager.is_update_checked = self._parts.is_spread  # only torch's AdamW and SGD support shards
        self._goes_back = False
        self.finished: Any = None
        """Result of `train()`, if an identical run has finished before; None otherwise."""
        self.resumed: Checkpoint | None = None
        """Checkpoint from which this run was resumed; None without one."""

    def _about(self) -> dict[str, Any]:
        trainer, plan = self._trainer, self._trainer.snugfit
        data, sharding = trainer.train_dataset, self._parts.word
        return {
            "trainer": type(trainer).__name__,
            "asked": self._asked,
            "recipe": str(plan.recipe),
            "batch_size": plan.job.batch_size,
            "samples": count_of(data),
            **({"processes": self._ranks.size, SHARDING: sharding} if self._ranks.are_many else {}),
            "order_seed": self._seed,
            "versions": versions(),
            FACTS: self._facts,
        }

    def open(self, resume_from: str | bool | None) -> None:
        """Find the checkpoint for `train(resume_from_checkpoint=...)` and store it in `resumed`.

        A run that starts from the beginning renames an older run's checkpoints later.
        """
        self._facts = run_facts(self._trainer)
        if resume_from or self._trainer.args.save_strategy != "no":
            self._note_data()
        self.finished = finished_output(self._trainer, self.root, self._about(), resume_from, self._ranks)
        if self.finished is not None:
            text = FINISHED_TEXT.format(step=self._trainer.state.global_step)
            self._journal.tell("note", text=text)
            return
        if resume_from:
            named = None if resume_from is True else Path(str(resume_from))
            self.resumed = self._ranks.first_answers(lambda: self._find(named))
            self._goes_back, self.state.folder = named is not None, self.resumed.folder
            about = self.resumed.about
            self._seed = about["order_seed"]
            # A checkpoint of this step exists, so the next save need not write it again.
            self._manager.saved_step = self.resumed.step
            if about["asked"] == self._asked != about["recipe"]:  # memory ran out
                change_recipe(self._trainer, Recipe.parse(about["recipe"]))
        # accelerate's sampler draws each epoch's order from this seed.
        self._trainer.accelerator.dataloader_config.data_seed = self._seed
        self._manager.about = self._about()

    def _note_data(self) -> None:
        """Store fingerprints of some samples, once, if a checkpoint exists or will be saved. A resumed run
        compares them.
        """
        if not self._is_data_noted:
            self._is_data_noted = True
            self._facts |= dataset_facts(self._trainer.train_dataset)

    def _find(self, named: Path | None) -> Checkpoint:
        """Return the newest or the named checkpoint of this run. Raises `UsageError` if there is none."""
        checkpoint = self._manager.newest() if named is None else self._manager.checkpoint_at(named)
        if checkpoint is None:
            raise _no_checkpoint(self.root)
        self._refuse_another_run(checkpoint)
        check_trainer_state(checkpoint.folder)
        return checkpoint

    def _refuse_another_run(self, checkpoint: Checkpoint) -> None:
        if "order_seed" not in checkpoint.about:
            raise UsageError(f"{checkpoint.folder} was not written by a fitted trainer.{CURE}")
        # A resumed run may have another number of processes, if their global batch is the same.
        before = replace(checkpoint, about=with_global_batch(checkpoint.about))
        names, warned = ("batch_size", "samples"), ("processes", SHARDING)
        options: dict[str, Any] = {"names": names, "warned": warned, "recipe": "asked", "cure": CURE}
        refuse_another_run(self._manager, before, with_global_batch(self._about()), **options)

    def begin(self, resumed_from: str | None) -> None:
        """Restore the run's saved state from its folder, and allocate the memory for copies of checkpoints.

        It is called once, before the first step, when the optimizer exists. Raises `SnugfitError` for an
        optimizer or a schedule that no checkpoint can store, or whose update cannot be stopped.
        """
        if self._begun:
            return
        self._begun = True
        # All checks must pass before the first checkpoint is renamed.
        state = train_state_of(self._trainer)
        state.ranks = self._ranks
        refuse_optimizer(state.optimizer, keeps=True)
        self._parts.check(state)
        # The schedule exists only now, so that `open` could not compare it.
        self._facts |= {**optimizer_facts(state.optimizer), **schedule_facts(state.scheduler)}
        if self.resumed is not None:
            wrong = compare_facts(self.resumed.about, self._about())
            self._manager.refuse_another_run(self.resumed, wrong, [], cure=CURE)
        if self._ranks.is_first:
            self._rename_older()
        if resumed_from is not None:
            self._parts.restore(state, Path(resumed_from))
        if self._trainer.args.save_strategy != "no" and (self._ranks.is_first or self._parts.is_spread):
            self._manager.prepare(state)

    def _rename_older(self) -> None:
        """Rename the older checkpoints in the folder that this run does not continue. It is called after all
        checks.
        """
        remove_finished_result(self.root)
        if self.resumed is None:
            self._manager.set_aside_earlier()
        elif self._goes_back:
            self._manager.discard_later(self.resumed)

    def check_first_update(self) -> None:
        """After the first update, raise `SnugfitError` for optimizer states that no checkpoint can store."""
        self._manager.check_first_update(lambda: train_state_of(self._trainer))

    def save(self, go_on: Callable[[], None] = lambda: None) -> bool:
        """Save a checkpoint of this step, unless one exists. Return False if saving failed.

        `go_on` is the saving method of the user's subclass. With uploads to the hub or callbacks on save,
        wait until the files are written.
        """
        trainer = self._trainer
        step = trainer.state.global_step
        best = trainer.state.best_global_step or None
        if best is not None and self._ranks.first_answers(lambda: self._has_step(best)):
            # The Trainer sets the folder's name only after its own save, which this one replaces.
            trainer.state.best_model_checkpoint = str(self.root / f"checkpoint-{best}")
        if self._manager.saved_step == step:
            return True
        self._note_data()
        # The recipe may have changed since `open`, when memory ran out.
        self._manager.about["recipe"] = str(trainer.snugfit.recipe)
        self._manager.save(step, lambda staging: self._take(staging, go_on), best=best)
        if not trainer.args.push_to_hub and not calls_on_save(trainer):
            return True
        # A callback on saving may read the folder, so it must be complete.
        self.wait()
        is_kept = self._ranks.first_answers(lambda: self._manager.failure is None)
        if trainer.args.push_to_hub and is_kept and self._ranks.is_first:
            push_checkpoint(trainer, self.root / f"checkpoint-{step}")
        return is_kept

    def _has_step(self, step: int) -> bool:
        """Return True if the folder has a checkpoint of this step, or this is the current step."""
        is_now = step == self._trainer.state.global_step
        return bool(is_now or (self.root / f"checkpoint-{step}").is_dir())

    def _take(self, staging: Staging, callback: Callable[[], None]) -> Writable | None:
        snapshot = self._snapshot(staging)
        if not isinstance(snapshot, Snapshot) or not self.users_files.any:
            return snapshot
        draft = self._store.new_draft(snapshot.step)
        return self.users_files.collect(draft, snapshot, callback)

    @property
    def is_saved(self) -> bool:
        """True if a checkpoint of this step exists."""
        return bool(self._manager.saved_step == self._trainer.state.global_step)

    def _snapshot(self, staging: Staging) -> Writable | None:
        """Return the copy of the run's state that this process writes into the checkpoint.

        The first process writes for all; the others send it their random states and write nothing. With
        sharded weights, each writes its own shards.
        """
        trainer, ranks = self._trainer, self._ranks
        is_stopped = self.interrupts.stopping is not None
        # All processes take part, because gathering their random states needs each of them.
        files = self.state.files(is_stopped=is_stopped)
        random = ranks.gather(all_rng_states(trainer.args.device)) if ranks.are_many else []
        # The tokenizer or processor may be given only through the collate function.
        processing = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
        saves = hasattr(processing, "save_pretrained")
        beside: dict[str, Any] = {"files": files, "processing": processing if saves else None}
        state = train_state_of(trainer)
        state.ranks = ranks
        return self._parts.snapshot(state, staging, random=random, is_stopped=is_stopped, **beside)

    def wait(self) -> None:
        """Block until all checkpoints are written."""
        self._manager.wait()

    def finish(self, output: Any) -> None:
        """Finish writing the last checkpoint and store the result of `train()`. Raises `SnugfitError` when
        writing failed.
        """
        self.wait()
        self._manager.raise_if_last_failed()
        if not self._ranks.is_first:
            return
        state, limit = self._trainer.state, self._trainer.args.save_total_limit
        if limit == 1 and state.best_model_checkpoint is not None:  # the Trainer then keeps the best alone
            self._store.retain(limit, {state.best_global_step}, newest=False)
        note_finished(self._trainer, self.root, self._about(), output)


def refuse_no_checkpoint(root: Path, resume_from: str | bool | None) -> None:
    """Raise `UsageError` if the checkpoint to resume does not exist, before anything is written into
    `root`.
    """
    # If a process ended while it replaced a checkpoint, the old one is in `.replaced-*`.
    if resume_from is True and not [*root.glob("checkpoint-*"), *root.glob(".replaced-*")]:
        raise _no_checkpoint(root)
    if resume_from and resume_from is not True:
        named_step(Path(str(resume_from)), root, in_root=False)


def _no_checkpoint(root: Path) -> UsageError:
    return UsageError(
        f"resume_from_checkpoint is True, but {root} has no checkpoint. Leave it out for the first start."
    )


def _order_seed(trainer: Any) -> int:
    """Return the seed from which accelerate draws the order of samples in an epoch."""
    import torch

    given = trainer.args.data_seed
    return int(torch.random.initial_seed() if given is None else given)


# ---- a finished run ---------------------------------------------------------------------------------------


FINISHED_RUN = "finished.json"

SAME = ("trainer", "asked", "batch_size", "samples", "length")
"""Entries of a finished run's description that must be equal, besides its facts and its length. The number of
processes is not compared.
"""

FOLDERS_OF_THIS_PROCESS: set[Path] = set()
"""Output folders of earlier runs in this process. Another `train()` with such a folder trains again."""


def remove_finished_result(root: Path) -> None:
    """Remove the stored result of a finished `train()` before a run continues or starts in this folder."""
    FOLDERS_OF_THIS_PROCESS.add(root.resolve())
    with suppress(OSError):
        (root / FINISHED_RUN).unlink()


def note_finished(trainer: Any, root: Path, about: Mapping[str, Any], output: Any) -> None:
    """Store the result of `train()` in the run's folder, if a checkpoint contains the final weights."""
    best = trainer.state.best_global_step if trainer.args.load_best_model_at_end else None
    step = best or trainer.state.global_step
    if not (root / f"checkpoint-{step}").is_dir():
        return
    # `pack` encodes NaN and infinity, which JSON does not support.
    state, _ = pack({"state": asdict(trainer.state), "loss": output.training_loss, "metrics": output.metrics})
    document = {"about": {**about, "length": _length(trainer)}, "checkpoint": step, "result": state}
    with suppress(OSError):  # the disk may be full; the next start then resumes the last checkpoint
        write_document(root / FINISHED_RUN, document)


def finished_output(
    trainer: Any, root: Path, about: Mapping[str, Any], resume_from: str | bool | None, ranks: Ranks
) -> Any:
    """Return the result of `train()` if exactly this run has finished in this folder.

    The final weights and state are loaded into the trainer. Return None for an unfinished run, or one to
    train again. The first of several processes decides.
    """
    from transformers import TrainerState
    from transformers.trainer_utils import TrainOutput

    now = {**about, "length": _length(trainer)}
    finished = ranks.first_answers(lambda: _finished_run(root, now, resume_from))
    if finished is None:
        return None
    result, weights = finished
    parts = trainer_parts(trainer)
    # The model is sharded first, because each process loads its own shards.
    parts.spread_model()
    parts.load_weights(trainer.model, weights, ranks)
    trainer.state = TrainerState(**result["state"])
    # The stored state has the states of callbacks too, which the Trainer restores only when it resumes.
    restore_callbacks(trainer)
    return TrainOutput(trainer.state.global_step, result["loss"], result["metrics"])


def _finished_run(
    root: Path, now: Mapping[str, Any], resume_from: str | bool | None
) -> tuple[dict[str, Any], Path] | None:
    """Return the stored result of a finished run that equals the description `now`, and the checkpoint with
    its weights.

    Return None for an unfinished or different run, or if `resume_from` does not request it.
    """
    import torch
    from transformers import TrainerState

    try:
        document = read_document(root / FINISHED_RUN)
        before, step = document["about"], document["checkpoint"]
        if (
            not _is_newest_requested(root, resume_from)
            or differences(with_global_batch(before), with_global_batch(now), SAME)
            or compare_facts(before, now)
        ):
            return None
        result: dict[str, Any] = unpack(document["result"], {}, torch.device("cpu"))
        TrainerState(**result["state"])
        return result, verify(root / f"checkpoint-{step}", step).folder
    # If this file is invalid, the run is resumed from its last checkpoint instead.
    except (BadDocument, OSError, LookupError, TypeError, ValueError, AttributeError, SnugfitError):
        return None


def _is_newest_requested(root: Path, resume_from: str | bool | None) -> bool:
    """Return True if `resume_from` requests the folder's newest state. The default requests it only in a new
    process.
    """
    from transformers.trainer_utils import get_last_checkpoint

    if resume_from is None:
        return root.resolve() not in FOLDERS_OF_THIS_PROCESS
    if isinstance(resume_from, bool):
        return resume_from
    # If the path is not the newest checkpoint, training continues from it.
    newest = get_last_checkpoint(root)
    return newest is not None and Path(resume_from).resolve() == Path(newest).resolve()


def _length(trainer: Any) -> list[float]:
    return [trainer.args.max_steps, trainer.args.num_train_epochs]


# ---- facts ------------------------------------------------------------------------------------------------


FREE = frozenset({
    # replaced by the recipe or the global batch, or compared at the optimizer
    "optim", "bf16", "fp16", "tf32", "half_precision_backend", "per_device_train_batch_size",
    "gradient_accumulation_steps", "gradient_checkpointing", "gradient_checkpointing_kwargs",
    "activation_checkpointing", "activation_checkpointing_kwargs", "auto_find_batch_size", "mixed_precision",
    # without effect on a step, or compared elsewhere
    "output_dir", "overwrite_output_dir", "run_name", "project", "report_to", "disable_tqdm", "debug",
    "prediction_loss_only", "load_best_model_at_end", "push_to_hub", "ignore_data_skip",
    "restore_callback_states_from_checkpoint", "resume_from_checkpoint",
    "include_for_metrics", "batch_eval_metrics", "include_num_input_tokens_seen", "include_tokens_per_second",
    "enable_jit_checkpoint", "skip_memory_metrics", "use_cpu", "local_rank", "use_cache", "full_determinism",
    "average_tokens_across_devices", "remove_unused_columns", "torch_empty_cache_steps", "jit_mode_eval",
    "bf16_full_eval", "fp16_full_eval", "parallelism_config", "deepspeed", "predict_with_generate",
    "dataset_num_proc", "generate_during_eval", "activation_offloading",
    "per_device_eval_batch_size", "distributed_state", "deepspeed_plugin",
    # a loader's work that does not change the order of samples
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
    "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order",
})  # fmt: skip
"""Names of `TrainingArguments` that may differ on resuming. They have no effect on a step's results, or are
compared elsewhere.
"""

FREE_BEGINNINGS = (
    "eval_", "save_", "log_", "logging_", "hub_", "trackio_", "ddp_", "fsdp", "torch_compile", "do_", "push_",
    "generation_", "torchdynamo", "ray_", "past_", "tpu_", "xla", "mp_",
)  # fmt: skip
"""Name prefixes of further `TrainingArguments` that may differ on resuming."""

BEST_MODEL_ARGUMENTS = ("metric_for_best_model", "greater_is_better")
"""`TrainingArguments` that may be added or removed on resuming, but not changed, because the best value so
far depends on them.
"""


def run_facts(trainer: Any) -> Facts:
    """Return properties that identify a trainer's run before it trains. They include its optimizer if it
    exists.
    """
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate's wrapper
    return {
        **(_code(trainer) if trainer.snugfit.compare_code else {}),
        **({} if optimizer is None else optimizer_facts(optimizer)),
        **_arguments(trainer),
        **settings_of("data_collator", trainer.data_collator),
        **model_facts(trainer.model),
    }


def with_global_batch(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's description in which `batch_size` is that of all processes together."""
    processes = about.get("processes", 1)
    return {**about, "processes": processes, "batch_size": about["batch_size"] * processes}


def _code(trainer: Any) -> Facts:
    """Return fingerprints of the user's code that runs in a step: collator, loss, and methods of a Trainer
    subclass.
    """
    # Methods that `fit` inserts are not the user's code.
    kinds = [kind for kind in type(trainer).__mro__ if not kind.__module__.startswith("snugfit.")]
    methods = {
        name: next(vars(holder)[name] for holder in (trainer, *kinds) if name in vars(holder))
        for name in ("compute_loss", "training_step")
    }
    functions = {"data_collator": trainer.data_collator, "compute_loss_func": trainer.compute_loss_func}
    return code_facts({**functions, **methods}) | forward_facts(trainer.model)


def _arguments(trainer: Any) -> Facts:
    args = trainer.args
    given = {
        name: value
        for name, value in vars(args).items()
        if name not in FREE
        and not name.startswith((*FREE_BEGINNINGS, "_"))
        and (value is not None or name not in BEST_MODEL_ARGUMENTS)
    }
    if not brings_optimizer(trainer):  # so that the optimizer is refused before any weight is restored
        # The suffix `_fused` only selects another kernel of the same optimizer.
        given["optim"] = getattr(args.optim, "value", args.optim).removesuffix("_fused")
    accelerators = vars(args.accelerator_config) if hasattr(args.accelerator_config, "__dict__") else {}
    given["accelerator_config"] = accelerators
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    # A schedule that does not depend on the run's length allows a longer run.
    if has_users_schedule(trainer) or not depends_on_length(schedule, args.warmup_steps):
        given = {name: value for name, value in given.items() if name not in LENGTH_OPTIONS}
    # `max_steps` overrides the number of epochs, which then has no effect.
    elif args.max_steps > 0:
        given.pop("num_train_epochs", None)
    return flatten("", given)
