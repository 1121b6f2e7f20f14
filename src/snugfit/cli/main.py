"""The `snugfit` command: it finds the subcommand, and turns every ending into a message and an exit code.

Commands return by themselves (exit 0) or raise. What they raise becomes one message on stderr and the exit
code that `errors.py` documents; a typing mistake is 2, Ctrl-C is 130, and a reader that goes away (`| head`)
ends the command without a word (`streams.py`). A traceback is shown only for unexpected errors, because
there it is what a report needs.

Two things are done here for speed, both about torch's and transformers' many Python objects:

- the cyclic garbage collector would walk through a heap that grows by imports again and again and free
  nothing, so it is asked to come less often;
- when the work is done, the interpreter would take the whole heap down object by object. The command has
  flushed its output and closed its files by then, so it ends the process at once.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer

from snugfit.cli.accuracy import accuracy
from snugfit.cli.arguments import Command
from snugfit.cli.calibrate import calibrate
from snugfit.cli.check import check
from snugfit.cli.doctor import doctor
from snugfit.cli.export import export
from snugfit.cli.gpus import gpus
from snugfit.cli.guide import guide
from snugfit.cli.lengths import lengths
from snugfit.cli.measure import measure
from snugfit.cli.plan import plan
from snugfit.cli.predict import predict
from snugfit.cli.streams import forget, open_all
from snugfit.cli.techniques import techniques
from snugfit.cli.train import train
from snugfit.errors import SnugfitError, escape_controls

_TypingMistake: type[Exception] = typer.BadParameter.__bases__[0]
"""Typer's root of all usage errors. It carries click with it under a private name, so the class is reached
through the one public member of its family."""

INTERRUPTED = 130
FEW_COLLECTIONS = 100_000
"""Objects made between two collections; Python's own figure is 700."""

SHORT_FORMS = {"--bs": "--batch-size", "--seqlen": "--sequence-length", "--seq-len": "--sequence-length"}
"""Options that people guess, whose letters are too far from ours to be found by likeness."""

app = typer.Typer(
    name="snugfit",
    help="Does a training step fit a GPU? Predict it without the GPU, plan what fits, train it, measure it.",
    epilog="Exit codes: 0 ok, 1 error, 2 usage, 3 does not fit (check: there are findings), 4 out of "
    "memory, 5 outside the band, 75 stopped and can be resumed, 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = (
    predict, plan, train, lengths, measure, check, export, guide, accuracy, calibrate, gpus, techniques,
    doctor,
)  # fmt: skip
for command in COMMANDS:
    app.command(cls=Command)(command)


def _show_version(asked: bool) -> None:
    if asked:
        from snugfit.versions import __version__

        typer.echo(f"snugfit {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Will this training step fit that GPU? Predict it without one, measure it on one, compare the two."""


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and gives its exit code; every expected error becomes a message on stderr."""
    code: object = 0
    try:
        code = app(args=list(arguments), prog_name="snugfit", standalone_mode=False)
        sys.stdout.flush()
    except SnugfitError as error:
        return _tell(str(error), error.exit_code)
    except _TypingMistake as mistake:
        return _tell_mistake(mistake)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except (BrokenPipeError, SystemExit):  # typer's of a broken pipe, or after it completed a word
        if "_SNUGFIT_COMPLETE" not in os.environ:
            forget(sys.stdout)
    if code == INTERRUPTED:  # typer makes a number of Ctrl-C
        return _tell("interrupted", INTERRUPTED)
    return code if isinstance(code, int) else 0


def main() -> None:
    """The console entry: `run`, then out of the process without taking the heap apart."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its advice is for scripts, not for reports
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # for a config of a few kB
    if "--offline" in sys.argv:  # read by huggingface_hub when it is imported
        os.environ["HF_HUB_OFFLINE"] = "1"
    gc.set_threshold(FEW_COLLECTIONS, 50, 50)
    open_all()
    code = run(sys.argv[1:])
    with suppress(BrokenPipeError, SnugfitError):  # whose exit code is another one already
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _tell(message: str, code: int) -> int:
    """One message; further lines stand under the first, so that a recipe's marker stays under its word."""
    name = "snugfit: "
    print(name + escape_controls(message).replace("\n", "\n" + " " * len(name)), file=sys.stderr)
    return code


def _tell_mistake(mistake: Exception) -> int:
    """A mistake in the command line, with the help that would have prevented it."""
    context = getattr(mistake, "ctx", None)
    path = context.command_path if context else "snugfit"
    message = " ".join(getattr(mistake, "format_message", mistake.__str__)().split())
    if not message:  # no arguments at all: typer has printed the help already
        return 2
    option = getattr(mistake, "option_name", "")
    if option in SHORT_FORMS:
        message = f"No such option: {option}. Did you mean {SHORT_FORMS[option]}?"
    message = message.replace("Value error, ", "").rstrip(".")  # typer's checks are pydantic's
    return _tell(f"{message}{'' if message.endswith('?') else '.'} Try: {path} --help", 2)
