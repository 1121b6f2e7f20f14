"""Batches without padding.

The sums equal those of the padded batch, with fewer tokens computed. The rehearsal matches the real step.
Unsuitable models and jobs are refused.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch

from kept import kept
from small_models import small_job
from snugfit.errors import RecipeError, RehearsalError
from snugfit.features.kernels.attentions import PADDING_FREE
from snugfit.features.kernels.without_padding.attention import _one_by_one, attend
from snugfit.features.kernels.without_padding.hooks import drop_padding, keep_first_tokens
from snugfit.features.kernels.without_padding.rows import PaddedLengths, RowRules, as_rows, without_padding
from snugfit.job.batch import REAL_VALUES
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job, Phase, Task
from snugfit.job.model import Model
from snugfit.planning.keep import kept_of
from snugfit.planning.search.search import plan
from snugfit.planning.search.space import space_of
from snugfit.prediction.predict import predict
from snugfit.rehearsal.device.buffers import OUTPUTS
from snugfit.rehearsal.device.policy import CpuPolicy, CudaPolicy
from snugfit.rehearsal.device.scratch import cuda_scratch
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import Trace
from snugfit.step.applier import change_live
from snugfit.step.build import build_model
from snugfit.step.open_step import open_step
from snugfit.step.step import LOOPS, Observer
from snugfit.step.wishes.handler import LiveTraining
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Slot
from test_law_rehearsed_equals_real import hold_to_reports
from tiers import crossed, slow_but
from tolerance import same_losses, same_parameters

CPU = torch.device("cpu")
RECIPE = "bf16 + padding_free"
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def a_job(family: str, **changes: Any) -> Job:
    """Return a job with four sequences of 16 tokens, half of them padding, without dropout."""
    facts, task = {
        "bert": (NO_DROPOUT, Task.MASKED_LM),
        "llama": ({}, Task.CAUSAL_LM),
        "qwen2": ({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}, Task.CAUSAL_LM),
        "gpt2": ({"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}, Task.CAUSAL_LM),
    }[family]
    given: dict[str, Any] = {"padding": 0.5, "learning_rate": 1e-3} | changes
    return replace(small_job(family, 2, facts), **({"task": task} | given))


def wide(attention: str) -> Setup:
    return replace(Recipe().setup(), attention=attention, weights_dtype="float64")


LENGTHS = (16, 3, 1, 9)


def uneven(*, left: bool = False, labels: str = "labels") -> dict[str, torch.Tensor]:
    """Return four sequences of these lengths, padded to 16, with labels on all real tokens."""
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(1, 96, (4, 16), generator=draw)
    kept = torch.arange(16) < torch.tensor(LENGTHS)[:, None]
    kept = kept.flip(1) if left else kept
    return {
        "input_ids": ids * kept,
        "attention_mask": kept.long(),
        labels: torch.where(kept, ids, torch.tensor(-100)),
    }


def grads_of(job: Job, attention: str, batch: dict[str, torch.Tensor]) -> tuple[float, dict[str, Any]]:
    torch.manual_seed(3)
    model = build_model(job, wide(attention), CPU)
    loss = model(**batch).loss
    loss.backward()
    return float(loss.detach()), {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.whole
@pytest.mark.parametrize(("masked", "family"), crossed([True, False], ["llama", "bert", "qwen2", "gpt2"]))
def test_loss_and_gradients_are_those_of_the_padded_batch(family: str, masked: bool) -> None:
    batch = uneven()
    if not masked:
        batch = {"input_ids": batch["input_ids"] + 1, "labels": batch["input_ids"] + 1}
        batch = {name: value.clamp(max=95) for name, value in batch.items()}
    (loss, padded), (packed_loss, packed) = (
        grads_of(a_job(family), attention, batch) for attention in ("sdpa", PADDING_FREE)
    )
    assert packed_loss == pytest.approx(loss, rel=1e-6), "losses are computed in 32 bits"
    for name, gradient in padded.items():
        torch.testing.assert_close(packed[name], gradient, rtol=1e-5, atol=1e-7)


WIDE_ENCODER = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 96}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {**WIDE_ENCODER, **NO_DROPOUT, "pad_token_id": 0},
    "roberta": {**WIDE_ENCODER, **NO_DROPOUT, "pad_token_id": 1},
    "electra": {**WIDE_ENCODER, **NO_DROPOUT, "embedding_size": 32, "pad_token_id": 0},
    "distilbert": {
        "dim": 64, "hidden_dim": 128, "n_heads": 4, "vocab_size": 96, "dropout": 0.0, "pad_token_id": 0,
        "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "n_layers": 2,
    },
    "xlm-roberta": {**WIDE_ENCODER, **NO_DROPOUT, "pad_token_id": 1},
    "camembert": {**WIDE_ENCODER, **NO_DROPOUT, "pad_token_id": 1},
}  # fmt: skip


def encoder_job(family: str, task: Task, **changes: Any) -> Job:
    facts = {"num_hidden_layers": 2, "max_position_embeddings": 40, **ENCODERS[family], "model_type": family}
    facts |= {"bos_token_id": 2, "eos_token_id": 3}
    given: dict[str, Any] = {"batch_size": 4, "sequence_length": 16, "padding": 0.5, "learning_rate": 1e-3}
    return Job(model=Model.from_config(facts, name=family), task=task, **given | changes)


def encoder_batch(job: Job) -> dict[str, torch.Tensor]:
    """Return a batch with the model's padding token, which occurs nowhere else."""
    batch, padding = uneven(), job.model.config["pad_token_id"]
    counted = batch["attention_mask"].bool()
    batch["input_ids"] = torch.where(counted, batch["input_ids"].clamp(min=5), padding)
    if job.task is Task.SEQUENCE_CLASSIFICATION:
        batch["labels"] = torch.tensor([0, 1, 1, 0])
    return batch


@pytest.mark.parametrize(
    ("task", "family"), crossed([Task.SEQUENCE_CLASSIFICATION, Task.MASKED_LM], ENCODERS)
)
def test_encoders_give_the_same_losses_and_gradients(family: str, task: Task) -> None:
    """Compare three inputs in 64 bits: a loop's batch, rows filled up to a length, and a padded batch."""
    job = encoder_job(family, task)
    batch = encoder_batch(job)
    loss, padded = grads_of(job, "sdpa", batch)
    rules = RowRules.of(build_model(job, wide("sdpa"), CPU))
    for given in (batch, *as_rows([batch], rules), *as_rows([batch], rules, PaddedLengths(8, 16))):
        packed_loss, packed = grads_of(job, PADDING_FREE, given)
        assert packed_loss == pytest.approx(loss, rel=1e-6), "losses are computed in 32 bits"
        for name, gradient in padded.items():
            torch.testing.assert_close(packed[name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mask", [[[0, 1, 1]], [[1, 1, 1], [0, 0, 0]]])
def test_a_head_that_reads_first_tokens_wants_them(mask: list[list[int]]) -> None:
    batch = {"input_ids": torch.ones(len(mask), 3, dtype=torch.long), "attention_mask": torch.tensor(mask)}
    with pytest.raises(RecipeError, match=r"first token of each sequence.*on the right.*'sdpa'"):
        without_padding(batch, RowRules(pools_first=True))


def test_an_encoder_without_layers_to_hook_is_refused() -> None:
    class Odd(torch.nn.Module):
        base_model_prefix = "body"

        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Linear(1, 1)

    Odd.__name__ = "OddForSequenceClassification"
    with pytest.raises(RecipeError, match=r"does not find the layers of Odd.*'sdpa'"):
        drop_padding(Odd())


def test_a_copy_s_hooks_take_no_first_tokens_twice() -> None:
    out = SimpleNamespace(last_hidden_state=torch.arange(12.0).view(1, 6, 2))
    given = {"cu_seq_lens_q": torch.tensor([0, 2, 5, 6], dtype=torch.int32), "sequence_count": 2}
    for _ in range(2):
        assert keep_first_tokens(None, (), given, out).last_hidden_state.tolist() == [[[0, 1]], [[4, 5]]]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("loop", "family", "more"),
    crossed(
        LOOPS,
        [
            ("llama", "plain"),
            ("llama", "micro_batches(2) + every_layer"),
            ("llama", "chunked_loss"),
            ("bert", "plain"),
        ],
        keep=3,
    ),
)
def test_every_loop_trains_as_with_padding(family: str, more: str, loop: str) -> None:
    runs = []
    for attention in ("sdpa", PADDING_FREE):
        setup = replace(
            Recipe.parse("sgd" if more == "plain" else f"sgd + {more}").setup(),
            attention=attention,
            weights_dtype="float64",
        )
        torch.manual_seed(7)
        step = open_step(a_job(family, learning_rate=0.1), setup, loop, CPU, keep_losses=True)
        losses = step.run(3, Observer())
        assert step.model is not None
        runs.append((losses, {name: value.detach() for name, value in step.model.named_parameters()}))
    same_losses(runs[0][0], runs[1][0])
    same_parameters(runs[0][1], runs[1][1])


@pytest.mark.whole
@pytest.mark.parametrize(
    ("padding", "family", "recipe"),
    crossed(
        [0.0, 0.5],
        [
            *(
                (family, more)
                for family in ("llama", "bert")
                for more in ("", " + every_layer + micro_batches(2)")
            ),
            ("llama", " + chunked_loss"),
        ],
        keep=2,
    ),
)
def test_a_real_step_allocates_what_its_trace_says(family: str, recipe: str, padding: float) -> None:
    hold_to_reports(a_job(family, padding=padding), Recipe.parse(RECIPE + recipe))


# ---- the batch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [False, True])
def test_a_batch_becomes_one_row_with_the_positions_that_its_tokens_had(left: bool) -> None:
    batch = uneven(left=left) | {"token_type_ids": torch.ones(4, 16, dtype=torch.long), "use_cache": False}
    packed, kept = without_padding(batch, RowRules(shifts=True))
    count = sum(LENGTHS)
    assert kept is not None
    assert packed["input_ids"].tolist() == [batch["input_ids"].flatten()[kept].tolist()]
    assert (packed["input_ids"] > 0).all()
    assert packed["token_type_ids"].shape == packed["position_ids"].shape == (1, count)
    starts = [16 - length if left else 0 for length in LENGTHS]
    expected = [
        at for start, length in zip(starts, LENGTHS, strict=True) for at in range(start, start + length)
    ]
    assert packed["position_ids"][0].tolist() == expected
    assert packed["cu_seq_lens_q"].tolist() == [0, 16, 19, 20, 29]
    assert packed["cu_seq_lens_q"].dtype is torch.int32
    assert (packed["max_length_q"], packed["use_cache"]) == (16, False)
    assert "attention_mask" not in packed
    unlabelled = (packed["labels"][0] == -100).nonzero().flatten().tolist()
    assert unlabelled == [0, 16, 19, 20], "labels whose inputs belong to another sequence"


def test_rows_that_are_recorded_have_few_lengths() -> None:
    """Sequences without labels fill the rows up. Values other than tensors are the same in all rows."""
    filling = PaddedLengths(8, 16)
    (row,) = as_rows([uneven()], RowRules(shifts=True), filling)
    assert row["input_ids"].shape == row["position_ids"].shape == (1, 32), "29 tokens, by 8"
    assert row["cu_seq_lens_q"].tolist() == [0, 16, 19, 20, 29, 32]
    assert row["labels"][0, 29:].tolist() == [-100] * 3
    assert (row["max_length_q"], row["max_length_k"]) == (16, 16)
    short = {name: value[:, :9] for name, value in uneven().items()}
    (other,) = as_rows([short], RowRules(shifts=True), filling)
    assert other["input_ids"].shape == (1, 24)
    assert other["cu_seq_lens_q"].tolist() == [0, 9, 12, 13, 22, 24]
    assert other["max_length_q"] == 16
    assert PaddedLengths(64, 384).step(8) == 192, "sixteen lengths of 3,072 tokens"


def test_micro_batches_of_as_many_samples_are_as_long_as_each_other() -> None:
    pieces = [{name: value[rows] for name, value in uneven().items()} for rows in ([0], [1], [2, 3])]
    rows = as_rows(pieces, RowRules(shifts=True), PaddedLengths(4, 16))
    assert [row["input_ids"].shape[1] for row in rows] == [16, 16, 12]
    assert rows[1]["cu_seq_lens_q"].tolist() == [0, 3, 16], "extra room for the longest sequence"
    assert rows[2]["cu_seq_lens_q"].tolist() == [0, 1, 10, 12]
    plain = as_rows(pieces, RowRules(shifts=True))
    assert [row["input_ids"].shape[1] for row in plain] == [16, 3, 10], "nothing is recorded"


def test_a_row_that_stands_for_others_still_does() -> None:
    batch = {name: value[:1].expand(4, -1) for name, value in uneven().items()}
    setattr(batch["input_ids"], REAL_VALUES, lambda: batch["input_ids"] + torch.arange(4)[:, None])
    (row,) = as_rows([batch], RowRules(shifts=True), PaddedLengths(64, 16))
    real = getattr(row["input_ids"], REAL_VALUES)()
    assert real.shape == row["input_ids"].shape == (1, 64)
    assert real[0, 16:32].tolist() == (batch["input_ids"][0] + 1).tolist()


def test_sequences_without_a_token_take_nothing_from_others() -> None:
    batch = uneven()
    for name, nothing in (("input_ids", 0), ("attention_mask", 0), ("labels", -100)):
        batch[name][[0, 3]] = nothing
    packed, _ = without_padding(batch, RowRules(shifts=True))
    assert packed["cu_seq_lens_q"].tolist() == [0, 0, 3, 4, 4]
    assert (packed["labels"][0] != -100).tolist() == [False, True, True, False]


@pytest.mark.whole
def test_logits_lie_as_the_batch_where_others_read_them() -> None:
    job, batch = a_job("llama"), uneven()
    torch.manual_seed(3)
    model = build_model(job, wide(PADDING_FREE), CPU)
    padded = build_model(job, wide("sdpa"), CPU)
    padded.load_state_dict(model.state_dict())
    labels = batch.pop("labels")
    real = batch["attention_mask"].bool()
    for one in (model, padded):
        one.eval()
    torch.testing.assert_close(model(**batch).logits[real], padded(**batch).logits[real])
    assert model(**batch, labels=labels).loss.item() == pytest.approx(
        padded(**batch, labels=labels).loss.item()
    )
    model.train()
    assert model(**batch).logits.shape == (4, 16, 96), "a loss outside of the model"
    assert model(**batch, labels=labels).logits.shape == (1, sum(LENGTHS), 96)


@pytest.mark.parametrize(
    "batch",
    [
        {"inputs_embeds": torch.ones(4, 16, 64)},
        {**uneven(), "attention_mask": torch.ones(4, 1, 16, 16)},
    ],
    ids=["embeddings", "a mask of its own"],
)
def test_other_batches_are_refused(batch: dict[str, torch.Tensor]) -> None:
    model = build_model(a_job("llama"), wide(PADDING_FREE), CPU)
    with pytest.raises(RecipeError, match="'sdpa'"):
        model(**batch)


def test_a_model_that_is_told_no_ends_mixes_no_sequences() -> None:
    model = build_model(a_job("llama"), wide(PADDING_FREE), CPU)
    with pytest.raises(RecipeError, match=r"would mix them.*set_attn_implementation"):
        model.model(input_ids=torch.ones(2, 4, dtype=torch.long))


@pytest.mark.parametrize(
    "given", [{"softcap": 30.0}, {"s_aux": torch.ones(4)}, {"attention_mask": torch.ones(1)}]
)
def test_what_the_kernel_lacks_is_refused(given: dict[str, Any]) -> None:
    row, ends = torch.ones(1, 4, 6, 16), torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(RecipeError, match="which padding_free does not have"):
        attend(SimpleNamespace(is_causal=True), row, row, row, cu_seq_lens_q=ends, **given)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_the_cpu_computes_each_sequence_by_itself(causal: bool, window: int | None) -> None:
    """The reference computes scores explicitly, with two query heads for one key head."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 8, dtype=torch.float64) for heads in (2, 1, 1))
    out = _one_by_one(query, key, value, torch.tensor([0, 5, 9]), 0.0, None, causal, window)
    places = torch.arange(9)
    apart = places[:, None] - places[None, :]
    seen = (places < 5)[:, None] == (places < 5)[None, :]
    seen &= (apart >= 0) | torch.tensor(not causal)
    if window is not None:
        seen &= apart.abs() < window
    scores = (query @ key.transpose(2, 3) / 8**0.5).masked_fill(~seen, float("-inf"))
    torch.testing.assert_close(out, scores.softmax(-1) @ value)


# ---- a live model ----------------------------------------------------------------------------------------


def test_a_live_model_drops_its_padding_and_keeps_it_again() -> None:
    model: Any = build_model(a_job("llama"), wide("sdpa"), CPU)
    for recipe, rows in ((RECIPE, (1, sum(LENGTHS))), ("bf16", (4, 16)), (RECIPE, (1, sum(LENGTHS)))):
        live = LiveTraining(front_end="fit", recipe=Recipe.parse(recipe), model=model, device=CPU)
        said = list(change_live(live, Recipe.parse(recipe).setup()))
        assert any("attention was" in line for line in said)
        with torch.no_grad():
            assert model(**uneven()).logits.shape[:2] == rows


@pytest.mark.parametrize("live", [False, True])
def test_a_model_from_python_is_predicted_without_padding(live: bool) -> None:
    """Test a model that already trains this way, so that its copy has its hooks, and one that is only
    predicted."""
    model: Any = build_model(a_job("llama"), wide("sdpa"), CPU).float()
    if live:
        change = LiveTraining(front_end="fit", recipe=Recipe.parse(RECIPE), model=model, device=CPU)
        list(change_live(change, Recipe.parse(RECIPE).setup()))
    job = Job(model=Model.from_module(model, uneven()), task=Task.CUSTOM, batch_size=4)
    trace = rehearse(job, Recipe.parse(RECIPE).setup(), CudaPolicy())
    count = sum(LENGTHS)
    assert shapes(trace, "_flash_attention_forward") == {((count, 4, 16), (count, 2, 16), (count, 2, 16))}
    assert model.config._attn_implementation == (PADDING_FREE if live else "sdpa"), "as it was"


def test_rows_that_a_collator_has_made_stay_as_they_are() -> None:
    model: Any = build_model(a_job("llama"), wide(PADDING_FREE), CPU)
    packed, _ = without_padding(uneven(), RowRules(shifts=True))
    losses = [model(**batch).loss.item() for batch in (uneven(), packed)]
    assert losses[0] == losses[1]


# ---- rehearsed for a GPU -----------------------------------------------------------------------------------


def traced(recipe: str = RECIPE, **changes: Any) -> Trace:
    return rehearse(a_job("llama", **changes), Recipe.parse(recipe).setup(), CudaPolicy())


def shapes(trace: Trace, operator: str) -> set[tuple[tuple[int, ...], ...]]:
    return {kernel.shapes for kernel in trace.kernels if kernel.operator == f"aten::{operator}"}


@pytest.mark.parametrize(("padding", "tokens"), [(0.0, 64), (0.5, 32), (0.75, 16)])
def test_a_gpu_is_asked_for_tokens_that_count(padding: float, tokens: int) -> None:
    trace = traced(padding=padding)
    expected = {((tokens, 4, 16), (tokens, 2, 16), (tokens, 2, 16))}
    assert shapes(trace, "_flash_attention_forward") == expected
    dtypes = {kernel.dtype for kernel in trace.kernels if "_flash" in kernel.operator}
    assert dtypes == {"torch.bfloat16"}, "keys and values come back from transformers' cache in 32 bits"
    assert shapes(trace, "silu") == {((1, tokens, 112),)}
    assert not trace.waits, "the host has the batch"


def test_memory_follows_the_tokens() -> None:
    job = a_job("llama", batch_size=64)
    half, none = (predict(replace(job, padding=padding), RECIPE, gpu="h200") for padding in (0.5, 0.0))
    padded = predict(job, "bf16", gpu="h200")
    kinds = [dict(one.footprint.kinds) for one in (half, none, padded)]
    saved = [one["activations"] for one in kinds]
    assert saved[0] == pytest.approx(saved[1] / 2, rel=0.02)
    assert saved[0] < 0.55 * saved[2]


def test_backward_takes_what_flash_attention_takes_for_several_lengths() -> None:
    """The buffers have 128 rows between two sequences, heads rounded up to 32 numbers, and keys' gradients
    per head."""
    query, key = (
        torch.empty(100, 8, 40, device="meta", dtype=torch.bfloat16),
        torch.empty(100, 2, 40, device="meta", dtype=torch.bfloat16),
    )
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    gpu: Any = None
    scratch = cuda_scratch(
        "aten::_flash_attention_backward", (query, query, key, key, query, None, ends, ends), None, gpu
    )
    rows = 100 + 3 * 128
    sizes = [4 * 8 * rows, 4 * rows * 8 * 64, 100 * 8 * 40 * 2, 100 * 8 * 40 * 2]
    assert scratch[0] is OUTPUTS
    assert [nbytes for _, nbytes in scratch[1:5]] == sizes
    assert [-nbytes for _, nbytes in scratch[:4:-1]] == sizes


# ---- refused, planned --------------------------------------------------------------------------------------

CLASSIFIED = replace(small_job("modernbert", 2), task=Task.SEQUENCE_CLASSIFICATION)
"""A job whose classification head may read the mean of all tokens."""


@pytest.mark.parametrize(
    ("job", "recipe", "says"),
    [
        (CLASSIFIED, RECIPE, "belong to whole sequences.*Try 'sdpa'"),
        (small_job("t5", 2), RECIPE, "belong to whole sequences"),
        (small_job("llama", 2), "padding_free", "computes in 16 bits.*Add 'bf16'"),
        (small_job("llama", 2), RECIPE + " + compiled", "compiled.*was not tested"),
        (small_job("llama", 2, {"head_dim": 12}), RECIPE, "heads of 12 numbers"),
        (replace(small_job("llama", 2), phase=Phase.EVALUATE), RECIPE, "in training alone"),
        (small_job("gemma2", 2), RECIPE, "softcap|cap"),
    ],
)
def test_what_does_not_fit_is_refused(job: Job, recipe: str, says: str) -> None:
    with pytest.raises((RecipeError, RehearsalError), match=says):
        predict(job, recipe, gpu="h200")


@pytest.mark.parametrize("kind", ["PromptTuning", "PromptEncoder", "PrefixTuning"])
def test_a_prompt_before_each_sequence_is_refused(kind: str) -> None:
    """peft would put one prompt in front of the row of all sequences."""
    config: Any = getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model: Any = peft.get_peft_model(build_model(a_job("llama"), wide("sdpa"), CPU).float(), config)
    job = Job(model=Model.from_module(model, uneven()), task=Task.CUSTOM, batch_size=4)
    Recipe.parse("bf16").check(job)
    with pytest.raises(RecipeError, match=rf"{config.peft_type.value} adapters.*Try 'sdpa'"):
        Recipe.parse(RECIPE).check(job)


def test_gpus_before_ampere_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"8\.0"):
        Recipe.parse("fp16 + padding_free").check(a_job("llama"), (7, 5))


@pytest.mark.stored_rehearsals
@pytest.mark.whole
@pytest.mark.parametrize("micro_batches", slow_but([2, 1], 1))
def test_a_plan_offers_it_where_there_is_padding(micro_batches: int) -> None:
    """For a captured step, the plan's rehearsal in parts equals a full one."""
    job, gpu = a_job("llama"), find_gpu("h200")
    for padding in (0.0, 0.5):
        space = space_of(replace(job, padding=padding), fixed=kept_of(job, kept(but="attention")))
        assert any("padding_free" in str(one) for one in space.offers(Slot.ATTENTION)) == bool(padding)
    recipe = f"{RECIPE} + captured + micro_batches({micro_batches})"
    best = plan(job, gpu=gpu, keep=kept(recipe, but="allocator"), workers=1).best
    assert best is not None
    predicted = predict(job, best.recipe, gpu=gpu)
    assert predicted.timing is not None
    assert best.reserved_bytes == predicted.footprint.reserved_bytes
    assert best.step_seconds == pytest.approx(predicted.timing.step_seconds)


def test_the_cpu_rehearses_its_own_way() -> None:
    trace = rehearse(a_job("llama"), Recipe.parse(RECIPE).setup(), CpuPolicy())
    assert trace.attention == ("flash_for_cpu",)
    assert not shapes(trace, "_flash_attention_forward")
