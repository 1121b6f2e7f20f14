"""Versions of packages that a requirements or constraints file allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from snugfit.errors import UsageError
from snugfit.user_files import read_text

if TYPE_CHECKING:
    from packaging.requirements import Requirement

NAMES = ("constraints.txt", "requirements.txt")
"""Names of files beside a virtual environment that contain its versions, in the order of reading."""

_OF_INDEX = ("--index-url", "--extra-index-url", "--find-links", "--no-index", "--pre", "-i ", "-f ")
"""Options of pip that a file may have, because they change no version."""


@dataclass(frozen=True)
class Pins:
    """The requirements of one file."""

    file: Path
    requirements: tuple[Requirement, ...]

    @classmethod
    def read(cls, file: Path) -> Pins:
        """Return the requirements of a file in pip's format. Raises `UsageError` with the number of an
        unusable line.
        """
        from packaging.requirements import InvalidRequirement, Requirement

        parsed = []
        for number, line in enumerate(read_text(file, noun="requirements file").splitlines(), 1):
            text = line.partition(" #")[0].strip()
            if not text or text.startswith(("#", *_OF_INDEX)):
                continue
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                raise UsageError(
                    f"{file}, line {number}: {text[:80]!r} is not a requirement such as torch==2.12.0. Write "
                    "one package with its version on each line."
                ) from None
            if requirement.marker is None or requirement.marker.evaluate():
                parsed.append(requirement)
        if not parsed:
            raise UsageError(f"{file} names no package. Write lines such as torch==2.12.0.")
        return cls(file, tuple(parsed))

    @cached_property
    def text(self) -> str:
        """The requirements in alphabetical order, one on each line."""
        return "\n".join(sorted(map(str, self.requirements)))

    def mismatches(self, installed: Mapping[str, str]) -> list[str]:
        """Return a phrase for each requirement that the installed versions, by name, do not meet."""
        return mismatches(self.requirements, installed)


def mismatches(requirements: tuple[Requirement, ...], installed: Mapping[str, str]) -> list[str]:
    """Return a phrase for each of the requirements that the installed versions do not meet. The keys of
    `installed` are canonical names of packages.
    """
    from packaging.utils import canonicalize_name

    phrases = []
    for one in requirements:
        version = installed.get(canonicalize_name(one.name))
        if version is None:
            phrases.append(f"{one.name}{one.specifier} is not installed")
        # A prerelease that is installed was chosen by the user.
        elif not one.specifier.contains(version, prereleases=True):
            phrases.append(f"{one.name} is {version}, not {one.specifier}")
    return phrases


def own_requirements() -> tuple[Requirement, ...]:
    """Return snugfit's own requirements, without those of its extras. Raises `UsageError` if snugfit is not
    installed as a package.
    """
    from packaging.requirements import Requirement

    try:
        texts = metadata.requires("snugfit") or []
    except metadata.PackageNotFoundError:
        raise UsageError(
            "snugfit is not installed as a package, so its requirements are unknown. Install it with pip."
        ) from None
    parsed = map(Requirement, texts)
    return tuple(one for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""}))
