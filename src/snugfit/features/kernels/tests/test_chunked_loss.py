"""The loss in chunks: equal to that of whole logits, with rehearsed bytes. Other uses get whole logits."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from fitted import fitted, losses_of, spoken, trained, trainer_of
from fitted import model_of as small_model
from small_models import small_job
from small_runs import resumed_as_whole, rows, small_run
from snugfit.errors import RecipeError
from snugfit.features.kernels.head.chunked_loss import ChunkedCrossEntropy, Loss
from snugfit.features.kernels.head.deferred_logits import DeferredLogits, LogitsComputedWhole, defer_logits
from snugfit.job.build import instantiate
from snugfit.job.config import check_facts
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.planning.search.space import space_of
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import LOGITS_BYTES, LogitsWish
from snugfit.techniques.technique import Slot
from test_law_fidelity import run
from test_law_rehearsed_equals_real import hold_to_reports
from test_law_rehearsed_equals_real import job as law_job
from test_own_forward import hold_copy
from tiers import crossed

WIDE = {
    "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 48,
    "vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
SEQ2SEQ = {
    "d_model": 32, "vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip
HEADS: dict[str, dict[str, Any]] = {
    "llama, tied": {"model_type": "llama", **WIDE, "tie_word_embeddings": True},
    "gemma2, capped": {"model_type": "gemma2", **WIDE, "head_dim": 8, "final_logit_softcapping": 2.0},
    "granite, divided": {"model_type": "granite", **WIDE, "logits_scaling": 3.0},
    "cohere, multiplied": {"model_type": "cohere", **WIDE, "logit_scale": 0.5},
    "bert, with a bias": {"model_type": "bert", **WIDE},
    "t5": {
        "model_type": "t5", **SEQ2SEQ, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4,
        "dropout_rate": 0.0,
    },
    "bart, with a buffer added": {
        "model_type": "bart", **SEQ2SEQ, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    },
}  # fmt: skip
AUTO = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM", "bart": "AutoModelForSeq2SeqLM"}


def model_of(facts: dict[str, Any]) -> Any:
    import transformers

    kind = getattr(transformers, AUTO.get(facts["model_type"], "AutoModelForCausalLM"))
    torch.manual_seed(0)
    model = kind.from_config(transformers.AutoConfig.for_model(**facts))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model.train()


def batch(**more: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    tokens = torch.randint(3, 97, (3, 20))
    labels = tokens.clone()
    labels[0, :7] = -100
    return {"input_ids": tokens, "labels": labels, **more}


@pytest.mark.parametrize("head", HEADS)
def test_the_loss_of_every_kind_of_head_and_its_gradients_are_those_of_whole_logits(head: str) -> None:
    whole = model_of(HEADS[head])
    chunked = copy.deepcopy(whole)
    defer_logits(chunked, LogitsWish(tokens=16))
    counts: list[dict[str, Any]] = (
        [{}] if AUTO.get(whole.config.model_type) else [{}, {"num_items_in_batch": 41}]
    )
    for count in counts:
        outs = [model(**batch(**count)) for model in (whole, chunked)]
        assert isinstance(outs[1].logits, DeferredLogits)
        assert outs[1].logits.shape == outs[0].logits.shape
        assert outs[1].logits.whole is None
        for out in outs:
            (out.loss / 3).backward()
        torch.testing.assert_close(outs[1].loss, outs[0].loss)
        for one, other in zip(whole.parameters(), chunked.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad)


GIVEN = torch.Generator().manual_seed(3)
HIDDEN, WEIGHT = (torch.randn(rows, 32, generator=GIVEN).bfloat16().half().float() for rows in (200, 97))
LABELS = torch.randint(0, 97, (200,), generator=GIVEN)
LABELS[::7] = -100


def gradients(
    dtype: torch.dtype, tokens: int = 0, scale: float = 1.0, smoothing: float = 0.0
) -> list[torch.Tensor]:
    """Return loss and gradients of hidden states and head; `tokens=0` uses whole logits."""
    hidden, weight = (value.to(dtype, copy=True).requires_grad_() for value in (HIDDEN, WEIGHT))
    wide = torch.promote_types(dtype, torch.float32)
    if tokens:
        loss = Loss(True, -100, smoothing, lambda logits: logits)
        value = ChunkedCrossEntropy.apply(hidden, weight, None, LABELS, loss, tokens, dtype)
    else:
        logits = functional.linear(hidden, weight).to(wide)
        value = functional.cross_entropy(logits, LABELS, label_smoothing=smoothing)
    (value * scale).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [value.detach(), hidden.grad / scale, weight.grad / scale]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_in_64_bits_the_sums_are_the_same(smoothing: float) -> None:
    for one, other in zip(
        gradients(torch.float64, smoothing=smoothing),
        gradients(torch.float64, 16, smoothing=smoothing),
        strict=True,
    ):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 1024.0)])
def test_in_16_bits_chunks_are_as_near_to_the_truth_as_whole_logits(dtype: torch.dtype, scale: float) -> None:
    """The head's gradient is rounded once for each chunk. With 13 chunks its error is 1.2 times that of whole
    logits; all other errors are equal."""
    truth = gradients(torch.float64)

    def errors(values: list[torch.Tensor]) -> list[float]:
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(values, truth, strict=True)]

    whole, chunked = errors(gradients(dtype, scale=scale)), errors(gradients(dtype, 16, scale=scale))
    assert chunked[1] < 1.1 * whole[1]
    assert chunked[2] < 1.5 * whole[2]


@pytest.mark.skipif(not hasattr(functional, "linear_cross_entropy"), reason="torch 2.13 has it first")
def test_torchs_own_loss_in_chunks_agrees() -> None:
    hidden, weight = (value.clone().requires_grad_() for value in (HIDDEN, WEIGHT))
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=16, chunking_method=None)
    functional.linear_cross_entropy(hidden, weight, LABELS, options=options).backward()
    _, of_hidden, of_weight = gradients(torch.float32, 16)
    torch.testing.assert_close(of_hidden, hidden.grad)
    torch.testing.assert_close(of_weight, weight.grad)


def test_gradients_are_handed_on_once() -> None:
    hidden = HIDDEN.clone().requires_grad_()
    loss = ChunkedCrossEntropy.apply(
        hidden, WEIGHT, None, LABELS, Loss(True, -100, 0.0, torch.clone), 16, hidden.dtype
    )
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="whole_logits"):
        loss.backward()


def test_no_chunk_s_gradient_is_an_answer_of_autograd_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's thread for a GPU may hold a returned gradient while the next chunk is computed. So the
    memory of a step would vary between runs."""

    def answer(*arguments: Any, **keywords: Any) -> Any:
        pytest.fail("autograd was asked for gradients")

    monkeypatch.setattr(torch.autograd, "grad", answer)
    hidden, weight = (torch.rand(size, 4, requires_grad=True) for size in (6, 9))
    loss = Loss(mean=True, ignore_index=-100, label_smoothing=0.0, scores=lambda logits: logits)
    ChunkedCrossEntropy.apply(hidden, weight, None, torch.arange(6), loss, 2, torch.float32).backward()
    assert hidden.grad is not None
    assert hidden.grad.abs().sum() > 0


def test_a_batch_without_labels_has_no_gradient_as_ever() -> None:
    hidden = HIDDEN.clone().requires_grad_()
    none = torch.full_like(LABELS, -100)
    loss = ChunkedCrossEntropy.apply(
        hidden, WEIGHT, None, none, Loss(True, -100, 0.0, torch.clone), 16, hidden.dtype
    )
    loss.backward()
    assert loss.isnan()
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_whatever_else_asks_for_logits_gets_them_whole() -> None:
    """Such as the Trainer's label smoother, and a metric."""
    model = model_of(HEADS["llama, tied"])
    plain = model(**batch()).logits
    defer_logits(model, LogitsWish(tokens=16))
    logits = model(**batch()).logits
    with pytest.warns(LogitsComputedWhole, match="log_softmax"):
        scores = functional.log_softmax(logits[..., :-1, :].contiguous().float(), -1)
    torch.testing.assert_close(scores, functional.log_softmax(plain[..., :-1, :], -1))
    assert scores.requires_grad
    with pytest.warns(LogitsComputedWhole):
        doubled = logits.mul_(2)
    torch.testing.assert_close(doubled, plain * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert type(model.eval()(**batch()).logits) is torch.Tensor
        defer_logits(model, None)
        assert type(model.train()(**batch()).logits) is torch.Tensor


def test_a_head_that_is_no_single_linear_layer_is_refused_by_name() -> None:
    peft = pytest.importorskip("peft")
    model = model_of(HEADS["llama, tied"] | {"tie_word_embeddings": False})
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "lm_head"]))
    with pytest.raises(RecipeError, match=r"no adapter changes.*whole_logits"):
        defer_logits(adapted, LogitsWish())
    classes = Job(model=Model.from_config(check_facts({"model_type": "bert", **WIDE}, where="b"), name="b"),
                  task=Task.SEQUENCE_CLASSIFICATION)  # fmt: skip
    with pytest.raises(
        RecipeError, match=r"sequence-classification is not over a vocabulary\. Try 'whole_logits'"
    ):
        Recipe.parse("chunked_loss").check(classes)


LAW_1 = ["chunked_loss(tokens=16)", "bf16 + chunked_loss(tokens=24)", "lora + bf16 + chunked_loss(tokens=16)"]


@pytest.mark.whole
@pytest.mark.parametrize(("recipe", "family"), crossed(LAW_1, ["llama", "gpt2", "t5", "bert"], keep=3))
def test_rehearsed_bytes_are_real_ones(family: str, recipe: str) -> None:
    this = law_job(family)
    if family == "bert":
        this = Job(model=this.model, task=Task.MASKED_LM, batch_size=4, sequence_length=16, padding=0.25)
    hold_to_reports(this, Recipe.parse(recipe))


@pytest.mark.whole
def test_each_loop_trains_it_alike() -> None:
    """Each loop trains as with whole logits, also in micro-batches and under autocast."""
    this = small_job("gpt2", 1, {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, batch_size=4)
    for more in ("", " + micro_batches(2)", " + bf16"):
        whole, chunked = (
            run(this, Recipe.parse(f"{head}{more}").setup())
            for head in ("whole_logits", "chunked_loss(tokens=8)")
        )
        tolerance = 2e-2 if "bf16" in more else 1e-5
        assert chunked.losses == pytest.approx(whole.losses, rel=tolerance)
    trainer = rehearse(this, Recipe.parse("chunked_loss(tokens=8)").setup(), CudaPolicy(), loop="trainer")
    assert any(kernel.operator == "aten::addmm_" for kernel in trainer.kernels)


def test_a_plan_offers_it_where_logits_are_more_than_a_chunk() -> None:
    this = small_job("gpt2", 1, batch_size=1)
    refused = {exclusion.what: exclusion.why for exclusion in space_of(this).excluded}
    assert "no more than one chunk" in refused["chunked_loss"]
    large = small_job("gpt2", 1, {"vocab_size": LOGITS_BYTES // 32}, batch_size=1, sequence_length=16)
    assert "chunked_loss" in [one.name for one in space_of(large).offers(Slot.HEAD)]


@pytest.mark.whole
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    this = small_job("gpt2", 1, batch_size=4, sequence_length=16)
    samples = [{"input_ids": row["input_ids"]} for row in rows(24)]
    recipe = "chunked_loss(tokens=8) + micro_batches(2)"
    resumed_as_whole(small_run(tmp_path, recipe, job=this, samples=samples, max_steps=4, save_steps=2), 3)


@pytest.mark.whole
@pytest.mark.parametrize("micro", [(4, 1), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_a_live_trainer_trains_it_and_evaluates_with_whole_logits(
    tmp_path: Path, micro: tuple[int, int]
) -> None:
    logs = []
    for recipe in ("whole_logits", "chunked_loss(tokens=8)"):
        trainer = trainer_of(
            tmp_path / recipe, small_model("gpt2"), spoken(), micro=micro, more={"eval_dataset": spoken(8)}
        )
        logs.append(losses_of(trained(fitted(trainer, recipe))))
        assert trainer.predict(spoken(4)).predictions.shape[-1] == 96
    assert logs[0]
    assert logs[1] == pytest.approx(logs[0], rel=1e-4)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.filterwarnings("ignore::snugfit.features.kernels.head.deferred_logits.LogitsComputedWhole")
def test_a_copy_of_a_model_computes_with_its_own_weights(way: str) -> None:
    model = instantiate(small_job("llama", 1), dtype=None, attention="sdpa")
    defer_logits(model, LogitsWish())
    hold_copy(model, way)
