"""Parts that a checkpoint needs and a `state_dict` omits: buffers, extra state, tensors that transformers
drops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fitted import killed, model_of, quiet, trained, trainer_of
from snugfit import accelerate, fit
from snugfit.errors import SnugfitError
from snugfit.training.checkpoint.weights import load_weights
from test_accelerate import go
from test_adapter_checkpoints import assert_same, keep
from test_fit_keeping import At, die


class Center(nn.Module):
    """A module that stores its past in four ways.

    These are a non-persistent buffer, a buffer made by the forward pass, extra state, and plain attributes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), {"count": 0, "last": 0.0}
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.queue, self.turn = torch.zeros(3, 4), 0

    def get_extra_state(self) -> dict[str, Any]:
        return dict(self.calls)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = dict(state)

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        if not hasattr(self, "first"):
            self.register_buffer("first", x.mean(0), persistent=False)
        self.calls = {"count": self.calls["count"] + 1, "last": float(x.mean())}
        self.mean = self.mean * 0.9 + 0.1 * x.mean(0)
        self.queue[self.turn] = x.mean(0)
        self.turn = (self.turn + 1) % 3
        out = self.linear(x - self.mean - self.first + self.queue.mean(0)) * self.calls["count"]
        return {"loss": (out - self.calls["last"]).square().mean()}


def centered() -> Center:
    torch.manual_seed(0)
    return Center()


def points() -> list[dict[str, Any]]:
    torch.manual_seed(1)
    return [{"x": torch.randn(4), "labels": torch.tensor(0)} for _ in range(16)]


def stack(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def fitted_center(folder: Path, *, killed: bool = False) -> Any:
    trainer = trainer_of(folder, centered(), points(), save_strategy="steps", save_steps=2)
    trainer.data_collator = stack
    if killed:
        trainer.add_callback(At(3, die))
    return fit(trainer, "plain", watch=quiet)


@pytest.mark.whole
def test_a_fitted_module_goes_on_with_its_buffers_and_extra_state(tmp_path: Path) -> None:
    whole = trained(fitted_center(tmp_path / "whole"))
    killed(fitted_center(tmp_path / "cut", killed=True))
    resumed = trained(fitted_center(tmp_path / "cut"), True)
    assert_same(whole.model, resumed.model)
    assert whole.model.calls == resumed.model.calls
    assert torch.equal(whole.model.queue, resumed.model.queue)


def by_hand(folder: Path, *, stop: int = 0, resume: bool = False) -> Center:
    model = centered()
    loader = torch.utils.data.DataLoader(points(), batch_size=4, collate_fn=stack)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = accelerate(model, optimizer, loader, "plain", output_dir=folder, watch=quiet)
    assert not resume or run.resume()
    go(run, 1, save=2, stop=stop)
    return model


def test_a_rotary_embedding_that_has_grown_goes_on(tmp_path: Path) -> None:
    """Its frequencies are in no `state_dict`, and its current length is a plain number."""
    import transformers

    def grown(*lengths: int) -> Any:
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32,
            max_position_embeddings=8, rope_parameters=rope,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
        keep(model, tmp_path)
        for length in lengths:
            model(input_ids=torch.zeros(1, length, dtype=torch.long))
        return model

    first, again = grown(24), grown()
    keep(first, tmp_path)
    load_weights(again, tmp_path)
    for length in (6, 12):
        ids = torch.arange(length)[None]
        assert torch.equal(first(input_ids=ids).logits, again(input_ids=ids).logits)


@pytest.mark.whole
def test_a_module_of_ones_own_loop_too(tmp_path: Path) -> None:
    whole = by_hand(tmp_path / "whole")
    by_hand(tmp_path / "cut", stop=2)
    again = by_hand(tmp_path / "cut", resume=True)
    assert_same(whole, again)
    assert whole.calls == again.calls


@pytest.mark.whole
def test_an_optimizer_of_another_order_is_refused(tmp_path: Path) -> None:
    """States are stored by position, so matrices of equal shape would silently exchange their states."""

    def run(order: int) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        loader = torch.utils.data.DataLoader(points(), batch_size=4, collate_fn=stack)
        optimizer = torch.optim.Adam(list(model.parameters())[::order], lr=0.1)

        def loss(model: Any, batch: Any) -> Any:
            return model(batch["x"]).square().mean()

        return accelerate(model, optimizer, loader, "plain", output_dir=tmp_path, loss=loss, watch=quiet)

    with run(1) as first:
        for batch in first:
            first.step(batch)
        first.save()
    with run(-1) as again, pytest.raises(SnugfitError, match=r"0\.weight was in the place of 1\.bias"):
        again.resume()


@pytest.mark.whole
def test_extra_state_that_no_file_can_hold_is_refused_at_the_start(tmp_path: Path) -> None:
    class Object(Center):
        """A module whose state contains a function."""

        def get_extra_state(self) -> Any:
            return {"made": len}

    loader = torch.utils.data.DataLoader(points(), batch_size=4, collate_fn=stack)
    model = Object()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SnugfitError, match="get_extra_state"):
        accelerate(model, optimizer, loader, "plain", output_dir=tmp_path, watch=quiet)


class Tied(nn.Module):
    """A module with one matrix under two names, and a view of another."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.other.weight = self.one.weight
        self.whole = nn.Parameter(torch.randn(6, 4))
        self.register_buffer("part", self.whole.detach()[:2])


def test_tied_weights_and_views_are_put_back(tmp_path: Path) -> None:
    first, again = Tied(), Tied()
    keep(first, tmp_path)
    load_weights(again, tmp_path)
    assert_same(first, again)
    assert again.one.weight is again.other.weight


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "mixtral", "gemma2"])
def test_models_of_transformers_come_back_in_every_bit(family: str, tmp_path: Path) -> None:
    """The models have tied heads, experts under other names in files, and an fp32 part in a bf16 model."""
    first, again = (model_of(family, seed=seed).bfloat16() for seed in (1, 2))
    name = next(name for name, module in first.named_modules() if "norm" in type(module).__name__.lower())
    for model in (first, again):
        model.get_submodule(name).float()
        for weight in model.get_submodule(name).parameters():
            weight.data += 0.1 * torch.rand_like(weight)
    keep(first, tmp_path)
    load_weights(again, tmp_path)
    assert_same(first, again)


def test_what_transformers_drops_when_it_saves_is_kept(tmp_path: Path) -> None:
    first, again = (model_of("bert", seed=seed) for seed in (1, 2))
    for model in (first, again):
        model._keys_to_ignore_on_save = ["bert.pooler.dense.weight"]
        model.probe = nn.Linear(3, 3)
    keep(first, tmp_path)
    load_weights(again, tmp_path)
    assert_same(first, again)


def test_a_part_of_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    keep(model_of("bert"), tmp_path)
    file = tmp_path / "model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if "layer.1" not in name}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(SnugfitError, match=r"bert\.encoder\.layer\.1\..* is missing"):
        load_weights(model_of("bert"), tmp_path)
