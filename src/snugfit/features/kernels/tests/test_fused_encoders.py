"""Encoders with our kernels' operations beside their own code, on the CPU, where both are plain torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from snugfit.errors import RecipeError
from snugfit.features.kernels import attention as attentions
from snugfit.features.kernels.fused_model import use_fused
from snugfit.features.kernels.operations import seeds
from snugfit.features.kernels.operations.joint_linear import joint_view
from snugfit.step.checkpointing import checkpoint_layers
from snugfit.techniques.setup import CheckpointWish

WIDE = {
    "hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 80,
    "vocab_size": 60, "max_position_embeddings": 24,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": WIDE,
    "roberta": WIDE,
    "electra": {**WIDE, "embedding_size": 32},
    "distilbert": {
        "dim": 48, "n_heads": 3, "n_layers": 2, "hidden_dim": 80, "vocab_size": 60,
        "max_position_embeddings": 24,
    },
    "vit": {
        "hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 80,
        "image_size": 16, "patch_size": 8,
    },
    "gpt2": {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 24, "vocab_size": 60},
}  # fmt: skip
DROPOUTS = (
    "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "dropout",
    "attention_dropout", "seq_classif_dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop",
)  # fmt: skip


def build(family: str, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> Any:
    """Return a model in training with weights other than zero and one."""
    from transformers import AutoConfig, AutoModelForImageClassification, AutoModelForSequenceClassification

    config = AutoConfig.for_model(family, **CONFIGS[family])
    for name in DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, dropout)
    config.pad_token_id = 0
    kind = AutoModelForImageClassification if family == "vit" else AutoModelForSequenceClassification
    torch.manual_seed(3)
    model = kind.from_config(config).to(dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    return model.train()


def batch_for(family: str, *, mask: bool = False) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    labels = torch.tensor([0, 1, 0])
    if family == "vit":
        return {
            "pixel_values": torch.randn(3, 3, 16, 16, generator=draw, dtype=torch.float64),
            "labels": labels,
        }
    batch = {"input_ids": torch.randint(3, 60, (3, 11), generator=draw), "labels": labels}
    if mask:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1, 7:] = 0
    return batch


def pass_of(
    model: Any, batch: dict[str, torch.Tensor], seed: int = 0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the logits and the gradients of one pass."""
    model.zero_grad()
    torch.manual_seed(seed)
    out = model(**batch)
    out.loss.backward()
    return out.logits.detach(), {
        name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
    }


def close(left: Any, right: Any, rtol: float = 1e-9) -> None:
    assert left[1].keys() == right[1].keys()
    torch.testing.assert_close(left[0], right[0], rtol=rtol, atol=rtol)
    for name, one in left[1].items():
        torch.testing.assert_close(
            one, right[1][name], rtol=rtol, atol=rtol, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_outputs_and_gradients_are_those_of_the_model_s_own_code(family: str, mask: bool) -> None:
    """The comparison is in 64 bits and covers every gradient."""
    model = build(family)
    fused = copy.deepcopy(model)
    use_fused(fused)
    batch = batch_for(family, mask=mask)
    expected = pass_of(model, batch)
    close(expected, pass_of(fused, batch))
    no_gradient = (".key.bias", ".k_lin.bias", ".k_proj.bias")  # softmax does not depend on it
    assert all(
        float(one.abs().max()) > 1e-6 for name, one in expected[1].items() if not name.endswith(no_gradient)
    )
    assert {name: one.shape for name, one in fused.state_dict().items()} == {
        name: one.shape for name, one in model.state_dict().items()
    }


def test_what_has_no_known_module_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"no kernels for Linear.*'torch_kernels'"):
        use_fused(torch.nn.Linear(2, 2))


def test_weights_of_a_joint_product_lie_side_by_side_until_they_are_moved() -> None:
    model = build("bert")
    use_fused(model)
    attention = model.bert.encoder.layer[0].attention.self
    layers = attention.query, attention.key, attention.value
    assert joint_view([layer.weight for layer in layers]) is not None
    before = pass_of(model, batch_for("bert"))
    attention.key.weight.data = attention.key.weight.data.clone()
    assert joint_view([layer.weight for layer in layers]) is None
    close(before, pass_of(model, batch_for("bert")))


def test_a_layer_with_an_adapter_is_called_as_it_is() -> None:
    from peft import LoraConfig, get_peft_model

    plain = get_peft_model(
        build("bert"), LoraConfig(target_modules=["query", "dense"], init_lora_weights=False)
    )
    fused = copy.deepcopy(plain)
    use_fused(fused)
    close(pass_of(plain, batch_for("bert")), pass_of(fused, batch_for("bert")))


@pytest.mark.parametrize("family", ["bert", "roberta", "electra", "distilbert"])
def test_padded_batches_need_no_mask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding on the right, on both sides and none: tokens and all gradients are those under a mask."""
    monkeypatch.setattr(attentions, "HALVES", ("torch.float64",))
    monkeypatch.setattr(attentions, "has_kernel", lambda tensor: True)
    called, real = [], attentions.attend_in_stretches

    def attend(*arguments: Any) -> Any:
        called.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(attentions, "attend_in_stretches", attend)
    model = build(family)
    fused = copy.deepcopy(model)
    use_fused(fused)
    batch = batch_for(family, mask=True)
    del batch["labels"]
    mask = batch["attention_mask"]
    mask[2, :2], mask[2, 9:] = 0, 0
    results = []
    for one in (model, fused):
        loss = (one.base_model(**batch).last_hidden_state * mask.unsqueeze(-1)).square().sum()
        loss.backward()
        gradients = {name: weight.grad for name, weight in one.named_parameters() if weight.grad is not None}
        results.append((loss.detach(), gradients))
    assert len(called) == 2
    close(*results)


def test_a_mask_with_gaps_is_refused() -> None:
    ends = attentions.stretches(torch.tensor([[1, 1, 0], [0, 1, 0], [1, 1, 1], [0, 0, 0]]))
    assert ends.tolist() == [0, 0, 2, 3, 4, 5, 6, 6, 9, 9, 9, 9, 12]
    with pytest.raises(RuntimeError, match=r"gaps among its tokens\. Take 'torch_kernels'"):
        attentions.stretches(torch.tensor([[1, 0, 1]]))


def test_a_batch_without_padding_goes_through_them_too() -> None:
    """One row of two sequences, with positions that are given."""
    from snugfit.features.kernels.without_padding.attention import register
    from snugfit.features.kernels.without_padding.hooks import drop_padding

    register()
    model = build("bert", dtype=torch.float32)
    model.set_attn_implementation("padding_free")
    fused = copy.deepcopy(model)
    use_fused(fused)
    states = []
    for one in (model.bert, fused.bert):
        drop_padding(one)
        batch = batch_for("bert", mask=True)
        del batch["labels"]
        states.append(one(**batch).last_hidden_state)
    assert states[0].shape == (1, 3 * 11 - 4, 48)
    torch.testing.assert_close(*states, rtol=1e-5, atol=1e-5)


# ---- dropout ---------------------------------------------------------------------------------------------


def fused_with_dropout(family: str) -> Any:
    model = build(family, dropout=0.3)
    use_fused(model)
    return model


@pytest.mark.parametrize("family", CONFIGS)
def test_dropout_follows_torch_s_generator(family: str) -> None:
    model, batch = fused_with_dropout(family), batch_for(family)
    first, again, other = (pass_of(model, batch, seed) for seed in (1, 1, 2))
    close(first, again, rtol=0)
    assert not torch.equal(first[0], other[0])
    model.eval()
    assert torch.equal(pass_of(model, batch, 1)[0], pass_of(model, batch, 2)[0])


@pytest.mark.parametrize("family", CONFIGS)
def test_masks_of_the_backward_pass_are_those_of_the_forward_pass(family: str) -> None:
    """The directional derivative matches finite differences of the loss, with one seed."""
    model, batch = fused_with_dropout(family), batch_for(family)
    gradients = pass_of(model, batch, 4)[1]
    weights = dict(model.named_parameters())
    direction = {name: torch.randn_like(one) for name, one in gradients.items()}
    losses = []
    for step in (1e-6, -1e-6):
        with torch.no_grad():
            for name, one in direction.items():
                weights[name].add_(one, alpha=step)
        torch.manual_seed(4)
        losses.append(float(model(**batch).loss))
        with torch.no_grad():
            for name, one in direction.items():
                weights[name].sub_(one, alpha=step)
    slope = sum(float((one * direction[name]).sum()) for name, one in gradients.items())
    assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(slope, rel=1e-5, abs=1e-7)


def by_layers(model: Any) -> Any:
    checkpoint_layers(model, CheckpointWish())
    return model


@pytest.mark.parametrize("family", CONFIGS)
def test_layers_that_are_recomputed_drop_the_same(family: str) -> None:
    """They do so even if another pass begins before the backward pass of the first."""
    batch = batch_for(family)
    model = by_layers(fused_with_dropout(family))
    expected = pass_of(model if family in ("electra", "vit") else fused_with_dropout(family), batch, 6)
    close(expected, pass_of(model, batch, 6))
    model.zero_grad()
    torch.manual_seed(6)
    first = model(**batch).loss
    model(**batch)
    first.backward()
    later = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    close(expected, (expected[0], later))


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_model_s_own_switch_recomputes_the_same(reentrant: bool) -> None:
    model, batch = fused_with_dropout("bert"), batch_for("bert")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    gradients = pass_of(model, batch, 4)[1]
    weights = dict(model.named_parameters())
    name = "bert.encoder.layer.0.output.dense.weight"
    direction, losses = torch.randn_like(weights[name]), []
    for step in (1e-6, -2e-6):
        weights[name].data.add_(direction, alpha=step)
        torch.manual_seed(4)
        losses.append(float(model(**batch).loss))
    assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(
        float((gradients[name] * direction).sum()), rel=1e-5
    )


def test_a_pass_draws_one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(seeds, "_draw", lambda device: drawn.append(0) or torch.tensor([len(drawn)]))
    model = fused_with_dropout("bert")
    pass_of(model, batch_for("bert"))
    pass_of(model, batch_for("bert"))
    assert len(drawn) == 2
