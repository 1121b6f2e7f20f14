"""The order of samples, their batches, and the data loader."""

from __future__ import annotations

import gc
import os
import pickle
import random
import signal
import time
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from small_models import small_job
from small_tokenizers import NUMBERS, tokenizer
from snugfit.data.collate import Collate
from snugfit.data.row_sources import read_rows
from snugfit.data.samples import Samples, samples_of
from snugfit.data.tokens import padding_token
from snugfit.errors import UsageError
from snugfit.job.batch import label_items
from snugfit.job.job import Job, Task
from snugfit.training.run.loader import feed
from snugfit.training.run.order import SampleOrder


def drawn(count: int = 40) -> list[dict[str, Any]]:
    """Return orders of many sizes, some with lengths."""
    draw = random.Random(7)
    found = []
    for number in range(count):
        micro = draw.choice([1, 2, 3, 5])
        samples = draw.randint(micro * 4, 400)
        found.append(
            {
                "samples": samples,
                "batch_size": micro * draw.randint(1, 4),
                "micro_batches": micro,
                "seed": number,
                "shuffle": draw.random() < 0.8,
                "drop_last": draw.random() < 0.3,
                "bucket": draw.random() < 0.5,
                "lengths": [draw.randint(1, 99) for _ in range(samples)],
            }
        )
    return found  # fmt: skip


def flat(order: SampleOrder, steps: range) -> list[int]:
    return [sample for step in steps for piece in order.step(step) for sample in piece]


@pytest.mark.parametrize("size", drawn(), ids=str)
def test_an_epoch_sees_every_sample_once(size: dict[str, Any]) -> None:
    order = SampleOrder(**size)
    steps = order.steps_per_epoch
    for epoch in (0, 2):
        seen = flat(order, range(epoch * steps, (epoch + 1) * steps))
        assert len(set(seen)) == len(seen)
        left = size["samples"] % size["batch_size"] if size["drop_last"] else 0
        assert len(seen) == size["samples"] - left
        assert set(seen) <= set(range(size["samples"]))


@pytest.mark.parametrize("size", drawn(), ids=str)
def test_a_step_is_cut_into_pieces_of_one_size(size: dict[str, Any]) -> None:
    order = SampleOrder(**size)
    micro = size["batch_size"] // size["micro_batches"]
    for step in range(order.steps_per_epoch):
        pieces = [len(piece) for piece in order.step(step)]
        if sum(pieces) == size["batch_size"]:
            assert pieces == [micro] * size["micro_batches"]
        else:
            assert step == order.steps_per_epoch - 1
            assert max(pieces) <= micro
            assert max(pieces) - min(pieces) <= 1
            assert sum(pieces) == size["samples"] % size["batch_size"]


@pytest.mark.parametrize("size", drawn(), ids=str)
def test_a_step_does_not_remember(size: dict[str, Any]) -> None:
    """A step is the same in any order of calls, in any process, and with any number of micro-batches."""
    order = SampleOrder(**size)
    steps = range(3 * order.steps_per_epoch)
    told = {step: order.step(step) for step in random.Random(1).sample(steps, len(steps))}
    again = pickle.loads(pickle.dumps(order))
    whole = SampleOrder(**{**size, "micro_batches": 1})
    for step in steps:
        assert again.step(step) == told[step]
        assert whole.step(step) == (tuple(sample for piece in told[step] for sample in piece),)


def test_epochs_and_seeds_differ_and_a_sequence_does_not() -> None:
    order = SampleOrder(50, 5, 1, seed=3)
    first, second = flat(order, range(10)), flat(order, range(10, 20))
    assert first != second
    assert first != flat(SampleOrder(50, 5, 1, seed=4), range(10))
    assert (order.epoch(9), order.epoch(10)) == (0, 1)
    lies = SampleOrder(50, 5, 1, seed=3, shuffle=False)
    assert flat(lies, range(20)) == [*range(50)] * 2


def test_the_order_is_what_numpy_drew_when_it_was_written() -> None:
    """A run that resumes under a newer snugfit must train on the same samples."""
    assert SampleOrder(10, 4, 2, seed=42).step(0) == ((5, 6), (0, 7))
    assert SampleOrder(10, 4, 2, seed=42).step(5) == ((6, 5),)


def test_the_random_numbers_of_others_are_left_alone() -> None:
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    flat(SampleOrder(50, 5, 1, seed=3, bucket=True, lengths=[*range(1, 51)]), range(20))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


def padding(order: SampleOrder) -> float:
    lengths = np.asarray(order.lengths)
    pieces = [piece for step in range(order.steps_per_epoch) for piece in order.step(step)]
    return 1 - lengths.sum() / sum(len(piece) * lengths[list(piece)].max() for piece in pieces)


def test_buckets_pad_little_and_stay_random() -> None:
    lengths = np.random.Generator(np.random.PCG64(1)).integers(1, 500, 4000)
    plain = SampleOrder(4000, 16, 4, seed=1, lengths=lengths)
    bucket = SampleOrder(4000, 16, 4, seed=1, lengths=lengths, bucket=True)
    assert padding(plain) > 0.3
    assert padding(bucket) < 0.02
    means = [lengths[flat(bucket, range(step, step + 1))].mean() for step in range(250)]
    assert np.corrcoef(means[:-1], means[1:])[0, 1] < 0.3, "batches of similar length are not adjacent"
    one, two = ({frozenset(flat(bucket, range(k, k + 1))) for k in range(e, e + 250)} for e in (0, 250))
    assert not one & two, "the batches of the epochs differ"


def test_the_last_small_batch_is_random_too() -> None:
    """It is set apart before sorting. Otherwise it would always hold the shortest or the longest samples."""
    lengths = [*range(1, 102)]
    last = [
        lengths[index]
        for seed in range(200)
        for index in flat(SampleOrder(101, 4, 1, seed=seed, lengths=lengths, bucket=True), range(25, 26))
    ]
    assert len(last) == 200
    assert np.mean(last) == pytest.approx(51, abs=7)


AMISS: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": 6, "micro_batches": 4}, "A batch of 6 cannot be cut into 4 equal micro-batches"),
    ({"samples": 3, "batch_size": 4, "drop_last": True}, "3 samples are less than one batch of 4"),
    ({"samples": 0}, "samples: 0 is not allowed"),
    ({"batch_size": 0}, "batch size: 0 is not allowed"),
    ({"micro_batches": True}, "micro-batches: True is not allowed"),
    ({"bucket": True}, "Grouping by length needs the length of every sample"),
    ({"bucket": True, "lengths": [1, 2]}, "Grouping by length needs"),
]


@pytest.mark.parametrize(("changes", "says"), AMISS)
def test_an_order_that_cannot_be(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        SampleOrder(**{"samples": 10, "batch_size": 4, "micro_batches": 2, "seed": 0, **changes})


# ---- batches --------------------------------------------------------------------------------------------


def job_of(task: Task, **more: Any) -> Job:
    family = {Task.CAUSAL_LM: "gpt2", Task.SEQ2SEQ_LM: "t5"}.get(task, "bert")
    return replace(small_job(family, 1), task=task, sequence_length=12, target_length=8, **more)


def test_a_batch_is_padded_to_its_longest() -> None:
    collate = Collate(job_of(Task.CAUSAL_LM), 6)
    batch = collate([{"input_ids": [7, 8, 9], "labels": [-100, 8, 9]}, {"input_ids": [7], "labels": [7]}])
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[7, 8, 9], [7, 6, 6]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "labels": [[-100, 8, 9], [7, -100, -100]],
    }
    assert {value.dtype for value in batch.values()} == {torch.int64}
    assert "attention_mask" not in collate([{"input_ids": [7, 8], "labels": [7, 8]}] * 2)


@pytest.mark.parametrize(
    ("longest", "multiple", "length"), [(3, None, 3), (3, 8, 8), (8, 8, 8), (9, 8, 12), (3, 5, 5)]
)
def test_lengths_of_batches(longest: int, multiple: int | None, length: int) -> None:
    """Lengths are rounded up, and never exceed the planned length of the job."""
    collate = Collate(job_of(Task.CAUSAL_LM), 0, pad_to_multiple_of=multiple)
    batch = collate([{"input_ids": [7] * longest, "labels": [7] * longest}])
    assert batch["input_ids"].shape == batch["labels"].shape == (1, length)
    assert ("attention_mask" in batch) is (length > longest)


def test_labels_of_each_task() -> None:
    classes = Collate(job_of(Task.SEQUENCE_CLASSIFICATION), 0)
    batch = classes(
        [
            {"input_ids": [7], "label": 1, "token_type_ids": [1]},
            {"input_ids": [7, 8], "label": 0, "token_type_ids": [0, 1]},
        ]
    )
    assert (batch["labels"].dtype, batch["labels"].tolist()) == (torch.int64, [1, 0])
    assert batch["token_type_ids"].tolist() == [[1, 0], [0, 1]]
    number = Collate(job_of(Task.SEQUENCE_CLASSIFICATION, labels=1), 0)
    labels = number([{"input_ids": [7], "label": 1.5}, {"input_ids": [7], "label": 2}])["labels"]
    assert (labels.dtype, labels.tolist()) == (torch.float32, [1.5, 2.0])
    target = Collate(job_of(Task.SEQ2SEQ_LM), 0, pad_to_multiple_of=4)
    batch = target([{"input_ids": [7] * 9, "labels": [8]}, {"input_ids": [7], "labels": [8] * 5}])
    assert (batch["input_ids"].shape, batch["labels"].shape) == ((2, 12), (2, 8))
    assert batch["labels"][0].tolist() == [8] + [-100] * 7


@pytest.mark.parametrize("multiple", [None, 4])
@pytest.mark.parametrize(
    ("task", "manner", "collator"),
    [
        (Task.SEQUENCE_CLASSIFICATION, "bert", "DataCollatorWithPadding"),
        (Task.TOKEN_CLASSIFICATION, "bert", "DataCollatorForTokenClassification"),
        (Task.SEQ2SEQ_LM, "t5", "DataCollatorForSeq2Seq"),
    ],
)
def test_a_batch_is_what_transformers_collators_make(
    task: Task, manner: str, collator: str, multiple: int | None
) -> None:
    """Our collator omits the attention mask if nothing is padded."""
    import transformers

    words, samples = tokenizer(manner), samples_for(task)
    theirs = getattr(transformers, collator)(words, pad_to_multiple_of=multiple)
    ours = Collate(job_of(task), padding_token(job_of(task), words), pad_to_multiple_of=multiple)
    for first in range(0, len(samples), 4):
        batch, known = ours(samples[first : first + 4]), theirs(samples[first : first + 4])
        mask = known.pop("attention_mask")
        assert torch.equal(batch.pop("attention_mask", torch.ones_like(mask)), mask)
        assert set(batch) == set(known)
        assert all(torch.equal(batch[name], known[name]) for name in batch)


def test_a_batch_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="A sample of 13 tokens, but the job was planned for at most 12"):
        Collate(job_of(Task.CAUSAL_LM), 0)([{"input_ids": [7] * 13, "labels": [7] * 13}])
    with pytest.raises(UsageError, match="pad_to_multiple_of is 0"):
        Collate(job_of(Task.CAUSAL_LM), 0, pad_to_multiple_of=0)


# ---- the loader -----------------------------------------------------------------------------------------

TASKS = (
    Task.SEQUENCE_CLASSIFICATION,
    Task.TOKEN_CLASSIFICATION,
    Task.CAUSAL_LM,
    Task.MASKED_LM,
    Task.SEQ2SEQ_LM,
)


def samples_for(task: Task, count: int = 23) -> Samples:
    draw = random.Random(3)
    texts = [[draw.choice(NUMBERS) for _ in range(draw.randint(2, 10))] for _ in range(count)]
    rows: list[dict[str, Any]] = [
        {
            "text": " ".join(words),
            "label": draw.randrange(2),
            "tokens": words,
            "ner_tags": [draw.randrange(2) for _ in words],
            "source": " ".join(words),
            "target": " ".join(reversed(words)),
        }
        for words in texts
    ]
    manner = {Task.CAUSAL_LM: "gpt2", Task.SEQ2SEQ_LM: "t5"}.get(task, "bert")
    asked = {} if task in (Task.TOKEN_CLASSIFICATION, Task.SEQ2SEQ_LM) else {"text": "text"}
    return samples_of(read_rows(rows, columns=asked), job_of(task), tokenizer(manner))


def fed(samples: Samples, task: Task, micro: int = 2, **more: Any) -> list[list[dict[str, Any]]]:
    order = SampleOrder(len(samples), 4, micro, seed=1, bucket=True, lengths=samples.lengths)
    steps = {"start_step": 0, "stop_step": 2 * order.steps_per_epoch} | more
    batches = feed(samples, order, Collate(job_of(task), 0), **steps)
    return [
        [{name: value.tolist() for name, value in piece.items()} for piece in pieces] for pieces in batches
    ]


@pytest.mark.parametrize("task", TASKS)
def test_pieces_hold_what_the_whole_batch_holds(task: Task) -> None:
    samples = samples_for(task)
    order = SampleOrder(len(samples), 4, 4, seed=1)
    whole = replace_micro(order, 1)
    collate = Collate(job_of(task), 0)
    steps = {"start_step": 0, "stop_step": order.steps_per_epoch}
    for cut, (one,) in zip(
        feed(samples, order, collate, **steps), feed(samples, whole, collate, **steps), strict=True
    ):
        items = [label_items(job_of(task), piece) for piece in cut]
        assert min(items) > 0
        assert sum(items) == label_items(job_of(task), one)
        assert sum(len(piece["input_ids"]) for piece in cut) == len(one["input_ids"])


def replace_micro(order: SampleOrder, micro_batches: int) -> SampleOrder:
    return replace(order, micro_batches=micro_batches)


def test_a_later_start_goes_on_where_the_earlier_would_have_been() -> None:
    samples = samples_for(Task.MASKED_LM)
    whole = fed(samples, Task.MASKED_LM)
    assert [len(pieces) for pieces in whole] == [2, 2, 2, 2, 2, 2] * 2
    assert fed(samples, Task.MASKED_LM, start_step=5, stop_step=9) == whole[5:9]
    assert fed(samples, Task.MASKED_LM, start_step=9, stop_step=9) == []


@pytest.mark.whole
def test_workers_change_nothing_and_are_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    real = torch.utils.data.DataLoader.__iter__
    monkeypatch.setattr(
        torch.utils.data.DataLoader, "__iter__", lambda self: started.append(self) or real(self)
    )
    samples = samples_for(Task.MASKED_LM)
    alone = fed(samples, Task.MASKED_LM)
    assert fed(samples, Task.MASKED_LM, workers=2) == alone
    assert len(started) == 2, "one iterator a run, over both epochs"


@pytest.mark.whole
def test_a_loader_draws_no_random_number_of_others() -> None:
    """torch's own DataLoader draws a number from the global generator at each start."""
    samples = samples_for(Task.MASKED_LM)
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    fed(samples, Task.MASKED_LM, workers=1)
    fed(samples, Task.MASKED_LM)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


def test_a_plain_list_is_fed_too() -> None:
    rows = [{"input_ids": [7, 8], "label": index % 2} for index in range(4)]
    order = SampleOrder(4, 2, 1, seed=0, shuffle=False)
    collate = Collate(job_of(Task.SEQUENCE_CLASSIFICATION), 0)
    labels = [
        pieces[0]["labels"].tolist() for pieces in feed(rows, order, collate, start_step=0, stop_step=2)
    ]
    assert labels == [[0, 1], [0, 1]]


def workers_of_this_process() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.whole
def test_workers_hear_nobody_but_their_parent() -> None:
    """A signal to the whole process group must not end the workers of a loop that finishes its step."""
    samples = samples_for(Task.SEQUENCE_CLASSIFICATION)
    order = SampleOrder(len(samples), 4, 2, seed=1)
    before = workers_of_this_process()
    batches = feed(
        samples,
        order,
        Collate(job_of(Task.SEQUENCE_CLASSIFICATION), 0),
        start_step=0,
        stop_step=40,
        workers=1,
    )
    next(batches)
    (worker,) = (each for each in workers_of_this_process() if each not in before)
    for name in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
        someone_else(worker.pid, name)
    assert len(list(batches)) == 39
    assert gone(worker), "it ends with the last batch"


@pytest.mark.whole
def test_workers_end_when_their_parent_has_had_enough() -> None:
    samples = samples_for(Task.SEQUENCE_CLASSIFICATION)
    order = SampleOrder(len(samples), 4, 2, seed=1)
    before = workers_of_this_process()
    collate = Collate(job_of(Task.SEQUENCE_CLASSIFICATION), 0)
    batches = feed(samples, order, collate, start_step=0, stop_step=10_000, workers=2)
    next(batches)
    first, second = (each for each in workers_of_this_process() if each not in before)
    batches.close()
    gc.collect()
    assert gone(first)
    assert gone(second)
    last = feed(samples, order, collate, start_step=0, stop_step=10_000, workers=1)
    next(last)
    (worker,) = (each for each in workers_of_this_process() if each not in before)
    os.kill(worker.pid, signal.SIGTERM)  # as multiprocessing ends its daemons at Python's exit
    assert gone(worker)
    last.close()


def someone_else(pid: int, number: int) -> None:
    """Send a signal from a process that is not the parent."""
    import subprocess
    import sys

    subprocess.run([sys.executable, "-c", f"import os; os.kill({pid}, {int(number)})"], check=True)


def gone(process: psutil.Process) -> bool:
    """Return True if the process ends within ten seconds. A zombie counts as ended."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False
