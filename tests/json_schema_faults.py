"""Check a value against the parts of JSON Schema that `snugfit schema` uses.

An object with `properties` must have no further keys here. The schema itself allows keys of later versions.
"""

from __future__ import annotations

from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
KEYWORDS = {
    "$defs", "$ref", "$schema", "additionalProperties", "anyOf", "const", "description", "enum", "items",
    "maxItems", "minItems", "prefixItems", "properties", "required", "title", "type", "x-unit",
}  # fmt: skip


def faults(root: dict[str, Any], value: Any, seen: set[tuple[str, str]]) -> list[str]:
    """Return the faults of a document, and add its keys to `seen` by the name of their object."""
    return _faults(root, root, value, "document", seen)


def _faults(
    root: dict[str, Any], schema: dict[str, Any], value: Any, place: str, seen: set[tuple[str, str]]
) -> list[str]:
    assert set(schema) <= KEYWORDS, f"{place}: unknown keywords {set(schema) - KEYWORDS}"
    found: list[str] = []
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        found += _faults(root, root["$defs"][name], value, name, seen)
    if "anyOf" in schema:
        found += _faults_of_choices(root, schema["anyOf"], value, place, seen)
    if "const" in schema and value != schema["const"]:
        found.append(f"{place}: {value!r} is not {schema['const']!r}")
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{place}: {value!r} is not one of {schema['enum']}")
    if not _has_type(schema.get("type"), value):
        return [*found, f"{place}: {value!r} is not of type {schema['type']}"]
    if isinstance(value, list):
        entries = schema.get("prefixItems") or [schema.get("items", {})] * len(value)
        if len(entries) != len(value):
            found.append(f"{place}: {len(value)} entries instead of {len(entries)}")
        for entry, one in zip(entries, value, strict=False):
            found += _faults(root, entry, one, f"{place}[]", seen)
    if isinstance(value, dict) and "properties" in schema:
        known = schema["properties"]
        found += [f"{place}: without {name}" for name in schema["required"] if name not in value]
        found += [f"{place}: further key {name}" for name in value if name not in known]
        for name in known.keys() & value.keys():
            seen.add((place, name))
            found += _faults(root, known[name], value[name], f"{place}.{name}", seen)
    if isinstance(value, dict) and "additionalProperties" in schema:
        for name, one in value.items():
            found += _faults(root, schema["additionalProperties"], one, f"{place}.{name}", seen)
    return found


def _faults_of_choices(
    root: dict[str, Any], choices: list[dict[str, Any]], value: Any, place: str, seen: set[tuple[str, str]]
) -> list[str]:
    """Return no faults if a choice has none, else those of the choice with the fewest."""
    tried: list[list[str]] = []
    for choice in choices:
        keys: set[tuple[str, str]] = set()
        if not (found := _faults(root, choice, value, place, keys)):
            seen |= keys
            return []
        tried.append(found)
    return min(tried, key=len)


def _has_type(names: str | list[str] | None, value: Any) -> bool:
    if names is None:
        return True
    listed = [names] if isinstance(names, str) else names
    if isinstance(value, bool):
        return "boolean" in listed
    return any(isinstance(value, TYPES[name]) for name in listed)
