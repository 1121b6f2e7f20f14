"""The predicted memory of an evaluation or generation in ONNX Runtime or OpenVINO on the CPU.

A session is not simulated. Its memory follows from a formula (`session_memory.py`) of a simulated call in
eager torch. No seconds are predicted, because no rate of these libraries was measured on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from snugfit.documents import encode_fields
from snugfit.errors import UsageError
from snugfit.job.job import Job

if TYPE_CHECKING:
    from snugfit.report.text.page import Page
    from snugfit.techniques.recipe import Recipe

SCHEMA = 1

LIBRARY = {"tensorrt": "onnxruntime"}
"""Library that runs the exported model on the CPU, if the technique has another name."""


@dataclass(frozen=True, kw_only=True)
class SessionPrediction:
    """Host memory of an evaluation or generation in another engine on the CPU, by a formula."""

    job: Job
    """The job, of the phase `evaluate` or `generate`."""
    recipe: str
    """The recipe with the engine, as text."""
    engine: str
    """Library that runs the exported model: `onnxruntime` or `openvino`."""
    session_bytes: int
    """Bytes by which loading and calls enlarge the process: the sum of the next three."""
    library_bytes: int
    """Bytes of parts of the library that are loaded late, and of the graph."""
    weights_bytes: int
    """Bytes of the weights, with a copy in the engine's own layout if it makes one."""
    activations_bytes: int
    """Bytes of activations, outputs and the cache."""
    process_bytes: int
    """Bytes of a process that has imported torch and transformers, beside the session."""
    largest_error: float
    """Largest relative error of the formula in all measured sessions of this engine and phase."""
    sessions: int
    """Number of these sessions."""
    memory_bytes: int | None = None
    """Limit of the host memory in bytes; None without one."""

    added_keys: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "schema": (Literal[1], "Version of the document."),
        "what": (Literal["session"], "Name of the document."),
        "basis": (Literal["formula"], "Figures are those of a fitted formula, not of a simulation."),
    }
    """JSON keys that `to_json` adds (`features/schema/json_schema.py`)."""

    @property
    def needed_bytes(self) -> int:
        """Bytes of host memory: the session, and the process beside it."""
        return self.session_bytes + self.process_bytes

    @property
    def fits(self) -> bool | None:
        """True if the needed bytes are within the limit; None without a limit."""
        return None if self.memory_bytes is None else self.needed_bytes <= self.memory_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document that `snugfit predict --recipe ENGINE --json` prints."""
        return {"schema": SCHEMA, "what": "session", "basis": "formula", **encode_fields(self)}


def predict_session(job: Job, recipe: Recipe | str, *, memory_bytes: int | None = None) -> SessionPrediction:
    """Return the predicted host memory of a job in `onnxruntime`, `openvino` or `tensorrt` on the CPU.

    Raises `UsageError` for a recipe without such an engine, and for another dtype than float32, for which the
    formula has no measured session. Raises `RecipeError` for a job that the engine does not support.
    """
    from snugfit.features.engines.fields import RUNTIME
    from snugfit.features.engines.session_memory import session_model, session_parts
    from snugfit.prediction.predict import IMPORTED_BYTES
    from snugfit.techniques.recipe import Recipe

    recipe = recipe if isinstance(recipe, Recipe) else Recipe.parse(recipe)
    setup = recipe.setup()
    word = RUNTIME.of(setup)
    if word is None:
        raise UsageError(
            f"The recipe {str(recipe)!r} has none of the engines onnxruntime, openvino and tensorrt. Try "
            "snugfit.predict."
        )
    recipe.check(job, None)
    dtype, engine = setup.created_dtype(job), LIBRARY.get(word, word)
    if dtype != "float32":
        raise UsageError(
            f"{word}: the formula of a session is fitted to float32, and the weights are {dtype}. Try "
            "--dtype float32, or snugfit measure."
        )
    model, parts = session_model(job, engine), session_parts(job, setup, engine)
    total, weights = model.session_bytes(parts), int(model.weights * parts.weights)
    return SessionPrediction(
        job=job,
        recipe=str(recipe),
        engine=engine,
        session_bytes=total,
        library_bytes=model.base,
        weights_bytes=weights,
        activations_bytes=total - model.base - weights,
        process_bytes=IMPORTED_BYTES,
        largest_error=model.largest_error,
        sessions=model.sessions,
        memory_bytes=memory_bytes,
    )


def answer(request: Any) -> SessionPrediction | None:
    """Return the answer of `snugfit predict` for a recipe with an engine that runs on the CPU. None for other
    recipes, and for a GPU. Raises `UsageError` for options that need a simulation.
    """
    from snugfit.features.engines.fields import RUNTIME

    word = RUNTIME.of(request.recipe.setup())
    if word is None or request.job.trains:
        return None
    if request.gpu is not None:
        if word != "openvino":
            return None
        raise UsageError(f"openvino runs on the CPU, and --gpu names {request.gpu.name}. Leave --gpu out.")
    for option in ("compare", "largest", "operators", "headroom", "software"):
        if request.flags.get(option):
            raise UsageError(
                f"--{option} needs a simulation, and the memory of {word} is a formula. Leave --{option} out."
            )
    return predict_session(request.job, request.recipe, memory_bytes=request.memory_bytes)


def render(prediction: SessionPrediction) -> Page:
    """Return the report of a session's memory, at most ten lines of 100 columns."""
    from snugfit.report.plan.next_steps import job_words
    from snugfit.report.text.answer import show_gib, subject
    from snugfit.report.text.facts import LABEL, Facts
    from snugfit.report.text.page import Page, Sentence
    from snugfit.techniques.recipe import Recipe

    job, engine, limit = prediction.job, prediction.engine, prediction.memory_bytes
    device = f"{engine} on the CPU"
    verdict = f"about {show_gib(prediction.needed_bytes)} of host memory"
    if limit is not None:
        fits = "fits" if prediction.fits else "does not fit"
        verdict = f"{fits}: needs {verdict}, and the limit is {show_gib(limit)}"
    parts = (
        (prediction.weights_bytes, "weights"),
        (prediction.activations_bytes, "activations, outputs and cache"),
        (prediction.library_bytes, "library and graph"),
    )
    rows = {
        "session": (
            f"{show_gib(prediction.session_bytes)}, by a formula that was off by at most "
            f"{prediction.largest_error * 100:.0f} % in {prediction.sessions} measured sessions"
        ),
        "of which": ", ".join(f"{show_gib(size)} {name}" for size, name in parts),
        "process": f"{show_gib(prediction.process_bytes)} for Python, torch and transformers",
        "seconds": f"not predicted, as no rate of {engine} was measured",
    }
    recipe = Recipe.parse(prediction.recipe)
    if not any(technique.name == engine for technique in recipe):
        rows["engine"] = f"{engine}, which runs the exported file where TensorRT has no GPU"
    command = f"Measure it: snugfit measure {job_words(job)} --recipe '{prediction.recipe}' --device cpu"
    return Page(
        [
            Sentence(
                f"{subject(job, recipe, device)}: {verdict}", "bad" if prediction.fits is False else "good"
            ),
            Sentence(f"{'recipe':{LABEL}}  {prediction.recipe}", "recipe"),
            Facts(tuple(rows.items())),
            Sentence(command, "command"),
        ]
    )
