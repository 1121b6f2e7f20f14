"""Registration of the feature `exchange`: training configurations of other libraries are read, checked and
written.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from snugfit.errors import UsageError
from snugfit.techniques.feature import Configuration, Feature

_NO_DIFF = "snugfit check writes no diff any more. Its table lists each cure, and --json gives it as `fix`."


class Exchange(Feature):
    """The feature that adds the commands `check` and `export`, and the options `--arguments`, `--export` and
    transformers'."""

    removed_options: ClassVar[Mapping[tuple[str, str], str]] = {
        ("check", "--output"): _NO_DIFF,
        ("check", "--force"): _NO_DIFF,
    }

    def commands(self) -> Sequence[Callable[..., Any]]:
        """Return the functions of `snugfit check` and `snugfit export`."""
        from snugfit.features.exchange.commands import check, export

        return (check, export)

    def documents(self) -> Mapping[str, type]:
        """Return the class of each command's JSON output by command, for `snugfit schema`."""
        from snugfit.features.exchange.check import Checked
        from snugfit.features.exchange.export import Export

        return {"export --json": Export, "check --json": Checked}

    def options(self, command: str) -> Sequence[inspect.Parameter]:
        """Return the options `--arguments`, `--export` and the collected flags of transformers that a command
        accepts.
        """
        from snugfit.features.exchange.commands import options

        return options(command)

    def rewrite_words(self, words: Sequence[str], declared: Collection[str]) -> Sequence[str]:
        """Return a command line's words, with transformers' flags collected into a hidden option if the
        command has it.
        """
        from snugfit.features.exchange.commands import TRAINER_ARGUMENT

        if TRAINER_ARGUMENT not in declared or not any(word.startswith("--") for word in words):
            return words
        from snugfit.features.exchange.command_line import split_flags

        words, foreign = split_flags(words, declared)
        return [word for pair in foreign for word in (TRAINER_ARGUMENT, pair)] + words

    def further_options(self, declared: Collection[str]) -> Collection[str]:
        """Return the flags of transformers that a command accepts, in addition to its own."""
        from snugfit.features.exchange.command_line import argument_names
        from snugfit.features.exchange.commands import TRAINER_ARGUMENT

        return argument_names() if TRAINER_ARGUMENT in declared else ()

    def advice_on_file(self, document: Mapping[Any, Any]) -> str:
        """Return advice for another library's configuration in the place of a job file: use the option
        `--arguments`.
        """
        from snugfit.features.exchange.dialect import dialect, recognise

        name = recognise(document) if len(document) > 1 else None
        return f"This looks like {dialect(name).title}: read such a file with --arguments." if name else ""

    def read_configuration(self, flags: Mapping[str, Any], settings: dict[str, Any]) -> Configuration | None:
        """Return the configuration in the file of `--arguments`. The transformers' flags of the command
        override its keys.
        """
        if not flags.get("trainer_arguments") and not flags.get("arguments_file"):
            if (model := str(flags.get("model"))).endswith(".py"):
                raise UsageError(f"{model} is not a model. To read a training script: --arguments {model}.")
            return None
        from snugfit.features.exchange.read import read_request

        return read_request(flags, settings)

    def prepare(self, command: str, request: Any) -> Any:
        """Return a command's parsed options unchanged. Raises `UsageError` for an option `--export` that
        cannot be satisfied.
        """
        from snugfit.features.exchange.commands import check_export

        check_export(command, request.flags, request.job, request.gpus)
        return request

    def take_answer(self, flags: Mapping[str, Any], answer: Any) -> None:
        """Write the recipe in a command's result to the files that its option `--export` names."""
        from snugfit.features.exchange.commands import write_export

        write_export(flags, answer)

    def next_steps(self, plan: Any, configuration: Configuration | None) -> Mapping[str, str]:
        """Return further lines for a plan's report by title: Trainer arguments, and an export command for the
        user's tool.
        """
        from snugfit.features.exchange.next_steps import next_steps
        from snugfit.techniques.recipe import Recipe

        return next_steps(plan.job, Recipe.parse(plan.best.recipe), getattr(configuration, "export", ""))
