"""What was found in a configuration file, as text."""

from __future__ import annotations

from rich.console import Group, RenderableType

from snugfit.exchange.check import Checked, Finding
from snugfit.exchange.dialect import as_word, dialect
from snugfit.report.text.terminal import table, words


def render(checked: Checked, changes: str = "") -> RenderableType:
    """The findings, the gravest first, each with what to do, and the `changes` as a unified diff."""
    title = dialect(checked.document.dialect).title
    head = f"{checked.document.path} ({title})"
    unread = [words(f"Computed while the script runs, and not checked: {', '.join(checked.unread)}.")]
    notes = unread if checked.unread else []
    if not checked.findings:
        return Group(words(f"{head}: nothing found."), *notes)
    rows = [(one.kind, ", ".join(one.keys), one.says, _cure(one)) for one in checked.findings]
    count = f"{len(rows)} finding{'s' if len(rows) > 1 else ''}"
    diff = [words(changes)] if changes else []
    return Group(words(f"{head}: {count}."), table(("Kind", "What", "Why", "Cure"), rows), *diff, *notes)


def _cure(finding: Finding) -> str:
    fix = finding.fix
    if fix is None:
        return "by hand"
    done = [f"rename {old} to {new}" for old, new in fix.rename.items()]
    done += [f"remove {key}" for key in fix.remove]
    done += [f"write {key}={as_word(value)}" for key, value in fix.set.items()]
    return "; ".join(done)
