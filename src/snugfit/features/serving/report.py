"""The report of `snugfit serve`, which fits one screen."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType

from snugfit.features.serving.answer import ServingAnswer, ServingComparison
from snugfit.report.text.table import table
from snugfit.report.text.terminal import words
from snugfit.units import show_bytes


def render(answer: ServingAnswer) -> RenderableType:
    """Return the terminal report of one inference server, at most 15 lines at 120 columns."""
    width = max(len(title) for title, _, _ in _rows(answer))
    rows = [f"  {title.ljust(width)}  {size:>10}  {note}".rstrip() for title, size, note in _rows(answer)]
    doubts = [f"Note: {doubt}" for doubt in answer.doubts[:2]]
    return Group(*(words(line) for line in (*_verdict(answer), *rows, _sequences(answer), *doubts)))


def _verdict(answer: ServingAnswer) -> Iterator[str]:
    gpus = answer.gpu if answer.tensor_parallel == 1 else f"{answer.tensor_parallel} x {answer.gpu}"
    verdict = "starts" if answer.starts else "does not start"
    yield f"{answer.model}, {answer.engine} {answer.version}, {gpus}: {verdict} (formula, not measured)"
    if answer.refusal:
        yield answer.refusal


def _rows(answer: ServingAnswer) -> Iterator[tuple[str, str, str]]:
    """Yield one row per part of the GPU's memory: its name, size and a remark."""
    share = f"{answer.utilization:g} of {show_bytes(answer.total_bytes)}" if answer.utilization else ""
    yield "may be used", show_bytes(answer.usable_bytes), share
    yield "weights", show_bytes(answer.weights_bytes), answer.weights_layout
    # sglang and llama.cpp keep this memory outside of the cache's budget, or allocate a fixed buffer.
    peak = {"vllm": "profiling run", "sglang": "kept free for a prompt", "llama.cpp": "graph's buffer"}
    yield "activations", show_bytes(answer.activation_bytes), peak[answer.engine]
    yield "outside torch", show_bytes(answer.non_torch_bytes), "libraries, communication"
    if answer.graph_bytes:
        later = "" if answer.graphs_reduce_cache else ", captured after the cache is allocated"
        yield "CUDA graphs", show_bytes(answer.graph_bytes), f"estimate{later}"
    tokens = f"{answer.cache_tokens:,} tokens of {show_bytes(answer.token_bytes)}, in blocks of"
    cached = f"{tokens} {answer.block_size}" if answer.token_bytes else "a state for each sequence"
    yield "cache", show_bytes(answer.cache_bytes), cached


def _sequences(answer: ServingAnswer) -> str:
    count = f"{answer.sequences:,} sequence{'' if answer.sequences == 1 else 's'}"
    limit = f"{answer.engine} computes at most {answer.most_sequences:,} at once"
    return (
        f"Room for {count} of {answer.sequence_tokens:,} tokens; {limit}. Longest: {answer.longest:,} tokens."
    )


def render_all(comparison: ServingComparison) -> RenderableType:
    """Return a table of the server's memory with one row per GPU."""
    first = comparison.answers[0]
    heads = ("GPU", "Starts", "Weights>", "Cache>", "Tokens>", f"Sequences of {first.sequence_tokens:,}>")
    rows = (
        (
            answer.gpu,
            "yes" if answer.starts else "no",
            show_bytes(answer.weights_bytes),
            show_bytes(answer.cache_bytes),
            f"{answer.cache_tokens:,}",
            f"{answer.sequences:,}",
        )
        for answer in comparison.answers
    )
    title = f"{first.engine} {first.version} with {first.model} (formula, not measured)"
    return table(heads, rows, title=title)
