"""Loading of the model's image processor or feature extractor, and its settings for a checksum.

The processor is loaded from a folder or the hub's cache, like a tokenizer (`tokens.py`). Image processors
have several implementations that differ in the last bits. The implementation that needs only Pillow is used,
so that a run is the same on every machine.
"""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from snugfit.data.pretrained import load_pretrained
from snugfit.errors import UsageError
from snugfit.features.media.tasks import PICTURES, SOUNDS
from snugfit.job.job import Job
from snugfit.job.weights import own_folder as folder_of_model

FILES = ("preprocessor_config.json", "processor_config.json")


def load_processor(given: Any, job: Job) -> Any:
    """Return the image processor or feature extractor for the job's task.

    `given` is its name, its folder, or a processor of transformers, perhaps with several parts. Raises
    `UsageError` if it cannot be loaded.
    """
    from transformers import AutoFeatureExtractor

    inner, what = _KINDS[job.task]
    if isinstance(given, str | os.PathLike):
        is_picture = job.task == PICTURES.name
        return load_pretrained(
            given,
            _load_image_processor if is_picture else AutoFeatureExtractor.from_pretrained,
            what,
            word="processor",
            patterns=FILES,
            file=FILES[0],
        )
    # A multi-part processor has the part as an attribute.
    processor = getattr(given, inner, given)
    inputs = getattr(processor, "model_input_names", None)
    # A tokenizer is callable too, but has a vocabulary.
    if not callable(processor) or not inputs or hasattr(processor, "vocab_size"):
        raise UsageError(
            f"The processor is of type {type(given).__name__}; for {job.task} it must be transformers' "
            f"{what}, or its folder."
        )
    return processor


_KINDS = {
    PICTURES.name: ("image_processor", "image processor"),
    SOUNDS.name: ("feature_extractor", "feature extractor"),
}
"""For each task, a multi-part processor's attribute for the part, and its name in messages."""


def own_folder(job: Job) -> Path | None:
    """Return the model's folder if it contains a processor, else None."""
    folder = folder_of_model(job.model.name, job.model.origin)
    return folder if folder and has_processor(folder, job) else None


def has_processor(given: Any, job: Job) -> bool:
    """Return True if a folder, or a transformers processor with several parts, contains the processor for the
    job's task.
    """
    if isinstance(given, str | os.PathLike):
        return any((Path(given).expanduser() / name).exists() for name in FILES)
    return hasattr(given, _KINDS[job.task][0])


def settings_of(preprocessor: Any) -> dict[str, Any]:
    """Return the class and settings of the transformers processor in a preprocessor, for a checksum of the
    dataset.
    """
    processor = getattr(preprocessor, fields(preprocessor)[0].name)
    settings = processor.to_dict() if hasattr(processor, "to_dict") else {}
    return {"class": type(processor).__name__, **settings}


def _load_image_processor(name: str, **options: Any) -> Any:
    from transformers import AutoImageProcessor

    try:
        # Implementations differ in the last bits; Pillow's runs on every machine.
        return AutoImageProcessor.from_pretrained(name, backend="pil", **options)
    except ImportError:  # older versions look for torchvision before they look at the backend
        return _by_its_class(Path(name))


def _by_its_class(folder: Path) -> Any:
    """Return the image processor of the class in a folder's config, in the implementation that needs only
    Pillow.
    """
    import transformers

    named = json.loads((folder / FILES[0]).read_text())["image_processor_type"].removesuffix("Fast")
    return getattr(transformers, f"{named}Pil").from_pretrained(folder, local_files_only=True)
