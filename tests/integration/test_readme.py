"""Both READMEs say the same in few lines, their diff is the real one, and every path in them exists.

That every command is run by a test, test_docs.py sees to.
"""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml
from coverage import Coverage

from tests.integration.test_examples import changed_lines
from tests.support import commands
from tests.support.processes import ROOT, clean_environ

READMES = ("README.md", "README_cn.md")
MOST_LINES = 150
# The diff stands where a newcomer reads, too.
PAGES_WITH_DIFF = (*READMES, "docs/start.md")
# Pages by which a script comes to run: README first, then what it leaves to the others.
FIRST_PAGES = ("README.md", "docs/start.md", "docs/many-machines.md")
# What tests/integration/test_launch_forms.py and test_install.py run.
RUN_BY_NAME = (
    commands.FLEET_TRAIN,
    commands.OLD_RECIPE,
    commands.TODAYS_IPS,
    commands.TODAYS_MASTER,
    commands.ONE_PROCESS,
    commands.INSTALL,
)


def text_of(readme: str) -> str:
    return (ROOT / readme).read_text()


def test_both_readmes_have_the_same_commands_in_the_same_order() -> None:
    english, chinese = (commands.shell_commands(text_of(readme)) for readme in READMES)
    assert english == chinese


def test_the_first_pages_have_every_launch_command() -> None:
    printed = [command for page in FIRST_PAGES for command in commands.shell_commands(text_of(page))]
    assert [command for command in RUN_BY_NAME if command not in printed] == []


@pytest.mark.parametrize("readme", READMES)
def test_a_readme_is_short(readme: str) -> None:
    assert len(text_of(readme).splitlines()) <= MOST_LINES, "move what is too much into a page of docs/"


def half_width(markdown: str) -> list[str]:
    """Punctuation of ASCII in Chinese prose, with what stands before it; not in code and in targets of links."""
    prose = re.sub(r"^```.*?^```$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`\n]*`", "码", prose)).replace("[", "").replace("]", "")
    prose = re.sub(r"(?m)^\d+\. ", "", prose)
    return re.findall(r".{0,8}(?:[,;:!?()](?![0-9A-Za-z])|(?<![0-9A-Za-z])[,;:!?()]|(?<=[\u3400-\u9fff])[.\"'])", prose)


def test_the_chinese_readme_has_full_width_punctuation_outside_code() -> None:
    assert half_width(text_of("README_cn.md")) == []


@pytest.mark.parametrize(
    "wrong",
    [
        "导入,保存",
        "导入: 保存",
        "用 `x`, 再保存",
        "见[入门](a.md).",
        "配置(profile)",
        "(2020 年)",
        "保存.",
        "运行 Gloo, 再保存",
    ],
)
def test_half_width_punctuation_is_found(wrong: str) -> None:
    assert half_width(wrong)


@pytest.mark.parametrize(
    "right",
    ["导入，保存。", "3.3.1 与 1,000", "`a, b`：[入门](a.md)", "```bash\nx, y 中,文\n```\n好。"],  # noqa: RUF001
)
def test_full_width_punctuation_numbers_and_code_are_let_through(right: str) -> None:
    assert half_width(right) == []


def test_only_bash_diff_blocks_are_used() -> None:
    languages = {lang for readme in READMES for lang in re.findall(r"^```(\w*)\n", text_of(readme), re.MULTILINE)}
    assert languages - {""} == {"bash", "diff"}, "a command in a block of another language would be missed"


def test_make_demo_is_the_demo_script() -> None:
    assert ".venv/bin/python tools/demo.py" in _recipe_of("demo")
    assert (ROOT / "tools" / "demo.py").exists()


def test_make_test_is_this_suite() -> None:
    """``make test`` and ``make test-long`` leave no test out."""
    short, long = (_recipe_of(target)[-1] for target in ("test", "test-long"))
    assert short.startswith(".venv/bin/python -m pytest ")
    assert short.endswith(' -m "not long"')
    assert short.removesuffix('"not long"') == long.removesuffix("long")


def test_make_coverage_runs_the_same_tests_of_two_folders() -> None:
    measured, short = (_recipe_of(target)[-1] for target in ("coverage", "test"))
    assert measured.startswith(f"{short} --cov ")
    assert measured.endswith(" tests/unit tests/parallel")
    settings = Coverage(config_file=str(ROOT / "pyproject.toml"))
    asked = {name: settings.get_option(f"run:{name}") for name in ("source", "branch", "patch")}
    assert asked == {"source": ["fleet_train"], "branch": True, "patch": ["subprocess"]}


def test_make_check_has_every_bar() -> None:
    recipe = " ".join(_recipe_of("check"))
    bars = ("ruff format --check", "ruff check", "mypy", "profile.export --check", "test_layers.py")
    assert [bar for bar in bars if bar not in recipe] == []


def _recipe_of(target: str) -> list[str]:
    done = subprocess.run(
        ["make", "-n", target, "VENV=.venv", "ARGS="],
        cwd=ROOT,
        env=clean_environ(),
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.strip() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("page", PAGES_WITH_DIFF)
def test_diff_is_the_real_one(page: str) -> None:
    (block,) = commands.fenced_blocks(text_of(page), "diff")
    shown = block.splitlines()
    removed, added = changed_lines()
    assert [line[1:] for line in shown if line.startswith("-")] == removed
    assert [line[1:] for line in shown if line.startswith("+")] == added
    script = (ROOT / "tools" / "examples" / "train_with_fleet.py").read_text().splitlines()
    context = [line[1:] for line in shown if line.startswith(" ") and line != " ..."]
    assert [line for line in context if line not in script] == []


@pytest.mark.parametrize("readme", READMES)
def test_every_linked_path_exists(readme: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text_of(readme))
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("readme", READMES)
def test_every_page_is_linked(readme: str) -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages - set(re.findall(r"\]\(docs/([\w-]+\.md)", text_of(readme))) == set()


@pytest.mark.parametrize("readme", READMES)
def test_the_table_of_pages_has_the_groups_of_the_site(readme: str) -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    groups = [pages for one in navigation for pages in one.values() if isinstance(pages, list)]
    made = ("reference/", "changelog.md")
    pages = [[page for entry in group for page in entry.values() if not page.startswith(made)] for group in groups]
    rows = [line for line in text_of(readme).splitlines() if line.startswith("| [")]
    table = [re.findall(r"\]\((?:docs/)?([^)]+)\)", row) for row in rows]
    assert [[page if "/" in page else page.lower() for page in row] for row in table] == pages[:-1]
    assert pages[-1] == [], "the last group has what is made from the code"


def test_gpu_requirements_differ_only_in_paddle_and_what_computes_on_cpus() -> None:
    cpu, gpu = (
        [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith(("#", "--"))]
        for name in ("requirements.txt", "requirements-gpu.txt")
    )
    # numba compiles the codec's loops on CPUs; on GPUs the codec is made of Paddle's operators.
    shared = [line for line in cpu if not line.startswith("numba==")]
    assert len(shared) == len(cpu) - 1
    assert [line.replace("paddlepaddle-gpu==", "paddlepaddle==") for line in gpu] == shared


def test_ci_runs_the_readmes_test_command() -> None:
    assert re.search(r"^make test( +#.*)?$", text_of("README.md"), re.MULTILINE)
