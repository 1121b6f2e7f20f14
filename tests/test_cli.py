"""The command line. Any wrong input gives one clear error and the documented exit code, and writes no
file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from made_up import footprint, measurement, prediction
from snugfit.cli import jobfile
from snugfit.cli.main import run
from snugfit.errors import NothingFits, UsageError
from snugfit.job.job import Phase
from snugfit.results.footprint import Footprint
from snugfit.techniques.roster import foreign_names
from snugfit.units import GIB

BERT = ["bert-large-uncased", "--task", "sequence-classification"]
V100 = ["--gpu", "v100-16gb"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run every command in a folder of its own, to check the files that it writes."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Invent predictions; return the list of requests."""
    questions: list[Any] = []

    def predict(job: Any, recipe: Any, **how: Any) -> Any:
        questions.append((job, recipe, how))
        return replace(prediction(), job=job, recipe=recipe, loop=how["loop"], memory_bytes=_memory(how))

    monkeypatch.setattr("snugfit.prediction.predict.predict", predict)
    return questions


def _memory(how: dict[str, Any]) -> int | None:
    return how.get("memory_bytes") or (how["gpu"].memory_bytes if how["gpu"] else None)


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], folder: Path, *, code: int = 2) -> str:
    """Run a command that must fail: one message on stderr beside progress, no output, no file."""
    before = sorted(folder.iterdir())
    assert run(arguments) == code
    out, told = capsys.readouterr()
    err = "".join(line for line in told.splitlines(keepends=True) if not line.endswith(" ...\n"))
    assert out == ""
    assert err.startswith("snugfit: ")
    assert err.count("snugfit: ") == 1
    assert "Traceback" not in err
    assert sorted(folder.iterdir()) == before
    return err


TYPED = {
    "no command": (["fit"], "fit"),
    "unknown option": (["predict", *BERT, "--batchsize", "4"], "batch"),
    "no model": (["predict", "--task", "causal-lm"], "Name one"),
    "no task": (["predict", "deberta-v3-base"], "--task"),
    "unknown task": (["predict", "gpt2", "--task", "causal-ml"], "causal-lm"),
    "unknown model": (["predict", "bert-large-uncasd", "--task", "masked-lm"], "bert-large-uncased"),
    "unknown phase": (["predict", *BERT, "--phase", "eval"], "evaluate"),
    "unknown loop": (["predict", *BERT, "--loop", "trainr"], "trainer"),
    "largest of nothing": (["predict", *BERT, "--largest", "batch"], "--memory"),
    "largest of what": (["predict", *BERT, *V100, "--largest", "bach"], "batch"),
    "two questions": (["predict", *BERT, *V100, "--largest", "batch", "--compare", "bf16"], "used together"),
    "two precisions": (["predict", *BERT, "--recipe", "bf16 + fp16"], "fp16"),
    "batch 0": (["predict", *BERT, "--batch-size", "0"], "batch size is 0"),
    "batch -1": (["predict", *BERT, "--batch-size", "-1"], "batch size is -1"),
    "batch 10^12": (["predict", *BERT, "--batch-size", "1000000000000"], "batch size is 1000000000000"),
    "batch a word": (["predict", *BERT, "--batch-size", "four"], "is four; allowed are whole numbers."),
    "no steps": (["plan", *BERT, "--steps", "0"], "--steps is 0; allowed are whole numbers from 1 up."),
    "no step to time": (["measure", *BERT, "--steps", "0"], "--steps is 0; allowed are whole numbers from 1"),
    "no time": (["measure", *BERT, "--deadline", "0"], "--deadline is 0"),
    "many workers": (["plan", *BERT, "--workers", "99"], "is 99; allowed are whole numbers from 1 to 64."),
    "padding a word": (["predict", *BERT, "--padding", "x"], "--padding is x; allowed are numbers."),
    "an empty recipe": (["predict", *BERT, "--recipe", ""], "--recipe is empty. Give it a value, or w"),
    "an empty GPU": (["plan", *BERT, "--gpu", ""], "--gpu is empty. Give it a value, or leave it out."),
    "an option without its value": (["predict", *BERT, "--recipe"], "argument. Try: snugfit predict --help"),
    "a GPU like none": (["predict", *BERT, "--gpu", "foo"], "like h200, a100-80gb or 'rtx 4090'."),
    "padding nan": (["predict", *BERT, "--padding", "nan"], "padding"),
    "padding whole": (["predict", *BERT, "--padding", "1"], "padding"),
    "a technique left out with a reason": (["predict", *BERT, "--recipe", "fa3"], "not predicted"),
    "a misspelt technique": (["predict", *BERT, "--recipe", "adamw_fuse"], "adamw_fused"),
    "a sequence too long": (["predict", *BERT, "--sequence-length", "513"], "512"),
    "an unknown GPU": (["predict", *BERT, "--gpu", "RTX 9999"], "RTX"),
    "no memory": (["predict", *BERT, "--memory", "0"], "'0' is not a positive amount"),
    "memory without a unit": (["predict", *BERT, "--memory", "16"], "16GiB"),
    "negative memory": (["predict", *BERT, "--memory", "-1"], "'-1' is not a positive amount"),
    "negative memory with a unit": (["predict", *BERT, "--memory", "-1GiB"], "not a positive amount"),
    "less than a byte": (["predict", *BERT, "--memory", "0.5B"], "less than a byte"),
    "too much memory": (["predict", *BERT, "--memory", "1e99GB"], "1e99GB"),
    "unknown gpu": (["gpus", "RTX 9999"], "RTX"),
    "set nothing": (["predict", *BERT, "--set", "padding"], "key=value"),
    "a key inside a single value": (["predict", *BERT, "--set", "padding.b.c=1"], "single value"),
    "set a list": (["predict", *BERT, "--set", "batch_size=[1, 2]"], "a list"),
    "no job file": (["predict", "--job", "missing.yaml"], "no such job file"),
    "unknown format": (["plan", *BERT, "--format", "pdf"], "markdown"),
    "no such choice": (["plan", *BERT, *V100, "--fidelity", "exact"], "'--fidelity': 'exact' is not one"),
    "an empty path": (["measure", *BERT, "--ledger", ""], "--ledger is empty. Give it a value, or"),
    "an empty path after =": (["measure", *BERT, "--ledger="], "--ledger is empty. Give it a"),
    "an empty name": (["gpus", ""], "A name is empty. Give it a value, or leave it out."),
    "two forms": (["plan", *BERT, "--json", "--format", "markdown"], "are two forms of"),
    "operators of several": (["predict", *BERT, "--operators", "--compare", "bf16"], "shows one recipe."),
    "a headroom of more than all": (["gpus", "t4", "--for", *BERT, "--headroom", "200%"], "leaves nothing"),
    "two prices": (["gpus", "t4", "--for", *BERT, "--price", "t4=1", "--price", "T4=2"], "prices, 1 and 2"),
    "a price below 0": (["gpus", "t4", "--for", *BERT, "--price", "t4=-1"], "must be a number above 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", TYPED)
def test_a_mistake_is_one_message_and_exit_2(
    name: str, capsys: pytest.CaptureFixture[str], empty_folder: Path, asked: list[Any]
) -> None:
    arguments, told = TYPED[name]
    assert told in refused(arguments, capsys, empty_folder)
    assert asked == []


@pytest.mark.parametrize(("recipe", "gpu", "told"), [
    ("micro_batches(3)", "h200", "micro_batches(3)"),
    ("tf32", "v100-16gb", "8.0"),
])  # fmt: skip
def test_what_the_recipe_refuses_is_told(
    recipe: str, gpu: str, told: str, capsys: pytest.CaptureFixture[str], empty_folder: Path
) -> None:
    """16 samples cannot be cut into 3 equal micro-batches; a V100 has no tf32."""
    arguments = ["predict", *BERT, "--batch-size", "16", "--recipe", recipe, "--gpu", gpu]
    assert told in refused(arguments, capsys, empty_folder)


def test_a_command_that_is_misspelt_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predit", "gpt2"]) == 2
    assert "Did you mean 'predict'? Try: snugfit --help" in capsys.readouterr().err


@pytest.mark.parametrize("memory", ["16GB", "16GiB", "16000MB", "1.5e1 GiB"])
def test_memory_takes_the_unit_that_was_written(
    memory: str, capsys: pytest.CaptureFixture[str], asked: list[Any]
) -> None:
    """GB is 10**9 bytes and GiB 2**30."""
    assert run(["predict", *BERT, "--memory", memory]) == 0
    sizes = {"16GB": 16 * 10**9, "16GiB": 16 * GIB, "16000MB": 16 * 10**9, "1.5e1 GiB": 15 * GIB}
    assert asked[0][2]["memory_bytes"] == sizes[memory]


def test_too_little_memory_is_exit_3_and_says_by_how_much(
    capsys: pytest.CaptureFixture[str], asked: list[Any]
) -> None:
    """Nothing fits in 512 MiB: a valid answer with an exit code of its own, and not an error."""
    assert run(["predict", *BERT, "--memory", "512MiB", "--no-ways-out"]) == 3
    assert "does not fit: needs 7.6 GiB, the limit is 0.5 GiB" in capsys.readouterr().out


def test_when_nothing_fits_the_search_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], empty_folder: Path
) -> None:
    def largest(*_: Any, **__: Any) -> Any:
        raise NothingFits("Not even one sample fits in 512.0 MiB: 1 needs 2.00 GiB.")

    monkeypatch.setattr("snugfit.planning.largest.largest", largest)
    arguments = ["predict", *BERT, "--memory", "512MiB", "--largest", "batch"]
    assert "Not even one" in refused(arguments, capsys, empty_folder, code=3)


def test_every_argument_reaches_the_job(capsys: pytest.CaptureFixture[str], asked: list[Any]) -> None:
    typed = "--sequence-length 128 --padding 0.25 --batch-size 8 --labels 5 --clip 1.0"
    more = "--phase evaluate --loop trainer --recipe bf16+tf32 --gpu h200 --software installed"
    assert run(["predict", *BERT, *typed.split(), *more.split()]) == 0
    job, recipe, how = asked[0]
    assert (job.sequence_length, job.padding) == (128, 0.25)
    assert (job.batch_size, job.labels, job.clip, job.phase) == (8, 5, 1.0, Phase.EVALUATE)
    assert str(recipe) == "bf16 + tf32"
    assert (how["loop"], how["software"], how["gpu"].key) == ("trainer", "installed", "H200-SXM")
    assert run(["predict", "t5-large", "--task", "seq2seq-lm", "--target-length", "64"]) == 0
    assert (asked[1][0].target_length, asked[1][0].routing) == (64, "balanced")
    assert run(["predict", *BERT, "--routing", "worst"]) == 0
    assert (asked[2][0].routing, asked[2][0].to_json()["routing"]) == ("worst", "worst")


def test_json_is_one_document(capsys: pytest.CaptureFixture[str], asked: list[Any]) -> None:
    assert run(["predict", *BERT, *V100, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"schema", "job", "recipe", "gpu", "footprint", "versions", "doubts"} <= set(document)
    assert {
        "requested_bytes",
        "allocated_bytes",
        "reserved_bytes",
        "nvml_bytes",
        "host_bytes",
        "at",
        "kinds",
    } <= set(document["footprint"])
    compared = [word for recipe in ("bf16", "fp16", "bf16") for word in ("--compare", recipe)]
    assert run(["predict", *BERT, *V100, "--json", *compared]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [one["recipe"] for one in document["predictions"]] == ["plain", "bf16", "fp16"]


@pytest.mark.parametrize(("outcome", "code"), [
    ("ok", 0), ("oom:torch", 4), ("host-oom", 1), ("signal:SEGV", 1), ("timeout", 1), ("no-result", 1),
])  # fmt: skip
def test_a_measured_death_has_its_exit_code(
    outcome: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(*_: Any, **__: Any) -> Any:
        return measurement(outcome=outcome, footprint=footprint() if outcome == "ok" else None)

    monkeypatch.setattr("snugfit.measurement.measure.measure", measure)
    assert run(["measure", *BERT, "--steps", "2"]) == code
    assert (outcome in capsys.readouterr().out) is (code != 0)


def test_a_machine_without_a_gpu_is_said_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []

    def measure(*_: Any, **__: Any) -> Any:
        told.append(capsys.readouterr().err)
        return measurement(outcome="ok", footprint=footprint())

    monkeypatch.setattr("snugfit.measurement.measure.measure", measure)
    monkeypatch.setattr("snugfit.measurement.target.torch_cuda", lambda: None)
    for device in ([], ["--device", "cpu"]):
        assert run(["measure", *BERT, *device]) == 0
    assert ["no GPU that torch can use" in text for text in told] == [True, False]


def test_predicting_beside_a_run_on_the_cpu_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], empty_folder: Path
) -> None:
    def measure(*_: Any, **__: Any) -> Any:
        raise AssertionError("measured")

    monkeypatch.setattr("snugfit.measurement.measure.measure", measure)
    arguments = ["measure", *BERT, "--device", "cpu", "--predict"]
    assert "Add --gpu NAME" in refused(arguments, capsys, empty_folder)


@pytest.mark.parametrize("outcome", ["ok", "oom:torch"])
def test_a_run_without_a_gpu_s_figures_shows_the_prediction(
    outcome: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: list[Any]
) -> None:
    """The run was on the CPU, or failed: no figures exist to compare with the prediction."""
    of_a_gpu = dict.fromkeys(("requested_bytes", "allocated_bytes", "reserved_bytes", "nvml_bytes"))
    on_host = Footprint(**of_a_gpu, host_bytes=GIB) if outcome == "ok" else None

    def measure(job: Any, recipe: Any, **_: Any) -> Any:
        return replace(measurement(outcome=outcome, footprint=on_host), job=job, recipe=recipe)

    monkeypatch.setattr("snugfit.measurement.measure.measure", measure)
    assert run(["measure", *BERT, *V100, "--predict"]) == (0 if outcome == "ok" else 4)
    shown = capsys.readouterr().out
    assert "at the peak" in shown
    assert "Error MiB" not in shown


# Job files ---------------------------------------------------------------------------------------

FILE = """\ufeffmodel: bert-large-uncased\r
task: sequence-classification   # a BOM before it, and Windows' ends of lines\r
batch_size: 8\r
lr: 1e-5\r
recipe: bf16 + micro_batches(4)\r
gpu: rtx 4090\r
"""


def test_a_job_file_says_what_flags_say_and_flags_are_stronger(
    capsys: pytest.CaptureFixture[str], asked: list[Any], empty_folder: Path
) -> None:
    """`1e-5`, a string in YAML 1.1, is a number; a byte order mark and CRLF are read."""
    (empty_folder / "job.yaml").write_text(FILE, encoding="utf-8", newline="")
    assert run(["predict", "--job", "job.yaml"]) == 0
    job, recipe, how = asked[0]
    assert (job.batch_size, job.learning_rate) == (8, 1e-5)
    assert (str(recipe), how["gpu"].key) == ("bf16 + micro_batches(4)", "RTX4090")
    assert run(["predict", "--job", "job.yaml", "--set", "batch_size=16", "--set", "clip=0.5"]) == 0
    assert (asked[1][0].batch_size, asked[1][0].clip) == (16, 0.5)
    assert run(["predict", "--job", "job.yaml", "--set", "batch_size=16", "--batch-size", "32"]) == 0
    assert asked[2][0].batch_size == 32


def test_a_job_file_says_what_a_plan_keeps_and_leaves_free(
    monkeypatch: pytest.MonkeyPatch, asked: list[Any], empty_folder: Path
) -> None:
    """`headroom` applies to predictions too, and a flag overrides it."""
    plans: list[dict[str, Any]] = []

    def refuse(job: Any, **question: Any) -> None:
        plans.append(question)
        raise UsageError("enough")

    monkeypatch.setattr("snugfit.cli.plan_cache.plan", refuse)
    keys = "keep: bf16\nfree: optimizer, matmul\nheadroom: 3%\n"
    (empty_folder / "job.yaml").write_text(FILE.replace("recipe: bf16 + micro_batches(4)\r\n", keys))
    assert run(["plan", "job.yaml"]) == 2
    assert {name: plans[0][name] for name in ("keep", "free", "headroom")} == {
        "keep": "bf16", "free": "optimizer, matmul", "headroom": "3%",
    }  # fmt: skip
    assert run(["plan", "job.yaml", "--headroom", "0", "--set", "keep=fp32"]) == 2
    assert (plans[1]["headroom"], plans[1]["keep"]) == ("0", "fp32")
    assert run(["predict", "job.yaml"]) == 0
    assert asked[0][2]["headroom"] == "3%"


WRITTEN = {
    "octal": ("sequence_length: 010", "octal"),
    "a key twice": ("batch_size: 4\nbatch_size: 8", "twice"),
    "a tab": ("model: gpt2\n\ttask: causal-lm", "tab"),
    "a Python object": ("model: !!python/object/apply:os.system ['touch owned']", "not allowed"),
    "aliases that multiply": ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "anchors"),
    "another trainer's key, misspelt": ("per_device_trian_batch_size: 4", "batch_size"),
    "a key of ours, misspelt": ("batch_sise: 4", "'batch_size'"),
    "two precisions": ("bf16: true\nfp16: true", "recipe"),
    "batch 0": ("model: gpt2\ntask: causal-lm\nbatch_size: 0", "batch size is 0"),
    "a huge batch": ("model: gpt2\ntask: causal-lm\nbatch_size: 1000000000000", "allowed are"),
    "accumulation": ("gradient_accumulation_steps: 3", "micro_batches"),
    "a strategy under its removed name": ("evaluation_strategy: steps", "write eval_strategy"),
    "a warm-up under its removed name": ("warmup_ratio: 0.1", "write warmup_steps"),
    "a device under its removed name": ("no_cuda: true", "write device: cpu"),
    "an optimizer under its removed name": ("optim: adamw_hf", "recipe"),
    "empty": ("", "empty"),
    "a list": ("- a\n- b", "a list"),
    "a word": ("hello", "key: value"),
    "nested": ("batch_size: {a: {b: {c: 1}}}", "nested"),
    "deep": ("a: " + "[" * 100_000, "nested"),
    "a mapping": ("batch_size: {a: 1}", "a mapping"),
    "true batch": ("batch_size: true", "a whole number"),
    "quoted batch": ('batch_size: "32"', "a whole number"),
    "half a batch": ("batch_size: 2.5", "a whole number"),
    "nan": ("padding: .nan", "a number"),
    "inf": ("learning_rate: 1e999", "a number"),
    "nothing": ("batch_size:", "a whole number"),
    "number as key": ("1: 2", "is not text"),
    "two documents": ("model: gpt2\n---\nmodel: gpt2", "document"),
    "NUL": ("model: gp\0t2", "job.yaml"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_a_bad_job_file_is_one_message_that_names_it(
    name: str, capsys: pytest.CaptureFixture[str], empty_folder: Path, asked: list[Any]
) -> None:
    text, told = WRITTEN[name]
    (empty_folder / "job.yaml").write_text(text, encoding="utf-8")
    err = refused(["predict", "--job", "job.yaml"], capsys, empty_folder)
    assert told in err
    assert len(err) < 2000
    assert asked == []
    assert not (empty_folder / "owned").exists()


def test_what_is_no_text_file_is_refused_without_being_read(
    capsys: pytest.CaptureFixture[str], empty_folder: Path
) -> None:
    """A FIFO would block, a huge file would fill the memory, and UTF-16 is not UTF-8."""
    os.mkfifo(empty_folder / "pipe")
    assert "regular file" in refused(["predict", "--job", "pipe"], capsys, empty_folder)
    assert "regular file" in refused(["predict", "--job", "."], capsys, empty_folder)
    with open(empty_folder / "huge", "wb") as file:
        file.truncate(1 << 30)
    assert "1,073,741,824 bytes" in refused(["predict", "--job", "huge"], capsys, empty_folder)
    (empty_folder / "wide").write_bytes("model: gpt2".encode("utf-16"))
    assert "UTF-8" in refused(["predict", "--job", "wide"], capsys, empty_folder)


@pytest.mark.parametrize(("text", "value"), [
    ("1e-5", 1e-5), ("1E5", 1e5), (".5", 0.5), ("0", 0), ("-3", -3), ("010", "010"), ("1_000", "1_000"),
    ("1:30", "1:30"), ("yes", "yes"), ("no", "no"), ("true", True), ("null", None), ("'1'", "1"),
    ("2024-01-01", "2024-01-01"),
])  # fmt: skip
def test_scalars_are_yaml_1_2(text: str, value: object) -> None:
    found = yaml.load(text, Loader=jobfile._Loader)
    assert found == value
    assert type(found) is type(value)


def test_every_advice_leads_somewhere() -> None:
    """Names of other libraries differ from ours, and each synonym refers to one of ours."""
    names = foreign_names()
    assert set(names.same.values()) <= set(jobfile.kinds())
    assert not set(names.keys) & set(jobfile.kinds())
    with pytest.raises(UsageError, match="batch_size"):
        jobfile.settings_from({"per_device_train_batch_size": 4}, "here")


# The process -------------------------------------------------------------------------------------


def command(*arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "snugfit", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **how,
    )


@pytest.mark.whole
def test_the_process_ends_with_the_codes_and_words_of_the_command() -> None:
    done = command("gpus", "RTX 9999")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("snugfit: ")


def test_the_command_without_a_question_and_its_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    assert "Exit codes" in capsys.readouterr().out
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("snugfit ")
    assert run([]) == 2
    capsys.readouterr()
    assert run(["gpus", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["gpus"]) > 50


@pytest.mark.whole
def test_a_reader_that_goes_away_ends_it_without_a_word() -> None:
    pipe = subprocess.Popen(
        [sys.executable, "-m", "snugfit", "gpus", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert pipe.stdout
    assert pipe.stderr
    pipe.stdout.read(10)
    pipe.stdout.close()
    assert pipe.stderr.read() == b""
    assert pipe.wait(timeout=30) == 0


def test_an_interrupted_command_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("snugfit.prediction.predict.predict", interrupt)
    assert run(["predict", *BERT]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("predict", ["[512]", "[no clipping]", "[train]", "[plain]", "[installed]"]),
        ("measure", ["[4]", "[no clipping]", "[train]", "[plain]", "[a GPU if there is one, else the CPU]"]),
    ],
)
def test_help_says_what_holds_when_nothing_is_said(
    name: str, defaults: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """rich treats a word in brackets as markup and would omit it."""
    monkeypatch.setenv("COLUMNS", "200")
    assert run([name, "--help"]) == 0
    told = capsys.readouterr().out
    assert [default for default in defaults if default not in told] == []


def test_a_gpu_that_is_named_twice_is_listed_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gpus", "h200", "l4", "H200-SXM", "--json"]) == 0
    keys = [gpu["key"] for gpu in json.loads(capsys.readouterr().out)["gpus"]]
    assert keys == ["H200-SXM", "L4"]


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("--bs", "Did you mean --batch-size? Try"),
        ("--batch", "Did you mean --batch-size? Try"),
        ("--lenght", "Did you mean --sequence-length or --target-length or --completion-length? Try"),
        ("--bogus", "No such option: --bogus. Try"),
    ],
)
def test_an_unknown_option_is_answered_with_what_is_like_it(
    option: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["predict", "gpt2", option, "4"]) == 2
    assert f"{answer}: snugfit predict --help" in capsys.readouterr().err
