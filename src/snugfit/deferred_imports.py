"""Deferral of imports that transformers and peft make for every model, until a job uses them.

Importing any model of transformers imports modules that few models use: DTensor, FSDP, distributed
checkpoints, torchao and torch's compiler. DTensor also imports torch's symbolic shapes, peft imports
bitsandbytes, and `TrainingArguments` imports peft. These imports take more CPU seconds than a prediction.
While `defer_imports` is in force, both receive placeholders for the modules and names of `DEFERRED_MODULES`.

The first use of a placeholder, or any other import of its module, ends the deferral, except for `ALONE`. All
modules are imported then, and each name that refers to a placeholder is rebound to the real object. Until
then no object of a real class exists, so `isinstance` with a placeholder is False. A simulation that is
running does not record these imports.

The compiler has a placeholder of its own. Functions that are excluded from compilation run unchanged. Calls
of the compiler's decorators are stored and repeated after its import.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from snugfit.hub_kernels import no_hub_kernels, only_errors

DEFERRED_MODULES = frozenset(
    {
        "bitsandbytes",
        "bitsandbytes.nn",
        "peft",
        "torch._dynamo._trace_wrapped_higher_order_op",
        "torch.distributed._composable.fsdp",
        "torch.distributed.checkpoint.hf_storage",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "torch.distributed.tensor._utils",
        "torch.distributed.tensor.placement_types",
        "torchao.prototype.safetensors.safetensors_support",
        "torchao.utils",
        "transformers.distributed.expert_parallel",
        "transformers.distributed.tensor_parallel",
        "triton.runtime.jit",
    }
)
"""Names of modules whose import is deferred."""

IMPORTERS = ("transformers.", "peft.", "torch.utils.flop_counter")
"""Prefixes of modules that import placeholders instead of the real modules."""

SYMBOLIC = frozenset({"sympy", "torch.fx.experimental.symbolic_shapes", "torch.utils._sympy.functions"})
"""Modules about symbolic shapes (tensor sizes as variables). Other modules import their names only within
functions.
"""

ALONE = SYMBOLIC | {"peft"}
"""Modules whose real import does not end the deferral of the others."""

PLAIN_SIZE_MODULES = ("torch._prims", "torch._refs", "torch._decomp", "torch._meta_registrations")
"""Prefixes of modules that pass plain integers to functions about symbolic shapes. The module `torch` does so
too.
"""

COMPILER, SETTINGS = "torch._dynamo", "torch._dynamo.config"

DTENSOR = "torch.distributed.tensor"
"""Module that peft reads as an attribute of `torch.distributed`, without an import."""

PLAIN_NUMBER_FUNCTIONS: Mapping[str, Callable[..., object]] = {
    "expect_true": bool,
    "free_unbacked_symbols": lambda numbers: set(),
    "guard_or_false": bool,
    "guard_or_true": bool,
    "guard_size_oblivious": bool,
    "statically_known_true": bool,
    "is_nested_int": lambda number: False,
    "sym_and": lambda *truths: all(truths),
    "sym_eq": operator.eq,
    "sym_or": lambda *truths: any(truths),
}
"""Replacements of functions about symbolic shapes, by function name. They are valid for plain integers."""

USERS = frozenset({"torch._compile", "torch.compiler", "torch.optim.optimizer"})
"""Modules in which `import torch._dynamo` is skipped: their functions use it through `torch`."""

REGISTERING = ("allow_in_graph", "assume_constant_result")
"""Names of the compiler's decorators that register a function and return it."""

UNCOMPILED_ATTRIBUTE = "__dynamo_disable"
"""Name of a function's attribute in which torch caches its variant that is excluded from compilation."""


LISTING, READS_LIST = "transformers.utils.import_utils", "fetch__all__"
"""Module and function that search all 2,000 source files of transformers for their lists `__all__`.

The function examines every line, which takes a sixth of a CPU second. The list is the end of its file. So the
replacement gives the function only the text from the last `__all__` on.
"""


class PutOffName(type):
    """Metaclass of placeholders for deferred names. They are classes, so that they work in unions and in
    `isinstance`."""

    module: str
    """The module that defines the real object."""

    def __instancecheck__(cls, instance: object) -> bool:
        return cls.module in sys.modules and isinstance(instance, _real(cls))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return cls.module in sys.modules and issubclass(subclass, _real(cls))

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        answer = PLAIN_NUMBER_FUNCTIONS.get(cls.__name__)
        if answer is not None and not keywords and all(map(_is_plain, arguments)):
            return answer(*arguments)
        return _real(cls)(*arguments, **keywords)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(cls), name)


class _PutOffModule(ModuleType):
    """A placeholder module whose attributes are placeholders."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        stand_in: Any = (
            _PutOffModule(full)
            if full in DEFERRED_MODULES
            else PutOffName(name, (), {"module": self.__name__})
        )
        setattr(self, name, stand_in)
        return stand_in


class _UncompiledFunction:
    """Wrapper of a function that torch's compiler must skip, used until the compiler is imported. It has only
    a weak reference to the function, because the function refers to this object. A strong reference would
    form a cycle that delays the release of memory.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = weakref.ref(function)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        function = self._function()
        assert function is not None
        return function(*arguments, **keywords)

    def forget(self) -> None:
        """Remove this wrapper from its function, so that torch disables compilation of the function again."""
        function = self._function()
        if function is not None and vars(function).get(UNCOMPILED_ATTRIBUTE) is self:
            delattr(function, UNCOMPILED_ATTRIBUTE)


class _StandInSettings:
    """Placeholder of `torch._dynamo.config`. Access to a setting that is not listed here imports the
    compiler.
    """

    error_on_nested_fx_trace = True
    """Setting of the compiler that checkpointing reads at each call. It has an effect only while `torch.fx`
    traces a model.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(SETTINGS), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(importlib.import_module(SETTINGS), name, value)


class _StandInCompiler:
    """Placeholder of `torch._dynamo` until it is imported."""

    config = _StandInSettings()

    def __init__(self) -> None:
        self._registered: list[tuple[str, Any]] = []
        self._as_they_are: list[weakref.ref[_UncompiledFunction]] = []

    def disable(self, fn: Any = None, recursive: bool = True, *, wrapping: bool = True, **_: Any) -> Any:
        """Return a function that is excluded from compilation, in the place of `torch._dynamo.disable`.

        For a decorator, the function imports the compiler at its first call. `torch._compile` passes
        `wrapping=False`; its function only calls `fn`.
        """
        from torch._compile import _disable_dynamo

        if wrapping or fn is None:
            return _disable_dynamo(fn, recursive)
        as_it_is = _UncompiledFunction(fn)
        self._as_they_are.append(weakref.ref(as_it_is))
        return as_it_is

    def graph_break(self, msg: str = "") -> None:
        """Do nothing, since no code is compiled before the compiler is imported."""

    def __getattr__(self, name: str) -> Any:
        if name not in REGISTERING:
            return getattr(importlib.import_module(COMPILER), name)

        def register(function: Any) -> Any:
            self._registered.append((name, function))
            return function

        return register

    def hand_over(self) -> None:
        """Repeat the stored decorator calls with the imported compiler, and detach the wrappers of excluded
        functions.
        """
        registered, self._registered = self._registered, []
        for name, function in registered:
            getattr(importlib.import_module(COMPILER), name)(function)
        for reference in self._as_they_are:
            if (as_it_is := reference()) is not None:
                as_it_is.forget()
        self._as_they_are.clear()


def _real(stand_in: PutOffName) -> Any:
    if stand_in.module not in ALONE:
        _DEFERRAL.complete()
    return getattr(importlib.import_module(stand_in.module), stand_in.__name__)


class _Deferral:
    """Replacement of Python's `__import__` that returns placeholders for rarely used modules. As an import
    finder, it also detects real imports of them.
    """

    def __init__(self) -> None:
        self.active = False
        self._stand_ins: dict[str, _PutOffModule] = {}
        self._symbolic: dict[str, _PutOffModule] = {}
        self._import = builtins.__import__
        self._compiler = _StandInCompiler()

    def begin(self) -> None:
        """Replace Python's import functions, unless transformers' models are imported already."""
        if self.active or "transformers.modeling_utils" in sys.modules or COMPILER in sys.modules:
            return
        import torch

        self.active = True
        self._import = builtins.__import__
        builtins.__import__ = self._import_or_stand_in
        sys.meta_path.insert(0, self)
        vars(torch)["_dynamo"] = self._compiler
        vars(torch.distributed).setdefault("tensor", self._stand_in_of(DTENSOR))

    def _stand_in_of(self, module: str) -> _PutOffModule:
        return self._stand_ins.setdefault(module, _PutOffModule(module))

    def _import_or_stand_in(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        importer = "" if globals is None else str(globals.get("__name__", ""))
        if (fromlist or name in DEFERRED_MODULES) and importer.startswith(IMPORTERS):
            assert globals is not None
            full = _absolute(name, str(globals.get("__package__", "")), level)
            if (
                full in DEFERRED_MODULES
                and full not in sys.modules
                and full != importer
                # The importer of a package that is not installed must get the ImportError.
                and importlib.util.find_spec(full.partition(".")[0])
            ):
                return self._stand_in_of(full)
        elif name in SYMBOLIC and name not in sys.modules:
            if importer == "torch" or importer.startswith(PLAIN_SIZE_MODULES):
                return self._symbolic.setdefault(name, _PutOffModule(name))
        elif name == COMPILER and not fromlist and importer in USERS:
            return sys.modules["torch"]
        return self._import(name, globals, locals, fromlist or (), level)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the import spec of a deferred module; None for any other. Its loader ends the deferral and
        rebinds the placeholders.
        """
        if name not in DEFERRED_MODULES and name not in SYMBOLIC and name != COMPILER:
            return None
        spec = PathFinder.find_spec(name, path, target)
        loader: Any = spec and spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_alone(module: ModuleType) -> None:
                with _outside_of_modes():
                    if name in ALONE:
                        execute(module)
                        return
                    self._end()
                    execute(module)
                    self._bind_real()

            loader.exec_module = execute_alone
        return spec

    def complete(self) -> None:
        """Import every deferred module, and replace its placeholders by the real objects."""
        with _outside_of_modes():
            self._end()
            self._bind_real()

    def _end(self) -> None:
        """Restore Python's import functions."""
        if not self.active:
            return
        self.active = False
        import torch

        if builtins.__import__ == self._import_or_stand_in:
            builtins.__import__ = self._import
        sys.meta_path.remove(self)
        if vars(torch).get("_dynamo") is self._compiler:
            del torch._dynamo
        if type(vars(torch.distributed).get("tensor")) is _PutOffModule:
            del torch.distributed.tensor

    def _bind_real(self) -> None:
        """Import the deferred modules, and rebind each name that refers to a placeholder. Repeat the
        compiler's decorator calls too.
        """
        self._compiler.hand_over()
        given, self._stand_ins = self._stand_ins, {}
        real: dict[int, Any] = {}
        with no_hub_kernels():
            for module_name, module in given.items():
                real[id(module)] = importlib.import_module(module_name)
                names = [name for name, value in vars(module).items() if isinstance(value, PutOffName)]
                for name in names:
                    real[id(vars(module)[name])] = getattr(real[id(module)], name)
        for loaded in list(sys.modules.values()):
            bound: dict[str, Any] = getattr(loaded, "__dict__", None) or {}
            for name, value in list(bound.items()):
                if type(value) in (PutOffName, _PutOffModule) and id(value) in real:
                    bound[name] = real[id(value)]


class _ListFinder:
    """Import finder that replaces `fetch__all__` of transformers, which parses a file's `__all__` list."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the import spec of the module that defines `fetch__all__`; None for any other. Its loader
        replaces the function after the module has run.
        """
        if name != LISTING:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        loader: Any = spec and spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_replace(module: ModuleType) -> None:
                execute(module)
                if READS_LIST in vars(module):
                    setattr(module, READS_LIST, of_last_list(getattr(module, READS_LIST)))

            loader.exec_module = execute_and_replace
        return spec


def of_last_list(read: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """Return a function that applies `read` only to the text from a file's last `__all__` on. `read` is
    transformers' parser of that list.
    """
    return lambda text: read(text[text.rfind("\n__all__") + 1 :])


def hasten_import() -> None:
    """Install an import finder that speeds up transformers' search of its source files."""
    if LISTING not in sys.modules:
        sys.meta_path.insert(0, _ListFinder())


_DEFERRAL = _Deferral()


def defer_imports() -> None:
    """Start to defer imports of rare modules, unless the process has imported a model of transformers."""
    _DEFERRAL.begin()


def are_put_off() -> bool:
    """Return True while imports of rarely used modules are deferred. A simulation during which the deferral
    ended is repeated.
    """
    return _DEFERRAL.active


def complete_imports() -> None:
    """Import the deferred modules now, and end the deferral."""
    if _DEFERRAL.active:
        _DEFERRAL.complete()


def _is_plain(value: object) -> bool:
    """Return True if a value is a number, a tuple of numbers or a tensor, without symbolic sizes."""
    import torch

    if isinstance(value, torch.Tensor):
        value = (*value.shape, *value.stride(), value.storage_offset())
    return type(value) in (bool, int) or (
        isinstance(value, tuple) and all(type(element) is int for element in value)
    )


def _absolute(name: str, package: str, level: int) -> str:
    if level == 0:
        return name
    base = package.rsplit(".", level - 1)[0] if level > 1 else package
    return f"{base}.{name}" if name else base


@contextlib.contextmanager
def _outside_of_modes() -> Iterator[None]:
    """Context in which computations at import are invisible to torch's modes (a recorder, the device of a
    `with`), and library warnings are hidden.
    """
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with only_errors(), _disable_current_modes(), torch._C.DisableTorchFunction():
        yield
