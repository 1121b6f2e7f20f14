"""The command `snugfit doctor`: it lists the installed packages, and the missing ones with the reason."""

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
