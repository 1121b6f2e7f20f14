"""LoRA through peft: frozen weights, and beside some of them a product of two thin matrices that trains.

W' = W + (alpha / r) B A with A (r x in) and B (out x r); Hu et al., arXiv 2106.09685, section 4.1. Gradients
and optimizer states exist for A and B only. The activations that the frozen weights' neighbours need are kept
as before, so memory falls by states and gradients and not by activations.

Defaults are peft's own (`LoraConfig`): rank 8, alpha 8, no dropout, and for each architecture the modules of
peft's table (BERT: query and value); all linear layers of one that the table lacks (`lora_targets.py`).
Dropout costs, for each adapted matrix, the input that was dropped out and its mask, which the backward pass
of A needs.
Adapters of a model in half precision are fp32, as peft makes them (`autocast_adapter_dtype`). The heads of
classification models train whole, as peft's task types do it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from snugfit.errors import RecipeError
from snugfit.techniques.counterpart import Counterpart, Setting
from snugfit.techniques.hub_kernels import no_hub_kernels
from snugfit.techniques.lora_targets import ALL_LINEAR, chosen_by_peft, default_targets, has_default_targets
from snugfit.techniques.setting import between
from snugfit.techniques.setup import Call, Setup
from snugfit.techniques.technique import Fidelity, Technique

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job

_PEFT_TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}
"""peft's task type by the end of a transformers class name; the type says which head trains whole."""

_TOKEN_HEADS = ("classifier", "score")
"""What peft trains whole in token classifiers; `all-linear` would adapt it too, and peft refuses both."""


@dataclass(frozen=True, kw_only=True)
class Lora(Technique):
    """Freezes the model and trains low-rank updates of some of its matrices."""

    fidelity: ClassVar = Fidelity.LEARNS
    needs: ClassVar = ("peft>=0.19",)
    extra: ClassVar = "peft"
    source: ClassVar = "Hu et al., arXiv 2106.09685; peft.LoraConfig"
    elsewhere: ClassVar = ("peft",)
    counterparts: ClassVar = (
        Counterpart(
            arguments={
                "lora.r": Setting("r"),
                "lora.target_modules": Setting("targets"),
                "lora.lora_dropout": Setting("dropout"),
            }
        ),
    )

    r: int = between(1, 4096, default=8)
    """Rank of the updates: columns of B and rows of A."""

    targets: tuple[str, ...] | None = None
    """Ends of the names of the modules to adapt, or `all-linear`; by default peft's choice for the
    architecture, and all linear layers where it has none."""

    dropout: float = between(0.0, 1.0, default=0.0)
    """Share of the inputs of A that is dropped."""

    def install(self, setup: Setup) -> Setup:
        """The model is replaced by peft's wrapper around it."""
        arguments = {"r": self.r, "targets": list(self.targets or ()), "dropout": self.dropout}
        return replace(setup, adapt=Call(path=f"{__name__}:adapt", arguments=arguments))

    def code(self, job: Job) -> tuple[str, ...]:
        """peft's wrapper, with the arguments that `adapt` gives it."""
        from snugfit.job.architectures import class_of

        model = class_of(job.task, job.transformers_config())
        given = _peft_arguments(
            model.__name__,
            inputs=model.main_input_name,
            r=self.r,
            targets=self.targets or (() if chosen_by_peft(job.model) else default_targets(job.model)),
            dropout=self.dropout,
        )
        shown = ", ".join(f"{key}={value!r}" for key, value in given.items() if value is not None)
        shown = shown.replace("'", '"')  # words of peft's and of the notation hold no quotes
        return (
            "from peft import LoraConfig, get_peft_model",
            "",
            f"model = get_peft_model(model, LoraConfig({shown}))",
        )

    def warnings(self, job: Job, compute_capability: tuple[int, int] | None) -> Iterator[str]:
        """Without targets, and where peft has no choice of its own, every linear layer is adapted."""
        if not self.targets and not has_default_targets(job.model):
            what = "a module of your own" if job.model.module is not None else job.model.architecture
            yield (
                f"peft has no default targets for {what}, so all linear layers are adapted, as with "
                f"{self.name}(targets={ALL_LINEAR}). To adapt fewer, give the ends of their names: "
                f"{self.name}(targets=q_proj|v_proj)."
            )

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Ranks in use on peft's targets, and on every matrix, as QLoRA does it (arXiv 2305.14314)."""
        if has_default_targets(job.model):
            yield from (cls(r=rank) for rank in (8, 16, 64))
        yield from (cls(r=rank, targets=(ALL_LINEAR,)) for rank in (8, 64))


def adapt(model: torch.nn.Module, *, r: int, targets: Sequence[str], dropout: float = 0.0) -> torch.nn.Module:
    """`model` wrapped by peft, its own weights frozen. Raises `RecipeError` when no module is a target."""
    with no_hub_kernels():
        from peft import LoraConfig, get_peft_model

    name = type(model).__name__
    inputs = str(getattr(model, "main_input_name", "input_ids"))
    chosen = targets or default_targets(model)
    config = LoraConfig(**_peft_arguments(name, inputs=inputs, r=r, targets=chosen, dropout=dropout))
    try:
        with warnings.catch_warnings():
            # GPT-2's Conv1D stores its weight transposed; peft sees that, does the right thing, and warns.
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False", category=UserWarning)
            # peft asks transformers 5 by the name of version 4.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            return get_peft_model(model, config)  # type: ignore[no-any-return]
    except ValueError as error:
        raise RecipeError(
            f"lora: peft finds nothing to adapt in {name} ({str(error).partition('. ')[0].rstrip('.')}). "
            "Name the modules, lora(targets=q_proj|v_proj), or use lora(targets=all-linear)."
        ) from error


def _peft_arguments(
    name: str, *, inputs: str, r: int, targets: str | Sequence[str], dropout: float
) -> dict[str, Any]:
    """`LoraConfig`'s arguments for a model of the class `name` whose main input is called `inputs`."""
    task = next((task for end, task in _PEFT_TASKS.items() if name.endswith(end)), None)
    if inputs != "input_ids":
        task = None  # peft's wrapper for seq2seq passes input_ids, which Whisper's decoder then gets twice
    if list(targets) == [ALL_LINEAR]:
        targets = ALL_LINEAR
    everywhere = targets == ALL_LINEAR
    return {
        "r": r,
        "lora_dropout": dropout,
        "target_modules": targets if isinstance(targets, str) else list(targets) or None,
        "exclude_modules": list(_TOKEN_HEADS) if everywhere and task == "TOKEN_CLS" else None,
        "task_type": task,
        "modules_to_save": ["classifier"] if name.endswith("ForImageClassification") else None,
    }
