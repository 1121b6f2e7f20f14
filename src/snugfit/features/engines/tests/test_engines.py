"""Other engines of evaluations: the errors of a wrong recipe, and the agreement with eager torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine_memory
import pytest
import torch

from snugfit.cli.main import run
from snugfit.errors import RecipeError, UsageError
from snugfit.features.engines import export, session, session_memory
from snugfit.features.engines import onnxruntime as onnxruntime_room
from snugfit.features.engines.fast_layers import use_fast_layers
from snugfit.features.engines.feature import Engines
from snugfit.features.engines.session_prediction import predict_session, render
from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.measurement.child import results_of
from snugfit.report.text.terminal import as_text
from snugfit.step.open_step import open_step
from snugfit.step.step import Observer
from snugfit.techniques import technique as technique_room
from snugfit.techniques.recipe import Recipe
from snugfit.units import GIB
from test_reference import hold_to_schema
from tiers import slow_but

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "bert": {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **SIZES},
    "llama": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES, "num_key_value_heads": 1,
        "num_hidden_layers": 1,
    },
}  # fmt: skip
GENERATES = {"phase": "generate", "phase_settings": {"new_tokens": 4}}


def small_job(model: str, **changes: Any) -> Job:
    fields = {"phase": "evaluate", "batch_size": 2, "sequence_length": 12, **changes}
    return Job(model=Model.from_config(MODELS[model], name=model), **fields)


def results(job: Job, recipe: str) -> dict[str, Any]:
    """Return the results of a measured run of one call, in this process."""
    torch.manual_seed(0)
    step = open_step(job, Recipe.parse(recipe).setup(), "plain", torch.device("cpu"))
    step.run(1, Observer())
    return results_of(step, 0)


@pytest.fixture
def export_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Export in this process, which saves ten seconds of imports. Return the engines of the exports."""
    engines = []

    def export_now(engine: str, loop: Any, folder: Path) -> dict[str, Any]:
        engines.append(engine)
        setup = Recipe().setup()
        step = open_step(loop.job, setup, "plain", loop.device)
        step.run(0, Observer())
        facts = export.write_export(export.FORMATS[engine], loop.job, step, folder)
        return {**facts, "seconds": 1.0, "peak_bytes": 1}

    monkeypatch.setattr(export, "export", export_now)
    return engines


LENGTHS = "generate --prompt 4 --new-tokens 4"
"""The words that follow `--phase` for a model of few positions."""

# ---- mistakes ----------------------------------------------------------------------------------------------

MISTAKES = [
    (
        "measure LLAMA --sequence-length 12 --recipe onnxruntime",
        "onnxruntime: it has no backward pass. Add --phase evaluate",
    ),
    (
        "measure LLAMA --sequence-length 12 --recipe openvino+bf16 --phase evaluate",
        "Try 'fp32' or 'bf16_pure'",
    ),
    (
        "measure LLAMA --sequence-length 12 --recipe openvino+eager --phase evaluate",
        "eager was not tested with it",
    ),
    ("measure LLAMA --recipe ov --phase generate --beams 2", "Leave --beams out"),
    (
        "measure LLAMA --recipe ort --phase generate --cache static",
        "has a dynamic cache, not static. Leave --cache out",
    ),
    ("measure LLAMA --recipe trt --phase generate", "Try 'onnxruntime', or --phase"),
    ("measure LLAMA --recipe fastpath --phase generate", "have no fast path"),
    ("measure LLAMA --recipe compiled --phase generate", "--cache static"),
    ("measure LLAMA --sequence-length 12 --recipe captured --phase evaluate", "mode=reduce-overhead"),
    (
        "predict LLAMA --sequence-length 12 --recipe onnxruntime --phase evaluate --gpu h200",
        "so it is not simulated. To measure it: snugfit measure",
    ),
    ("predict LLAMA --phase generate --recipe openvino --gpu h200", "Leave --gpu out"),
    ("predict LLAMA --phase generate --recipe ort --compare plain", "Leave --compare out"),
    (
        "predict LLAMA --sequence-length 12 --recipe ort --phase evaluate --dtype bfloat16",
        "is fitted to float32, and the weights are bfloat16",
    ),
    (
        "predict LLAMA --sequence-length 12 --recipe fastpath --phase evaluate",
        "temporary memory is not simulated",
    ),
    ("predict LLAMA --sequence-length 12 --recipe compiled --phase evaluate", "simulated in training only"),
]


@pytest.mark.parametrize(("typed", "message"), MISTAKES)
def test_a_mistake_is_one_clear_error(
    typed: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama"]))
    assert run(typed.replace("LLAMA", str(tmp_path)).replace("generate", LENGTHS).split()) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert message in printed
    assert "Traceback" not in printed


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(technique_room, "version_of", lambda name: None)
    for word, extra in (("onnxruntime", "onnx"), ("openvino", "openvino"), ("tensorrt", "onnx")):
        message = Recipe.parse(word)["engine"].missing_package() or ""
        assert f'Try: pip install "snugfit[{extra}]"' in message


def test_a_gpu_needs_a_library_with_cuda() -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    step = open_step(small_job("bert"), Recipe().setup(), "plain", torch.device("cuda"))
    for engine in ("onnxruntime", "openvino"):
        with pytest.raises(UsageError, match="Add --device cpu"):
            session.runner_arguments(engine, step)


class _CudaLibrary:
    """Module like onnxruntime-gpu without the libraries of its CUDA version."""

    __version__ = "1.31.1"


def test_a_session_that_fell_back_to_the_cpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    exporters = pytest.importorskip("transformers.exporters", reason="transformers is older than 5.23")
    step = open_step(small_job("bert"), Recipe.parse("onnxruntime").setup(), "plain", torch.device("cuda"))
    on_cpu = type("Exported", (), {"device": torch.device("cpu")})
    monkeypatch.setattr(exporters.ExportedModel, "from_pretrained", lambda *_, **__: on_cpu)
    monkeypatch.setitem(sys.modules, "onnxruntime", _CudaLibrary)
    with pytest.raises(UsageError, match=r"onnxruntime 1\.31\.1 found no libraries of its CUDA version"):
        session.load("onnxruntime", tmp_path, step, {})


def test_the_package_for_cuda_counts_as_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"onnxruntime-gpu": "1.31.1"}
    monkeypatch.setattr(technique_room, "version_of", installed.get)
    monkeypatch.setattr(onnxruntime_room, "version_of", installed.get)
    kind = type(Recipe.parse("onnxruntime")["engine"])
    assert kind.installed_version("onnxruntime") == "1.31.1"
    assert "onnx>=1.20" in (kind.missing_package() or "")


# ---- the fast path -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0.0, 0.5])
@pytest.mark.parametrize("task", ["sequence-classification", "token-classification"])
def test_the_fast_path_is_one_operator_a_layer_with_the_same_outputs(padding: float, task: str) -> None:
    """Without padding in the computation, outputs of tokens are equal too."""
    from torch.profiler import profile

    with profile() as seen:
        found = results(small_job("bert", padding=padding, task=task), "fastpath")
    counts = {one.key: one.count for one in seen.key_averages()}
    # One call is timed and one is compared.
    assert counts["aten::_transformer_encoder_layer_fwd"] == 2 * SIZES["num_hidden_layers"]
    assert counts.get("aten::_nested_tensor_from_mask", 0) == (2 if padding else 0)
    assert found["largest_error"] < 1e-6
    assert found["ids_equal"] is True


def test_the_fast_path_adds_no_weights() -> None:
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(**SIZES))
    assert use_fast_layers(model) == SIZES["num_hidden_layers"]
    own = model.encoder.layer[0].attention.self
    assert own.query.weight.untyped_storage().data_ptr() == own.value.weight.untyped_storage().data_ptr()


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(UsageError, match="llama has no encoder layers like BERT's"):
        results(small_job("llama"), "fastpath")


# ---- predicted sessions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", slow_but([{}, GENERATES], 1), ids=["evaluate", "generate"])
def test_the_memory_of_a_session_is_a_formula(changes: dict[str, Any]) -> None:
    predictions = {
        word: predict_session(small_job("llama", **changes), word, memory_bytes=GIB)
        for word in ("onnxruntime", "openvino", "tensorrt")
        if not (changes and word == "tensorrt")
    }
    for word, prediction in predictions.items():
        parts = prediction.library_bytes + prediction.weights_bytes + prediction.activations_bytes
        assert parts == prediction.session_bytes
        assert prediction.fits
        assert not replace(prediction, memory_bytes=prediction.needed_bytes - 1).fits
        text = " ".join(as_text(render(prediction), width=100).split())
        assert "by a formula that was off by at most" in text
        assert "no rate of o" in text
        assert f"--recipe '{word}' --device cpu" in text
    # Without TensorRT, ONNX Runtime runs the exported file. OpenVINO has a second copy of the weights.
    own = predictions["onnxruntime"].session_bytes
    assert predictions.get("tensorrt", predictions["onnxruntime"]).session_bytes == own
    assert predictions["openvino"].weights_bytes > predictions["onnxruntime"].weights_bytes
    with pytest.raises(UsageError, match="none of the engines"):
        predict_session(small_job("llama"), "plain")


def test_the_command_prints_a_session(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MODELS["llama"], "dtype": "float32"}))
    typed = ["predict", str(tmp_path), "--sequence-length", "12", "--phase", "evaluate", "--recipe", "ort"]
    assert run([*typed, "--memory", "500MiB", "--json"]) == 3
    hold_to_schema(
        Engines().documents(), [("predict --recipe ENGINE --json", json.loads(capsys.readouterr().out))]
    )


def test_the_stated_errors_are_those_of_the_measured_sessions() -> None:
    file = Path(engine_memory.__file__).parents[1] / "results/cpu-2026-11-30/engine-memory.json"
    rows = json.loads(file.read_text())["rows"]
    for engine, models in session_memory.ENGINES.items():
        for phase, model in models.items():
            errors = []
            for row in rows:
                generates = engine_memory.CASES[row["name"]][3] == engine_memory.GENERATES
                if row["engine"] == engine and generates is (phase == "generate"):
                    predicted = model.session_bytes(session_memory.SessionParts(**row["parts"]))
                    errors.append(abs(predicted / row["session_bytes"] - 1))
            assert len(errors) == model.sessions
            assert max(errors) == pytest.approx(model.largest_error, abs=0.006)


# ---- exported models ---------------------------------------------------------------------------------------

EXPORTS = [
    pytest.param("onnxruntime", "llama", GENERATES, marks=pytest.mark.whole),
    pytest.param("openvino", "bert", {"padding": 0.5}, marks=pytest.mark.slow),
    pytest.param("openvino", "llama", GENERATES, marks=pytest.mark.slow),
    pytest.param("onnxruntime", "llama", {}, marks=pytest.mark.slow),
]


def test_another_cache_of_a_recipe_is_refused() -> None:
    pytest.importorskip("snugfit.features.inference", reason="the feature inference is not there")
    job = replace(small_job("llama"), phase="generate", phase_settings={"new_tokens": 4})
    with pytest.raises(RecipeError, match=r"kv_cache\(static\) was not tested with it"):
        Recipe.parse("onnxruntime + kv_cache(static)").check(job, installed=False)


@pytest.mark.parametrize(("engine", "model", "changes"), EXPORTS)
def test_an_exported_model_agrees_with_eager(
    engine: str, model: str, changes: dict[str, Any], export_here: list[str]
) -> None:
    """The real library runs the file, without the weights of the torch model."""
    pytest.importorskip(engine, reason=f"{engine} is not installed")
    found = results(small_job(model, **changes), engine)
    assert export_here == [engine]
    assert 0 < found["largest_error"] < 1e-5
    assert found["ids_equal"] is True
    assert found["engine"].startswith(f"{engine} ")
    assert found["file_bytes"] > 0
    assert found["session_bytes"] > 0
    base = session_memory.ENGINES[engine][changes.get("phase", "evaluate")].base
    assert found["predicted_session_bytes"] > base


def test_an_empty_cache_begins_with_the_exported_shapes() -> None:
    from transformers import DynamicCache

    cache = DynamicCache()
    shapes = [[[2, 1, 5, 16], [2, 1, 5, 8]]] * 2
    session.begin_cache(cache, shapes, 3, torch.device("cpu"), torch.bfloat16)
    assert cache.layers[1].values.dtype == torch.bfloat16
    assert [tuple(one.keys.shape) for one in cache.layers] == [(3, 1, 0, 16)] * 2
    assert [tuple(one.values.shape) for one in cache.layers] == [(3, 1, 0, 8)] * 2
    cache.update(torch.ones(3, 1, 4, 16), torch.ones(3, 1, 4, 8), 0)
    session.begin_cache(cache, shapes, 3, torch.device("cpu"), torch.bfloat16)
    assert cache.get_seq_length() == 4


def test_a_cache_of_windows_is_refused() -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    facts = {**MODELS["llama"], "model_type": "mistral", "sliding_window": 8}
    facts["architectures"] = ["MistralForCausalLM"]
    job = replace(small_job("llama", **GENERATES), model=Model.from_config(facts, name="mistral"))
    with pytest.raises(UsageError, match="onnxruntime: the model's cache has windows or states"):
        results(job, "onnxruntime")


def test_a_failed_export_is_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed = type("Run", (), {"returncode": 1, "stdout": b"...\nValueError: no rule for this operator\n"})
    monkeypatch.setattr(export.subprocess, "run", lambda *_, **__: failed)
    step = open_step(small_job("bert"), Recipe.parse("openvino").setup(), "plain", torch.device("cpu"))
    with pytest.raises(UsageError, match="cannot export bert for openvino: ValueError: no rule for this"):
        export.export("openvino", step, tmp_path)
    request = json.loads((tmp_path / "request.json").read_text())
    assert request["setup"]["runtime"] is None


def test_without_tensorrt_the_onnx_file_is_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(session, "exported_model", lambda engine, loop: made.append(engine))
    step = open_step(small_job("bert"), Recipe.parse("tensorrt").setup(), "plain", torch.device("cpu"))
    build: Callable[[], Any] = lambda: pytest.fail("the model was built in torch")  # noqa: E731
    session.tensorrt_model(step, build)
    assert made == ["onnxruntime"]
    assert step.results["note"].endswith("The ONNX file was checked, and run in ONNX Runtime instead.")


@pytest.mark.slow
def test_the_command_exports_in_a_process_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    (tmp_path / "config.json").write_text(json.dumps(MODELS["bert"]))
    words = f"measure {tmp_path} --phase evaluate --batch-size 2 --sequence-length 12 --recipe onnxruntime"
    assert run([*words.split(), "--device", "cpu", "--ledger", str(tmp_path / "runs"), "--json"]) == 0
    calls = json.loads(capsys.readouterr().out)["calls"]
    assert calls["largest_error"] < 1e-5
    assert calls["setup_seconds"] > calls["export_seconds"] > 0
    assert calls["median_seconds"] <= calls["p90_seconds"]
