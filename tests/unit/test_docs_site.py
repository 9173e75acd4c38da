"""The site of `make docs`: its navigation has every page, and tools/plots.py draws what the result files say."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import plots  # noqa: E402

#: Folder into which tools/mkdocs_hook.py puts the page of the plots.
PLOTS = "docs/reference"
PAGES = sorted(path for pattern in ("*.md", "docs/**/*.md", "bench_serving/**/*.md") for path in ROOT.glob(pattern))


def entries(navigation: Any) -> Iterator[str]:
    """Yield the pages of a navigation, which nests lists and titles."""
    if isinstance(navigation, str):
        yield navigation
    else:
        for part in navigation.values() if isinstance(navigation, dict) else navigation:
            yield from entries(part)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_every_page_is_in_the_navigation_once() -> None:
    config = yaml.safe_load((ROOT / "tools" / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(entries(config["nav"])) == sorted([*map(name, PAGES), f"{PLOTS}/plots.md"])


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_lists_end_where_code_hosts_end_them(page: Path) -> None:
    """In a list item mkdocs needs four spaces before a table or second paragraph, and an empty line after it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"\n\n {1,3}\S.*", text) == []
    assert re.findall(r"\n\n {4}\S.*(?:\n {4}.*)*\n(?:[-*]|\d+\.) .*", text) == []


def test_the_tools_of_the_site_are_pinned_one_a_line() -> None:
    """The Makefile reads them by lines."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extra = project.partition("\ndocs = [\n")[2].partition("\n]")[0]
    assert len(extra.splitlines()) == 7
    assert len(set(re.findall(r"ruff==[\d.]+", project))) == 1
    assert all(re.fullmatch(r'  "[\w-]+==[\d.]+",', line) for line in extra.splitlines())


def test_the_fastest_kernel_of_a_library_is_drawn() -> None:
    rows = [
        {"peer": "sgl_2push", "bytes": 2048, "us": 5.0},
        {"peer": "sgl_1push", "bytes": 1024, "us": 3.0},
        {"peer": "sgl_2push", "bytes": 1024, "us": 4.0},
        {"peer": "sgl_fused", "bytes": 1024, "us": 1.0},
        {"peer": "nccl", "bytes": 1024, "us": 2.0},
    ]
    assert list(plots.fastest(rows, "sgl_").items()) == [(1024, 3.0), (2048, 5.0)]


def test_plots_show_the_runs_of_the_performance_page(tmp_path: Path) -> None:
    runs = plots.engine_runs()
    table = plots.section("In the engines").partition("\n- ")[0]
    assert [file for _, file in runs] == re.findall(r"results/([\w.-]+\.json)", table)
    assert len({name for name, _ in runs}) == len(runs) >= 10
    *pictures, page = plots.write(tmp_path)
    assert len(pictures) == len(set(pictures)) == 3 + len(runs)
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"\]\(([\w.-]+\.svg)\)", text) == [picture.name for picture in pictures]
    assert re.findall(r"results/([\w.-]+\.json)", text) == [f"{picture.stem}.json" for picture in pictures]
    for _, file in runs:
        report = plots.load(file)
        drawn = (tmp_path / file).with_suffix(".svg").read_text(encoding="utf-8")
        assert drawn.count(">batch ") == len(report["decode"])
        assert drawn.count(">TTFT, ") == len(report["prefill"])
        for arms in report["decode"].values():
            own, ours = (arms[arm]["decode_ms"]["median"] for arm in ("default", "llm_comm"))
            assert f">{own:.2f} → {ours:.2f} ms<" in drawn
            assert f">{arms['llm_comm']['speedup_over']['default']['median']:.2f}x<" in drawn


@pytest.mark.parametrize("world", [8, 4, 2])
def test_kernels_are_drawn_for_all_libraries_on_logarithmic_axes(world: int) -> None:
    file = re.findall(r"results/([\w.-]+_peers\.json)", plots.section(f"{world} GPUs"))[0]
    report = plots.load(file)
    assert report["world"] == world
    (axes,) = plots.draw_kernels(report).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [line.get_label() for line in axes.lines] == list(plots.LIBRARIES)
    ours = {row["bytes"]: row["us"] for row in report["rows"] if row["peer"] == "llm_comm"}
    assert list(zip(*axes.lines[0].get_data(), strict=True)) == sorted(ours.items())
