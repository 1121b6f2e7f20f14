"""Export of a model to a file, in a separate process: `python -m snugfit.features.engines.export REQUEST
FOLDER`.

An export needs more memory than the model. In another process this memory does not count in the measured
peak. transformers' exporters write the files. A model that generates is exported once, as its decode step
with a dynamic number of tokens. The prompt is such a step with an empty cache. So the weights are stored
once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.documents import read_document, write_document
from snugfit.errors import UsageError

if TYPE_CHECKING:
    from snugfit.job.job import Job

FORMATS = {"onnxruntime": "onnx", "openvino": "openvino"}
"""Export format of transformers by inference engine."""


def export(engine: str, loop: Any, folder: Path) -> Mapping[str, Any]:
    """Export the model of a step (an evaluation or generation) into a folder, and return properties of the
    export by name.

    The weights are random, drawn with the current seed. Raises `UsageError` for a model that transformers
    cannot export.
    """
    import torch

    from snugfit.features.engines.fields import RUNTIME

    setup = loop.setup.with_fields(**{RUNTIME.name: RUNTIME.default})
    request = folder / "request.json"
    document = {
        "job": loop.job.to_json(),
        "setup": setup.to_json(),
        "device": str(loop.device),
        "format": FORMATS[engine],
        "seed": torch.initial_seed(),
    }
    write_document(request, document)
    command = [sys.executable, "-P", "-m", __name__, str(request), str(folder)]
    begin = time.monotonic()
    run = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if run.returncode:
        last = run.stdout.decode(errors="replace").strip().splitlines()[-1:]
        raise UsageError(
            f"transformers cannot export {loop.job.model.name} for {engine}: {' '.join(last)[:300]}. "
            "Try the recipe plain or compiled(what=model)."
        )
    return {**read_document(folder / "facts.json"), "seconds": time.monotonic() - begin}


def main() -> None:
    """Export the model that the request file describes, and write properties of the export next to it."""
    import torch

    from snugfit.job.job import Job
    from snugfit.measurement.host import peak_resident_bytes
    from snugfit.step.open_step import open_step
    from snugfit.step.step import Observer
    from snugfit.techniques.setup import Setup

    request, folder = read_document(Path(sys.argv[1])), Path(sys.argv[2])
    job, setup = Job.from_json(request["job"]), Setup.from_json(request["setup"])
    torch.manual_seed(request["seed"])
    step: Any = open_step(job, setup, "plain", torch.device(request["device"]))
    step.run(0, Observer())
    facts = write_export(request["format"], job, step, folder)
    write_document(folder / "facts.json", {**facts, "peak_bytes": peak_resident_bytes()})
    sys.stdout.flush()
    # Without `os._exit`, the interpreter would free the heap object by object.
    os._exit(0)


def write_export(form: str, job: Job, step: Any, folder: Path) -> dict[str, Any]:
    """Write the exported model of a step into a folder, and return properties of the export by name."""
    import torch
    from transformers.exporters.auto import EXPORT_BACKENDS, get_exporter_class

    from snugfit.job.batch_layout import map_leaves

    options = {"stateful": False} if form == "openvino" else {}
    facts: dict[str, Any] = {}
    # Weights are drawn on the measured device. Exported from there, the file would have its device in it.
    cpu = torch.device("cpu")
    model, inputs = (
        step.model.to(cpu),
        map_leaves(
            step.first_batch(), lambda _, value: value.to(cpu) if isinstance(value, torch.Tensor) else value
        ),
    )
    if job.added_phase is not None:
        from transformers.exporters.utils import decompose_for_generation

        config = step.generation_config()
        parts = decompose_for_generation(model, inputs, generation_config=config, multi_token_decode=True)
        model, inputs = parts["decode"]
        # As in `generate`, only the logits of the last token are computed.
        inputs["logits_to_keep"] = 1
        facts["cache"] = [
            [list(layer.keys.shape), list(layer.values.shape)] for layer in inputs["past_key_values"].layers
        ]
        options["dynamic"] = True
    inputs.pop("labels", None)  # exporters reject models with a loss
    with torch.no_grad():
        exported = get_exporter_class(form)().export(model, inputs, EXPORT_BACKENDS[form].config(**options))
    exported.save_pretrained(folder)
    return facts


if __name__ == "__main__":
    main()
