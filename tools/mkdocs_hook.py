"""Hook of tools/mkdocs.yml: the site has the folders of the repository, so links between files work unchanged."""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import plots  # noqa: E402

#: Files of the site. A link to any other file of the repository fails `make docs`: add its pattern here.
PATTERNS = ("*.md", "LICENSE", "bench_serving/**/*.md", "configs/*.yaml", "docs/**/*.*")
#: Page of the plots, and the folder of its pictures.
PLOTS = "docs/reference"


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
