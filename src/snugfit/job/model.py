"""The model of a job: an architecture as an immutable value. `build.py` creates an `nn.Module` from it.

A model consists of its facts, the sizes and switches of a config.json, as canonical JSON text. It can
therefore be predicted anywhere, without the files of its origin. Alternatively, it is a user's own module
from Python with an example batch. Such a model exists in one process only.

`Model.find` tries a path, a preset, an existing folder, the hub's cache, a preset of the same sizes
(`names.py`), and the hub. HF_HUB_OFFLINE=1 and `online=False` forbid the hub, and no socket is opened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from snugfit.errors import JobError, ModelError, one_line
from snugfit.job.architectures import task_of
from snugfit.job.batch_layout import BatchDims, BatchLayout, leaves
from snugfit.job.config import LAYERS, check_facts, ignored_keys, without_ignored
from snugfit.job.dtype import main_dtype
from snugfit.job.find import find_facts
from snugfit.job.inputs import has_classes, inputs_of
from snugfit.job.weights import own_folder, stored_dtype

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Model:
    """An architecture: the values of a config.json, or a module from Python."""

    name: str
    """Name of the model on the hub, its path, or its class."""

    origin: str
    """Source of the model: `preset`, `path`, `hub cache`, `config` for keys given in Python, or `python` for
    a module.

    A config that was fetched from the hub is in the hub's cache too.
    """

    facts: str = field(default="{}", repr=False)
    """Checked config as canonical JSON text; `{}` for a module from Python."""

    module: nn.Module | None = None
    """User's own module; None for models that are constructed from a config (`facts`)."""

    dtype: str | None = None
    """Dtype of the checkpoint's weights, or of the weights of `module`, by torch's name; None if it is
    unknown.
    """

    resized: bool = field(default=False, compare=False, repr=False)
    """True if the embedding has more or fewer rows than the checkpoint's."""

    example: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    """Example batch, which `module` takes as keyword arguments; None without `module`."""

    batch_dims: BatchDims | None = field(default=None, compare=False, repr=False)
    """Dimension of samples by the name of a tensor in `example`; None if the user gave no names."""

    @classmethod
    def find(
        cls,
        name: str | os.PathLike[str],
        *,
        online: bool = True,
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> Self:
        """Return the model called `name`. `tell` receives a sentence about a config that was fetched from the
        hub.

        Raises `ModelError` with the allowed names.
        """
        if not isinstance(name, str | os.PathLike):
            raise ModelError(f"{name!r} is not the name of a model: give text or a path.")
        full_name, origin, facts = find_facts(os.fspath(name), online=online, tell=tell)
        # Older configs name no dtype, and transformers then takes that of the weights.
        if "dtype" not in facts and (folder := own_folder(full_name, origin)):
            facts |= {"dtype": stored_dtype(folder)}
        return cls.from_config(facts, name=full_name, origin=origin)

    @classmethod
    def from_config(cls, facts: Mapping[str, Any], *, name: str, origin: str = "config") -> Self:
        """Return the model of this config.json's values, which must have passed `check_facts`."""
        sizes = {key: value for key, value in facts.items() if key != "dtype"}
        # With sorted keys, equal facts are equal texts, by which models compare and hash.
        return cls(
            name=name, origin=origin, facts=json.dumps(sizes, sort_keys=True), dtype=facts.get("dtype")
        )

    @classmethod
    def from_module(
        cls, module: nn.Module, example: Mapping[str, Any], *, batch_dims: BatchDims | None = None
    ) -> Self:
        """Return a model from any module, with a batch that it takes as keyword arguments.

        The module's output must have a `loss`. A prediction repeats the example's samples and cuts them into
        micro-batches. Samples are along the first dimension of every tensor, where that is equally long in
        all. Otherwise `batch_dims` names it for each tensor that contains samples. None is for a tensor that
        is never cut, such as a graph's edges. A tensor in a nested mapping has a dotted name
        (`"vision.pixels"`). Raises `ModelError` for an invalid module or batch, `JobError` for a dimension
        that does not exist.
        """
        import torch

        if not isinstance(module, torch.nn.Module):
            type_name = f"the class {module.__name__}" if isinstance(module, type) else f"{module!r}"[:80]
            raise ModelError(
                f"from_module takes an instance of nn.Module, not {type_name}. Give an instance of a class "
                "derived from it."
            )
        if not isinstance(example, Mapping) or not example:
            raise ModelError(
                "The example batch must map the arguments of forward to tensors, and must not be empty."
            )
        for key, value in leaves(example):
            if isinstance(value, list | tuple) or (hasattr(value, "ndim") and not torch.is_tensor(value)):
                kind = type(value).__name__
                raise ModelError(f"The example batch's {key!r} is of type {kind}; give a tensor.")
        # A wrong dimension is reported at once, not in the middle of a prediction.
        BatchLayout.of(example, batch_dims)
        return cls(
            name=type(module).__name__,
            origin="python",
            module=module,
            dtype=main_dtype(module),
            example=dict(example),
            batch_dims=batch_dims,
        )

    @property
    def vocabulary(self) -> int:
        """Rows of the model's embedding; 0 if the config gives none."""
        rows = (self.config.get("text_config") or self.config).get("vocab_size") if not self.module else 0
        return rows if isinstance(rows, int) else 0

    def with_vocabulary(self, rows: int) -> Self:
        """Return the model with an embedding of this number of rows, as after
        `resize_token_embeddings(rows)`.
        """
        config = self.config
        if isinstance(config.get("text_config"), dict):
            config["text_config"] = {**config["text_config"], "vocab_size": rows}
        else:
            config["vocab_size"] = rows
        return replace(self, facts=json.dumps(config, sort_keys=True), resized=True)

    def layout(self, samples: int) -> BatchLayout:
        """Return the layout of samples in batches like the example, for jobs of this number of samples."""
        return BatchLayout.of(self.example or {}, self.batch_dims, samples=samples)

    @property
    def layers(self) -> int:
        """The number of layers in the model's deepest stack, by the config; 0 if the config does not give
        one.
        """
        stated = {} if self.module is not None else self.config
        return max((stated[key] for key in LAYERS if isinstance(stated.get(key), int)), default=0)

    @property
    def config(self) -> dict[str, Any]:
        """The values of the config.json, as a new dict."""
        document: dict[str, Any] = json.loads(self.facts)
        return document

    @property
    def architecture(self) -> str:
        """transformers' `model_type`, or `python` for a module from Python."""
        return str(self.config.get("model_type", "python"))

    @property
    def task(self) -> str | None:
        """Task of the head that the checkpoint has, or the only task of the architecture; None if several are
        possible."""
        return task_of(self.architecture, self.config.get("architectures") or ())

    @property
    def doubts(self) -> tuple[str, ...]:
        """Warnings about the config's code, which is ignored."""
        if "auto_map" not in ignored_keys(self.config):
            return ()
        return (
            'Its config names custom code ("auto_map"), which is not run. The prediction is for '
            f"transformers' own {self.architecture}.",
        )

    def to_json(self) -> dict[str, Any]:
        """Return the model as a JSON object; `Model.from_json` reads it back, except for a module from
        Python.
        """
        dtype = {"dtype": self.dtype} if self.dtype else {}
        return {"name": self.name, "origin": self.origin, "config": self.config, **dtype}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the model from the JSON object of `to_json`.

        Raises `JobError` if it existed only in Python, and `ModelError` for any other document.
        """
        if not isinstance(document, Mapping):
            raise ModelError(
                f"This is not a model document of snugfit, but of type {type(document).__name__}. Give "
                "what Model.to_json() returned."
            )
        if lacking := {"name", "origin", "config"} - set(document):
            raise ModelError(
                f"This is not a model document of snugfit: it has no {' and no '.join(sorted(lacking))}. "
                "Give what Model.to_json() returned. For a config.json: Model.find('path/config.json')."
            )
        if document["origin"] == "python":
            raise JobError(
                f"The model {document['name']!r} existed only in Python. Give the module itself again."
            )
        facts = check_facts(document["config"], where=str(document["name"]))
        facts |= {"dtype": document.get("dtype")}
        return cls.from_config(facts, name=document["name"], origin=document["origin"])

    def transformers_config(self, task: str, labels: int) -> Any:
        """Return a new transformers config from the config.json's values, with the architecture's own
        defaults for the rest.

        `labels` are the classes of a classification head; other tasks ignore them.
        """
        from transformers import AutoConfig

        facts = without_ignored(self.facts)
        # Only a head of classes has a number of labels.
        head = {"num_labels": labels} if has_classes(task) else {}
        try:
            config = AutoConfig.for_model(facts.pop("model_type"), **facts, **head)
        except Exception as error:
            raise ModelError(
                f"{self.name}: transformers cannot use this config: {one_line(error, 1000)} Correct the "
                "config.json, or try another version of transformers."
            ) from error
        # If an architecture has two heads for one task (DeiT), from_config reads the choice here.
        config.architectures = config.architectures or []
        if task == "sequence-classification":
            name_a_pad_token(config.get_text_config())
        inputs = inputs_of(task, self.architecture)
        inputs.complete(config)
        # Synthetic targets have a separate length, which a decoder without an encoder does not support.
        if task == "seq2seq-lm" and not config.is_encoder_decoder and inputs.takes_tokens:
            raise JobError(
                f"{self.name} ({self.architecture}) has no decoder of its own. Synthetic batches have "
                f"targets of another length, so they do not fit it in {task}. Choose another task."
            )
        if config.is_encoder_decoder:
            _name_a_start_token(config)
            self._refuse_without_end_token(config, task)
        return config

    def _refuse_without_end_token(self, config: Any, task: str) -> None:
        """Raise `ModelError` for an encoder-decoder classifier without an end token, since it reads that
        token's hidden state."""
        end, rows = first_end_token(config), getattr(config, "vocab_size", None)
        if task == "sequence-classification" and (end is None or (rows and not 0 <= end < rows)):
            raise ModelError(
                f'{self.name}: "eos_token_id" is {json.dumps(end)}. The classifier of '
                f"{self.architecture} reads each sequence at its end token, so this must be a token of "
                "the vocabulary. Correct it in the config.json."
            )


def first_end_token(config: Any) -> int | None:
    """Return the token that ends a sequence; some architectures have several."""
    end = getattr(config, "eos_token_id", None)
    return end[0] if isinstance(end, list) else end


def _name_a_start_token(config: Any) -> None:
    """Set the pad token as the decoder's start token, as in T5's documentation; configs of its kind omit it.

    The choice of the token changes no predicted bytes.
    """
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    if getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id


def name_a_pad_token(config: Any) -> None:
    """Set the pad token, by which decoders find a sequence's last token. Without one they take batches of 1
    only.

    Users of GPT-2 or Llama as a classifier do the same. The pad token is the end token, or token 0 if the
    vocabulary of a small config does not include that.
    """
    if getattr(config, "pad_token_id", None) is None:
        first, rows = first_end_token(config), getattr(config, "vocab_size", 0)
        config.pad_token_id = first if first is not None and first < rows else 0
