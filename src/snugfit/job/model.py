"""The model: an architecture as a frozen value, and how to build it.

A model is its facts, the sizes and switches of a config.json, kept as canonical text inside the value: what
was found once can be predicted anywhere, without the files it came from. Or it is a module of the user's own,
from Python, together with an example batch; such a model lives in one process only.

`Model.find` looks in this order, and the first that applies decides:

1. text written as a path (begins with `.`, `/` or `~`, or ends in `.json`): that file, or the config.json in
   that folder;
2. the name of a bundled preset, with or without its owner, in any case of letters. When a folder of that name
   with a config.json also stands in the working directory, the two could be meant: it is refused, and the
   message says how to write each;
3. an existing folder or file;
4. a hub id: in the local cache, or from the hub when `online` is asked for. Otherwise no socket is opened.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from snugfit.errors import JobError, ModelError, RecipeError, SnugfitError
from snugfit.job.architectures import HEADS, tasks_of, transformers_version
from snugfit.job.weights import freeze_as

if TYPE_CHECKING:
    from torch import nn

    from snugfit.job.job import Job

CUSTOM = "custom"
CLASSIFICATION = ("sequence-classification", "token-classification", "image-classification")
TEXT_TO_TEXT = ("seq2seq-lm", "sequence-classification")
"""Tasks for which an encoder-decoder shifts its labels or its input to the right, behind a start token."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """An architecture: facts from a config.json, or a module from Python."""

    name: str
    """As the hub, the path or the class calls it."""

    origin: str
    """`preset`, `path`, `hub cache`, `hub` or `python`."""

    facts: str = field(default="{}", repr=False)
    """The checked config as canonical JSON text; `{}` for a module from Python."""

    module: nn.Module | None = None
    """The user's own module; None for models that are built from facts."""

    example: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    """A batch that `module` takes as keyword arguments."""

    @classmethod
    def find(cls, name: str | os.PathLike[str], *, online: bool = False) -> Self:
        """The model that `name` stands for. Raises `ModelError` with what is allowed."""
        from snugfit.job.find import find_facts

        if not isinstance(name, str | os.PathLike):
            raise ModelError(f"{name!r} is no name of a model: give text or a path.")
        full_name, origin, facts = find_facts(os.fspath(name), online=online)
        return cls.from_config(facts, name=full_name, origin=origin)

    @classmethod
    def from_config(cls, facts: Mapping[str, Any], *, name: str, origin: str = "path") -> Self:
        """The model of a config's keys; they must have passed `check_facts`."""
        return cls(name=name, origin=origin, facts=json.dumps(facts, sort_keys=True))

    @classmethod
    def from_module(cls, module: nn.Module, example: Mapping[str, Any]) -> Self:
        """Any module, with a batch it takes as keyword arguments; it gives an output with a `loss`."""
        import torch

        if not isinstance(module, torch.nn.Module):
            what = f"the class {module.__name__}" if isinstance(module, type) else f"{module!r}"[:80]
            raise ModelError(f"from_module takes a module that was made, an nn.Module, and not {what}.")
        if not isinstance(example, Mapping) or not example:
            raise ModelError("The example batch is empty or no mapping of forward's arguments to tensors.")
        for key, value in example.items():
            if isinstance(value, list | tuple) or (hasattr(value, "ndim") and not torch.is_tensor(value)):
                kind = type(value).__name__
                raise ModelError(f"The example batch's {key!r} is of type {kind}; give a tensor.")
        return cls(name=type(module).__name__, origin="python", module=module, example=dict(example))

    @property
    def config(self) -> dict[str, Any]:
        """The facts as a fresh dict."""
        document: dict[str, Any] = json.loads(self.facts)
        return document

    @property
    def architecture(self) -> str:
        """transformers' `model_type`, or `python`."""
        return str(self.config.get("model_type", "python"))

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `Model.from_json` reads it back, except for a module from Python."""
        return {"name": self.name, "origin": self.origin, "config": self.config}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The model that `to_json` wrote. Raises `JobError` when it lived only in Python, `ModelError` for
        what is no such document."""
        if not isinstance(document, Mapping):
            raise ModelError(f"This is no model that snugfit wrote, but of type {type(document).__name__}.")
        if lacking := {"name", "origin", "config"} - set(document):
            raise ModelError(
                f"This is no model that snugfit wrote: it has no {' and no '.join(sorted(lacking))}."
            )
        if document["origin"] == "python":
            raise JobError(
                f"The model {document['name']!r} lived in Python only; give the module itself again."
            )
        from snugfit.job.config import check_facts

        facts = check_facts(document["config"], where=str(document["name"]))
        return cls.from_config(facts, name=document["name"], origin=document["origin"])

    def refuse(self, job: Job) -> None:
        """Raises `JobError` for a job that this model cannot do; imports nothing heavy when it can."""
        if job.padding and job.task in (CUSTOM, "image-classification"):
            raise JobError(f"padding is {job.padding}; the batches of the task {job.task} have none.")
        if self.module is not None:
            if job.task != CUSTOM:
                raise JobError(
                    f"{self.name} is a module from Python; its task is {CUSTOM!r}, not {job.task}."
                )
            return
        possible = tasks_of(self.architecture)
        if job.task not in possible:
            raise JobError(
                f"{self.name} ({self.architecture}) has no head for {job.task} in transformers"
                f" {transformers_version()}. Tasks it has: {', '.join(possible) or 'none'}."
            )
        from snugfit.job.limits import refuse_lengths

        refuse_lengths(self, job)

    def settings(self, job: Job) -> Any:
        """A fresh transformers config for the job: the facts, with the architecture's own defaults."""
        from transformers import AutoConfig

        facts = self.config
        labels = {"num_labels": job.labels} if job.task in CLASSIFICATION else {}
        try:
            config = AutoConfig.for_model(facts.pop("model_type"), **facts, **labels)
        except Exception as error:
            raise ModelError(f"{self.name}: transformers cannot use this config: {_line(error)}") from error
        # Where an architecture has two heads for one task (DeiT), from_config looks here for the choice.
        config.architectures = config.architectures or []
        if job.task == "sequence-classification":
            _name_a_pad_token(config.get_text_config())
        if job.task == "seq2seq-lm" and not config.is_encoder_decoder:
            raise JobError(
                f"{self.name} ({self.architecture}) has no decoder of its own, so synthetic batches, whose "
                f"targets have a length of their own, do not fit it in {job.task}."
            )
        if config.is_encoder_decoder and job.task in TEXT_TO_TEXT:
            _name_a_start_token(config)
            self._refuse_without_end_token(config, job)
        return config

    def _refuse_without_end_token(self, config: Any, job: Job) -> None:
        """A classifier with a decoder reads the hidden state of the end token."""
        end, rows = first_end_token(config), getattr(config, "vocab_size", None)
        if job.task == "sequence-classification" and (end is None or (rows and not 0 <= end < rows)):
            raise ModelError(
                f'{self.name}: "eos_token_id" is {json.dumps(end)}. The classifier of {self.architecture} '
                "reads each sequence at its end token, so one of the vocabulary is needed."
            )

    def build(self, job: Job, *, dtype: str, attention: str, weights: Path | None = None) -> nn.Module:
        """The real model under the ambient `torch.device`, its weights born in `dtype`, ready for the job:
        random, or those of the folder `weights` (`find_weights`)."""
        from snugfit.job.twin import twin

        model = twin(self.module) if self.module is not None else self._build(job, dtype, attention, weights)
        return model.train(job.trains)

    def _build(self, job: Job, dtype: str, attention: str, weights: Path | None) -> nn.Module:
        import torch
        import transformers

        from snugfit.job.limits import refuse_lengths

        refuse_lengths(self, job, complete=self.settings(job).to_dict())
        auto_class = getattr(transformers, HEADS[job.task][0])

        def born(attention: str) -> nn.Module:
            config = self.settings(job)
            how = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
            model: nn.Module
            if weights is None:
                model = auto_class.from_config(config, trust_remote_code=False, **how)
            else:
                model, loaded = auto_class.from_pretrained(
                    weights,
                    config=config,
                    use_safetensors=True,
                    local_files_only=True,
                    output_loading_info=True,
                    **how,
                )
                if len(loaded["missing_keys"]) >= len(list(model.parameters())):
                    raise ModelError(f"{weights} holds none of the weights of {self.name}: another model's?")
                with torch.device("meta"):
                    freeze_as(auto_class.from_config(config, trust_remote_code=False, **how), model)
            return model

        try:
            return born(attention)
        except Exception as error:
            if "attn_implementation" not in str(error):
                self._blame_config(error)
            if attention != "sdpa":
                raise RecipeError(
                    f"{self.name} cannot use the attention {attention!r}: {_line(error)}"
                ) from None
        # As transformers itself chooses when nothing is asked for: some architectures (Gemma 2) have no
        # scaled_dot_product_attention. The model says which it has: `model.config._attn_implementation`.
        return born("eager")

    def _blame_config(self, error: Exception) -> NoReturn:
        """A constructor of transformers that fails has met a config it cannot use. Memory that ran out, whose
        errors are subclasses of `RuntimeError`, is another matter and passes; so do our own errors, and our
        own mistakes (a rehearsal listens while a model is built)."""
        narrower = isinstance(error, RuntimeError) and type(error) is not RuntimeError
        if narrower or isinstance(error, SnugfitError) or _raised_by_us(error):
            raise error
        kind = type(error).__name__
        if isinstance(error, KeyError) and (key := _key_of(error.args[0], self.config)):
            says = f'"{key}" is {json.dumps(error.args[0])}, which transformers {transformers_version()}'
            raise ModelError(f"{self.name}: {says} does not know.") from error
        raise ModelError(f"{self.name}: transformers cannot build it ({kind}): {_line(error)}") from error


def _raised_by_us(error: Exception) -> bool:
    """Whether it was raised in snugfit's own code, and not in what that calls."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__", "")).startswith("snugfit.")


def _line(error: Exception) -> str:
    """What a foreign error says, on one line."""
    return " ".join(str(error).split())


def _key_of(value: object, config: Mapping[str, Any]) -> str | None:
    """The key, or the dotted path to it, that holds this text; None when none does."""
    for key, held in config.items():
        if isinstance(held, dict) and (inner := _key_of(value, held)):
            return f"{key}.{inner}"
        if isinstance(value, str) and held == value:
            return key
    return None


def first_end_token(config: Any) -> int | None:
    """The token that ends a sequence; some architectures have several."""
    end = getattr(config, "eos_token_id", None)
    return end[0] if isinstance(end, list) else end


def _name_a_start_token(config: Any) -> None:
    """What T5's documentation says, and what configs of its kind leave out: the pad token starts the decoder.
    No byte depends on which token it is."""
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    if getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id


def _name_a_pad_token(config: Any) -> None:
    """Decoders find a sequence's last token by the pad token; without one they take batches of 1 only.

    What every user of GPT-2 or Llama as a classifier writes: the end token pads, or token 0 where the
    vocabulary of a small config does not reach it.
    """
    if config.pad_token_id is None:
        first = first_end_token(config)
        config.pad_token_id = first if first is not None and first < config.vocab_size else 0
