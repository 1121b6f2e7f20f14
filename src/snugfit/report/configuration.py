"""A user's configuration in a terminal: what became of every key, or what was found and how to cure it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from snugfit.exchange.account import Reading
from snugfit.exchange.check import Checked, Finding
from snugfit.exchange.dialect import as_word, dialect
from snugfit.report.text.table import table
from snugfit.report.text.terminal import words

LONGEST_VALUE = 40


def render_reading(reading: Reading) -> RenderableType:
    """The account of a file, key by key."""
    head = words(f"From {reading.path} ({reading.title}), for the {reading.settings['loop']} loop:")
    parts: list[RenderableType] = [head]
    for lines, heads in (
        (reading.took, ("Taken", "Value", "Here")),
        (reading.differs, ("Not quite the same", "Value", "Why")),
    ):
        if lines:
            parts.append(table(heads, ((line.key, _short(line.value), line.says) for line in lines)))
    if reading.ignored:
        parts.append(table(("Ignored", "Why"), _by_reason(reading)))
    return Group(*parts, Text())


def _by_reason(reading: Reading) -> list[tuple[str, str]]:
    reasons: dict[str, list[str]] = {}
    for line in reading.ignored:
        reasons.setdefault(line.says, []).append(line.key)
    return [(", ".join(keys), reason) for reason, keys in reasons.items()]


def _short(value: str) -> str:
    return value if len(value) <= LONGEST_VALUE else value[: LONGEST_VALUE - 3] + "..."


def render_check(checked: Checked) -> RenderableType:
    """The findings, the gravest first, each with its cure."""
    title = dialect(checked.document.dialect).title
    head = f"{checked.document.path} ({title})"
    unread = [
        words(f"Not checked, because the script computes it while it runs: {', '.join(checked.unread)}.")
    ]
    notes = unread if checked.unread else []
    if not checked.findings:
        return Group(words(f"{head}: nothing found."), *notes)
    rows = [(one.kind, ", ".join(one.keys), one.says, _cure(one)) for one in checked.findings]
    count = f"{len(rows)} finding{'s' if len(rows) > 1 else ''}"
    return Group(words(f"{head}: {count}."), table(("Kind", "What", "Why", "Cure"), rows), *notes)


def _cure(finding: Finding) -> str:
    fix = finding.fix
    if fix is None:
        return "by hand"
    done = [f"rename {old} to {new}" for old, new in fix.rename.items()]
    done += [f"remove {key}" for key in fix.remove]
    done += [f"write {key}={as_word(value)}" for key, value in fix.set.items()]
    return "; ".join(done)
