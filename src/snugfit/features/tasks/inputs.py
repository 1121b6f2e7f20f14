"""Synthetic batches of this feature's tasks.

Shapes: B samples, S sequence length, C choices of a sample (the job's `labels`).

| task               | inputs              | labels                                                     |
|--------------------|---------------------|------------------------------------------------------------|
| question-answering | input_ids (B, S)    | start_positions (B), end_positions (B): tokens of the answer |
| multiple-choice    | input_ids (B, C, S) | labels (B), the correct choice                             |
| text-embedding     | input_ids (B, 2, S) | none: the pairs of other samples are the wrong answers     |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from snugfit.errors import JobError
from snugfit.features.tasks import tasks
from snugfit.features.tasks.contrast import TEXTS
from snugfit.job.batch import Batch, BatchShapes, SampleInputs
from snugfit.job.inputs import ModelInputs

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job


class AnswerSpans(SampleInputs):
    """Random first and last tokens of answers, which creates synthetic batches for question answering."""

    def targets(
        self, shapes: BatchShapes, samples: int, inputs: Batch, generator: torch.Generator
    ) -> Mapping[str, Any]:
        """Return the positions of answers in tokens, each (B). They are never in the padding."""
        import torch

        # The loss ignores positions beyond the sequence, so a mean over samples needs tokens of the text.
        length = shapes.padding_of(inputs["input_ids"]).start
        ends = torch.randint(length, (samples, 2), generator=generator, device="cpu").sort(dim=1).values
        return {"start_positions": ends[:, 0].clone(), "end_positions": ends[:, 1].clone()}


class ChoiceTexts(SampleInputs):
    """Random texts of choices, which creates synthetic batches for multiple choice."""

    def inputs(self, shapes: BatchShapes, samples: int, generator: torch.Generator) -> Batch:
        """Return token ids (B, C, S), with their attention mask if there is padding."""
        choices = shapes.job.labels
        flat = shapes.tokens(samples * choices, generator)
        return {name: value.view(samples, choices, -1) for name, value in flat.items()}


class TextPairs(SampleInputs):
    """Random pairs of texts, which creates synthetic batches for embeddings."""

    def inputs(self, shapes: BatchShapes, samples: int, generator: torch.Generator) -> Batch:
        """Return token ids (B, 2, S), with their attention mask if there is padding."""
        flat = shapes.tokens(samples * TEXTS, generator)
        return {name: value.view(samples, TEXTS, -1) for name, value in flat.items()}

    def targets(
        self, shapes: BatchShapes, samples: int, inputs: Batch, generator: torch.Generator
    ) -> Mapping[str, Any]:
        """Return no labels: the other samples of the batch are the wrong answers."""
        return {}


class QuestionInputs(ModelInputs):
    """Input type of models that find an answer's first and last token in a text."""

    task = tasks.QUESTIONS.name

    def of_job(self, job: Job, config: Any) -> AnswerSpans:
        """Return the class of a job's synthetic answers."""
        return AnswerSpans()

    def label_items(self, batch: Mapping[str, Any]) -> int:
        """Return the number of samples, over which the losses of first and last tokens are averaged."""
        return len(batch["start_positions"])

    def correct(self, out: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return True for each answer whose first and last token are both found: the exact match of SQuAD
        (arXiv 1606.05250, section 6.1) on tokens, (B).
        """
        starts, ends = (getattr(out, f"{end}_logits").argmax(-1) for end in ("start", "end"))
        is_correct: torch.Tensor = (starts == batch["start_positions"]) & (ends == batch["end_positions"])
        return is_correct


class ChoiceInputs(ModelInputs):
    """Input type of models that choose one of several texts. The job's `labels` is the number of choices."""

    task = tasks.CHOICES.name
    has_classes = True

    def of_job(self, job: Job, config: Any) -> ChoiceTexts:
        """Return the class of a job's synthetic choices. Raises `JobError` for a single choice."""
        if job.labels < 2:
            raise JobError(f"labels is {job.labels}; {job.task} needs 2 choices or more. Set labels: 4.")
        return ChoiceTexts()

    def sequences(self, job: Job) -> int:
        """Return the number of choices."""
        return job.labels


class EmbeddingInputs(ModelInputs):
    """Input type of encoders of texts, which are trained to give the texts of a pair similar embeddings."""

    task = tasks.EMBEDDING.name

    def of_job(self, job: Job, config: Any) -> TextPairs:
        """Return the class of a job's synthetic pairs."""
        return TextPairs()

    def sequences(self, job: Job) -> int:
        """Return the number of texts in a pair."""
        return TEXTS

    def label_items(self, batch: Mapping[str, Any]) -> int:
        """Return the number of pairs."""
        return len(batch["input_ids"])

    def correct(self, out: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return True for each text whose partner is the most similar of the batch (arXiv 2004.04906, section
        3.2), (B).
        """
        nearest = out["logits"].argmax(-1)
        is_correct: torch.Tensor = nearest == nearest.new_tensor(range(len(nearest)))
        return is_correct


QUESTION_INPUTS, CHOICE_INPUTS, EMBEDDING_INPUTS = QuestionInputs(), ChoiceInputs(), EmbeddingInputs()
