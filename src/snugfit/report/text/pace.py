"""Text about the speed of a step: its seconds with their range, samples and tokens a second, and MFU."""

from __future__ import annotations

from snugfit.job.phases import PhaseWords
from snugfit.results.speed import StepSpeed
from snugfit.units import show_seconds


def pace(speed: StepSpeed, words: PhaseWords) -> str:
    """Return the speed as text: `about 800.0 ms, 750 ms to 860 ms; 20.0 samples/s, 41,000 tokens/s, 38 %
    MFU`. Missing values are left out."""
    about = ", ".join(filter(None, (f"about {show_seconds(speed.step_seconds)}", show_spread(speed))))
    return f"{about}; {show_rates(speed, words)}"


def show_rate(speed: StepSpeed, words: PhaseWords) -> str:
    """Return the throughput of a table with only one: `20.0`, in samples or tokens a second."""
    rate = getattr(speed, f"{words.rate}_per_second")
    return f"{rate:,.1f}"


def show_rates(speed: StepSpeed, words: PhaseWords) -> str:
    """Return the throughput: `20.0 samples/s, 41,000 tokens/s, 38 % MFU`. Missing values are left out."""
    rates = [f"{speed.samples_per_second:,.1f} {words.item}/s"]
    rates += [] if speed.tokens_per_second is None else [f"{show_tokens(speed.tokens_per_second)} tokens/s"]
    rates += [] if speed.mfu is None else [f"{show_mfu(speed.mfu)} MFU"]
    return ", ".join(rates)


def show_spread(speed: StepSpeed | None) -> str:
    """Return the range of a step's seconds as text: `750 ms to 860 ms`; empty if it is unknown."""
    if speed is None or speed.low_seconds is None or speed.high_seconds is None:
        return ""
    return f"{roughly(speed.low_seconds)} to {roughly(speed.high_seconds)}"


def show_tokens(per_second: float | None) -> str:
    """Return tokens a second: `41,000`; a dash for a step without tokens."""
    return "-" if per_second is None else f"{per_second:,.0f}"


def show_mfu(mfu: float | None) -> str:
    """Return model FLOPs utilisation in per cent as text; a dash if it is unknown."""
    return "-" if mfu is None else f"{100 * mfu:.0f} %"


def roughly(seconds: float) -> str:
    """Return the seconds with two digits, the precision of a spread: `0.75 s`, `860 ms`, `43 ms`."""
    rounded = float(f"{seconds:.2g}")
    return f"{rounded:g} s" if rounded >= 1 else f"{1e3 * rounded:g} ms"
