"""Synthetic batches of pairs. Shapes: B samples, S tokens of a prompt with its answer.

| tensor              | shape     | content                                                              |
|---------------------|-----------|----------------------------------------------------------------------|
| input_ids           | (B, 2, S) | the chosen answer after its prompt, then the rejected one            |
| attention_mask      | (B, 2, S) | 0 for padding; only with padding                                     |
| labels              | (B, 2, S) | tokens of the answers, -100 elsewhere; not for rewards               |
| desirable           | (B)       | kto: True for a desirable answer                                     |
| reference_log_probs | (B, 2)    | log-probabilities of both answers, if they are precomputed           |
| advantages          | (B)       | grpo, rloo: the advantage of each answer; input_ids are (B, S)       |

Samples are the first dimension, so that a loop cuts batches as those of other tasks. A pair of `kto` is an
answer, and another prompt's answer after the same prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snugfit.features.preferences.settings import FORMS, tensors_of
from snugfit.job.batch import IGNORED, Batch, BatchShapes, SampleInputs
from snugfit.job.inputs import ModelInputs

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job


@dataclass(frozen=True)
class PairInputs(SampleInputs):
    """Random pairs of token sequences."""

    completion_length: int
    """Number of tokens at the end of each sequence that belong to the answer."""

    def inputs(self, shapes: BatchShapes, samples: int, generator: torch.Generator) -> Batch:
        """Return random token ids (B, 2, S), with their attention mask if there is padding."""
        import torch

        length, rows = shapes.job.sequence_length, PAIRS.sequences(shapes.job)
        ids = shapes.ids(rows * samples, length, generator)
        # Decoders read a reward at the last token that differs from the padding token.
        ids[ids == shapes.pad_token] = (shapes.pad_token + 1) % shapes.vocabulary
        batch, shape = {"input_ids": ids}, (samples, rows, length) if rows > 1 else (samples, length)
        if shapes.job.padding:
            mask, padding = torch.ones_like(ids), shapes.padding_of(ids)
            mask[:, padding], ids[:, padding] = 0, shapes.pad_token
            batch["attention_mask"] = mask
        return {name: value.view(shape) for name, value in batch.items()}

    def targets(self, shapes: BatchShapes, samples: int, inputs: Batch, generator: torch.Generator) -> Batch:
        """Return the tensors beside the token ids that the loss reads. Labels (B, 2, S) are the tokens of
        answers, with -100 for prompts and padding.
        """
        import torch

        labels = inputs["input_ids"].clone()
        padding = shapes.padding_of(labels.flatten(0, -2)) if shapes.job.padding else slice(0, 0)
        end = padding.start or shapes.job.sequence_length
        # The answer is before the padding, and at least one token of it counts.
        labels[..., : min(max(0, end - self.completion_length), end - 1)] = IGNORED
        labels[..., padding] = IGNORED
        tensors = {
            "labels": labels,
            "desirable": torch.arange(samples, device="cpu") % 2 == 0,
            "advantages": torch.ones(samples, device="cpu"),
            "reference_log_probs": torch.zeros(samples, 2, device="cpu"),
        }
        return {name: tensors[name] for name in tensors_of(shapes.job) if name in tensors}


class Pairs(ModelInputs):
    """Inputs of tasks on preferences."""

    def serves(self, task: str, architecture: str) -> bool:
        """Return True for a task on preferences other than rewards."""
        return task in FORMS and task != "reward"

    def sequences(self, job: Job) -> int:
        """Return the number of token sequences in a sample: two in a pair."""
        task: Any = job.added_task
        rows: int = task.rows
        return rows

    def label_items(self, batch: Any) -> int:
        """Return the number of samples, over which the loss is a mean; of a student's, that of tokens."""
        if batch["input_ids"].ndim == 3 or "labels" not in batch:
            return len(batch["input_ids"])
        return int((batch["labels"][:, 1:] != IGNORED).sum())

    def correct(self, out: Any, batch: Any) -> torch.Tensor | None:
        """Return True for each pair whose chosen answer has the higher score, (B), as TRL's
        `rewards/accuracies`. None for tasks without pairs of scores.
        """
        scores: torch.Tensor = out["logits"]
        # KTO has one score in a sample, and tasks with advantages have tokens (B, S).
        has_pairs = scores.ndim == 2 and batch["input_ids"].ndim == 3
        return scores[:, 0] > scores[:, 1] if has_pairs else None

    def of_job(self, job: Job, config: Any) -> PairInputs:
        """Return the maker of the job's pairs."""
        # Settings of another phase have no length of answers.
        given = job.phase_settings.get("completion_length", 0)
        return PairInputs(given or -(-job.sequence_length // 2))


class RewardPairs(Pairs):
    """Inputs of reward models, whose head gives one number to each answer."""

    def serves(self, task: str, architecture: str) -> bool:
        """Return True for the task of reward models."""
        return task == "reward"

    def complete(self, config: Any) -> None:
        """Set the head's size to one number, and a padding token."""
        from snugfit.job.model import name_a_pad_token

        config.num_labels = 1
        name_a_pad_token(config.get_text_config())


REWARD_PAIRS, PAIRS = RewardPairs(), Pairs()
