"""`snugfit.accelerate`: a hand-written loop under a recipe."""

from __future__ import annotations

import gc
import json
import math
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader
from transformers.optimization import Adafactor

from fitted import classified, copy_of, dropping, model_of, padded, quiet, spoken
from made_up_plans import planned
from small_models import small_job
from small_runs import losses
from small_streams import RESUMABLE, Entropy, Masking, ReadOnce
from snugfit import accelerate, train
from snugfit.documents import read_document
from snugfit.errors import NothingFits, OutOfMemory, RecipeError, SnugfitError, UsageError
from snugfit.features.loops.custom_loop.run import HandRun, Stopped
from snugfit.features.loops.custom_loop.step import CustomStep
from snugfit.training.checkpoint.manifest import MANIFEST, seal
from snugfit.training.rng import all_rng_states
from tiers import slow_but

pytestmark = pytest.mark.whole

Losses = dict[int, tuple[float, float | None]]


def loop_of(
    folder: Path | None,
    recipe: Any = "plain",
    *,
    model: Any = None,
    loader: Any = None,
    optimizer: Callable[..., Any] = torch.optim.AdamW,
    **more: Any,
) -> HandRun:
    """Return a run over a small BERT with dropout, or over the given model."""
    model = model if model is not None else model_of("bert", dropout=0.1).train()
    loader = loader if loader is not None else loader_of()
    made = optimizer(model.parameters(), lr=1e-3)
    return accelerate(model, made, loader, recipe, output_dir=folder, **{"clip": 1.0, "watch": quiet, **more})


def loader_of(data: Any = None, **more: Any) -> Any:
    wanted: dict[str, Any] = {"batch_size": 4, "shuffle": True, "collate_fn": padded, **more}
    return DataLoader(data if data is not None else classified(22), **wanted)


def go(run: HandRun, epochs: int = 2, *, save: int = 0, stop: int | None = None) -> Losses:
    """Return loss and norm of each step that this process takes."""
    seen = {}
    with run:
        for _ in run.epochs(epochs):
            for batch in run:
                loss = run.step(batch)
                seen[run.steps] = (loss, run._step.norm)
                if run.steps == save:
                    run.save()
                if run.steps == stop:
                    return seen
    return seen


# ---- the same training ----------------------------------------------------------------------------------


CUTS = ("plain", "micro_batches(2)", "every_layer + micro_batches(4)", "adafactor_torch + micro_batches(2)")


@pytest.mark.parametrize(
    ("family", "recipe"),
    slow_but(
        [*(("bert", each) for each in CUTS), ("llama", CUTS[1]), ("llama", "selective(attention)")],
        lambda case: case in (("bert", CUTS[1]), ("llama", "selective(attention)")),
    ),
)
def test_it_equals_our_own_loop(family: str, recipe: str, tmp_path: Path) -> None:
    data = _of_one_length(classified(22) if family == "bert" else spoken(22))
    model = model_of(family).train()
    model.save_pretrained(tmp_path / "weights")
    job = small_job(family, 2, dropping(family))
    train(
        replace(job, clip=1.0, learning_rate=1e-3), recipe, data, output_dir=tmp_path / "ours",
        weights=tmp_path / "weights", collate=padded, device="cpu", max_steps=7, weight_decay=0.0,
        train_sampling_strategy="sequential", save_strategy="no", lr_scheduler_type="constant",
    )  # fmt: skip

    def made(parameters: Any, lr: float) -> Any:
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0, foreach=True)

    run = loop_of(None, recipe, model=model, loader=loader_of(data, shuffle=False), optimizer=made)
    ours = losses(tmp_path / "ours")
    assert go(run, stop=7) == {step: (loss, norm) for step, (loss, norm, _) in ours.items()}


def _of_one_length(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cut samples to one length. A cut batch is padded as a whole, but our own loop pads each micro-batch."""

    def filled(value: Any, with_: int) -> Any:
        return [*value, *[with_] * 20][:16] if isinstance(value, list) else value

    return [
        {"input_ids": filled(each["input_ids"], 7), "labels": filled(each["labels"], -100)}
        for each in samples
    ]


def test_a_loss_of_ones_own_counts_by_its_items() -> None:
    """The user's own mean over tokens, in micro-batches with uneven numbers of them."""

    def loss(model: Any, batch: dict[str, Any]) -> Any:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        wanted = batch["labels"][:, 1:]
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), wanted.flatten())

    def items(batch: Any) -> int:
        return int((batch["labels"][:, 1:] != -100).sum())

    def seen(recipe: str, **more: Any) -> Losses:
        run = loop_of(
            None, recipe, model=model_of("llama"), loader=loader_of(spoken(16), shuffle=False), **more
        )
        return go(run, 1)

    own = seen("plain")
    for recipe in ("plain", "micro_batches(2)"):
        given = seen(recipe, loss=loss, items=items)
        for step, (value, norm) in own.items():
            assert given[step] == (pytest.approx(value, rel=1e-5), pytest.approx(norm, rel=1e-4))


def test_nothing_random_is_drawn_before_the_first_batch() -> None:
    own = torch.Generator().manual_seed(3)
    model, loader = model_of("bert"), loader_of(generator=own)
    before, states = own.get_state(), all_rng_states(torch.device("cpu"))
    loop_of(None, model=model, loader=loader)
    assert json.dumps(_listed(all_rng_states(torch.device("cpu")))) == json.dumps(_listed(states))
    assert torch.equal(own.get_state(), before)


def _listed(value: Any) -> Any:
    return str(value) if not isinstance(value, torch.Tensor) else value.tolist()


# ---- checkpoints ----------------------------------------------------------------------------------------


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples that draw from all of the host's generators."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = classified(22)[index]
        drawn = [torch.randint(5, 90, ()).item(), random.randrange(5, 90), numpy.random.randint(5, 90)]
        return {**sample, "input_ids": [*drawn, *sample["input_ids"]]}


class Shuffled:
    """A loader that is not torch's: it shuffles by Python's generator."""

    batch_size = 4

    def __iter__(self) -> Iterator[Any]:
        order = random.sample(range(22), 22)
        for start in range(0, 22, 4):
            yield padded([Noisy()[index] for index in order[start : start + 4]])


def masking_loader() -> Any:
    """Return a loader whose collator creates a generator at its first batch."""
    return loader_of(collate_fn=Masking())


LOADERS: dict[str, Callable[[], Any]] = {
    "a stream": lambda: loader_of(RESUMABLE["a stream"](), shuffle=False),
    "a stream of datasets": lambda: loader_of(RESUMABLE["a stream of datasets"](), shuffle=False),
    "a counting stream": lambda: loader_of(RESUMABLE["a counting stream"](), shuffle=False),
    "generators of the dataset's own": lambda: loader_of(RESUMABLE["drawing from its own"]()),
    "a collator's own generator": masking_loader,
    "a DataLoader": loader_of,
    "random samples": lambda: loader_of(Noisy()),
    "a generator of its own": lambda: loader_of(Noisy(), generator=torch.Generator().manual_seed(8)),
    "workers": lambda: loader_of(Noisy(), num_workers=2),
    "an iterable": Shuffled,
}


@cache
def whole_of(kind: str) -> Losses:
    """Return the losses of a run without interruption and checkpoints."""
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(1)
    return go(loop_of(None, loader=LOADERS[kind]()))


STOPS = {kind: (5, 9) if kind == "workers" else (1, 5, 6, 9) for kind in LOADERS}
"""Steps after which a run is abandoned; an epoch is six."""


OFTEN = ("a stream of datasets", "generators of the dataset's own", "workers")
"""Kinds of `make test`: each of the rest lacks a generator or position."""


@pytest.mark.parametrize(
    ("kind", "stop"),
    slow_but(
        [(kind, stop) for kind, stops in STOPS.items() for stop in stops],
        lambda case: case[1] == 5 and case[0] in OFTEN,
    ),
)
def test_a_resumed_run_sees_the_batches_that_were_to_come(kind: str, stop: int, tmp_path: Path) -> None:
    """Dropout, order and samples draw from generators."""
    whole = whole_of(kind)
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(1)
    run = loop_of(tmp_path / "run", loader=LOADERS[kind]())
    assert not run.resume()
    go(run, save=stop, stop=stop + 1)
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(2)
    other = model_of("bert", dropout=0.1, seed=9).train()
    torch.manual_seed(0)  # every model here starts from this seed
    torch.rand(5)
    again = loop_of(tmp_path / "run", model=other, loader=LOADERS[kind]())
    assert again.resume()
    assert again.steps == stop
    assert go(again) == {step: seen for step, seen in whole.items() if step > stop}


@pytest.mark.parametrize(
    "recipe",
    slow_but(
        [
            "bf16 + micro_batches(2)",
            "muon",
            "host_adamw",
            "fp16",
            "adamw_8bit",
            "every_layer",
            "bf16 + every_layer + fused",
            "lion",
            "bf16_pure + adamw_stochastic",
            "adamw_4bit",
            "apollo(rank=4, renew=3)",
            "galore(rank=4, update_proj_gap=3)",
        ],
        1,
    ),
)
def test_each_recipe_resumes(recipe: str, tmp_path: Path) -> None:
    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 12)

    def started() -> HandRun:
        torch.manual_seed(1)
        return loop_of(tmp_path / "run", recipe, scheduler=schedule)

    whole = go(started(), 1)
    go(started(), 1, save=2, stop=4)
    again = started()
    assert again.resume()
    assert again.scheduler.get_last_lr()[0] == pytest.approx(1e-3 * 10 / 12)
    assert go(again, 1) == {step: seen for step, seen in whole.items() if step > 2}


@pytest.mark.parametrize("dataset", [Entropy, ReadOnce])
def test_data_that_cannot_be_made_again_is_refused_where_checkpoints_are_kept(
    dataset: Any, tmp_path: Path
) -> None:
    loader = loader_of(dataset(), shuffle=False)
    with pytest.raises(UsageError, match=f"The dataset {dataset.__name__} cannot be read again"):
        loop_of(tmp_path, loader=loader)
    loop_of(None, loader=loader_of(dataset(), shuffle=False))


def test_other_data_is_refused_within_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the facts that are compared at the start do not cover the samples."""
    monkeypatch.setattr("snugfit.features.loops.data_facts.dataset_facts", lambda data: {})
    torch.manual_seed(1)
    go(loop_of(tmp_path), save=3, stop=3)
    again = loop_of(tmp_path, loader=loader_of(classified(22)[::-1]))
    assert again.resume()
    with pytest.raises(SnugfitError, match="gave another batch 3 than before"):
        go(again)
    assert again.steps == 3


def test_an_epoch_may_be_left_before_its_end(tmp_path: Path) -> None:
    """Two steps of each of three epochs, killed within the second."""

    def steps(run: HandRun, stop: int | None = None) -> Losses:
        seen = {}
        with run:
            for _ in run.epochs(3):
                for taken, batch in enumerate(run, start=run.steps % 2 + 1):
                    loss = run.step(batch)
                    seen[run.steps] = (loss, run._step.norm)
                    if run.steps == 3 and run._checkpoints is not None:
                        run.save()
                    if run.steps == stop:
                        return seen
                    if taken == 2:
                        break
        return seen

    torch.manual_seed(1)
    whole = steps(loop_of(None))
    torch.manual_seed(1)
    steps(loop_of(tmp_path), stop=4)
    again = loop_of(tmp_path)
    assert again.resume()
    assert len(whole) == 6
    assert steps(again) == {step: seen for step, seen in whole.items() if step > 3}


def test_a_run_that_nobody_holds_gives_its_folder_back(tmp_path: Path) -> None:
    run = loop_of(tmp_path)
    run.step(padded(classified(4)))
    run.save()
    del run
    gc.collect()
    again = loop_of(tmp_path)
    assert again.resume()
    again.close()


def test_a_batch_that_was_not_used_comes_again(tmp_path: Path) -> None:
    torch.manual_seed(1)
    run = loop_of(tmp_path)
    with run:
        batches = iter(run)
        run.step(next(batches))
        lent = next(batches)
        run.save()
    again = loop_of(tmp_path)
    assert again.resume()
    with again:
        assert torch.equal(next(iter(again))["input_ids"], lent["input_ids"])


def test_what_is_not_resumed_is_put_aside(tmp_path: Path) -> None:
    go(loop_of(tmp_path), save=4, stop=4)
    go(loop_of(tmp_path), save=2, stop=2)
    names = {each.name for each in tmp_path.iterdir()}
    assert "checkpoint-2" in names
    assert "checkpoint-4" not in names
    assert any(name.startswith("checkpoint-4") for name in names)


def test_another_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    go(loop_of(tmp_path), save=2, stop=2)
    for other in (
        {"loader": loader_of(batch_size=2)},
        {"clip": 0.5},
        {"optimizer": lambda parameters, lr: torch.optim.AdamW(parameters, lr=2 * lr)},
        {"loader": loader_of(classified(23))},
        {"optimizer": torch.optim.SGD},
        {"model": model_of("llama"), "loader": loader_of(spoken(22))},
    ):
        with loop_of(tmp_path, **other) as run, pytest.raises(UsageError, match="another run"):
            run.resume()


@pytest.mark.parametrize("resumes", [True, False])
def test_a_run_that_keeps_nothing_leaves_no_folder(resumes: bool, tmp_path: Path) -> None:
    """Cases: a missing checkpoint, and a run without steps. A folder that existed before stays."""
    for folder, stays in ((tmp_path / "new" / "out", False), (tmp_path, True)):
        with loop_of(folder) as run:
            if resumes:
                says = rf"checkpoint to resume from is '{tmp_path}/checkpoint-9'.*{folder} has none"
                with pytest.raises(UsageError, match=says):
                    run.resume(tmp_path / "checkpoint-9")
        assert folder.exists() == stays
    assert not (tmp_path / "new").exists()


# ---- failures of a step ---------------------------------------------------------------------------------


def test_what_is_no_number_stops_before_the_update(tmp_path: Path) -> None:
    with loop_of(tmp_path) as run:
        batches = iter(run)
        for _ in range(2):
            run.step(next(batches))
        before = {name: value.clone() for name, value in run.model.state_dict().items()}
        handle = next(run.model.parameters()).register_hook(lambda gradient: gradient * math.nan)
        with pytest.raises(SnugfitError, match=r"Step 3: .*No weight was changed") as told:
            run.step(next(batches))
        handle.remove()
    assert (tmp_path / "nonfinite-step-3.safetensors").is_file()
    assert "nonfinite-step-3" in str(told.value)
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
    again = loop_of(tmp_path)
    assert again.resume()
    assert again.steps == 2
    again.close()


def _exhausts(step: CustomStep, at: int) -> None:
    """Exhaust memory in the forward pass of this step, once."""
    plain, begin, begun = step.loss_of, step.take, [0]

    def loss(model: Any, batch: Any) -> Any:
        if begun == [at]:
            begun.append(at)
            torch.rand(7)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return plain(model, batch)

    def take(*given: Any) -> Any:
        begun[0] += 1
        return begin(*given)

    step.loss_of, step.take = loss, take  # type: ignore[method-assign]


def test_memory_that_runs_out_names_the_next_recipe(tmp_path: Path) -> None:
    """The run resumes under that recipe and takes the same steps, with dropout off."""
    model = model_of("bert")
    torch.manual_seed(1)
    whole = go(loop_of(None, model=copy_of(model)))
    torch.manual_seed(1)
    run = loop_of(tmp_path, model=copy_of(model))
    _exhausts(run._step, 3)
    with run:
        batches = iter(run)
        for _ in range(2):
            run.step(next(batches))
        with pytest.raises(OutOfMemory, match=r"step 3 .*'micro_batches\(2\)'.*2.00 GiB"):
            run.step(next(batches))
        assert run.steps == 2
        assert all(each.grad is None for each in run.model.parameters())
        run.save()
    again = loop_of(tmp_path, "micro_batches(2)", model=copy_of(model))
    assert again.resume()
    assert go(again) == {
        step: (pytest.approx(loss, rel=1e-4), pytest.approx(norm, rel=1e-3))
        for step, (loss, norm) in whole.items()
        if step > 2
    }


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_a_signal_ends_it_on_a_border(name: str, code: int, tmp_path: Path) -> None:
    run = loop_of(tmp_path)
    batches = iter(run)
    for _ in range(2):
        run.step(next(batches))
    os.kill(os.getpid(), getattr(signal, name))
    with pytest.raises(Stopped) as stopped:
        next(batches)
    assert stopped.value.code == code
    again = loop_of(tmp_path)
    assert again.resume()
    assert again.steps == 2
    again.close()


# ---- unsupported objects --------------------------------------------------------------------------------


def test_the_recipe_is_done_to_what_is_there() -> None:
    told: list[str] = []
    run = loop_of(
        None,
        "bf16_pure + adamw_8bit + every_layer + workers(2)",
        watch=lambda event: told.append(event.get("text", "")),
    )
    with run:
        assert next(run.model.parameters()).dtype is torch.bfloat16
        assert type(run.optimizer).__module__.startswith("bitsandbytes")
        assert run.optimizer.param_groups[0]["lr"] == 1e-3
        assert run._batches._loader.num_workers == 2
        assert math.isfinite(run.step(next(iter(run))))
    assert [line.split(" ")[0] for line in told if line] == ["weights", "activations", "the"]


def test_an_optimizer_whose_states_begin_with_it_may_be_replaced() -> None:
    """Adagrad creates its states in the constructor, before its first step."""
    run = loop_of(None, "lion", optimizer=torch.optim.Adagrad)
    assert type(run.optimizer).__name__ == "Lion"
    with pytest.raises(RecipeError, match=r"bf16_pure: the Adagrad has states for float32"):
        loop_of(None, "bf16_pure", optimizer=torch.optim.Adagrad)


def test_an_optimizer_without_a_learning_rate_is_refused() -> None:
    """transformers' Adafactor may compute its rates itself."""
    with pytest.raises(UsageError, match=r"The Adafactor has the learning rate None.*lr=1e-3"):
        loop_of(None, "adamw_fused", optimizer=lambda weights, lr: Adafactor(weights, lr=None))


def test_wishes_that_cannot_be_honoured_are_refused_by_name() -> None:
    model = model_of("bert")
    before = {name: value.clone() for name, value in model.state_dict().items()}

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)

        def forward(self, inputs: Any) -> Any:
            return self.linear(inputs).sum()

    with pytest.raises(RecipeError, match=r"(?s)lora.*get_peft_model"):
        loop_of(None, "lora(targets=all-linear)", model=model)
    with pytest.raises(RecipeError, match=r"(?s)eager.*Module does not allow choosing its attention"):
        loop_of(None, "eager", model=Module(), loader=[{"inputs": torch.ones(2, 4)}])
    with pytest.raises(RecipeError, match=r"(?s)workers.*Shuffled"):
        loop_of(None, "workers(2)", model=model, loader=Shuffled())
    made = torch.optim.AdamW(model.parameters())
    with pytest.raises(RecipeError, match="scheduler=lambda optimizer"):
        accelerate(
            model, made, loader_of(), "adamw_8bit", scheduler=torch.optim.lr_scheduler.ConstantLR(made)
        )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": torch.optim.AdamW}, "must be a model"),
    ({"loader": iter([])}, "needs a loader"),
    ({"loader": 3}, "needs a loader"),
    ({"loader": [(torch.ones(2, 3), torch.ones(2))]}, "map the model's arguments"),
    ({"loader": []}, "the loader gave None"),
    ({"recipe": 3}, "must be a plan, a recipe"),
    ({"loss": 3}, "loss is 3; it must be a function"),
    ({"scheduler": "cosine"}, "scheduler is 'cosine'"),
    ({"clip": -1.0}, "gradient norm"),
    ({"logging_steps": 0}, "logging_steps"),
    ({"save_total_limit": 0}, "save_total_limit"),
    ({"output_dir": 3}, "output_dir is 3"),
    ({"recipe": "bf17"}, "bf16"),
    ({"recipe": "micro_batches(3)"}, "micro_batches"),
    ({"optimizer": lambda parameters, lr: "adamw"}, "must be a torch optimizer"),
    (
        {"optimizer": lambda parameters, lr: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr)},
        "has 1 parameters that do not belong to this model",
    ),
]


@pytest.mark.parametrize(("wrong", "says"), WRONG)
def test_mistakes_are_told(wrong: dict[str, Any], says: str) -> None:
    given = dict(wrong)
    model = given.pop("model", None)
    if model is not None:
        with pytest.raises(UsageError, match=says):
            accelerate(model, None, loader_of(), "plain")  # type: ignore[arg-type]
        return
    with pytest.raises(UsageError, match=says):
        loop_of(given.pop("output_dir", None), given.pop("recipe", "plain"), **given)


def test_mistakes_in_the_loop_are_told(tmp_path: Path) -> None:
    run = loop_of(None)
    with pytest.raises(UsageError, match="output_dir"):
        run.save()
    with pytest.raises(UsageError, match="not tensor"):
        run.step(torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="22 samples, but the global batch of this run is 4"):
        run.step(padded(classified(22)))
    with pytest.raises(UsageError, match="gave none"):
        run.step({"input_ids": torch.ones(2, 4, dtype=torch.long)})
    with pytest.raises(UsageError, match="for batch in run"):
        for _ in run.epochs(2):
            pass
    run.close()
    with pytest.raises(UsageError, match="closed"):
        run.step(padded(classified(4)))
    kept = loop_of(tmp_path)
    kept.step(padded(classified(4)))
    with pytest.raises(UsageError, match="before the first step"):
        kept.resume()
    kept.close()


def test_a_plan_is_taken_for_the_batch_that_it_is_for() -> None:
    found = replace(planned(1), job=replace(small_job("bert", 2), batch_size=4))
    assert found.best is not None
    with loop_of(None, found) as run:
        assert str(run.recipe) == found.best.recipe
    with pytest.raises(UsageError, match="global batch of 4, but the loader gives 2"):
        loop_of(None, found, loader=loader_of(batch_size=2))
    with pytest.raises(NothingFits, match="nearest miss"):
        loop_of(None, replace(found, best=None))


def test_it_prints_what_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = loop_of(tmp_path, "every_layer", watch=None, logging_steps=3)
    go(run, 1, save=4)
    lines = capsys.readouterr().err.splitlines()
    said = [line for line in lines if not line.startswith(("Writing", "[transformers]"))]
    assert said[0] == "activations are those of every_layer"
    assert [line.split("  ")[0] for line in said if line.startswith("step")] == ["step 3", "step 6"]
    assert "samples/s" in said[1]
    assert any(line.startswith(f"saved {tmp_path}") for line in said)
    assert said[-1] == "closed after step 6" or said[-2] == "closed after step 6"


class Table:
    """A schedule's function that no checkpoint can save."""

    def __init__(self) -> None:
        self.lock = object()

    def __call__(self, step: int) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("scheduler", "says"),
    [
        (torch.optim.lr_scheduler.ReduceLROnPlateau, "needs 'metrics'"),
        (lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, Table()), "could be saved with"),
    ],
)
@pytest.mark.parametrize("recipe", ["bf16_pure + every_layer + adamw_fused", "every_layer"])
def test_a_schedule_is_refused_before_anything_is_changed(
    recipe: str, scheduler: Any, says: str, tmp_path: Path
) -> None:
    """Also a schedule from a function, which gets the recipe's optimizer."""
    model = model_of("bert").train()
    before = {name: value.dtype for name, value in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forwards = [module.forward for module in model.modules()]
    with pytest.raises(SnugfitError, match=says):
        accelerate(
            model, optimizer, loader_of(), recipe, scheduler=scheduler, output_dir=tmp_path, watch=quiet
        )
    assert {name: value.dtype for name, value in model.named_parameters()} == before
    assert [module.forward for module in model.modules()] == forwards
    assert "initial_lr" not in optimizer.param_groups[0]
    assert "step" not in vars(optimizer)


def test_a_checkpoint_of_other_content_under_right_checksums_ends_in_one_line(tmp_path: Path) -> None:
    def rewritten(file: Path, text: str) -> None:
        manifest = read_document(file.parent / MANIFEST)
        file.write_text(text)
        (file.parent / MANIFEST).unlink()
        seal(file.parent, manifest["step"], manifest["about"], lambda: False)

    torch.manual_seed(1)
    go(loop_of(tmp_path), save=1, stop=1)
    for name in ("hand.json", "state.json"):
        file = tmp_path / "checkpoint-1" / name
        before = file.read_text()
        for text in ("[]", "{}", "{"):
            rewritten(file, text)
            says = r"checkpoint-1 has correct checksums|with the keys"
            with loop_of(tmp_path) as run, pytest.raises(SnugfitError, match=says):
                run.resume()
        rewritten(file, before)
    file = tmp_path / "checkpoint-1" / "hand.json"
    before = file.read_text()
    for name, value in (("epoch", "1"), ("epoch", -1), ("place", 0.5), ("place", None)):
        rewritten(file, json.dumps({**json.loads(before), name: value}))
        says = f'checkpoint-1 has correct checksums.*"{name}" is {value!r}'
        with loop_of(tmp_path) as run, pytest.raises(SnugfitError, match=says):
            run.resume()
    rewritten(file, before)
    with loop_of(tmp_path) as run:
        assert run.resume()
