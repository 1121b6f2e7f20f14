"""GaLore: AdamW on projected gradients, as the authors' package computes it, and a simulation matches a
run."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from aligned import compare, peak
from cpu_scratch import compared
from fitted import model_of
from reported import foreseen, reports
from small_models import small_job
from snugfit.features.optimizers.updates.galore import GaloreWithAdamW, leave_others_to_adamw
from snugfit.features.optimizers.updates.matrices import MATRICES
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job
from snugfit.prediction.predict import predict
from snugfit.rehearsal.device.policy import CpuPolicy, CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.results.footprint import Kind
from snugfit.techniques.recipe import Recipe
from tiers import crossed

NUMBERS: dict[str, Any] = {
    "lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-2, "scale": 0.25,
}  # fmt: skip
SIDES = ("std", "reverse_std", "left", "right", "full")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


def stepped(gradients: list[torch.Tensor], rank: int, renew: int = 2, side: str = "std") -> Any:
    """Return a matrix and its optimizer, after a step by each gradient."""
    weight = torch.nn.Parameter(torch.ones_like(gradients[0]))
    optimizer = GaloreWithAdamW([weight], **NUMBERS, rank=rank, renew=renew, side=side)
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    return weight.detach(), optimizer.state[weight]


def by_the_paper(gradients: list[torch.Tensor], rank: int, renew: int, side: str) -> torch.Tensor:
    """Return the weight after algorithm 2 in fp64, with torch's own AdamW on the projection.

    P and Q are computed in fp32, because the signs of singular vectors depend on the library.
    """
    rows, columns = gradients[0].shape
    weight = torch.ones(rows, columns, dtype=torch.float64)
    named = {
        "std": "left" if rows < columns else "right",
        "reverse_std": "right" if rows < columns else "left",
    }
    p, q = torch.eye(rows, dtype=torch.float64), torch.eye(columns, dtype=torch.float64)
    adamw: Any = None
    for step, gradient in enumerate(gradients):
        if step % renew == 0:
            u, _, vh = torch.linalg.svd(gradient, full_matrices=False)
            p = u[:, :rank].double() if named.get(side, side) != "right" else p
            q = vh[:rank].double().T if named.get(side, side) != "left" else q
        projected = p.T @ gradient.double() @ q
        if adamw is None:
            small = torch.nn.Parameter(torch.zeros_like(projected))
            adamw = torch.optim.AdamW(
                [small], lr=1.0, betas=NUMBERS["betas"], eps=NUMBERS["eps"], weight_decay=0.0
            )
        before, small.grad = small.detach().clone(), projected
        adamw.step()
        weight *= 1 - NUMBERS["lr"] * NUMBERS["weight_decay"]
        weight += NUMBERS["lr"] * NUMBERS["scale"] * p @ (small.detach() - before) @ q.T
    return weight


@pytest.mark.whole
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("shape", [(40, 60), (60, 40)])
def test_updates_are_those_of_the_paper(shape: tuple[int, int], side: str) -> None:
    gradients = [torch.randn(shape) for _ in range(5)]
    taken, _ = stepped(gradients, 7, side=side)
    assert torch.allclose(taken.double(), by_the_paper(gradients, 7, 2, side), rtol=1e-4, atol=1e-5)


@pytest.mark.whole
def test_an_update_is_of_the_rank_and_the_singular_vectors_are_found_anew_in_time() -> None:
    weight, _ = stepped([torch.randn(40, 60)], 7)
    assert torch.linalg.matrix_rank(weight - 0.999, atol=1e-6) == 7
    gradients = [torch.randn(20, 30) for _ in range(5)]
    seen = [stepped(gradients[: count + 1], 3)[1]["left"] for count in range(5)]
    assert [torch.equal(*pair) for pair in pairwise(seen)] == [True, False, True, False]


@pytest.mark.whole
@pytest.mark.parametrize("rank", [1, 7])
@pytest.mark.parametrize("side", SIDES)
def test_a_state_holds_no_more_than_the_rank(side: str, rank: int) -> None:
    """A slice of a matrix's singular vectors would keep all of them alive."""
    _, state = stepped([torch.randn(40, 60)], rank, side=side)
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in tensors)
    assert all(one.is_contiguous() for one in tensors)
    if side == "std":
        assert sum(one.numel() for one in tensors) == rank * (40 + 2 * 60)


@pytest.mark.whole
def test_its_state_goes_through_a_checkpoint_that_is_safe_to_load() -> None:
    model = torch.nn.Linear(30, 20)
    optimizer = GaloreWithAdamW(model.parameters(), rank=3)
    model(torch.randn(4, 30)).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded["state"][0]["left"], optimizer.state[model.weight]["left"])


@pytest.mark.parametrize(
    ("targets", "projected"),
    [
        ((), {"query", "key", "value", "dense"}),
        (("all-linear",), {"query", "key", "value", "dense", "classifier"}),
        (("attention.self",), {"query", "key", "value"}),
    ],
)
def test_which_layers_are_projected(targets: tuple[str, ...], projected: set[str]) -> None:
    model = model_of("bert")
    leave_others_to_adamw(model, targets)
    names = {weight: name for name, weight in model.named_parameters()}
    [group] = GaloreWithAdamW(model.parameters(), rank=1).param_groups
    own = {names[group["params"][at]] for at in group[MATRICES]}
    assert {name.split(".")[-2] for name in own} == projected
    assert not any("embeddings" in name or "bias" in name for name in own)
    [group] = GaloreWithAdamW(model.parameters(), rank=1000).param_groups
    assert not group[MATRICES]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("recipe", "family"),
    crossed(["bf16_pure + galore(rank=4, proj_type=full)", "galore(rank=4)"], ["llama", "bert"], keep=1),
)
def test_a_real_step_allocates_what_its_trace_says(family: str, recipe: str) -> None:
    job, setup = small_job(family, 2), Recipe.parse(recipe).setup()
    trace = compared(foreseen(rehearse(job, setup, CpuPolicy())))
    real = compared(reports(job, setup))
    third = [[event for event in events if event.step == 2] for events in (real, trace)]
    assert all(third)
    assert compare(*third).similarity == 1.0
    assert peak([event for event in real if event.step]) == peak([event for event in trace if event.step])


def test_a_decomposition_takes_a_copy_of_the_matrix_in_the_first_step_alone() -> None:
    job, setup = small_job("bert", 2), Recipe.parse("galore(rank=4)").setup()
    trace = rehearse(job, setup, CudaPolicy())
    copies = [block for block in trace.blocks if "copy by columns" in block.operator]
    assert len(copies) == 2 * 6 + 1  # layers, the matrices of each, and the pooler's
    assert {block.step for block in copies} == {0}
    assert not any("svd" in kernel.operator for kernel in trace.kernels)


def test_what_is_not_known_is_said() -> None:
    prediction = predict(small_job("bert", 2), "galore(rank=4)", gpu=find_gpu("h200"))
    assert any("singular value" in doubt and "not predicted" in doubt for doubt in prediction.doubts)


def test_bytes_of_its_states_follow_from_the_rank() -> None:
    """The states are rank x (2n + m) numbers of an m x n matrix, m the smaller, and AdamW's two moments of
    all other weights.
    """
    job = small_job("bert", 2)
    footprint = predict(job, "galore(rank=4)", gpu=find_gpu("h200")).footprint
    model = model_of("bert")
    leave_others_to_adamw(model)
    [group] = GaloreWithAdamW(model.parameters(), rank=4).param_groups
    matrices = {id(group["params"][at]) for at in group[MATRICES]}
    expected = sum(
        4 * 4 * (2 * max(one.shape) + min(one.shape)) if id(one) in matrices else 8 * one.numel()
        for one in model.parameters()
    )
    assert dict(footprint.kinds)[Kind.OPTIMIZER_STATES] == pytest.approx(expected, rel=0.02)


def test_beside_thin_adapters_it_is_refused() -> None:
    from snugfit.errors import RecipeError

    with pytest.raises(RecipeError, match="rank 8 train"):
        Recipe.parse("lora + galore").check(small_job("bert", 2), installed=False)
    Recipe.parse("lora(r=64) + galore(rank=8)").check(small_job("bert", 2), installed=False)


@pytest.mark.whole
@pytest.mark.slow
def test_it_learns_digits_in_small_spaces(tmp_path: Path) -> None:
    """The rank is smaller than the model's matrices, so that gradients are really projected."""
    import snugfit

    task = pytest.importorskip("snugfit.features.digits", reason="the feature digits is not there")
    train, test = task.digits()
    job: Job = task.digits_job(learning_rate=5e-3, batch_size=48)
    done = snugfit.train(
        job, Recipe.parse("galore(rank=8, update_proj_gap=20, scale=1)"), train, evaluation=test,
        output_dir=tmp_path, device="cpu", max_steps=100, warmup_steps=0.1, save_strategy="no",
        eval_strategy="steps", eval_steps=100,
    )  # fmt: skip
    assert done.evaluated
    assert done.evaluated.accuracy
    assert done.evaluated.accuracy > 0.9
