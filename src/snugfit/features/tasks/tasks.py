"""The training tasks of this feature: their heads in transformers and their names on the hub."""

from __future__ import annotations

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
EMBEDDING = AddedTask(
    name="text-embedding",
    head=("AutoModelForTextEncoding", "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES"),
    elsewhere=("embedding", "sentence-similarity", "feature-extraction"),
    mixing="each text is compared with the partners of all texts in the batch",
)
