"""Tables of the guide's results for the terminal, Markdown and CSV.

**Recipes of today.** Tables of the guide's experiments next to today's fastest recipes.
"""

from __future__ import annotations

from collections.abc import Iterator

from snugfit.features.guide.cells import csv_text, show_samples_range
from snugfit.features.guide.methods import (
    UNKNOWN,
    change,
    helps,
    method_lines,
    show_rate,
    show_share,
    show_size,
    show_with_sign,
    stage_lines,
)  # fmt: skip
from snugfit.features.guide.per_parameter import PerParameter
from snugfit.features.guide.result import GuideResult, GuideRow, LargeModelRow, ModernRow
from snugfit.features.guide.suite import anatomy, machines, source
from snugfit.report.text.grid import Grid, escape
from snugfit.report.text.page import Page, Sentence
from snugfit.results.speed import StepSpeed
from snugfit.units import show_bytes, show_mib


def render(result: GuideResult) -> Page:
    """Return all tables and warnings of the guide's result for a terminal."""
    return Page(grids(result), (Sentence(f"Uncertain: {doubt}", "uncertain") for doubt in result.doubts))


def markdown(result: GuideResult, *, plot: str = "") -> str:
    """Return all tables and warnings of the guide's result as Markdown. `plot` is the picture's file name in
    the same folder.
    """
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    picture = f"![Memory and speed of all experiments]({plot})\n" if plot else ""
    head = f"## The guide's experiments on {escape(result.gpu)}\n\nPredicted with {escape(versions)}.\n"
    return "\n".join([head, picture, *(grid.markdown() for grid in grids(result))])


def csv(result: GuideResult) -> str:
    """Return the guide's result as CSV with one line per experiment, in bytes, seconds and fractions."""
    known = list(machines())
    heads = ["experiment", "recipe", "loop", "predicted_bytes", "predicted_change", "fits", "refused"]
    heads += ["predicted_samples_per_second", "predicted_step_seconds", "low_seconds", "high_seconds"]
    heads += ["measured_bytes", "step_seconds", "samples_per_second", "outcome"]
    for name in known:
        heads += [
            f"published_bytes_{name}",
            f"published_samples_per_second_{name}",
            f"predicted_then_bytes_{name}",
            f"predicted_then_samples_per_second_{name}",
        ]
    modern = {row.name: row for row in result.modern}
    heads += ["recipe_today", "bytes_today", "samples_per_second_today"] if modern else []
    rows = ([*_csv_row(row, result.vanilla, known), *_csv_today(modern.get(row.name))] for row in result.rows)
    return csv_text(heads, rows)


def _csv_today(row: ModernRow | None) -> list[object]:
    return [row.recipe, row.needed_bytes, _samples(row.speed)] if row else []


def _csv_row(row: GuideRow, vanilla: GuideRow, known: list[str]) -> list[object]:
    timing, speed_now = row.timing, row.predicted_speed
    cells: list[object] = [row.name, row.recipe, row.loop, row.predicted_bytes]
    cells += [change(row.predicted_bytes, vanilla.predicted_bytes), row.fits, row.refused]
    cells += [speed_now and speed_now.samples_per_second, speed_now and speed_now.step_seconds]
    cells += [speed_now and speed_now.low_seconds, speed_now and speed_now.high_seconds, row.measured_bytes]
    cells += [timing and timing.step_seconds, timing and timing.samples_per_second, row.outcome]
    for name in known:
        then = row.then_on(name)
        cells += [then and then.published_bytes, then and then.published.samples_per_second]
        cells += [then and then.predicted_bytes, _samples(then.predicted_speed) if then else None]
    return cells


def grids(result: GuideResult) -> Iterator[Grid]:
    """Yield the tables of the guide's result.

    They are experiments, today's recipes, measurements, published figures, methods, methods without figures,
    stages of memory, and bytes per parameter.
    """
    yield _experiments(result)
    yield from modern_grids(result)
    if result.device:
        yield _measurements(result)
    yield _published_figures(result)
    yield _methods(result)
    if result.without_figures:
        yield without_figures_grid(result)
    yield _stages(result)
    if result.per_parameter:
        yield _per_parameter(result)


def _experiments(result: GuideResult) -> Grid:
    rows = []
    for row in result.rows:
        recipe = row.recipe if row.loop == "plain" else f"{row.recipe} ({row.loop} loop)"
        fits = {True: "yes", False: "no", None: "refused" if row.refused else UNKNOWN}[row.fits]
        change_to = show_share(row.predicted_bytes, result.vanilla.predicted_bytes)
        speed = _samples(row.predicted_speed)
        figures = (show_size(row.predicted_bytes), change_to, fits, show_rate(speed))
        likely = show_samples_range(row.predicted_speed)
        faster = show_share(speed, _samples(result.vanilla.predicted_speed))
        rows.append((row.name, *figures, likely, faster, recipe))
    reasons = dict.fromkeys(row.why_refused for row in result.rows if row.refused)
    names = {reason: [row.name for row in result.rows if row.why_refused == reason] for reason in reasons}
    refused = " ".join(f"Not predicted: {'; '.join(names[reason])} ({reason})" for reason in reasons)
    memory_limit = f"{show_bytes(result.memory_bytes)} may be used. " if result.memory_bytes else ""
    return Grid(
        title=f"The guide's experiments, predicted for {result.gpu}",
        heads=(
            "Experiment",
            "MiB>",
            "MiB to vanilla>",
            "Fits",
            "Samples/s>",
            "Likely samples/s>",
            "Speed to vanilla>",
            "Recipe<",
        ),
        rows=tuple(rows),
        note=memory_limit + refused,
    )


def _measurements(result: GuideResult) -> Grid:
    vanilla = result.vanilla
    rows = []
    for row in result.rows:
        speed = row.timing.samples_per_second if row.timing else None
        predicted = _samples(row.predicted_speed)
        before = vanilla.timing.samples_per_second if vanilla.timing else None
        rows.append(
            (
                row.name,
                show_size(row.predicted_bytes),
                show_size(row.measured_bytes),
                show_share(row.predicted_bytes, row.measured_bytes, 2),
                show_share(row.measured_bytes, vanilla.measured_bytes),
                show_rate(predicted),
                show_samples_range(row.predicted_speed),
                show_rate(speed) or row.outcome or UNKNOWN,
                show_share(predicted, speed),
                show_share(speed, before),
            )
        )
    heads = (
        "Experiment",
        "Predicted MiB>",
        "Measured MiB>",
        "Error>",
        "MiB to vanilla>",
        "Predicted samples/s>",
        "Likely samples/s>",
        "Measured samples/s>",
        "Speed error>",
        "Speed to vanilla>",
    )
    return Grid(title=f"Measured on {result.device}", heads=heads, rows=tuple(rows))


def _published_figures(result: GuideResult) -> Grid:
    known = machines()
    rows = []
    for row in result.rows:
        for then in row.then:
            before = result.vanilla.then_on(then.published.machine) or then
            speed, predicted = then.published.samples_per_second, _samples(then.predicted_speed)
            rows.append(
                (
                    row.name,
                    known[then.published.machine].gpu or then.published.machine,
                    f"{then.published.mib:,}",
                    show_share(then.published_bytes, before.published_bytes),
                    show_size(then.predicted_bytes),
                    show_share(then.predicted_bytes, then.published_bytes, 2),
                    show_rate(speed),
                    show_rate(predicted),
                    show_samples_range(then.predicted_speed),
                    show_share(predicted, speed),
                )
            )
    heads = (
        "Experiment",
        "Machine",
        "Published MiB>",
        "MiB to vanilla>",
        "Predicted MiB>",
        "Error>",
        "Published samples/s>",
        "Predicted samples/s>",
        "Likely samples/s>",
        "Speed error>",
    )
    notes = "; ".join(f"{machine.name}: {machine.note}" for machine in known.values() if not machine.gpu)
    return Grid(
        title="As published, and predicted under the software of the time",
        heads=heads,
        rows=tuple(rows),
        note=f"Published: {source()}. Machines without a named GPU are shown, but not predicted. {notes}.",
    )


def _methods(result: GuideResult) -> Grid:
    rows = tuple(
        (
            line.method,
            line.experiment or "not predicted",
            helps(line.speed, less_is_better=False),
            f"{show_with_sign(line.speed)} {line.speed_from}".strip(),
            line.guide_speed,
            helps(line.memory, less_is_better=True),
            show_with_sign(line.memory),
            line.guide_memory,
        )
        for line in method_lines(result)
    )
    heads: tuple[str, ...] = ("Method", "Shown by", "Speed", "Speed change>", "Guide on speed")
    heads += ("Memory", "Memory change>", "Guide on memory")
    note = "Memory is predicted. Speed is measured, or where it was not, as published, else predicted."
    return Grid(title="Which technique helps with what", heads=heads, rows=rows, note=note)


def without_figures_grid(result: GuideResult) -> Grid:
    """Return a table of the guide's methods without published figures, with the reason if one could not be
    predicted.
    """
    refused = {row.name: row.why_refused for row in result.rows if row.refused}
    rows = tuple(
        (
            f"{line.chapter}: {line.name}",
            "not predicted" if line.experiment in refused else line.status,
            line.guide,
            refused.get(line.experiment, line.today),
            line.instead,
        )
        for line in result.without_figures
    )
    return Grid(
        title="Methods in the guide without a figure",
        heads=("Named", "Here", "The guide", "Today", "Recipes today<"),
        rows=rows,
        note=(
            "A prediction is that of an experiment above, or with --modern of a large model. The rest "
            "has no figure."
        ),
    )


def _stages(result: GuideResult) -> Grid:
    rows = tuple(
        (
            line.stage,
            show_size(line.predicted_bytes),
            ", ".join(f"{machine} {show_mib(size)}" for machine, size in line.published),
        )
        for line in stage_lines(result)
    )
    heads = ("Stage", "Predicted MiB>", "Published MiB, by machine")
    return Grid(title=f"GPU memory from idle to training, on {result.gpu}", heads=heads, rows=rows)


def _per_parameter(result: GuideResult) -> Grid:
    rows = tuple(
        (_model_and_optimizer(line), "refused", *[UNKNOWN] * 8)
        if line.refused
        else (
            _model_and_optimizer(line),
            *(f"{part:.2f}" for part in (line.weights, line.copies, line.gradients, line.states, line.rest)),
            line.peak,
            f"{line.total:.2f}",
            UNKNOWN if line.rule_states is None else f"{line.rule_states:g}",
            UNKNOWN if line.rule_total is None else f"{line.rule_total:g}",
        )
        for line in result.per_parameter
    )
    heads: tuple[str, ...] = (
        "Model and optimizer",
        "Weights>",
        "Copies>",
        "Gradients>",
        "States>",
        "Rest>",
        "Peak in",
        "All>",
    )
    heads += ("Rule: states>", "Rule: all>")
    refused = [f"{line.optimizer}: {line.refused}" for line in result.per_parameter if line.refused]
    reason = [f"{part}: {text}" for part, text in anatomy()["why"].items()]
    note = " ".join(["How the guide's rule differs.", *reason, *dict.fromkeys(refused)])
    return Grid(
        title=f"Bytes per parameter at the peak ({anatomy()['precision']}, tiny batch), and the guide's rule",
        heads=heads,
        rows=rows,
        note=note,
    )


def _model_and_optimizer(line: PerParameter) -> str:
    """Return model and optimizer in one cell, because only both identify a row.

    The model is without its organisation. The precision is added if it is not the guide's.
    """
    other = line.precision not in ("", anatomy()["precision"])
    return f"{line.model.rpartition('/')[2]}, {line.optimizer}" + (f" ({line.precision})" if other else "")


def _samples(speed: StepSpeed | None) -> float | None:
    return speed.samples_per_second if speed else None


# ---- recipes of today --------------------------------------------------------------------------------------


def modern_grids(result: GuideResult) -> Iterator[Grid]:
    """Yield a table of today's fastest recipe for each experiment, and one of large models without DeepSpeed.
    Either is left out if it was not requested.
    """
    if result.modern:
        yield _experiments_of_today(result)
    if result.large_models:
        yield _large_models(result.large_models)


def _experiments_of_today(result: GuideResult) -> Grid:
    then = {row.name: row for row in result.rows}
    rows = tuple(_cells(then[row.name], row) for row in result.modern)
    heads: tuple[str, ...] = ("Experiment", "MiB>", "Today's MiB>", "MiB change>")
    heads += ("Samples/s>", "Today's samples/s>", "Likely samples/s>", "Speed change>")
    return Grid(
        title=f"The guide's experiments, and today's best recipe in the same memory of {result.gpu}",
        heads=(*heads, "Changed<", "Recipe today<"),
        rows=rows,
        note="Each recipe is the fastest of a plan (--fidelity rounds, AdamW) that takes no more memory than "
        "the experiment does with today's software, or than the GPU has where it cannot run. Layers are "
        "compiled in none: snugfit plan looks at that.",
    )


def _cells(then: GuideRow, now: ModernRow) -> tuple[str, ...]:
    speed_then = then.predicted_speed.samples_per_second if then.predicted_speed else None
    speed_now = now.speed.samples_per_second if now.speed else None
    changed = ", ".join(f"{change.then} -> {change.now}" for change in now.instead)
    return (
        now.name,
        show_size(then.predicted_bytes),
        show_size(now.needed_bytes),
        show_share(now.needed_bytes, then.predicted_bytes),
        show_rate(speed_then),
        show_rate(speed_now),
        show_samples_range(now.speed),
        show_share(speed_now, speed_then),
        changed or now.why_none,
        now.recipe,
    )


def _large_models(models: tuple[LargeModelRow, ...]) -> Grid:
    rows = tuple(
        (
            row.name,
            row.gpu,
            show_bytes(row.needed_bytes) if row.needed_bytes is not None else UNKNOWN,
            {True: "yes", False: "no", None: "refused"}[row.fits],
            show_rate(row.speed.samples_per_second if row.speed else None),
            show_samples_range(row.speed),
            row.refused.strip().rpartition("\n")[2] or row.why,
            row.recipe,
        )
        for row in models
    )
    return Grid(
        title="Large models on one GPU, with DeepSpeed and without",
        heads=(
            "Job",
            "GPU",
            "Needed>",
            "Fits",
            "Samples/s>",
            "Likely samples/s>",
            "Why",
            "Recipe<",
        ),
        rows=rows,
        note="The guide's advice for a model that does not fit is ZeRO with offload to the CPU: T5-3b in a "
        "batch of 20 on a 24 GB RTX 3090, where it did not fit in a batch of 1 (Hugging Face's blog, January "
        "2021). If DeepSpeed is installed, its own engine is simulated; these steps were not measured.",
    )
