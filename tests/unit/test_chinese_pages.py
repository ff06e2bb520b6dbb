"""The Chinese pages say what the English ones say: the same commands, code, names, numbers and links by section."""

from __future__ import annotations

import calendar
import posixpath
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.processes import ROOT

ENGLISH, CHINESE = ROOT / "docs", ROOT / "docs" / "zh"
PAGES = sorted(path.name for path in CHINESE.glob("*.md"))
READMES = (ROOT / "README.md", ROOT / "README_cn.md")
PAIRS = [READMES, *((ENGLISH / page, CHINESE / page) for page in PAGES)]
MOST_LINES = 110
_COMMENT = re.compile(r"(^|\s+)#(\s.*)?$")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_MONTHS = list(calendar.month_name)
_MONTH = re.compile("|".join(filter(lambda name: name not in ("", "May"), _MONTHS)))
_NUMBER = re.compile(r"\d[\d,.]*\d|\d")


@dataclass
class Section:
    """What a section has that no translation changes."""

    level: int
    code: list[str] = field(default_factory=list)
    links: Counter[str] = field(default_factory=Counter)
    names: set[str] = field(default_factory=set)
    numbers: Counter[str] = field(default_factory=Counter)

    def read(self, text: str, path: Path) -> Section:
        text = " ".join(text.split())
        self.links.update(_target(link, path) for link in _LINK.findall(text))
        text = _LINK.sub("]", text)
        self.names |= set(re.findall(r"`([^`]+)`", text))
        text = re.sub(r"`[^`]+`", "", text)
        self.numbers.update(_NUMBER.findall(_MONTH.sub(lambda month: f" {_MONTHS.index(month[0])} ", text)))
        return self


def sections(path: Path) -> Iterator[Section]:
    """By heading, in order; the first one is what comes before the title."""
    section, text, fence = Section(0), "", ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if fence:
            section.code.append(line if fence.endswith("text") else _COMMENT.sub("", line))
            fence = "" if line.strip() == "```" else fence
        elif line.strip().startswith("```"):
            fence = line
            section.code.append(line)
        elif heading := re.match(r"(#+) ", line):
            yield section.read(text, path)
            section, text = Section(len(heading[1])), line[len(heading[0]) :]
        else:
            text += "\n" + line
    yield section.read(text, path)


def _target(link: str, path: Path) -> str:
    """Where a link leads, without its anchor; a page and its translation are the same."""
    if re.match(r"[a-z]+:", link):
        return link
    name = link.partition("#")[0]
    where = posixpath.normpath(posixpath.join(path.parent.relative_to(ROOT).as_posix(), name) if name else path.name)
    return {"README_cn.md": "README.md"}.get(where, where.replace("docs/zh/", "docs/")) if name else "this page"


@pytest.mark.parametrize("page", READMES, ids=lambda page: page.stem)
def test_a_readme_is_short(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=[chinese.name for _, chinese in PAIRS])
def test_a_chinese_page_has_the_commands_names_numbers_and_links_of_the_english_one(
    english: Path, chinese: Path
) -> None:
    theirs, ours = list(sections(english)), list(sections(chinese))
    assert [each.level for each in ours] == [each.level for each in theirs]
    for number, (here, there) in enumerate(zip(ours, theirs, strict=True)):
        assert here == there, f"section {number}"


@pytest.mark.parametrize("page", PAGES)
def test_a_chinese_page_leads_to_chinese_pages(page: str) -> None:
    links = {link.partition("#")[0] for link in _LINK.findall((CHINESE / page).read_text(encoding="utf-8"))}
    assert not links & {f"../{name}" for name in PAGES}
