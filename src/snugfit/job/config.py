"""Reading of a config.json: within size limits, and with its values checked before any library reads them.

A config.json is untrusted input, and transformers trusts it. A key may name code on the hub, a size may be
10**12, a file may be a pipe that never ends. So it is read here first, with one error type, in three steps:
the file, its text, its facts. (Facts are the values that determine the model.)

The facts leave out settings of a recipe (attention and expert kernels) and names that change no byte (labels,
versions, paths). They have the checkpoint's dtype once, under "dtype".

Anchors: CVE-2026-4372 (`_attn_implementation_internal` led to code from the hub), CVE-2026-5241 (a nested
config switched remote code on).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from snugfit.documents import BadDocument, parse_json, read_limited
from snugfit.errors import ModelError, did_you_mean
from snugfit.job.architectures import model_types, transformers_version
from snugfit.job.dtype import KEYS, config_dtype

LARGEST_FILE = 4 << 20
DEEPEST = 32
MOST_LAYERS = 1_000
"""Largest accepted number of layers: that of DeepNet, the deepest published transformer (arXiv:2203.00555).
The allocator replays each operator of each layer. So a prediction of this depth takes half a minute, and a
plan takes minutes.
"""

LARGEST_SIZE = 1 << 24

BASES = frozenset({
    "rope_theta", "global_rope_theta", "local_rope_theta", "rope_local_base_freq", "rotary_emb_base",
})  # fmt: skip
"""Config keys of the bases of rotary position embeddings. Their values must be above 0."""

LAYERS = frozenset({
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "num_encoder_layers",
    "encoder_layers", "decoder_layers",
})  # fmt: skip
"""Config keys that count layers, over all architectures."""

SIZES = frozenset({
    "hidden_size", "d_model", "n_embd", "dim", "embedding_size", "embed_dim", "intermediate_size",
    "moe_intermediate_size", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim",
    "hidden_dim", "num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads",
    "encoder_attention_heads", "decoder_attention_heads", "head_dim", "d_kv", "vocab_size",
    "max_position_embeddings", "n_positions", "n_ctx", "max_source_positions",
    "max_target_positions", "num_mel_bins", "image_size", "patch_size", "num_channels",
})  # fmt: skip
"""Config keys of sizes or counts, whose values must be at least 1."""

PARTS = frozenset({"type_vocab_size", "num_local_experts", "num_experts", "num_experts_per_tok"})
"""Config keys that count optional parts of a model. Their values may be 0."""

HEADS_OF = (
    ("num_attention_heads", "hidden_size"),
    ("n_head", "n_embd"),
    ("encoder_attention_heads", "d_model"),
    ("decoder_attention_heads", "d_model"),
    ("n_heads", "dim"),
)
"""Config keys of head counts, each with the key of the width that the count divides. The check applies to
configs without a width of one head.
"""

HEAD_WIDTHS = ("head_dim", "d_kv", "kv_channels", "qk_nope_head_dim", "attention_head_size")

DTYPES = frozenset({
    "float16", "bfloat16", "float32", "float64", "half", "float", "double", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
})  # fmt: skip
"""Names of torch's floating-point dtypes."""

# transformers ignores `auto_map` without trust_remote_code. Answers report both keys (`ignored_keys`).
IGNORED_KEYS = ("auto_map", "quantization_config")
"""Config keys that do not change the model. Answers report them as ignored."""

# An infinite number is `Infinity` in Python's JSON; this form keeps the facts strict JSON.
FLOAT_TAG = "__float__"
INFINITE = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
"""Numbers that JSON does not have, by their names. transformers writes such a number as an object with one
key and this name.
"""

NAMES_ONLY = frozenset({
    "_name_or_path", "_commit_hash", "transformers_version", "id2label", "label2id",
    "num_labels", "problem_type", "finetuning_task", "task_specific_params", "tokenizer_class",
    "pipeline_tag",
})  # fmt: skip

Facts = dict[str, Any]


def read_config(path: Path) -> Facts:
    """Return the values of the config.json at `path` that determine the model. Raises `ModelError` for any
    file that cannot be used.
    """
    try:
        # A regular file only, opened without blocking: a pipe would never end.
        content = read_limited(path, LARGEST_FILE)
    except OSError as error:
        raise ModelError(
            f"{path}: cannot be read ({_cause(path, error)}). Name a file that can be read."
        ) from None
    except BadDocument as fault:
        raise ModelError(f"{path}: {fault}. A config.json must not be larger than 4 MiB.") from None
    return parse_config(content, location=str(path))


def parse_config(content: bytes, *, location: str) -> Facts:
    """Return the values of a config.json's `content` that determine the model; `location` begins every error
    message.
    """
    try:
        # `constants` allows `Infinity`, which Python's JSON writes.
        document = _tag_infinite(parse_json(content.decode("utf-8"), constants=True))
    except UnicodeDecodeError:
        raise ModelError(
            f"{location}: this is not UTF-8 text. A config.json is JSON in UTF-8. Save it in UTF-8."
        ) from None
    # Deep nesting exceeds Python's own limit before `_depth` can count it.
    except RecursionError:
        raise ModelError(
            f"{location}: nested more than {DEEPEST} levels deep. Give a model's own config.json."
        ) from None
    except ValueError as error:
        cause = error if content.strip() else "it is empty"
        raise ModelError(f"{location}: not a config.json: {cause}. Give a model's own config.json.") from None
    if not isinstance(document, dict):
        raise ModelError(f"{location}: this is {_kind(document)}; a config.json must be one JSON object.")
    return check_facts(document, where=location)


def check_facts(document: Mapping[str, Any], *, where: str) -> Facts:
    """Check the values of a config.json, and return those that determine the model's sizes."""
    model_type = document.get("model_type")
    if not isinstance(model_type, str):
        lacks = "has no" if model_type is None else f"{_show(model_type)} is not a"
        raise ModelError(f'{where}: {lacks} "model_type", the name of an architecture such as "bert".')
    if _depth(document) > DEEPEST:
        raise ModelError(f"{where}: nested more than {DEEPEST} levels deep. Give a model's own config.json.")
    # A nested config can choose code and sizes too (CVE-2026-5241).
    for config in _configs(document):
        for complaint in _complaints(config):
            raise ModelError(f"{where}: {complaint}")
    # Known architectures only, and last, so that a dangerous key is reported first.
    if model_type not in model_types():
        own_code = ' Its "auto_map" names custom code, and snugfit does not run code from a config.'
        raise ModelError(
            f"{where}: the installed transformers {transformers_version()} does not know the "
            f"architecture {model_type!r}; another version may have "
            f"it.{did_you_mean(model_type, model_types())}{own_code if document.get('auto_map') else ''}"
        )
    dtype = config_dtype(document)
    return _sizes_of(document) | ({"dtype": dtype} if dtype else {})


def without_ignored(facts: str) -> Facts:
    """Return the values of a config.json (canonical JSON text `facts`) without the ignored keys, from which a
    model is built.

    Infinite numbers become floats.
    """

    def build(node: dict[str, Any]) -> Any:
        if node.keys() == {FLOAT_TAG} and node[FLOAT_TAG] in INFINITE:
            return INFINITE[node[FLOAT_TAG]]
        return {key: value for key, value in node.items() if key not in IGNORED_KEYS}

    document: Facts = json.loads(facts, object_hook=build)
    return document


def ignored_keys(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ignored keys of a config.json with their values."""
    return {key: node[key] for node in _configs(facts) for key in IGNORED_KEYS if node.get(key)}


def _tag_infinite(value: Any) -> Any:
    """Return the JSON value with infinite numbers in transformers' notation. Raises `ValueError` for NaN."""
    if isinstance(value, dict):
        return {key: _tag_infinite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_tag_infinite(inner) for inner in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if math.isnan(value):
        raise ValueError("NaN is not a JSON number")
    return {FLOAT_TAG: "Infinity" if value > 0 else "-Infinity"}


def _complaints(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error message for each invalid value in a model's config.json, and in configs nested in it.
    The most dangerous one is first.
    """
    yield from _outside_code(config)
    for key in sorted(LAYERS & config.keys()):
        # Otherwise a size of 10**12 would fail much later, with an error that does not name it.
        yield from _out_of_range(key, config[key], MOST_LAYERS)
    for key in sorted(SIZES & config.keys()):
        yield from _out_of_range(key, config[key], LARGEST_SIZE)
    for key in sorted(PARTS & config.keys()):
        yield from _out_of_range(key, config[key], LARGEST_SIZE, lowest=0)
    for key in sorted(BASES & config.keys()):
        yield from _no_base(key, config[key])
    if not isinstance(config.get("text_config"), dict | None):
        yield (
            f'"text_config" is {_show(config["text_config"])}; it must be an object, the config of the '
            "text model."
        )
    yield from _uneven_heads(config)
    yield from _uneven_parts(config)
    for key in KEYS:
        dtype = config.get(key)
        if dtype is not None and str(dtype).removeprefix("torch.") not in DTYPES:
            yield (
                f'"{key}" is {_show(dtype)}, which is not a floating-point dtype of torch, such as '
                '"bfloat16".'
            )


def _outside_code(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each key that names code, weights or kernels from outside the installed
    transformers.
    """
    if config.get("trust_remote_code"):
        yield (
            '"trust_remote_code" enables custom code, and snugfit does not run code from a config. '
            "Remove the key to use the architecture that transformers has for this model_type."
        )
    if config.get("use_pretrained_backbone"):
        yield '"use_pretrained_backbone" would download weights; set it to false.'
    for key, value in config.items():
        # A kernel from the hub has an owner in its name, and runs code.
        if _chooses_kernels(key) and "/" in json.dumps(value):
            yield (f'"{key}" is {_show(value)}: snugfit does not run kernels from the hub. Remove the key.')


def _out_of_range(key: str, value: Any, limit: int, *, lowest: int = 1) -> Iterator[str]:
    """Yield an error message unless a config's size is absent (null), a whole number in [lowest, limit], or a
    list of these.
    """
    for number in value if isinstance(value, list) else (value,):
        if number is None:
            continue
        # 1200.0 counts as a whole number, since transformers writes such numbers.
        if not _is_whole(number) or not lowest <= number <= limit:
            yield f'"{key}" is {_show(value)}; allowed are whole numbers from {lowest} to {limit:,}.'
            return


def _no_base(key: str, value: Any) -> Iterator[str]:
    """Yield an error message unless the base of rotary embeddings in the config is absent (null), a number
    above 0, or a list of these.
    """
    for number in value if isinstance(value, list) else (value,):
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if number is not None and not (is_number and number > 0):
            yield f'"{key}" is {_show(value)}; allowed are numbers above 0, such as 10000.0.'
            return


def _is_whole(number: Any) -> bool:
    whole_float = isinstance(number, float) and number.is_integer()
    return whole_float or (isinstance(number, int) and not isinstance(number, bool))


def _uneven_heads(config: Mapping[str, Any]) -> Iterator[str]:
    # If the config has a width of one head, the number of heads need not divide the model's width.
    if any(config.get(key) for key in HEAD_WIDTHS):
        return
    for heads_key, width_key in HEADS_OF:
        heads, width = config.get(heads_key), config.get(width_key)
        uneven = isinstance(heads, int) and isinstance(width, int) and width % heads
        if uneven and not _takes_uneven_heads(config.get("model_type"), heads_key, width_key):
            yield f'"{heads_key}" is {heads}, which does not divide "{width_key}", {width}.'


def _takes_uneven_heads(model_type: object, heads_key: str, width_key: str) -> bool:
    """Return True if attention heads of this architecture may have another width than hidden size / heads.

    Some have a width of their own when the config names none (GLM's 128). In others, the default hidden size
    is no multiple of the heads (GLM-4.5: 4096 and 96), and the remainder is cut. The function imports
    transformers.
    """
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return False
    try:
        # The class's default config shows if its heads divide the width.
        default = CONFIG_MAPPING[model_type]()
    except Exception:  # a class without defaults for its sizes has no width of one head
        return False
    if any(isinstance(getattr(default, key, None), int) for key in HEAD_WIDTHS):
        return True
    heads, width = getattr(default, heads_key, None), getattr(default, width_key, None)
    return isinstance(heads, int) and isinstance(width, int) and width % heads != 0


def _uneven_parts(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error message for uneven heads of keys and values, and for more experts per token than exist.

    Each head of keys and values must serve the same number of query heads.
    """
    shared, heads = config.get("num_key_value_heads"), config.get("num_attention_heads")
    if isinstance(shared, int) and isinstance(heads, int) and heads % shared:
        yield f'"num_key_value_heads" is {shared}, which does not divide "num_attention_heads", {heads}.'
    per_token = config.get("num_experts_per_tok")
    for key in ("num_local_experts", "num_experts"):
        experts = config.get(key)
        if isinstance(per_token, int) and isinstance(experts, int) and 0 < experts < per_token:
            yield f'"num_experts_per_tok" is {per_token}, more than "{key}", which is {experts}.'


def _configs(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a model's config and every object nested in it."""
    yield document
    for value in document.values():
        # Lists may contain configs too.
        for item in value if isinstance(value, list) else (value,):
            if isinstance(item, dict):
                yield from _configs(item)


def _sizes_of(config: Mapping[str, Any]) -> Facts:
    """Return a model's config without dtypes, without settings that a recipe determines, and without names
    that do not change a size.
    """
    return {
        key: _sizes_of(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in NAMES_ONLY and key not in KEYS and not _chooses_kernels(key)
    }


def _chooses_kernels(key: str) -> bool:
    # Keys with these prefixes select implementations, internal ones included (CVE-2026-4372).
    return key.startswith(("_attn", "_experts")) or key in ("attn_implementation", "experts_implementation")


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(_depth, value), default=0)
    return 0


def _kind(value: object) -> str:
    kinds = {list: "a list", str: "a text", type(None): "null", bool: "true or false"}
    return kinds.get(type(value), "a number")


def _show(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _cause(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError) and os.path.islink(path):
        return "a broken link"
    return (error.strerror or type(error).__name__).lower()
