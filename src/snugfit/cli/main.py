"""The `snugfit` command: it finds the subcommand, and turns every ending into a message and an exit code.

Commands return (exit 0) or raise. An exception becomes one message on stderr and the exit code that
`errors.py` documents. A typing mistake is 2, Ctrl-C is 130. A reader that goes away (`| head`) ends the
command without a message (`streams.py`). A traceback is shown only for unexpected errors, because a bug
report needs it.

Two measures are for speed. Both are about torch's and transformers' many Python objects:

- the cyclic garbage collector would walk again and again through a heap that grows by imports, and free no
  object. So it runs less often;
- at the end, the interpreter would free the whole heap object by object. The command has flushed its output
  and closed its files by then, so it ends the process at once.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.main import get_command

from snugfit.cli.arguments import Command, show_version
from snugfit.cli.gpus import gpus
from snugfit.cli.measure import measure
from snugfit.cli.plan import plan
from snugfit.cli.plugins import OPTION, named_plugins, without_plugins
from snugfit.cli.predict import predict
from snugfit.cli.reference import techniques
from snugfit.cli.streams import keep_libraries_off_stdout, open_all, redirect_to_null
from snugfit.cli.train import train
from snugfit.deferred_imports import hasten_import
from snugfit.documents import only_documents_on_stdout
from snugfit.errors import SnugfitError, escape_controls, missing_package_message, nearest
from snugfit.feature_folders import use_plugins
from snugfit.frontends.one_of_several import COMMAND_LINE, OWN_PROCESS, one_of_several
from snugfit.techniques.registry import features, hooks
from snugfit.training.ranks import ToldElsewhere

_TypingMistake: type[Exception] = typer.BadParameter.__bases__[0]
"""The base class of all usage errors in typer's private copy of click, reached through the public
`BadParameter`."""

INTERRUPTED = 130
FEW_COLLECTIONS = 100_000
"""Number of objects created between two garbage collections, fewer than with Python's own threshold of 700.
"""

SHORT_FORMS = {
    "--bs": "--batch-size", "--seqlen": "--sequence-length", "--seq-len": "--sequence-length",
    "--context": "--sequence-length", "--ctx": "--sequence-length", "--context-length": "--sequence-length",
    "--data": "--dataset", "--vram": "--memory", "--device": "--gpu",
}  # fmt: skip
"""Options that users guess, each with the right option, where the spelling is too different to find it by
similarity."""

SHORTEST_WORD = 4
"""Smallest number of letters of a word in an option that is compared with a mistyped one. Shorter words such
as `gpu` and `cpu` are too similar."""

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
    predict, plan, train, measure,
    *(command for commands in hooks("commands") for command in commands()),
    gpus, techniques,
)  # fmt: skip
for command in COMMANDS:
    app.command(cls=Command)(command)


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", help="Print the version and exit.", callback=show_version, is_eager=True
        ),
    ] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            OPTION,
            help="Load this plugin, by name or by the path of its folder. Can be repeated, here or after the "
            "command.",
            metavar="NAME_OR_PATH",
        ),
    ] = None,
) -> None:
    """Will this training step fit that GPU? Predict it without one, measure it on one, compare the two."""


@functools.cache
def _parser_of_all() -> Any:
    """Return the parser of all commands, built once: typer would build it again for each command line."""
    return get_command(app)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Every expected error becomes a message on stderr."""
    keep_libraries_off_stdout()
    code: object = 0
    COMMAND_LINE.set(tuple(arguments))
    try:
        with one_of_several():
            # Plugins may add options, so they are loaded before the arguments are parsed.
            use_plugins(named_plugins(arguments))
            arguments = without_plugins(arguments)
            for rewrite in hooks("rewrite_words"):
                arguments = rewrite(arguments, [command.__name__ for command in COMMANDS])
            with only_documents_on_stdout() if prints_document(arguments) else nullcontext():
                code = _parser_of_all()(args=arguments, prog_name="snugfit", standalone_mode=False)
            sys.stdout.flush()
    except ToldElsewhere as told:
        return told.exit_code
    except SnugfitError as error:
        return _print_error(str(error), error.exit_code)
    except _TypingMistake as mistake:
        return _print_mistake(mistake, arguments)
    except ImportError as error:
        if lacking := missing_package_message(" ".join(["snugfit", *arguments[:1]]), error):
            return _print_error(lacking, 2)
        raise
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except (BrokenPipeError, SystemExit):  # raised by typer for a broken pipe or completion
        if "_SNUGFIT_COMPLETE" not in os.environ:
            redirect_to_null(sys.stdout)
    if code == INTERRUPTED:  # typer returns this exit code after Ctrl-C
        return _print_error("interrupted", INTERRUPTED)
    return code if isinstance(code, int) else 0


def prints_document(arguments: Sequence[str]) -> bool:
    """Return True if this command line requests JSON output."""
    return bool({"--json", "--format=json"}.intersection(arguments)) or ("--format", "json") in pairwise(
        arguments
    )


def main() -> None:
    """Run the command, then exit without freeing the heap."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # transformers' advice is for scripts
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # a config has a few kB
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP's advice is for scripts
    if "--offline" in sys.argv:  # huggingface_hub reads it at import
        os.environ["HF_HUB_OFFLINE"] = "1"
    gc.set_threshold(FEW_COLLECTIONS, 50, 50)
    hasten_import()
    open_all()
    OWN_PROCESS.set(True)
    code = run(sys.argv[1:])
    with suppress(BrokenPipeError, SnugfitError):  # the exit code shows the failure already
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _print_error(message: str, code: int) -> int:
    """Print an error message and return the exit code. Further lines are indented below the first, so that a
    recipe's marker stays under its word."""
    name = "snugfit: "
    print(name + escape_controls(message).replace("\n", "\n" + " " * len(name)), file=sys.stderr)
    return code


NO_COMMANDS = {
    "watch": "It is a function: `with snugfit.watch() as seen: trainer.train()` in Python.",
    "fit": "It is a function: `snugfit.fit(trainer)` in a script. `snugfit train` trains by itself.",
    "accelerate": "It is a function: `snugfit.accelerate(...)` around a loop of your own.",
    "compare": "Recipes are compared by `snugfit predict MODEL --compare RECIPE`.",
    "estimate-memory": "It is called predict: `snugfit predict MODEL`.",
    "estimate": "It is called predict: `snugfit predict MODEL`.",
    "generate": "It is a phase: `snugfit predict MODEL --phase generate`.",
    "evaluate": "It is a phase: `snugfit predict MODEL --phase evaluate`.",
    "help": "It is written --help: `snugfit --help`, `snugfit plan --help`.",
    "version": "It is written --version: `snugfit --version`.",
}
"""Words that users type as a command but that are none, each with advice for the error message."""

REMOVED_OPTIONS = {option: advice for one in features() for option, advice in one.removed_options.items()}
"""Options of earlier versions and of other commands, each with advice for the error message."""


def _print_mistake(mistake: Any, arguments: Sequence[str]) -> int:
    """Print an error in the command line, with a hint on the right notation, and return the exit code."""
    context: Any = getattr(mistake, "ctx", None)
    command = next((one.__name__ for one in COMMANDS if [one.__name__] == arguments[:1]), "")
    path = context.command_path if context else f"snugfit {command}".rstrip()
    message = " ".join(getattr(mistake, "format_message", mistake.__str__)().split())
    if not message:  # without any arguments, typer has printed the help already
        return 2
    # Only typer's error for an unknown option has this attribute.
    if hasattr(mistake, "possibilities"):
        removed = REMOVED_OPTIONS.get((command, mistake.option_name), "")
        similar = _similar_options(mistake.option_name, context)
        name = mistake.option_name.lstrip("-")
        message = f"No such option: {mistake.option_name}." + (
            f" {removed}"
            if removed
            else f" Write the {name} without a flag: {path} {name.upper()}."
            if any(one.name == name for one in context.command.params if one.param_type_name == "argument")
            else f" Did you mean {' or '.join(similar)}?"
            if similar
            else ""
        )
    if message.startswith("No such command") and arguments and arguments[0] in NO_COMMANDS:
        message, path = f"No such command {arguments[0]!r}. {NO_COMMANDS[arguments[0]]}", "snugfit"
    message = _number_mistake(mistake) or message.replace("Value error, ", "")  # prefix of pydantic's errors
    message = message.rstrip(".")
    return _print_error(f"{message}{'' if message.endswith('?') else '.'} Try: {path} --help", 2)


def _similar_options(typed: str, context: Any) -> list[str]:
    """Return options with a similar spelling. If there are none, return those that contain such a word, or
    else options of features.

    For example, `--length` gives `--sequence-length`.
    """
    options_here = {text for one in context.command.params for text in one.opts}
    if SHORT_FORMS.get(typed) in options_here:
        return [SHORT_FORMS[typed]]
    name, parameters = typed.lstrip("-").replace("_", "-"), context.command.params
    options = [text[2:] for one in parameters if not one.hidden for text in one.opts if text.startswith("--")]
    if near := nearest(name, options):
        return [f"--{option}" for option in near]
    if begun := [option for option in options if option.startswith(name)]:
        return [f"--{option}" for option in begun]
    words = {word for option in options for word in option.split("-") if len(word) >= SHORTEST_WORD}
    if likely := nearest(name, words, count=1):
        return [f"--{option}" for option in options if likely[0] in option.split("-")]
    declared = {text for one in parameters for text in one.opts}
    further = {word for options in hooks("further_options") for word in options(declared)}
    return [f"--{word}" for word in nearest(name.replace("-", "_"), further)]


def _number_mistake(mistake: Any) -> str:
    """Return `--steps is 0; allowed are whole numbers from 1 up` for a wrong number, else an empty string."""
    reasons: list[Any] = getattr(mistake.__cause__, "errors", list)()
    declared = getattr(getattr(mistake, "param", None), "type_descriptor", None)
    if not reasons or not declared or declared.annotation not in (int, float):
        return ""
    low, high = declared.parameter_info.min, declared.parameter_info.max
    kind = "whole numbers" if declared.annotation is int else "numbers"
    span = f" from {low}" + (f" to {high:,}" if high is not None else " up") if low is not None else ""
    return f"{mistake.param.opts[0]} is {reasons[0]['input']}; allowed are {kind}{span}"
