"""The commands `snugfit doctor` and `snugfit env`: the state of this machine, and that of a bug report."""

from __future__ import annotations

from snugfit.cli import arguments as given


def doctor(as_json: given.AsJson = False) -> None:
    """Report this machine's package versions, extras (optional packages), GPUs and NVML."""
    from snugfit.features.doctor.examine import examine
    from snugfit.features.doctor.tables import render
    from snugfit.report.text.terminal import show, show_json

    findings = examine()
    if as_json:
        show_json(findings.to_json())
    else:
        show(render(findings))


def env(as_json: given.AsJson = False) -> None:
    """Print versions, builds, driver and GPUs for a bug report, without paths and names of this machine."""
    from snugfit.features.doctor.environment import environment, render
    from snugfit.report.text.terminal import show, show_json

    state = environment()
    if as_json:
        show_json(state.to_json())
    else:
        show(render(state))
