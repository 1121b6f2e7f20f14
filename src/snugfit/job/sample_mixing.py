"""Detection of models whose samples depend on each other, as by batch norm, so that micro-batches differ from
the whole batch.

Gradients of micro-batches add up to those of the batch if the loss is a mean over samples. Two kinds of
losses are no such mean:

- layers of a batch norm normalise by the mean and variance of the batch that they are given;
- a loss over the batch compares each sample with the others (CLIP, SimCLR, in-batch negatives). Or it takes
  statistics of all (Barlow Twins, the balance of experts).

With a task of snugfit, a model of transformers has a loss over samples or tokens. So only its layers may mix
samples. A module from Python is run on `meta` with two numbers of samples. A tensor that grows with their
square contains pairs. A product or a mean over the samples that is no single number is a statistic. Loops
with data compare gradients themselves (`training/run/cut_loss.py`). They detect the other cases, and record
them in the job (`Job.mixes_samples`).
"""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.job.architectures import class_names, class_of, source
from snugfit.job.batch_layout import map_leaves
from snugfit.job.clone import clone_to_device

if TYPE_CHECKING:
    from torch import nn

    from snugfit.job.job import Job
    from snugfit.job.model import Model

SAMPLES = (6, 10)
"""Numbers of samples in the two batches with which a module is tested. Their ratio is not a whole number."""

STATISTICS = ("mm", "addmm", "bmm", "mean", "sum", "var", "var_mean", "std", "std_mean")
"""Operators that may reduce over the samples of a batch. Batch norms are found as layers instead."""


OTHER_MODELS = re.compile(r"sub_configs|backbone|from \.\.\w")
"""Pattern of a model's source file that contains other models, or inherits from another architecture."""


class Mixing(NamedTuple):
    """Evidence that a sample's loss depends on other samples of the batch, as by batch norm. Both texts are
    empty if it does not.
    """

    reason: str = ""
    """Reason why the loss is not a mean over samples; empty if none was found."""

    unknown: str = ""
    """Reason why the effect of samples on each other could not be determined; empty if it was."""


_OF_FACTS: dict[tuple[str, str, int], str] = {}
_OF_MODULES: weakref.WeakKeyDictionary[Any, Mixing] = weakref.WeakKeyDictionary()


def mixing_of(job: Job) -> Mixing:
    """Return evidence that this job's samples depend on each other in training; empty if they do not. The
    random generators keep their states.
    """
    if not job.trains:
        return Mixing()
    if reason := job.mixes_samples + job.added_task.mixing:
        return Mixing(reason=reason)
    module = job.model.module
    if module is None:
        return Mixing(reason=_of_architecture(job))
    # Running a module takes seconds, so the result is cached as long as the module is alive.
    if module not in _OF_MODULES:
        _OF_MODULES[module] = _of_module(module, job.model)
    return _OF_MODULES[module]


def _of_architecture(job: Job) -> str:
    """Return the reason why a transformers model makes samples depend on each other, such as batch norm;
    empty if it does not. The model is built only if its file has a batch norm, or if it contains other
    models. Nothing is imported if the text of its files excludes both.
    """
    key = (job.model.facts, job.task, job.labels)
    if key not in _OF_FACTS:
        _OF_FACTS[key] = "" if is_plain_by_source(job.model, job.task) else norm_layers_of_job(job)
    return _OF_FACTS[key]


def norm_layers_of_job(job: Job) -> str:
    """Return a description of the batch-norm layers of transformers' own model for this job.

    The model is built only if its source file may have some.
    """
    import torch

    from snugfit.job.build import instantiate

    config = job.transformers_config()
    composed = getattr(config, "sub_configs", None) or getattr(config, "backbone_config", None)
    code = sys.modules[class_of(job.task, config).__module__]
    # Models that contain others may have batch norms in files that this one does not show.
    if not composed and "BatchNorm" not in inspect.getsource(code):
        return ""
    with torch.device("meta"):
        return norm_layers(instantiate(job, dtype="float32", attention="sdpa"))


def is_plain_by_source(model: Model, task: str) -> bool:
    """Return True if the transformers source files of a model contain no batch norm and no nested model.

    The files are read as text. The result is False if the text is inconclusive.
    """
    folder = model.architecture.replace("-", "_")
    try:
        config, code = (
            source(f"models/{folder}/{kind}_{folder}.py") for kind in ("configuration", "modeling")
        )
    except OSError:
        return False
    classes = class_names(task, model.architecture)
    is_whole = not OTHER_MODELS.search(config) and "backbone_config" not in model.config
    has_classes = bool(classes) and all(f"class {name}(" in code for name in classes)
    return is_whole and has_classes and "BatchNorm" not in code


def norm_layers(module: nn.Module) -> str:
    """Return a description of the layers of a module that normalize over the batch in training; empty if
    there are none.

    If the module itself is in training mode, layers in evaluation mode are frozen and not counted.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    # A frozen batch norm uses stored statistics and does not mix samples.
    layers = [layer for layer in layers if layer.training or not module.training]
    if not layers:
        return ""
    kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
    return f"{len(layers)} layers ({kinds}) normalise over the batch"


def _of_module(module: nn.Module, model: Model) -> Mixing:
    import torch

    if reason := norm_layers(module):
        return Mixing(reason=reason)
    layout = model.layout(SAMPLES[0])
    if layout.unclear:
        return Mixing(unknown="it is not clear which tensors of its batch contain samples")
    example = map_leaves(
        model.example or {}, lambda _, value: value.to("meta") if torch.is_tensor(value) else value
    )
    # One sample repeated: shapes alone show if an operator mixes samples.
    first = layout.part(example, 0, 1)
    try:
        with torch.device("meta"):
            copy = clone_to_device(module).train()
            runs = [_shapes(copy, layout.join([first] * samples)) for samples in SAMPLES]
    except Exception as error:  # any error of a user's module
        return Mixing(unknown=f"it could not be run without data ({type(error).__name__})")
    return Mixing(reason=_mixing_operator(*runs))


class _OperatorCall(NamedTuple):
    """One operator call in a forward pass: its name, and the numbers of values of its largest input and of
    its output.
    """

    name: str
    largest_input: int
    output: int


def _shapes(module: nn.Module, batch: dict[str, Any]) -> list[_OperatorCall]:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    calls: list[_OperatorCall] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
        ) -> Any:
            if function is torch.ops.aten._local_scalar_dense.default:  # for `if` and `.item()`
                # A condition is true and a number is 0, since the branch that runs depends on data.
                return arguments[0].dtype is torch.bool
            output = function(*arguments, **(keywords or {}))
            inputs = [value.numel() for value in tree_leaves(arguments) if torch.is_tensor(value)]
            for value in tree_leaves(output):
                if torch.is_tensor(value) and value.is_floating_point():
                    name = function.overloadpacket.__name__
                    calls.append(_OperatorCall(name, max(inputs, default=0), value.numel()))
            return output

    with torch.no_grad(), torch.random.fork_rng(devices=[]), Noted():  # type: ignore[no-untyped-call]
        module(**batch)
    return calls


def _mixing_operator(few: list[_OperatorCall], many: list[_OperatorCall]) -> str:
    """Return a description of the first operator that combines samples; empty if there is none. It compares
    tensor sizes for few and for many samples.
    """
    growth = SAMPLES[1] / SAMPLES[0]
    # Another sequence of operators allows no comparison.
    if [call.name for call in few] != [call.name for call in many]:
        return ""
    for one, other in zip(few, many, strict=True):
        # The size of a linear operator grows by this ratio at most; 1 % is a tolerance.
        if other.output > one.output * growth * 1.01:
            return (
                f"{one.name} makes a tensor that grows with the square of the samples: it compares "
                "each with each"
            )
        # A single number is a loss. A mean of several numbers over all samples is a statistic.
        is_statistic = one.name in STATISTICS and one.output == other.output > 1
        if is_statistic and other.largest_input > one.largest_input:
            return f"{one.name} sums over the samples of the batch before the loss"
    return ""
