"""Files for GitHub, pre-commit and editors: what they name exists and agrees."""

from __future__ import annotations

import ast
import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from click import Command, Context, Group

import fleet_train
from fleet_train.cli import cli
from tests.support.processes import ROOT

GITHUB = ROOT / ".github"
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
PYPROJECT = (ROOT / "pyproject.toml").read_text()  # Python 3.10 has no tomllib: single values are found by their lines
# Of GitHub's forms: what each kind of field may have besides type, id, attributes and validations.
ATTRIBUTES = {
    "markdown": {"value"},
    "textarea": {"label", "description", "placeholder", "value", "render"},
    "input": {"label", "description", "placeholder", "value"},
    "dropdown": {"label", "description", "options", "multiple", "default"},
}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def workflow() -> dict[str, Any]:
    content: dict[str, Any] = read(GITHUB / "workflows" / "ci.yml")
    return content


def steps() -> list[dict[str, Any]]:
    return [step for job in workflow()["jobs"].values() for step in job["steps"]]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))


def in_pyproject(name: str) -> Any:
    found = re.search(rf"^{name} = (.+)$", PYPROJECT, re.MULTILINE)
    assert found is not None, name
    return ast.literal_eval(found.group(1)) if found.group(1)[0] in "\"'[" else found.group(1)


def test_matrix_has_the_pythons_that_the_package_is_for() -> None:
    assert workflow()["jobs"]["check-and-test"]["strategy"]["matrix"]["python"] == PYTHONS
    assert re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT) == PYTHONS
    assert in_pyproject("requires-python") == f">={PYTHONS[0]}"
    assert in_pyproject("python_version") == PYTHONS[0]  # mypy's
    assert in_pyproject("target-version") == "py" + PYTHONS[0].replace(".", "")  # ruff's
    first, last = (python.replace(".", ", ") for python in (PYTHONS[0], PYTHONS[-1]))
    assert f"({first}) <= sys.version_info[:2] <= ({last})" in (ROOT / "tools" / "make_venv.sh").read_text()
    assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}" in (ROOT / "README.md").read_text()


def test_the_extra_cpu_has_what_make_demo_installs() -> None:
    needed = [*in_pyproject("dependencies"), *in_pyproject("cpu")]
    pinned = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert {re.split("[=>]", each)[0] for each in needed} == {line.partition("==")[0] for line in pinned}


def test_workflow_is_started_by_changes_and_may_only_read() -> None:
    content = workflow()
    assert set(content[True]) == {"push", "pull_request"}  # YAML 1.1 reads `on` as true
    assert content["permissions"] == {"contents": "read"}
    assert all(job["runs-on"] and job["timeout-minutes"] and job["steps"] for job in content["jobs"].values())


def test_workflow_says_that_it_has_not_been_run() -> None:
    assert (GITHUB / "workflows" / "ci.yml").read_text().startswith("# This workflow has not been run:")


def test_steps_run_targets_and_scripts_that_there_are() -> None:
    runs = [step["run"] for step in steps() if "run" in step]
    targets = {words[1] for words in map(shlex.split, runs) if words[0] == "make"}
    assert targets <= make_targets()
    assert {"docs", "wheel"} <= targets
    assert ".ci/run" in runs
    script = (ROOT / ".ci" / "run").read_text()
    assert re.search(r"^make check ", script, re.MULTILINE)
    assert "'make test'" in script
    assert [step["uses"] for step in steps() if "uses" in step and not re.search(r"@v\d+$", step["uses"])] == []


def test_tests_that_need_namespaces_have_them_in_ci() -> None:
    container = workflow()["jobs"]["check-and-test"]["container"]
    assert container["image"] == "python:${{ matrix.python }}-bookworm"  # .ci/run installs Debian's packages, as root
    assert "--privileged" in container["options"]


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_form_is_one_that_github_takes(form: Path) -> None:
    content = read(form)
    assert set(content) == {"name", "description", "title", "labels", "body"}
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    assert fields
    ids, labels = (
        [pick(field) for field in fields] for pick in (lambda f: f["id"], lambda f: f["attributes"]["label"])
    )
    assert len(set(ids)) == len(ids) == len(set(labels))
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+", each) for each in ids)
    for field in content["body"]:
        assert set(field) <= {"type", "id", "attributes", "validations"}
        assert set(field["attributes"]) <= ATTRIBUTES[field["type"]]
        assert set(field.get("validations", {})) <= {"required"}
        options = field["attributes"].get("options", [])
        assert len(set(options)) == len(options)
    assert len({read(path)["name"] for path in FORMS}) == len(FORMS)


def test_reports_of_bugs_ask_for_what_they_need() -> None:
    required = {
        field["attributes"]["label"]: field["attributes"].get("render")
        for field in read(GITHUB / "ISSUE_TEMPLATE" / "bug.yml")["body"]
        if field.get("validations", {}).get("required")
    }
    assert required["`python -m fleet_train version`"] == "text"
    assert required["`python -m fleet_train doctor --json`"] == "json"


def test_no_issue_goes_past_the_forms() -> None:
    assert read(GITHUB / "ISSUE_TEMPLATE" / "config.yml") == {"blank_issues_enabled": False}


def flags_of(command: Command) -> set[str]:
    return {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}


def is_wrong(code: str) -> bool:
    """Whether this, which a page has in backticks, is a command, flag, target, file or folder that there is not."""
    words = code.split()
    if words[:3] == ["python", "-m", "fleet_train"]:
        command = cli.get_command(Context(cli), words[3])
        flags = {word for word in words if word.startswith("--")}
        return command is None or isinstance(command, Group) or not flags <= flags_of(command)
    if words[0] == "make":
        return len(words) > 1 and words[1] not in make_targets()
    if re.fullmatch(r"[\w./-]+\.(md|json|txt|py|toml)", code):
        return not (ROOT / code).is_file()
    return code.endswith("/") and not (ROOT / code).is_dir()


def refused(page: Path) -> list[str]:
    return [code for code in re.findall(r"`([^`\n]+)`", page.read_text()) if is_wrong(code)]


PAGES = [*FORMS, GITHUB / "PULL_REQUEST_TEMPLATE.md", ROOT / "SECURITY.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_what_a_page_names_exists(page: Path) -> None:
    assert refused(page) == []


def test_names_that_do_not_exist_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    wrong = [
        "python -m fleet_train doctr",
        "python -m fleet_train doctor --jsn",
        "make chek",
        "docs/none.md",
        "nowhere/",
    ]
    page.write_text(
        " and ".join(f"`{code}`" for code in [*wrong, "make check", "python -m fleet_train version --json"])
    )
    assert refused(page) == wrong


def test_links_of_the_security_page_lead_to_headings() -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", (ROOT / "SECURITY.md").read_text())
    assert links
    for path, anchor in links:
        headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.MULTILINE)
        assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}, (path, anchor)


def test_the_security_page_contains_no_address() -> None:
    assert "@" not in (ROOT / "SECURITY.md").read_text()


def test_servers_listen_on_this_machine_alone_by_default() -> None:
    defaults = {
        (name, parameter.name): parameter.default
        for name, flag in (("monitor", "host"), ("train", "prometheus_host"))
        if (command := cli.get_command(Context(cli), name)) is not None
        for parameter in command.params
        if parameter.name == flag
    }
    assert defaults == {("monitor", "host"): "127.0.0.1", ("train", "prometheus_host"): "127.0.0.1"}


def risky(source: str) -> set[str]:
    """Calls that run what they read: pickles, YAML with Python's objects."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return {ast.unparse(call.func) for call in calls if is_risky(call)}


def is_risky(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    if name == "yaml.load":
        loaders = [*call.args[1:], *(word.value for word in call.keywords)]
        return not any("Safe" in ast.unparse(loader) for loader in loaders)
    return bool(
        re.search(r"(^|\.)(c?pickle|cloudpickle|dill|joblib|marshal)\.loads?$", name)
        or re.search(r"^yaml\.(unsafe_load|full_load)(_all)?$", name)
        or re.search(r"^(np|numpy|paddle|torch)\.load$", name)
    )


def test_files_are_never_read_as_pickles_or_as_yaml_with_objects() -> None:
    package = ROOT / "fleet_train"
    found = {str(path.relative_to(package)): risky(path.read_text()) for path in package.rglob("*.py")}
    assert {name: calls for name, calls in found.items() if calls} == {
        "spawning/shipping.py": {"cloudpickle.loads"}  # from the socket pair of the process that it has started
    }


def test_risky_calls_are_found() -> None:
    safe = "yaml.load(t, Loader=yaml.SafeLoader)\nyaml.safe_load(t)\njson.load(f)\n"
    assert risky(safe) == set()
    wrong = {"pickle.load", "cloudpickle.loads", "np.load", "yaml.load", "yaml.full_load"}
    assert risky("\n".join(f"{name}(x)" for name in wrong) + "\n" + safe) == wrong


def test_hooks_run_the_tools_of_make_and_download_nothing() -> None:
    (repository,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    recipes = (ROOT / "Makefile").read_text()
    sources = re.search(r"^SOURCES := (.+)$", recipes, re.MULTILINE)
    assert sources is not None
    for hook in repository["hooks"]:
        folder, tool = shlex.split(hook["entry"])[0].rsplit("/", 1)
        assert folder == ".venv/bin"
        assert f"$(BIN)/{tool}" in recipes
        assert re.search(rf"^{tool}==", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)
        if tool == "ruff":
            assert sorted(re.findall(r"\w+", hook["files"])) == sorted(sources.group(1).split())


def test_editors_break_lines_where_ruff_does() -> None:
    config = configparser.ConfigParser()
    config.read_string("[top]\n" + (ROOT / ".editorconfig").read_text())
    assert config["top"]["root"] == "true"
    assert config["*"]["max_line_length"] == in_pyproject("line-length")
    assert config["Makefile"]["indent_style"] == "tab"


def test_citation_agrees_with_the_package() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= set(citation)
    assert citation["version"] == fleet_train.__version__
    assert citation["license"] == in_pyproject("license") == "Apache-2.0"
    assert citation["authors"] == [{"name": "fleet_train developers"}]
    assert 'authors = [{ name = "fleet_train developers" }]' in PYPROJECT
    assert citation["keywords"] == in_pyproject("keywords")
    assert citation["abstract"] == in_pyproject("description") + "."


def test_the_changelog_has_this_version_and_each_version_is_short() -> None:
    _, *sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    released = [section for section in sections if not section.startswith("[Unreleased]")]
    heading = rf"\[{re.escape(fleet_train.__version__)}\] - (\d{{4}}-\d\d-\d\d|not released yet)\n"
    assert re.match(heading, released[0])
    assert [section.partition("\n")[0] for section in sections if len(section.splitlines()) > 80] == []
