"""Compilation of a model's layers one by one, or of the whole model, with `torch.compile`.

*Layers*: a model's repeated layers are compiled; the code around them (embeddings, masks, the head, the loss)
is not. Equal layers run one compiled program, so compiling takes seconds where a whole model takes a minute.
Masks are made outside. Within a compiled model, transformers may make an explicit mask where it would make
none. Attention with such a mask uses a slower kernel that stores every score.

*The model*: its forward pass is compiled at once, with its loss, as the Trainer's `torch_compile=True` does.
The recomputation of layers is compiled with them.

In both cases the method `forward` is compiled, not the module. Names in a state dict are therefore unchanged,
and hooks run uncompiled. A compiled layer is recomputed by running its program a second time in the backward
pass.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import shlex
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

from snugfit.errors import RecipeError
from snugfit.features.compile.fields import RECOMPILE_LIMIT
from snugfit.features.compile.memory_budget import InductorWithin, plain_refusals
from snugfit.step.checkpointing import layer_names, layer_stacks, without_cache

if TYPE_CHECKING:
    import torch

    from snugfit.features.compile.fields import CompileWish
    from snugfit.job.job import Job


def compile_parts(model: torch.nn.Module, wish: CompileWish) -> None:
    """Compile the model's layers, or the whole model, in place with `torch.compile`, as `wish` specifies."""
    if wish.is_one_program:
        _compile_model(model, wish)
    else:
        compile_layers(model, wish)


def compile_evaluated(model: torch.nn.Module, wish: CompileWish, *, generates: bool) -> None:
    """Compile a model in place for an evaluation whose batches have one length, or for text generation.

    Only generation keeps a cache of keys and values, and its size must not change.
    """
    if wish.is_one_program:
        forward = compiled_function(model.forward, wish)
        without = {} if generates or not _takes_cache(model) else {"use_cache": False}
        # `generate` reads the names of the forward method's arguments, which `wraps` preserves.
        model.forward = functools.wraps(model.forward)(functools.partial(forward, **without))
        return
    for layer in (layer for layers in _stacks_to_compile(model) for layer in layers):
        layer.forward = _without_cache(compiled_function(layer.forward, wish))


def _without_cache(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **keywords: Any) -> Any:
        # Training needs no cache of keys and values. With one, torch would give up after compiling the same
        # code eight times.
        arguments, keywords = without_cache(arguments, keywords)
        return compiled(*arguments, **keywords)

    return run


def _compile_model(model: torch.nn.Module, wish: CompileWish) -> None:
    """Compile the model's forward pass; evaluation, with batches of any length, runs uncompiled."""
    forward = model.forward
    compiled = compiled_function(forward, wish)
    # Each layer accesses the cache by its own number, so each would be compiled separately.
    without = {"use_cache": False} if _takes_cache(model) else {}

    @functools.wraps(forward)
    def run(*arguments: Any, **keywords: Any) -> Any:
        # Evaluation has batches of any length, and each new length would be compiled.
        if not model.training or model not in _ORIGINAL_FORWARDS:
            return forward(*arguments, **keywords)
        out = compiled(*arguments, **{**without, **keywords})
        return _with_own_numbers(out) if wish.records_graphs else out

    # `vars` contains `forward` only if a library replaced it on this object.
    _ORIGINAL_FORWARDS[model] = vars(model).get("forward"), run
    model.forward = run


def _with_own_numbers(out: Any) -> Any:
    """Return a model's output with its scalars (such as the loss) cloned, because the next replay of the CUDA
    graph overwrites them.
    """
    import torch

    if isinstance(out, torch.Tensor):
        return out.clone() if out.numel() == 1 else out
    if isinstance(out, MutableMapping):
        for name, value in out.items():
            out[name] = _with_own_numbers(value)
        return out
    return tuple(map(_with_own_numbers, out)) if type(out) is tuple else out


def _takes_cache(model: Any) -> bool:
    """Return True if the forward pass of this model, or of the base model inside of adapters, accepts
    `use_cache`.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "use_cache" in inspect.signature(inner.forward).parameters


def compile_layers(model: torch.nn.Module, wish: CompileWish) -> None:
    """Compile each of the model's repeated layers."""
    for layers in _stacks_to_compile(model):
        for layer in layers:
            _ORIGINAL_FORWARDS[layer] = vars(layer).get("forward"), None
            layer.forward = _in_training(layer, layer.forward, wish)


def _stacks_to_compile(model: torch.nn.Module) -> Sequence[Sequence[torch.nn.Module]]:
    """Return the stacks of a model's repeated layers. Raises `RecipeError` for a model without any."""
    stacks = layer_stacks(model)
    if not stacks:
        raise RecipeError(
            f"{type(model).__name__} has no stack of layers that are alike, so there is nothing to compile "
            "layer by layer. Leave 'compiled' out of the recipe."
        )
    return stacks


def compile_lines(job: Job, wish: CompileWish, *, trainer: bool) -> tuple[str, ...]:
    """Return Python lines that compile a job's `model` in a script without snugfit, in the same way. With
    `trainer` a whole model is compiled by the Trainer's arguments. Raises `RecipeError` where plain torch is
    not enough."""
    # A generated script does not contain the graph pass that keeps random numbers (`memory_budget.py`).
    if wish.budget < 1 and job.stated_dropout():
        raise RecipeError(
            "the layers have dropout. With a budget torch draws other random numbers for it in the "
            "backward pass (pytorch issue 190758). snugfit keeps them, but a script cannot"
        )
    bounded = (
        "from torch._functorch import config as functorch",
        "",
        f"functorch.activation_memory_budget = {wish.budget}  # a share of a layer's default",
    )
    before = bounded if wish.budget < 1 else ()
    arguments = ", ".join(f'{name}="{value}"' for name, value in compile_arguments(wish).items())
    if wish.is_one_program:
        return (*before, *_model_lines(wish, arguments, trainer=trainer))
    without_cache = (
        "model.config.use_cache = False  # layers that fill a cache would each get a program of its own",
    )
    return (
        *before,
        *(() if wish.cache else without_cache),
        *limit_lines(wish),
        "for layer in model.modules():",
        f"    if type(layer).__name__ in {layer_names(job)!r}:",
        f"        layer.compile({arguments})",
    )


def limit_lines(wish: CompileWish) -> tuple[str, ...]:
    """Return the Python lines that set torch's recompile limit; none for torch's default."""
    if wish.limit == RECOMPILE_LIMIT:
        return ()
    return ("import torch._dynamo", "", f"torch._dynamo.config.recompile_limit = {wish.limit}")


@contextlib.contextmanager
def recompile_limit(limit: int) -> Iterator[None]:
    """Context in which torch compiles at most `limit` programs for one function."""
    import torch._dynamo

    with torch._dynamo.config.patch(recompile_limit=limit):
        yield


def _model_lines(wish: CompileWish, call_arguments: str, *, trainer: bool) -> tuple[str, ...]:
    """Return Python lines that compile the whole `model`. accelerate and the Trainer put autocast around the
    model's forward pass, so `model.compile()` has it within.
    """
    without_cache = "model.config.use_cache = False"
    if wish.autocast == "around":
        arguments = f"model.forward, {call_arguments}" if call_arguments else "model.forward"
        return without_cache, f"model.forward = torch.compile({arguments})"
    # The Trainer's own `torch_compile` puts autocast within the compiled code.
    if trainer:
        return ()
    return (
        "from torch._functorch import config as functorch",
        "",
        'functorch.backward_pass_autocast = "off"  # as where autocast begins within the model',
        without_cache,
        f"model.compile({call_arguments})",
    )


def compile_arguments(wish: CompileWish) -> dict[str, Any]:
    """Return the arguments of `torch.compile` that differ from its defaults; the memory budget is not among
    them.
    """
    settings = {"backend": (wish.backend, "inductor"), "mode": (wish.mode, "default")}
    return {name: value for name, (value, default) in settings.items() if value != default}


def compiled_function(forward: Callable[..., Any], wish: CompileWish) -> Callable[..., Any]:
    """Return a module's forward pass compiled by `torch.compile` with these options."""
    import torch

    # torch's own backend suffices for these defaults; all other settings need the one defined here.
    if wish.budget == 1 and wish.autocast == "around":
        compiled: Callable[..., Any] = torch.compile(forward, **compile_arguments(wish))
        return compiled
    within = torch.compile(forward, backend=_backend(wish))

    def run(*arguments: Any, **keywords: Any) -> Any:
        with plain_refusals():
            return within(*arguments, **keywords)

    return run


def _backend(wish: CompileWish) -> Any:
    """Return the `backend` argument of `torch.compile` for these options."""
    import torch

    inductor = InductorWithin(wish.budget, wish.mode)
    backend = inductor if wish.backend == "inductor" else torch._dynamo.lookup_backend(wish.backend)
    return backend if wish.autocast == "around" else BackwardWithoutAutocast(backend)


@dataclass(frozen=True)
class BackwardWithoutAutocast:
    """A backend of `torch.compile` that wraps another backend, so that backward passes are traced without
    autocast.
    """

    backend: Callable[[Any, Any], Any]

    def __call__(self, graph: Any, inputs: Any) -> Any:
        """Return the compiled program of a graph that Dynamo traced."""
        with autocast_begins("within"):
            return self.backend(graph, inputs)


@contextlib.contextmanager
def autocast_begins(position: str) -> Iterator[None]:
    """Context in which torch.compile traces as if autocast were entered `around` the compiled function or
    `within` it. torch traces a backward pass together with its forward pass, under the autocast that is
    active around them.
    """
    from torch._functorch import config as functorch

    with functorch.patch(backward_pass_autocast="off") if position == "within" else contextlib.nullcontext():
        yield


def _in_training(
    layer: torch.nn.Module, forward: Callable[..., Any], wish: CompileWish
) -> Callable[..., Any]:
    """Return a replacement of a forward pass that runs compiled in training, without a key-value cache unless
    `wish` has one. Evaluation, with batches of any length, runs uncompiled.
    """
    compiled = compiled_function(forward, wish)
    if not wish.cache:
        compiled = _without_cache(compiled)

    @functools.wraps(forward)
    def run(*arguments: Any, **keywords: Any) -> Any:
        return (compiled if layer.training else forward)(*arguments, **keywords)

    return run


def run_as_written(model: torch.nn.Module) -> None:
    """Restore the uncompiled forward passes that `compile_parts` replaced. A user's own compilation stays. A
    wrapper that another library put around a compiled forward pass stays too, around the uncompiled one.
    """
    for module in model.modules():
        if module in _ORIGINAL_FORWARDS:
            before, run = _ORIGINAL_FORWARDS.pop(module)
            # If a library wrapped the compiled forward pass later, its wrapper must stay.
            if run is not None and vars(module).get("forward") is not run:
                continue
            del module.forward
            if before is not None:
                module.forward = before


_ORIGINAL_FORWARDS: WeakKeyDictionary[
    torch.nn.Module, tuple[Callable[..., Any] | None, Callable[..., Any] | None]
] = WeakKeyDictionary()
"""Earlier forward method of each compiled module; for a model that was compiled as a whole, also the compiled
one."""


@contextlib.contextmanager
def whole_layers() -> Iterator[None]:
    """Context in which torch.compile does not split the programs of layers within DDP.

    torch would split them at DDP's buckets, so that gradients are averaged during a program
    (`torch/_dynamo/backends/distributed.py`). Those of a layer are averaged during the next layer's program
    anyway.
    """
    import torch._dynamo

    with torch._dynamo.config.patch(optimize_ddp=False):
        yield


OUTPUT = "-o"
"""The option of a C++ compiler that precedes its output file."""


@contextlib.contextmanager
def whole_files() -> Iterator[None]:
    """Context in which each output of Inductor's C++ compiler gets its final name only after the compiler has
    finished.

    g++ writes under the final name into Inductor's cache, and Inductor reads any existing file as complete. A
    killed compiler (a stopped container, no memory left) would leave a partial file. Each later start would
    fail on it. Inductor and Triton write their other files under a temporary name and rename them.
    """
    from torch._inductor import cpp_builder

    compile_now = cpp_builder.run_compile_cmd

    def compile_and_rename(command: str, cwd: str) -> None:
        words = shlex.split(command)
        # The value of the option is the word after it.
        at = words.index(OUTPUT) + 1 if OUTPUT in words[:-1] else None
        if at is None:
            return compile_now(command, cwd)
        target = Path(words[at])
        # Compilers run in parallel, so the name contains the process and the thread.
        written = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
        words[at] = str(written)
        try:
            compile_now(shlex.join(words), cwd)
            os.replace(Path(cwd, written), Path(cwd, target))
        finally:
            Path(cwd, written).unlink(missing_ok=True)
        return None

    with patch.object(cpp_builder, "run_compile_cmd", compile_and_rename):
        yield
