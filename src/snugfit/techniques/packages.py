"""Whether the packages that a technique needs are installed, asked without importing them."""

from __future__ import annotations

from snugfit.techniques.technique import Technique


def missing(technique: Technique | type[Technique]) -> str | None:
    """`adamw_8bit needs bitsandbytes>=0.50, which is not installed. Try: ...`; None when all is there."""
    from importlib.metadata import PackageNotFoundError, version

    from packaging.requirements import Requirement

    for text in technique.needs:
        requirement = Requirement(text)
        cure = f'Try: pip install "snugfit[{technique.extra}]"'
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            return f"{technique.name} needs {text}, which is not installed. {cure}"
        if not requirement.specifier.contains(found, prereleases=True):
            return f"{technique.name} needs {text}; installed is {found}. {cure}"
    return None
