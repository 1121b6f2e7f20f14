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
from snugfit.step.install import call
from snugfit.techniques import roster
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.setup import LoaderWish, Setup

MIXED = {None: "no", "bfloat16": "bf16", "float16": "fp16"}
"""accelerate's word for an autocast dtype."""

_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
"""What versions of transformers call it."""


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


def apply(trainer: Any, job: Job, recipe: Recipe) -> list[str]:
    """Does what the recipe asks; gives a line for each argument that is another one now."""
    setup, args = recipe.setup(), trainer.args
    recipe.check(job, _capability(args.device))
    _refuse(trainer, recipe, setup)
    before = _told(args)
    _precision(trainer, setup)
    _adapt(trainer, setup)
    _weights(trainer.model, setup.weights_dtype)
    _attention(trainer.model, setup)
    _checkpoint(trainer, setup)
    args.gradient_accumulation_steps = setup.micro_batches
    args.per_device_train_batch_size = job.batch_size // setup.micro_batches
    trainer._train_batch_size = args.train_batch_size
    _loader(args, setup.loader)
    wish = setup.optimizer
    if not optimizer_is_theirs(trainer) and wish.trainer_name:
        args.optim = type(args.optim)(wish.trainer_name)
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


def _capability(device: Any) -> tuple[int, int] | None:
    import torch

    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _refuse(trainer: Any, recipe: Recipe, setup: Setup) -> None:
    """Raises `RecipeError` for wishes that this trainer cannot be given."""
    wrong = list(_refusals(trainer, recipe, setup))
    if wrong:
        raise RecipeError("\n".join([f"{recipe} cannot be given to this trainer:", *wrong]))


def _refusals(trainer: Any, recipe: Recipe, setup: Setup) -> Iterator[str]:
    model, plain = trainer.model, roster.plain(Slot.OPTIMIZER)
    theirs = optimizer_is_theirs(trainer)
    if theirs and recipe[Slot.OPTIMIZER] != plain:
        yield (
            f"{recipe[Slot.OPTIMIZER]}: the trainer brings an optimizer of its own. Leave one of them out."
        )
    if setup.adapt is not None and (hasattr(model, "peft_config") or trainer.optimizer is not None):
        yield f"{recipe[Slot.ADAPTERS]}: the model has adapters, or the trainer an optimizer, already."
    if setup.weights_dtype != _dtype(model) and getattr(model, "is_quantized", False):
        yield f"{recipe[Slot.PRECISION]}: the model's weights are quantized and stay what they are."
    attention = recipe[Slot.ATTENTION]
    if attention != roster.plain(Slot.ATTENTION) and not hasattr(model, "set_attn_implementation"):
        yield f"{attention}: {type(model).__name__} lets nobody choose its attention."
    if setup.autocast == "float16" and trainer.args.device.type == "cpu":
        yield f"{recipe[Slot.PRECISION]}: accelerate has no fp16 on the CPU. Try 'bf16'."


def _told(args: Any) -> dict[str, Any]:
    """The arguments that a recipe may change, as they are."""
    names = (
        "per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", *_CHECKPOINTING,
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


def _dtype(model: Any) -> str:
    found = {each.dtype for each in model.parameters() if each.is_floating_point()}
    return str(next(iter(found))).removeprefix("torch.") if len(found) == 1 else "mixed"


def _weights(model: Any, wanted: str) -> None:
    import torch

    if _dtype(model) != wanted:
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


def _checkpoint(trainer: Any, setup: Setup) -> None:
    """Layers are wrapped here, as everywhere in snugfit; the Trainer's own switch, which knows no spans, is
    off."""
    from snugfit.step.checkpointing import checkpoint_layers

    for name in _CHECKPOINTING:
        if hasattr(trainer.args, name):
            setattr(trainer.args, name, False)
    model = trainer.model
    known = next((name for name in _CHECKPOINTING if hasattr(type(model), f"is_{name}")), None)
    if known and getattr(model, f"is_{known}"):
        getattr(model, f"{known}_disable")()
    if setup.checkpoint is not None:
        checkpoint_layers(model, setup.checkpoint)


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
