"""The site that `make docs` builds: every page exists, every link resolves, nothing is loaded from the network.

Skipped where there is no .venv-docs: `make docs` makes it. In CI it must be there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from fleet_train.cli import COMMANDS
from tests.support.processes import ROOT, clean_environ
from tests.support.site import PYTHON

pytestmark = pytest.mark.site
# What a browser fetches by itself when it shows a page.
FETCHED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "video": "src"}
# What `make docs` reads.
READ = ("docs", "fleet_train", "strategies", "tools", "tests/unit", "tests/streams", "mkdocs.yml")
READ += ("README.md", "README_cn.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "pyproject.toml")


class Parsed(HTMLParser):
    """Of one page: what it fetches, where it links to, its anchors, its classes, and the texts of its paragraphs."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.classes: set[str] = set()
        self.paragraphs: list[str] = []
        self._inside = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if (attribute := FETCHED.get(tag)) and values.get("rel") not in ("next", "prev", "canonical"):
            self.fetched += [values[attribute] or ""] if attribute in values else []
        if tag == "a":
            self.links += [values["href"] or ""] if "href" in values else []
        self.anchors.add(values.get("id") or "")
        self.classes |= set((values.get("class") or "").split())
        if tag == "p":
            self._inside = True
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "p"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.paragraphs[-1] += data


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [PYTHON, "-m", "mkdocs", "build", "--strict", "--site-dir", site]
    environ = clean_environ() | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=170, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Parsed]:
    return {path: Parsed(path) for path in sorted(site.rglob("*.html"))}


def test_every_page_of_the_docs_and_every_reference_is_there(site: Path) -> None:
    expected = {path.with_suffix(".html").name for path in (ROOT / "docs").glob("*.md")}
    expected |= {"index.html", "index_cn.html", "changelog.html", "contributing.html", "reference/command-line.html"}
    expected |= {"reference/profile.html", "reference/catalogue.html", "reference/api/index.html"}
    assert [name for name in sorted(expected) if not (site / name).is_file()] == []


def test_readers_find_commands_keys_profiles_and_public_functions(site: Path) -> None:
    def anchors(page: str) -> set[str]:
        return Parsed(site / page).anchors

    assert anchors("reference/command-line.html") >= set(COMMANDS)
    assert anchors("reference/profile.html") >= {"use_local_sgd", "fuse_grad_size_in_MB", "environment"}
    assert anchors("reference/catalogue.html") >= {path.stem for path in (ROOT / "strategies").glob("*.yaml")}
    functions = {name.rpartition(".")[2] for name in anchors("reference/api/index.html")}
    assert functions >= {"init", "distributed_optimizer", "save_persistables", "world_size", "from_profile", "spawn"}


def test_search_knows_keys_and_functions_but_not_what_sources_say(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    places = {entry["location"] for entry in index["docs"]}
    assert "reference/profile.html#fuse_grad_size_in_MB" in places
    assert any(place.endswith(".save_persistables") for place in places)
    assert [place for place in places if place.startswith("source/")] == []


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[Path, Parsed]) -> None:
    found = [(path.name, url) for path, page in pages.items() for url in page.fetched if _is_elsewhere(url)]
    for style in site.rglob("*.css"):
        urls = re.findall(r"""(?:url\(|@import)\s*["']?([^"')]+)""", style.read_text(encoding="utf-8"))
        found += [(style.name, url) for url in urls if _is_elsewhere(url)]
    assert found == []
    # The theme's script fetches mermaid for a page with a diagram in it, and GitHub's figures for a repository.
    assert {name for page in pages.values() for name in page.classes} & {"mermaid", "md-source"} == set()


def _is_elsewhere(url: str) -> bool:
    return bool(urlsplit(url).netloc)


def test_every_link_leads_to_a_page_and_an_anchor(site: Path, pages: dict[Path, Parsed]) -> None:
    broken = [
        f"{path.relative_to(site)}: {link}" for path, page in pages.items() for link in _broken(path, page, pages)
    ]
    assert broken == []


def _broken(path: Path, page: Parsed, pages: dict[Path, Parsed]) -> Iterator[str]:
    for link in page.links:
        parts = urlsplit(link)
        if parts.scheme or path.name == "404.html":  # its links start from the server's root
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        target = target / "index.html" if target.is_dir() else target
        is_known = target not in pages or unquote(parts.fragment) in {*pages[target].anchors, "__top", "__skip"}
        if not target.is_file() or not is_known:
            yield link


def test_no_list_and_no_table_is_shown_as_running_text(pages: dict[Path, Parsed]) -> None:
    wrong = [
        (path.name, line)
        for path, page in pages.items()
        for text in page.paragraphs
        for line in text.splitlines()
        if re.match(r"- \S|\| .* \|", line)
    ]
    assert wrong == []


def test_faults_of_pages_stop_the_build_by_name(tmp_path: Path) -> None:
    for name in READ:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    page = tmp_path / "docs" / "faults.md"
    faults = ["[a](nothing.md)", "[b](gpu.md#nowhere)", "[c](../fleet_train/nothing.py)"]
    page.write_text(page.read_text() + "\n\n".join(["", *faults, '<script src="https://a.org/b.js"></script>', ""]))
    (tmp_path / "docs" / "forgotten.md").write_text("# Forgotten\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    for words in ("nothing.md", "gpu.md#nowhere", "../fleet_train/nothing.py", "https://a.org/b.js", "forgotten.md"):
        assert re.search(rf"WARNING.*\n?.*{re.escape(words)}", done.stderr), (words, done.stderr)


def test_make_docs_builds_what_is_tested_here() -> None:
    environ = clean_environ() | {"PATH": os.environ["PATH"]}
    done = subprocess.run(["make", "-n", "docs"], cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    assert ".venv-docs/bin/python -m mkdocs build --strict" in done.stdout
