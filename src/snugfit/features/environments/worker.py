"""The process that predicts a job in another environment, for `upgrade-check`.

Its arguments are the paths of two JSON files: the job, and the answer that it writes.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snugfit.job.job import Job


def answer_of(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prediction of the question's job and the arguments that it uses, or an error, as JSON."""
    from snugfit.errors import SnugfitError, missing_package_message
    from snugfit.job.job import Job
    from snugfit.prediction.predict import predict
    from snugfit.techniques.recipe import Recipe

    options = {name: value for name, value in question.items() if name not in ("job", "recipe")}
    try:
        job = Job.from_json(question["job"])
        prediction = predict(job, Recipe.parse(question["recipe"]), **options)
        return {"prediction": prediction.to_json(), "arguments": arguments_of(job)}
    except SnugfitError as error:
        return {"error": str(error)}
    except ImportError as error:  # an environment may lack a dependency of transformers
        return {"error": missing_package_message("The prediction", error) or str(error)}


def arguments_of(job: Job) -> dict[str, list[str]]:
    """Return the names of arguments of the job's model and config, and of the Trainer, by owner."""
    model, config = job.model_class(), type(job.config_to_read())
    owners: dict[str, Callable[..., Any]] = {
        config.__name__: config,
        f"{model.__name__}.forward": model.forward,
        f"{model.__name__}.from_pretrained": model.from_pretrained,
    }
    try:
        from transformers import Trainer, TrainingArguments
    except ImportError:  # they need accelerate
        pass
    else:
        owners |= {"Trainer": Trainer, "TrainingArguments": TrainingArguments}
    return {name: argument_names(owner) for name, owner in owners.items()}


def argument_names(owner: Callable[..., Any]) -> list[str]:
    """Return the names of the named arguments of a function or class, in alphabetical order."""
    named = [
        one.name
        for one in inspect.signature(owner).parameters.values()
        if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) and one.name != "self"
    ]
    # The constructor of a config may accept only keywords of any name.
    of_class = [one.name for one in dataclasses.fields(owner)] if dataclasses.is_dataclass(owner) else []
    return sorted({*named, *of_class})


def main(request_file: str, answer: str) -> None:
    """Write the answer to the question in the file `request_file` to the file `answer`."""
    Path(answer).write_text(json.dumps(answer_of(json.loads(Path(request_file).read_text()))))


if __name__ == "__main__":
    main(*sys.argv[1:])
