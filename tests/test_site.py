"""The pages of the documentation site, without a build: links, menu, messages and commands."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path, PurePosixPath

import pytest
import site_pages
import yaml

from test_docs import ERROR_PAGES, ROOT, anchors

LINKS = re.compile(r'(?:\]\(|<a href=")([^)#:"\s]*)(?:#([^)"\s]*))?[)"]')
MADE = re.compile(r"\{ #(\S+) \}")


@cache
def pages() -> dict[str, str]:
    return site_pages.pages()


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Return a folder with the site's pages."""
    for place, text in pages().items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text)
    return tmp_path


def test_links_of_the_site_lead_somewhere(written: Path) -> None:
    """Outputs and commands in fences have no links."""
    wrong = []
    for place, text in pages().items():
        for target, anchor in LINKS.findall(site_pages.FENCED.sub("", text)):
            linked = written / PurePosixPath(place).parent / target if target else written / place
            if linked.suffix == ".md":
                wrong += [f"{place}: {target}"] if not linked.exists() else []
                known = anchors(linked) | {*MADE.findall(linked.read_text())} if linked.exists() else set()
                wrong += [f"{place}: {target}#{anchor}"] if anchor and anchor not in known else []
            else:
                wrong += [f"{place}: {target}"] if not (ROOT / "docs" / target).exists() else []
    assert wrong == []


def test_the_menu_has_each_page_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"[\w/.-]+\.md$", text[text.index("\nnav:") :], re.MULTILINE)
    assert sorted(listed) == sorted(pages())


def test_a_link_out_of_docs_becomes_one_to_the_repository(tmp_path: Path) -> None:
    page = ROOT / "docs" / "plan.md"
    assert site_pages.target(page, "plan.md", "../results/README.md", "#draws") == (
        f"{site_pages.repository()}/blob/main/results/README.md#draws"
    )
    assert site_pages.target(page, "plan.md", "../results", "").endswith("/tree/main/results")
    assert site_pages.target(page, "errors/x.md", "../README.md", "#a") == "../index.md#a"
    with pytest.raises(FileNotFoundError, match=r"docs/plan\.md: the link missing\.md leads nowhere"):
        site_pages.target(page, "plan.md", "missing.md", "")


def test_an_output_of_a_notebook_is_html_or_escaped_text() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {
            "cell_type": "code",
            "source": ["a < b"],
            "outputs": [
                {"text": ["1 < 2\n"]},
                {"data": {"text/html": ["<b>1</b>"], "text/plain": ["1"]}},
                {"data": {}},
            ],
        },
    ]
    first, code, text, answer = site_pages.notebook({"cells": cells}).strip().split("\n\n")
    assert (first, code) == ("# Title", "```python\na < b\n```")
    assert "<pre>1 &lt; 2\n</pre>" in text
    assert ">1<" not in text
    assert "<b>1</b>" in answer


def test_each_prediction_of_the_table_has_its_command() -> None:
    document = json.loads(max((ROOT / "results").glob("models-*.json")).read_text())
    page = pages()["models.md"]
    table = {line for line in page.splitlines() if line.startswith("| ")}
    for one in document["predictions"]:
        assert f"```text\n{one['command']}\n```" in page
        row = next(line for line in table if line.startswith(f"| {one['model']} | {one['method']} |"))
        assert f">{one['needed_bytes'] / 2**30:.1f}<" in row
        assert ("<b>" in site_pages.cell(one)) == one["fits"] == (one["needed_bytes"] <= one["memory_bytes"])


KIND = re.compile(r"^\*\*Cause\*\* \(kind: ([^)]+)\)", re.MULTILINE)


@pytest.mark.parametrize("page", ERROR_PAGES, ids=lambda page: page.stem)
def test_a_message_has_the_kind_of_its_page(page: Path) -> None:
    diagnose = pytest.importorskip("snugfit.features.diagnosis.diagnose").diagnose
    text = page.read_text()
    assert re.findall(r"^\*\*(\w+)\b", text, re.MULTILINE) == ["Cause", "Command", "Remedy"]
    message = re.findall(r"^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[0]
    kind = KIND.search(text)
    if kind:
        assert str(diagnose(message.encode(), "page")[0].kind) == kind[1]
    else:
        with pytest.raises(Exception, match="No out-of-memory error in this text"):
            diagnose(message.encode(), "page")


def test_the_settings_are_valid_yaml() -> None:
    """The menu and the plugins are what Zensical reads; one tag of Python is the theme's."""
    text = re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text())
    assert yaml.safe_load(text)["docs_dir"] == site_pages.FOLDER.relative_to(ROOT).as_posix()
