"""Models whose forward pass runs an exported file in ONNX Runtime or OpenVINO.

Such a model has the class, the config and the module tree of the original, with weights on `meta`. So
transformers' `generate` works with it, and only the engine holds weights in memory.
"""

from __future__ import annotations

import functools
import importlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.errors import UsageError, one_line
from snugfit.versions import torch_cuda

if TYPE_CHECKING:
    import torch


CUDA_PROVIDER = "CUDAExecutionProvider"
"""ONNX Runtime's name of its kernels for NVIDIA's GPUs."""


def exported_model(engine: str, loop: Any) -> Any:
    """Export the model of a step, load the file, and return a model whose forward pass runs it.

    Time and memory of the export are added to the measurement of the step.
    """
    from snugfit.features.engines.export import export
    from snugfit.features.engines.session_memory import watch_session

    arguments, model = runner_arguments(engine, loop), skeleton(loop)
    if loop.job.added_phase is not None:
        _refuse_other_caches(engine, model)
    # The libraries have mapped the exported files into memory, so their names may be removed.
    with tempfile.TemporaryDirectory(prefix="snugfit-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        facts = export(engine, loop, folder)
        loop.results |= {
            "engine": f"{engine} {version_of_engine(engine)}",
            "export_seconds": facts["seconds"],
            "export_peak_bytes": facts["peak_bytes"],
            "file_bytes": sum(path.stat().st_size for path in folder.iterdir()),
        }
        check_file(engine, folder)
        # Later imports of the engine's packages would count as memory of the session.
        watch_session(engine, loop)
        begin = time.monotonic()
        exported = load(engine, folder, loop, arguments)
        loop.results["load_seconds"] = time.monotonic() - begin
    return with_forward(model, exported, loop.device, facts.get("cache"))


def tensorrt_model(loop: Any, build: Callable[[], Any]) -> Any:
    """Return the model compiled by torch-tensorrt. Without that package, return one that runs the exported
    ONNX file.
    """
    try:
        import torch_tensorrt  # noqa: F401

        missing = "" if loop.device.type == "cuda" else "TensorRT needs a GPU"
    # If TensorRT's libraries are missing, ONNX Runtime raises a plain Exception.
    except Exception as error:
        missing = f"torch_tensorrt cannot be imported ({one_line(error, 200)})"
    if missing:
        model = exported_model("onnxruntime", loop)
        loop.results["note"] = f"{missing}. The ONNX file was checked, and run in ONNX Runtime instead."
        return model
    model = build()
    model.compile(backend="torch_tensorrt")
    return model


def runner_arguments(engine: str, loop: Any) -> dict[str, Any]:
    """Return the arguments with which transformers loads an export: torch's number of threads, and the
    precision.

    Raises `UsageError` for a device that the installed library does not support.
    """
    import torch

    if engine == "openvino":
        if loop.device.type != "cpu":
            raise UsageError("openvino runs on the CPU. Add --device cpu.")
        dtype = loop.setup.created_dtype(loop.job)
        # A loaded file has lost the precision hint of its export. Without it, a CPU with bf16 instructions
        # computes in bf16.
        precision = {"float32": {"INFERENCE_PRECISION_HINT": "f32"}}.get(dtype, {})
        return {
            "device": loop.device,
            "config": {"INFERENCE_NUM_THREADS": torch.get_num_threads(), **precision},
        }
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if loop.device.type != "cuda":
        return {"device": loop.device, "session_options": options}
    if CUDA_PROVIDER not in onnxruntime.get_available_providers():
        raise UsageError(
            "The installed onnxruntime has no CUDA. Add --device cpu, or install onnxruntime-gpu instead."
        )
    # Its default computes products in TF32, whose error is about 1e-3.
    cuda = {"device_id": loop.device.index or 0, "use_tf32": "0"}
    return {"providers": [(CUDA_PROVIDER, cuda), "CPUExecutionProvider"], "session_options": options}


def check_file(engine: str, folder: Path) -> None:
    """Import the packages that load an exported model. Check an ONNX file."""
    from transformers.exporters.auto import get_runner_class

    from snugfit.features.engines.export import FORMATS

    get_runner_class(FORMATS[engine])
    if engine == "onnxruntime":
        import onnx

        onnx.checker.check_model(str(folder / "model.onnx"))


def load(engine: str, folder: Path, loop: Any, arguments: Mapping[str, Any]) -> Any:
    """Return transformers' `ExportedModel` in a folder. Raises `UsageError` for a file that the engine cannot
    load.
    """
    from transformers.exporters import ExportedModel

    try:
        exported = ExportedModel.from_pretrained(folder, **arguments)
    # ONNX Runtime has no common error class, and no kernels for some dtypes.
    except Exception as error:
        raise UsageError(
            f"{engine} cannot load the exported model: {one_line(error, 300)}. Try --dtype float32."
        ) from None
    if exported.device.type != loop.device.type:
        # ONNX Runtime prints why it cannot load its library for CUDA, and then runs on the CPU.
        raise UsageError(
            f"{engine} {version_of_engine(engine)} found no libraries of its CUDA version, and would run on "
            f"the CPU. torch has CUDA {torch_cuda()}. Install onnxruntime-gpu for it, or add --device cpu."
        )
    return exported


def version_of_engine(engine: str) -> str:
    """Return the version of the imported library `onnxruntime` or `openvino`.

    Packages of other names have the same library, such as onnxruntime-gpu.
    """
    return str(importlib.import_module(engine).__version__)


def _refuse_other_caches(engine: str, model: Any) -> None:
    """Raise `UsageError` for a model whose cache holds other tensors than the keys and values of all
    tokens.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    # Exporting such a cache would fix the window's length, or the number of tokens in a state.
    if not all(type(layer) is DynamicLayer for layer in cache.layers):
        raise UsageError(
            f"{engine}: the model's cache has windows or states, and such a decode step was not tested with "
            "it. Leave it out."
        )


def skeleton(loop: Any) -> Any:
    """Return the model of a step (an evaluation or generation) on `meta`."""
    import torch

    from snugfit.job.build import instantiate
    from snugfit.step.applier import model_arguments

    with torch.device("meta"):
        return instantiate(loop.job, **model_arguments(loop.setup))


def with_forward(model: Any, exported: Any, device: torch.device, cache: Sequence[Any] | None) -> Any:
    """Return the model with a forward pass that runs the export on a device.

    `cache` has the shapes of keys and values by layer, for a model that generates.
    """
    traced, forward = frozenset(exported.runners["model"].metadata.kwargs), model.forward

    @functools.wraps(forward)
    def run(**inputs: Any) -> Any:
        if cache is not None:
            begin_cache(inputs["past_key_values"], cache, len(inputs["input_ids"]), device, exported.dtype)
        return exported(**{name: value for name, value in inputs.items() if name in traced})

    # `generate` creates tensors on the device of the model's weights, which have no data here.
    kind = type(model)
    model.__class__ = type(kind.__name__, (kind,), {"device": device, "__module__": kind.__module__})
    model.forward = run
    return model


def begin_cache(
    cache: Any, shapes: Sequence[Any], rows: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Fill an empty cache object with keys and values of zero tokens, which are inputs of the exported
    graph.
    """
    import torch

    if cache.get_seq_length():
        return
    for layer, pair in enumerate(shapes):
        keys, values = (
            torch.empty(rows, heads, 0, size, device=device, dtype=dtype) for _, heads, _, size in pair
        )
        cache.update(keys, values, layer)
