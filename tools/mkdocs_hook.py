"""Hook of tools/mkdocs.yml: the site has the folders of the repository, so links between files work unchanged."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import plots  # noqa: E402

#: Files of the site. A link to any other file of the repository fails `make docs`: add its pattern here.
PATTERNS = ("*.md", "LICENSE", "bench_serving/**/*.md", "configs/*.yaml", "docs/**/*.*")
#: Page of the plots, and the folder of its pictures.
PLOTS = "docs/reference"
#: Page of the public names in tables, to which the site adds their docstrings.
API = "docs/api.md"
#: Cell of a table that holds names and nothing else.
NAMES = r"(?:(?:, )?`[\w.]+`)+"

logger = logging.getLogger("mkdocs.hooks.api")  # a warning fails `make docs`


def on_config(config: MkDocsConfig) -> None:
    """Name anchors as code hosts do. Plain YAML, which the tests read, cannot hold a Python function."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by the files of the repository that the site has, and add the plots."""
    kept = Files([file for file in files if file.src_dir != config.docs_dir])  # files of plugins and the theme
    drawn = plots.write(ROOT / "build" / "plots")
    sources = {
        **{path.relative_to(ROOT).as_posix(): path for pattern in PATTERNS for path in sorted(ROOT.glob(pattern))},
        **{f"{PLOTS}/{path.name}": path for path in drawn},
        "assets/mkdocs.css": ROOT / "tools" / "mkdocs.css",
    }
    for name, path in sources.items():
        kept.append(File.generated(config, name, abs_src_path=str(path)))
    return kept


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Add the docstrings of the public names to their page, in the order of its tables."""
    if page.file.src_uri != API:
        return markdown
    names: list[str] = []
    methods: list[str] = []
    for section in re.split(r"^## ", markdown, flags=re.MULTILINE):
        cells = re.findall(rf"(?<=\| ){NAMES}(?= \|)", section)
        found = [name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)]
        (methods if section.startswith("`Communicator`") else names).extend(found)
    directives = [f"::: llm_comm.{name.removeprefix('llm_comm.')}" for name in names]
    directives[names.index("Communicator")] += f"\n    options: {{members: {list(dict.fromkeys(methods))}}}"
    return "\n\n".join([markdown, "## Reference", *directives])


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link the tables of the public names to the docstrings, and pages that docstrings name."""
    if page.file.src_uri != API:
        return html
    anchors = re.findall(r'id="(llm_comm\.[\w.]+)"', html)
    targets = {name: anchor for anchor in reversed(anchors) for name in (anchor, anchor.rpartition(".")[2])}

    def link(code: re.Match[str]) -> str:
        if code[1] not in targets:
            logger.warning("%s: %s has no docstring", API, code[1])
        return f'<a href="#{targets.get(code[1])}">{code[0]}</a>'

    def link_cell(cell: re.Match[str]) -> str:
        return re.sub(r"<code>(.*?)</code>", link, cell[0])

    tables, heading, docstrings = html.partition('<h2 id="reference"')
    tables = re.sub(r"<td>(?:(?:, )?<code>[\w.]+</code>)+</td>", link_cell, tables)
    docstrings = re.sub(r"\bdocs/([\w/]+)\.md(#[\w-]+)?", r'<a href="\1.html\2">\g<0></a>', docstrings)
    return tables + heading + docstrings
