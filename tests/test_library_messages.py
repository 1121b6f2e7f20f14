"""Log messages of libraries stay out of an answer: DeepSpeed prints its messages on stdout."""

import json
import logging
import os
import runpy
import sys

import pytest
import torch

from snugfit.cli.main import run
from snugfit.cli.streams import keep_libraries_off_stdout
from snugfit.job.gpu import find_gpu
from snugfit.training.options import TrainOptions
from snugfit.training.run.opening import schedule


@pytest.fixture
def logger():
    """Return DeepSpeed's logger, made by DeepSpeed itself, for the time of a test."""
    logger = logging.getLogger("DeepSpeed")
    handlers, filters, level = logger.handlers[:], logger.filters[:], logger.level
    yield logger
    logger.handlers[:], logger.filters[:] = handlers, filters
    logger.setLevel(level)


def _log(logger, file, message):
    logger.setLevel(logging.WARNING)
    logger.addHandler(logging.StreamHandler(stream=sys.stdout))
    logger.handle(logger.makeRecord(logger.name, logging.WARNING, file, 1, message, (), None))


def test_stdout_holds_answers_only(logger, capsys):
    keep_libraries_off_stdout()
    _log(logger, "engine.py", "gradients are not reduced")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "DeepSpeed: gradients are not reduced\n"


def test_the_accelerator_that_deepspeed_found_is_not_told(logger, capsys):
    keep_libraries_off_stdout()
    _log(logger, "real_accelerator.py", "Setting accelerator to CPU.")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("form", [["--json"], ["--format", "json"], ["--format=json"]])
def test_a_library_s_print_stays_out_of_a_json_document(form, monkeypatch, capsys):
    def print_and_find(name):
        print("Setting accelerator to CPU.")
        return [t4]

    t4 = find_gpu("t4")
    monkeypatch.setattr("snugfit.job.gpu.find_gpus", print_and_find)
    assert run(["gpus", "t4", *form]) == 0
    printed = capsys.readouterr()
    assert "T4" in str(json.loads(printed.out))
    assert printed.err == "Setting accelerator to CPU.\n"


def test_stdout_of_workers_is_stderr(capfd):
    """The fork server imports this module before the libraries."""
    stdout = os.dup(1)
    try:
        runpy.run_module("snugfit.prediction.quiet_workers")
        os.write(1, b"printed by a library\n")
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
    assert capfd.readouterr() == ("", "printed by a library\n")


def test_a_schedule_imports_bitsandbytes_without_its_advice(monkeypatch):
    """transformers imports peft for its TrainingArguments, and peft imports bitsandbytes."""
    imported = []
    monkeypatch.setattr("snugfit.training.run.opening.import_peft", lambda: imported.append("peft"))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule(type("Run", (), {"options": TrainOptions()}), optimizer, 4)
    assert imported == ["peft"]
