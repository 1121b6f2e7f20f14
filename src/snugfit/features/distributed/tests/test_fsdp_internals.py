"""Private names of torch's FSDP2 that `apply/adjacent_shards.py` replaces or reads.

Each method has the listed parameters and is called with that many values, and each attribute exists. A
version of torch that changes one fails here, before it gathers wrong weights.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param as parameters
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
from torch.distributed.fsdp._fully_shard import _fsdp_state as states

from snugfit.features.distributed.apply import adjacent_shards

METHODS: dict[str, tuple[tuple[str, ...], tuple[ModuleType, ...]]] = {
    "init_all_gather_outputs": (
        ("all_gather_input_numels", "all_gather_input_dtypes", "world_size", "device"),
        (collectives, groups),
    ),
    "alloc_all_gather_outputs": ((), (collectives,)),
    "init_unsharded_param": ((), (groups,)),
}
"""Replaced methods of `FSDPParam`, with their parameters and the modules that call them."""

OF_PARAMETER = {
    "all_gather_inputs", "all_gather_outputs", "orig_dtype", "param_dtype", "sharded_param", "_module_info",
    "_orig_size", "_sharded_param_data", "_unsharded_param",
}  # fmt: skip
"""Attributes of `FSDPParam` that are read or set."""

OF_GROUP = {"fsdp_params", "mp_policy"}
"""Attributes of `FSDPParamGroup` that are read."""

OF_OTHERS = {
    (FSDPModule, "_get_fsdp_state"), (states.FSDPState, "_fsdp_param_group"),
    (parameters.ParamModuleInfo, "module"), (parameters.ParamModuleInfo, "param_name"),
}  # fmt: skip
"""Further attributes of FSDP2's classes, each with its class."""


@cache
def tree_of(source: Any) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(source)))


def attributes_of(kind: type) -> set[str]:
    """Return the names that a class defines, annotates, or sets in its methods."""
    own = {
        node.attr
        for node in ast.walk(tree_of(kind))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }
    return own | vars(kind).keys() | inspect.get_annotations(kind).keys()


@pytest.mark.parametrize("name", METHODS)
def test_a_replaced_method_of_a_parameter_has_its_known_signature(name: str) -> None:
    names, callers = METHODS[name]
    assert tuple(inspect.signature(getattr(parameters.FSDPParam, name)).parameters)[1:] == names
    for module in callers:
        calls = [
            node
            for node in ast.walk(tree_of(module))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == f"fsdp_param.{name}"
        ]
        assert calls, f"{module.__name__} no longer calls it"
        assert all(len(call.args) == len(names) and not call.keywords for call in calls)


def test_gathered_shards_are_a_property() -> None:
    assert isinstance(vars(parameters.FSDPParam)["all_gather_inputs"], property)
    assert issubclass(adjacent_shards._words_class(), parameters.FSDPParam)


def test_attributes_of_parameters_and_groups_exist() -> None:
    assert attributes_of(parameters.FSDPParam) >= OF_PARAMETER | METHODS.keys()
    assert attributes_of(groups.FSDPParamGroup) >= OF_GROUP
    assert all(hasattr(kind, name) or name in inspect.get_annotations(kind) for kind, name in OF_OTHERS)


def test_no_other_private_name_is_used() -> None:
    source = ast.parse(Path(adjacent_shards.__file__).read_text(encoding="utf-8"))
    nodes = [node for node in ast.walk(source) if isinstance(node, ast.Attribute)]
    of_parameters = {node.attr for node in nodes if ast.unparse(node.value) in ("one", "member", "super()")}
    of_group = {node.attr for node in nodes if ast.unparse(node.value) == "group"}
    assert of_parameters <= OF_PARAMETER | METHODS.keys() | {"__class__"}
    assert of_group <= OF_GROUP
