"""Logs in the formats of several torch versions, of libraries, of Linux and of schedulers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from snugfit.cli.main import run
from snugfit.errors import UsageError
from snugfit.features.diagnosis.diagnose import diagnose
from snugfit.features.diagnosis.match import tensor_sizes
from snugfit.features.diagnosis.result import Diagnosis, FailureKind
from snugfit.features.diagnosis.text import span_of
from snugfit.units import GIB, MIB


def diagnosed(text: str) -> Diagnosis:
    return diagnose(text.encode(), "log")[0]


def _errors() -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield name, text and kind of each error of `data/errors.txt`."""
    for part in (Path(__file__).parent / "data" / "errors.txt").read_text().split("==== ")[1:]:
        head, text = part.split("\n", 1)
        name, kind = head.split(" | ")
        yield name, (text.removesuffix("\n"), kind)


ERRORS = dict(_errors())
"""Errors as PyTorch, its libraries, Linux and schedulers print them, with the kind of each."""


@pytest.mark.parametrize("name", ERRORS)
def test_each_wording_has_its_kind_and_changes(name: str) -> None:
    text, kind = ERRORS[name]
    found = diagnosed(f"step 10: loss 2.1\n{text}\n")
    assert found.kind == kind, found.summary
    assert found.line == {"a bare word": 3, "NCCL": 5, "cudaMallocAsync": 4}.get(name, 2)
    assert len(found.changes) == 3


def test_figures_of_a_message() -> None:
    found = diagnosed(ERRORS["torch 2.5, another process"][0])
    assert found.requested_bytes is not None
    assert found.ledger is not None
    assert found.requested_bytes == pytest.approx(1.16 * GIB)
    ledger = found.ledger
    figures = (ledger.total_bytes, ledger.process_bytes, ledger.others_bytes, ledger.allocated_bytes)
    assert figures == pytest.approx((31.36 * GIB, 16.63 * GIB, 14.26 * GIB, 15.03 * GIB))
    assert "14.26 GiB" in found.summary


def test_figures_of_the_other_allocator() -> None:
    found = diagnosed(ERRORS["cudaMallocAsync"][0])
    assert found.ledger is not None
    sizes = (found.requested_bytes, found.ledger.allocated_bytes, found.ledger.free_bytes)
    assert sizes == pytest.approx((128 * MIB, 22.22 * GIB, 19.88 * MIB), rel=1e-3)
    assert (found.device, found.further_errors) == (0, 0)


def test_the_process_of_a_container_is_this_one() -> None:
    ledger = diagnosed(ERRORS["torch 2.6, in a container"][0]).ledger
    assert ledger is not None
    assert (ledger.others_bytes, ledger.process_bytes) == (0, round(47.51 * GIB))


def test_memory_before_torch_1_4_is_cached_beside_tensors() -> None:
    ledger = diagnosed(ERRORS["torch 1.2"][0]).ledger
    assert ledger is not None
    assert ledger.unallocated_bytes == round(85.29 * MIB)


def test_the_first_error_of_the_lowest_rank_is_taken() -> None:
    message = ERRORS["torch 2.3, fragments"][0]
    lines = [f"[rank{rank}]: {message.replace('GPU 0', f'GPU {rank}')}" for rank in (3, 1, 2, 1)]
    found = diagnosed("\n".join(["start", *lines, "  exitcode  : -9 (pid: 5)"]))
    assert (found.rank, found.device, found.line, found.further_errors) == (1, 1, 3, 3)


def test_a_message_on_several_lines_with_prefixes_is_read() -> None:
    words = ERRORS["torch 2.8, private pools"][0].split(" ")
    wrapped = "\n".join(
        f"\x1b[31m[rank0]: {' '.join(words[n : n + 7])}\x1b[0m" for n in range(0, len(words), 7)
    )
    assert diagnosed(wrapped).kind is FailureKind.FRAGMENTATION


TRACEBACK = """[rank0]: Traceback (most recent call last):
[rank0]:   File "/srv/app/train.py", line 90, in <module>
[rank0]:     loss.backward()
[rank0]:   File "/opt/torch/_tensor.py", line 581, in backward
[rank0]:     torch.autograd.backward(
[rank0]:   File "/opt/torch/autograd/__init__.py", line 347, in backward
[rank0]:     _engine_run_backward(
"""


def test_the_traceback_gives_code_and_phase() -> None:
    found = diagnosed(TRACEBACK + ERRORS["torch 2.1"][0])
    assert found.traceback == "<module> (train.py:90): loss.backward()"
    assert found.phase == "backward"


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("0: ", 0), (" 3: ", 3), ("node-2: [rank9]: ", 9), ("2026-11-02T10:22:33.12Z [rank2]: ", 2),
        ("> ", None), ("> > ", None), ("trainer-1  | ", None), ("(Train pid=34, ip=10.0.0.3) ", None),
        ("Nov 29 10:22:33 host python[34]: ", None),
    ],
)  # fmt: skip
def test_any_prefix_leaves_the_traceback(prefix: str, rank: int | None) -> None:
    text = TRACEBACK.replace("[rank0]: ", "") + ERRORS["torch 2.1"][0]
    found = diagnosed("\n".join(prefix + line for line in text.splitlines()))
    assert (found.traceback, found.phase) == ("<module> (train.py:90): loss.backward()", "backward")
    assert found.rank == rank


def test_ranks_that_write_in_turn_keep_their_own_traceback() -> None:
    message = ERRORS["torch 2.1"][0]
    first = (TRACEBACK + f"[rank0]: {message}").splitlines()
    second = [line.replace("rank0", "rank1").replace("loss.backward", "other") for line in first]
    found = diagnosed("\n".join(line for pair in zip(first, second, strict=True) for line in pair))
    assert (found.rank, found.traceback) == (0, "<module> (train.py:90): loss.backward()")


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (("Cell In[12], line 3", "File /opt/torch/_tensor.py:64, in Tensor.backward(self)"),
         "<module> (Cell In[12]:3): loss.backward()"),
        (("<ipython-input-5-ab> in <cell line: 3>()", "/opt/torch/_tensor.py in backward(self)"),
         "<cell line: 3> (<ipython-input-5-ab>:3): loss.backward()"),
    ],
)  # fmt: skip
def test_the_traceback_of_a_notebook_gives_the_code(heads: tuple[str, str], expected: str) -> None:
    head = "OutOfMemoryError                Traceback (most recent call last)"
    code = ["      2 x = 1", "\x1b[0;32m----> 3\x1b[0m loss.backward()", "", heads[1], "--> 64 torch.run("]
    found = diagnosed("\n".join([head, heads[0], *code, "", ERRORS["torch 2.1"][0]]))
    assert found.traceback == expected


def test_a_printed_error_gives_way_to_the_raised_one() -> None:
    message = ERRORS["torch 2.1"][0]
    printed = f"halving the batch: {message.partition(': ')[2]}\nstep 2: loss 3.1\n"
    found = diagnosed(printed + TRACEBACK + message)
    assert (found.line, found.further_errors) == (10, 1)
    assert found.notes[0].startswith("Line 1 has an earlier error")
    assert diagnosed(printed).line == 1
    assert diagnosed(f"{message}\n{TRACEBACK}{message}").line == 1


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[ERROR] [launch.py:322] ['python', 'train.py'] exits with return code = -9", FailureKind.HOST),
        ("zsh: killed     python train.py", FailureKind.HOST),
        ("fish: Job 1, 'python train.py' terminated by signal SIGKILL (Forced quit)", FailureKind.HOST),
        ("train.sh: Zeile 3:  3434 Getötet                python train.py", FailureKind.HOST),
        ("train.sh : ligne 3 :  3434 Processus arrêté      python train.py", FailureKind.HOST),
        ("train.sh: línea 3:  3434 Terminado (killed)      python train.py", FailureKind.HOST),
        ("  traceback : Signal 7 (SIGBUS) received by PID 3435", FailureKind.SHARED_MEMORY),
        ("Error out of memory at line 380 in file /src/csrc/ops.cu", FailureKind.LIBRARY),
    ],
)
def test_launchers_and_shells_report_killed_processes(text: str, kind: FailureKind) -> None:
    assert diagnosed(text).kind is kind


def test_advice_against_errors_is_no_error() -> None:
    with pytest.raises(UsageError, match="No out-of-memory error"):
        diagnosed("set PYTORCH_ALLOC_CONF to avoid CUDA out of memory errors\nDone.")


@pytest.mark.parametrize(
    ("shown", "tensor", "fits"),
    [
        ("2.00 MiB", 1000, True), ("2.00 MiB", 3 * MIB, False),
        ("20.00 MiB", 3 * MIB, True), ("20.00 MiB", 20 * MIB, True), ("20.00 MiB", MIB, False),
        ("64.00 MiB", 63 * MIB, True), ("64.00 MiB", 62 * MIB, False), ("1.16 GiB", round(1.157 * GIB), True),
    ],
)  # fmt: skip
def test_a_request_is_the_size_of_a_segment(shown: str, tensor: int, fits: bool) -> None:
    least, most = tensor_sizes(*span_of(shown))
    assert (least <= tensor <= most) == fits


def test_logits_are_guessed_from_their_size() -> None:
    size = 8 * 2048 * 128_256 * 4 / GIB
    text = ERRORS["torch 2.1"][0].replace("6.37 GiB", f"{size:.2f} GiB")
    found = [one for one in diagnosed(text).candidates if "Llama 3, fp32" in one.shapes]
    assert [(one.guess, one.shapes) for one in found] == [(True, "16,384 tokens × 128,256 of Llama 3, fp32")]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "empty"),
        ("   \n\n", "empty"),
        ("step 1\nstep 2\n", "No out-of-memory error"),
        ("jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5 bytes", "JAX"),
        ("ResourceExhaustedError: OOM when allocating tensor with shape[8,8]", "TensorFlow"),
        ("triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456", "Triton"),
    ],
)  # fmt: skip
def test_other_texts_are_refused_in_one_line(text: str, part: str) -> None:
    with pytest.raises(UsageError, match=part) as refusal:
        diagnosed(text)
    assert "\n" not in str(refusal.value)


def test_a_cut_message_is_no_error_of_ours() -> None:
    message = ERRORS["torch 2.8, private pools"][0]
    for end in range(len("torch.OutOfMemoryError: CUDA out of memory"), len(message), 9):
        assert diagnosed(message[:end]).kind in tuple(FailureKind)


def test_a_log_of_many_errors_is_read_in_linear_time() -> None:
    many = "\n".join(f"[rank1]: {ERRORS['torch 2.1'][0]}" for _ in range(3000)) + "\n( rank " * 20_000
    start = time.process_time()
    assert diagnosed(many).further_errors == 2999
    assert time.process_time() - start < 3


@pytest.mark.parametrize(
    "filler", ["\n", " ", "exitcode ", "[1] ", "1", "open ", "Tried to allocate ", "a: line 1: "]
)
def test_a_hostile_log_is_read_in_linear_time(filler: str) -> None:
    start = time.process_time()
    assert diagnosed(f"{filler * 200_000}\nKilled\n").kind is FailureKind.HOST
    assert time.process_time() - start < 3


def test_powershell_s_utf_16_is_read() -> None:
    content = ("\ufeff" + ERRORS["cuBLAS"][0]).encode("utf-16-le")
    assert diagnose(content, "log")[0].kind is FailureKind.LIBRARY
    assert diagnose(content[2:], "log")[0].kind is FailureKind.LIBRARY


def test_a_log_from_a_closed_stdin_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert run(["why-oom", "-"]) == 2
    assert "No log given." in capsys.readouterr().err
