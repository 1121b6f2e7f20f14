"""The training tasks of this feature: their heads in transformers and their names on the hub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from snugfit.job.inputs import AddedTask

QUESTIONS = AddedTask(
    name="question-answering",
    head=("AutoModelForQuestionAnswering", "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES"),
    elsewhere=("question-ans", "extractive-question-answering"),
)
CHOICES = AddedTask(
    name="multiple-choice",
    head=("AutoModelForMultipleChoice", "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES"),
)


@dataclass(frozen=True, kw_only=True)
class EmbeddingTask(AddedTask):
    """The task of encoders of texts that learn similar embeddings for the texts of a pair."""

    def finish(self, job: Any, setup: Any, model: Any, build: Callable[[], Any]) -> Any:
        """Return the encoder with the contrastive loss."""
        from snugfit.features.tasks.contrast import add_contrastive_loss

        return add_contrastive_loss(model)


EMBEDDING = EmbeddingTask(
    name="text-embedding",
    head=("AutoModelForTextEncoding", "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES"),
    elsewhere=("embedding", "sentence-similarity", "feature-extraction"),
    mixing="each text is compared with the partners of all texts in the batch",
)
