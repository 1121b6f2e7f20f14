"""How fast a step is, in words: its seconds with their spread, samples and tokens a second, and MFU."""

from __future__ import annotations

from snugfit.prediction.spread import SecondsSpread, spread_of
from snugfit.results.step_seconds import StepSeconds
from snugfit.units import show_seconds


def pace(
    seconds: float, *, samples: int, tokens: int, mfu: float | None, spread: SecondsSpread | None
) -> str:
    """`about 800.0 ms, 750 ms to 860 ms; 20.0 samples/s, 41,000 tokens/s, 38 % MFU`; what is not known
    is left out. `samples` and `tokens` are those of a step."""
    about = f"about {show_seconds(seconds)}" + (f", {show_spread(spread)}" if spread else "")
    rates = ", ".join(
        [f"{samples / seconds if seconds else 0:,.1f} samples/s", *_rates(seconds, tokens, mfu)]
    )
    return f"{about}; {rates}"


def show_spread(spread: SecondsSpread) -> str:
    """`750 ms to 860 ms`."""
    return f"{_roughly(spread.low)} to {_roughly(spread.high)}"


def spread_of_timing(timing: StepSeconds) -> SecondsSpread:
    """The spread of a prediction's seconds."""
    return spread_of(timing.step_seconds, bound=timing.bound, measured_rates=timing.measured_rates)


def tokens_per_second(seconds: float, tokens: int) -> str:
    """`41,000`; a dash where a step has none."""
    return f"{tokens / seconds:,.0f}" if tokens and seconds else "-"


def show_mfu(mfu: float | None) -> str:
    """Model FLOPs utilisation in per cent; a dash where no peak is known."""
    return "-" if mfu is None else f"{100 * mfu:.0f} %"


def _rates(seconds: float, tokens: int, mfu: float | None) -> list[str]:
    per_second = [f"{tokens_per_second(seconds, tokens)} tokens/s"] if tokens else []
    return per_second + ([] if mfu is None else [f"{show_mfu(mfu)} MFU"])


def _roughly(seconds: float) -> str:
    """Two figures, as much as a spread deserves: `0.75 s`, `860 ms`, `43 ms`."""
    rounded = float(f"{seconds:.2g}")
    return f"{rounded:g} s" if rounded >= 1 else f"{1e3 * rounded:g} ms"
