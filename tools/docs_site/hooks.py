"""Hooks of mkdocs for the site. Run from the repository's root: ``python -m mkdocs build --strict``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

from tools.docs_site.layout import PACKAGE, dotted_name, folders
from tools.docs_site.links import PAGES_OUTSIDE, Page, Rewriter, source_page, source_uri
from tools.docs_site.pages import INDEX, api_uri, generated_pages

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = {uri: source for source, uri in PAGES_OUTSIDE.items()}


def on_config(config: Any) -> Any:
    """Anchors as GitHub makes them, and a place in the navigation for each page of the API reference."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    config.nav = _with_api(config.nav)
    return config


def _with_api(nav: Any) -> Any:
    if isinstance(nav, list):
        return [_with_api(entry) for entry in nav]
    if isinstance(nav, dict):
        return {title: _with_api(entry) for title, entry in nav.items()}
    if nav != INDEX:
        return nav
    names = [dotted_name(folder, ROOT) for folder in folders(ROOT)]
    return [INDEX, *({name.removeprefix(f"{PACKAGE}."): api_uri(name)} for name in names)]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files of docs/, with one for each file of the repository that pages link to."""
    made = {uri: (ROOT / source).read_text(encoding="utf-8") for uri, source in _SOURCES.items()}
    rewriter = Rewriter(ROOT)
    for uri, text in made.items():
        rewriter.rewritten(Page(_SOURCES[uri], uri), text)
    for file in files.documentation_pages():
        page = Page(f"docs/{file.src_uri}", file.src_uri)
        rewriter.rewritten(page, (ROOT / page.source).read_text(encoding="utf-8"))
    made |= generated_pages(ROOT) | {source_uri(path): source_page(ROOT, path) for path in sorted(rewriter.shown)}
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Convert links and lists of hand-written pages; generated pages need no conversion."""
    del config, files
    uri = page.file.src_uri
    source = _SOURCES.get(uri, f"docs/{uri}")
    if not (ROOT / source).is_file():
        return markdown
    return Rewriter(ROOT).rewritten(Page(source, uri), markdown)
