"""A Setup's wishes, done to a live trainer: in its arguments where they have a word, to its model, or in the
subclass that it becomes.

    weights_dtype, attention, adapt, checkpoint   to the model, as `step/install.py` does to a model of ours
    autocast, scale_gradients                     bf16, fp16: the trainer makes its accelerator anew
    micro_batches                                 per_device_train_batch_size, gradient_accumulation_steps
    optimizer                                     the subclass's `create_optimizer`, with the user's numbers
    loader                                        dataloader_num_workers, dataloader_pin_memory
    matmul, expandable_segments                   around `train()`

Everything that can be refused is refused before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from snugfit.errors import RecipeError, UsageError
from snugfit.frontends.own import capability_of
from snugfit.step.accelerate_loop import MIXED
from snugfit.step.checkpointing import NAMES, checkpoint_layers, stop_own_checkpointing
from snugfit.step.install import call, dtype_of
from snugfit.techniques import roster
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.setup import LoaderWish, Setup


def refuse_what_cannot_be_fitted(trainer: Any) -> None:
    """Raises `UsageError` for what is no Trainer, and for one that trains on several devices."""
    import transformers

    if not isinstance(trainer, transformers.Trainer):
        what = f"the class {trainer.__name__}" if isinstance(trainer, type) else f"a {type(trainer).__name__}"
        raise UsageError(f"fit takes a transformers.Trainer that was made, and not {what}.")
    args = trainer.args
    unsaid = {
        "deepspeed": trainer.is_deepspeed_enabled,
        "fsdp": trainer.is_fsdp_enabled,
        f"{args.world_size} processes": args.world_size > 1,
        f"{args.n_gpu} GPUs in one process": args.n_gpu > 1,
        "a model that is spread over devices": trainer.is_model_parallel,
        "model_init": trainer.model_init is not None,
        "auto_find_batch_size, which changes the global batch": args.auto_find_batch_size,
        "use_liger_kernel": args.use_liger_kernel,
    }
    if found := [name for name, there in unsaid.items() if there]:
        raise UsageError(
            f"The trainer uses {', '.join(found)}; fit trains one model on one device, in a batch that stays"
            " what it is. Take it out, or leave fit out. (CUDA_VISIBLE_DEVICES=0 shows a process one GPU.)"
        )


def apply(trainer: Any, job: Job, recipe: Recipe, left: frozenset[Slot] = frozenset()) -> list[str]:
    """Does what the recipe asks, but for slots that are `left` as the user has them; gives a line for each
    argument that is another one now."""
    setup, args = recipe.setup(), trainer.args
    recipe.check(job, capability_of(args.device))
    _refuse(trainer, recipe, setup, left)
    before = _told(args)
    if Slot.PRECISION not in left:
        _precision(trainer, setup)
        _weights(trainer.model, setup.weights_dtype)
    if Slot.ADAPTERS not in left:
        _adapt(trainer, setup)
    if Slot.ATTENTION not in left:
        _attention(trainer.model, setup)
    if Slot.CHECKPOINTING not in left:
        checkpoint(trainer, setup)
    if Slot.BATCHING not in left:
        args.gradient_accumulation_steps = setup.micro_batches
        args.per_device_train_batch_size = job.batch_size // setup.micro_batches
        trainer._train_batch_size = args.train_batch_size
    if Slot.LOADING not in left:
        _loader(args, setup.loader)
    if Slot.OPTIMIZER not in left and setup.optimizer.trainer_name and not optimizer_is_theirs(trainer):
        args.optim = type(args.optim)(setup.optimizer.trainer_name)
    after = _told(args)
    return [
        f"{name} was {before[name]} and is {after[name]}" for name in after if before[name] != after[name]
    ]


def optimizer_is_theirs(trainer: Any) -> bool:
    """Whether the user brings the optimizer: made already, as a class with its arguments, or by a method."""
    import transformers

    ours = ("create_optimizer", "get_optimizer_cls_and_kwargs")
    written = any(
        name in vars(kind)
        for kind in type(trainer).__mro__
        for name in ours
        if not kind.__module__.startswith(("transformers.", "snugfit."))
        and issubclass(kind, transformers.Trainer)
    )
    # Once train() has run, the optimizer is there because the Trainer made it.
    made = trainer.optimizer is not None and not hasattr(trainer.optimizer, "accelerator_state")
    return made or trainer.optimizer_cls_and_kwargs is not None or written


def _refuse(trainer: Any, recipe: Recipe, setup: Setup, left: frozenset[Slot]) -> None:
    """Raises `RecipeError` for wishes that this trainer cannot be given."""
    wrong = [text for slot, text in _refusals(trainer, recipe, setup) if slot not in left]
    if wrong:
        raise RecipeError("\n".join([f"{recipe} cannot be given to this trainer:", *wrong]))


def _refusals(trainer: Any, recipe: Recipe, setup: Setup) -> Iterator[tuple[Slot, str]]:
    model, plain = trainer.model, roster.plain(Slot.OPTIMIZER)
    optimizer, precision, attention = (
        recipe[slot] for slot in (Slot.OPTIMIZER, Slot.PRECISION, Slot.ATTENTION)
    )
    if optimizer != plain and optimizer_is_theirs(trainer):
        yield (
            Slot.OPTIMIZER,
            f"{optimizer}: the trainer brings an optimizer of its own. Leave one of them out.",
        )
    if setup.adapt is not None and (hasattr(model, "peft_config") or trainer.optimizer is not None):
        says = "the model has adapters, or the trainer an optimizer, already."
        yield Slot.ADAPTERS, f"{recipe[Slot.ADAPTERS]}: {says}"
    if setup.weights_dtype != dtype_of(model) and getattr(model, "is_quantized", False):
        yield Slot.PRECISION, f"{precision}: the model's weights are quantized and stay what they are."
    if setup.autocast == "float16" and trainer.args.device.type == "cpu":
        yield Slot.PRECISION, f"{precision}: accelerate has no fp16 on the CPU. Try 'bf16'."
    if attention != roster.plain(Slot.ATTENTION) and not hasattr(model, "set_attn_implementation"):
        yield Slot.ATTENTION, f"{attention}: {type(model).__name__} lets nobody choose its attention."


def _told(args: Any) -> dict[str, Any]:
    """The arguments that a recipe may change, as they are."""
    names = (
        "per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", *NAMES,
        "dataloader_num_workers", "dataloader_pin_memory", "optim",
    )  # fmt: skip
    found = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return {name: getattr(value, "value", value) for name, value in found.items()}


def _precision(trainer: Any, setup: Setup) -> None:
    """Its accelerator's, which autocasts and scales gradients. accelerate keeps one state for the process,
    which is made anew."""
    from accelerate.state import AcceleratorState

    args, wanted = trainer.args, MIXED[setup.autocast]
    if trainer.accelerator.mixed_precision == wanted:
        return
    trainer.model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    trainer.model_wrapped = trainer.model
    args.bf16, args.fp16, args.mixed_precision = wanted == "bf16", wanted == "fp16", wanted
    AcceleratorState._reset_state()
    trainer.create_accelerator_and_postprocess()


def _adapt(trainer: Any, setup: Setup) -> None:
    if setup.adapt is None:
        return
    trainer.model = trainer.model_wrapped = call(setup.adapt, trainer.model)
    trainer.callback_handler.model = trainer.model
    trainer._signature_columns = None


def _weights(model: Any, wanted: str) -> None:
    import torch

    if dtype_of(model) != wanted:
        model.to(getattr(torch, wanted))


def _attention(model: Any, setup: Setup) -> None:
    """The model's own switch. One that has no attention of torch's keeps what it has, as when it is built."""
    if not hasattr(model, "set_attn_implementation"):
        return
    if getattr(model.config, "_attn_implementation", None) == setup.attention:
        return
    try:
        model.set_attn_implementation(setup.attention)
    except ValueError as refusal:
        if setup.attention != "sdpa":
            line = " ".join(str(refusal).split())
            raise RecipeError(
                f"{type(model).__name__} cannot use the attention {setup.attention!r}: {line}"
            ) from None


def checkpoint(trainer: Any, setup: Setup) -> None:
    """Layers are wrapped here, as everywhere in snugfit, also of a model that trains already; the Trainer's
    own switch, which knows no spans, is off. What was wrapped before is unwrapped first."""
    model = trainer.model
    for module, before in getattr(trainer, "snugfit_wrapped", []):
        module.__dict__.pop("forward", None)
        module.__dict__.update(before)
    for name in NAMES:
        if hasattr(trainer.args, name):
            setattr(trainer.args, name, False)
    stop_own_checkpointing(model)
    own = [(module, _own_forward(module)) for module in model.modules()]
    if setup.checkpoint is not None:
        checkpoint_layers(model, setup.checkpoint)
    trainer.snugfit_wrapped = [(module, before) for module, before in own if _own_forward(module) != before]


def _own_forward(module: Any) -> dict[str, Any]:
    return {"forward": module.__dict__["forward"]} if "forward" in module.__dict__ else {}


def _loader(args: Any, wish: LoaderWish) -> None:
    args.dataloader_num_workers = wish.workers
    if wish.pinned and args.device.type == "cuda":
        args.dataloader_pin_memory = True
    if not wish.workers:
        args.dataloader_prefetch_factor, args.dataloader_persistent_workers = None, False


def optimizer_arguments(trainer: Any, accepted: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of the user's `TrainingArguments` that an optimizer with these parameters takes."""
    args = trainer.args
    found: dict[str, Any] = {"lr": args.learning_rate}
    if "betas" in accepted:
        found |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return found
