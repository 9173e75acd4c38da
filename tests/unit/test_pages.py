"""The pages: their links lead somewhere, every result file is cited and exists, and tables say what the files say."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench_serving").rglob("*.md")])
LONGEST_PROSE_LINE = 400

_LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
_RESULT = re.compile(r"\bresults/([\w.-]+\.(?:json|png))")
_UNITS = {"K": 1 << 10, "M": 1 << 20}
#: Reports whose decode time holds the spread of two prefills: the pages take the median TPOT in its place.
_BY_TPOT = {"2026-11-21_h200x4_sglang_2.json"}


def lines(page: Path) -> list[str]:
    """Those of ``page`` that are no code."""
    kept, in_code = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            kept.append(line)
    return kept


@functools.cache
def anchors(page: Path) -> frozenset[str]:
    """As GitHub makes them of headings."""
    found: list[str] = []
    for line in lines(page):
        if match := re.match(r"#+ (.*)", line):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match[1]).strip().lower()
            slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return frozenset(found)


def broken(page: Path, target: str) -> str:
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists():
        return f"{target}: no such file"
    if anchor and (file.suffix != ".md" or anchor not in anchors(file)):
        return f"{target}: no such heading"
    return ""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for line in lines(page) for target in _LINK.findall(re.sub(r"`[^`]*`", "", line))]
    local = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [fault for target in local if (fault := broken(page, target))] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_lines_of_prose_are_not_too_long(page: Path) -> None:
    assert [line for line in lines(page) if len(line) > LONGEST_PROSE_LINE and not line.lstrip().startswith("|")] == []


_SOURCE = re.compile(r"`((?:\w+/)+\w+\.(?:py|cuh|cu|h|cpp|def|cmake))`")
#: Pages that name sources of engines too, or those of the day.
_NAMES_OTHER_SOURCES = ("docs/engines/vllm.md", "docs/engines/sglang.md", "docs/experiments/")


@pytest.mark.parametrize("page", [page for page in PAGES if not name(page).startswith(_NAMES_OTHER_SOURCES)], ids=name)
def test_sources_that_a_page_names_exist(page: Path) -> None:
    here = ("csrc", "llm_comm", "tests", "tools", "cmake", "bench_serving", "examples")
    there = [path.as_posix() for folder in here for path in (ROOT / folder).rglob("*.*")]
    named = _SOURCE.findall(page.read_text(encoding="utf-8"))
    assert [source for source in named if not any(path.endswith(f"/{source}") for path in there)] == []


def test_every_result_file_is_cited_and_exists() -> None:
    cited = {file for page in PAGES for file in _RESULT.findall(page.read_text(encoding="utf-8"))}
    assert cited == {path.name for path in RESULTS.iterdir()}


@pytest.mark.parametrize(("page", "limit"), [("README.md", 150), ("docs/reference/performance.md", 250)])
def test_pages_that_people_read_first_are_short(page: str, limit: int) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) < limit


# ---- Figures ---------------------------------------------------------------------------------------------------


def cells(line: str) -> list[str]:
    return [cell.strip().strip("*").strip() for cell in line.strip().strip("|").split("|")]


def rows(page: str, heading: str = "") -> Iterator[list[str]]:
    """Rows of the tables of ``page``, or of those below ``heading`` up to the next one."""
    inside = not heading
    for line in lines(ROOT / page):
        if heading and line.startswith("#"):
            inside = line.lstrip("# ") == heading
        if inside and line.startswith("|"):
            yield cells(line)


def byte_count(text: str) -> int:
    return int(text[:-1]) * _UNITS[text[-1]]


def load(file: str) -> Any:
    return json.loads((RESULTS / file).read_text(encoding="utf-8"))


def peers(file: str) -> dict[int, dict[str, float]]:
    """Microseconds by size and library."""
    found: dict[int, dict[str, float]] = {}
    for row in load(file)["rows"]:
        found.setdefault(row["bytes"], {})[row["peer"]] = row["us"]
    return found


def decode(file: str) -> dict[str, dict[str, float]]:
    """Decode milliseconds by batch size and arm."""
    return {
        batch: {
            arm: figures["median_tpot_ms"] if file in _BY_TPOT else figures["decode_ms"]["median"]
            for arm, figures in arms.items()
        }
        for batch, arms in load(file)["decode"].items()
    }


def speedups(file: str, over: str) -> dict[str, float]:
    """How many times faster llm_comm is than the arm ``over``, by batch size; empty without such an arm."""
    times = decode(file)
    if not all(over in arms for arms in times.values()):
        return {}
    if file in _BY_TPOT:
        return {batch: arms[over] / arms["llm_comm"] for batch, arms in times.items()}
    arms_of = load(file)["decode"]
    return {batch: arms_of[batch]["llm_comm"]["speedup_over"][over]["median"] for batch in times}


def assert_shows(text: str, value: float) -> None:
    """The first number of ``text`` is ``value``, to the digits that it has."""
    number = re.search(r"-?\d+(?:\.(\d+))?", text)
    assert number, text
    # Half a digit, and what rounding twice can add.
    assert abs(float(number[0]) - value) <= 0.51 * 10 ** -len(number[1] or ""), f"{text} is {value}"


def test_the_readme_shows_the_speed_that_was_measured() -> None:
    measured = peers("2026-11-21_h200x8_peers.json")
    shown = [row for row in rows("README.md", "Speed") if re.fullmatch(r"\d+[KM]", row[0])]
    assert shown
    for size, ours, *others in shown:
        us = measured[byte_count(size)]
        fastest = [
            min(time for peer, time in us.items() if peer.startswith(prefix))
            for prefix in ("sgl_", "fi_1shot", "vllm_reg", "nccl")
        ]
        assert_shows(ours, us["llm_comm"])
        for text, time in zip(others, fastest, strict=True):
            assert_shows(text, time)
            assert_shows(text.partition("(")[2], time / us["llm_comm"])


def test_the_readme_shows_the_engines_that_were_measured() -> None:
    shown = [row for row in rows("README.md", "Speed") if len(row) == 8 and _RESULT.search(row[-1])]
    assert shown
    for _, gpus, *ratios, over_nccl, source in shown:
        file = _RESULT.findall(source)[0]
        report = load(file)
        assert report["device"] == f"{gpus}x NVIDIA H200"
        assert source.startswith(report["commit"])
        measured = speedups(file, "default")
        for text, batch in zip(ratios, ("1", "4", "16", "64"), strict=True):
            assert_shows(text, measured[batch])
        nccl = speedups(file, "nccl").values()
        assert bool(over_nccl) == bool(nccl)
        if over_nccl:
            least, most = over_nccl.split(" to ")
            assert_shows(least, min(nccl))
            assert_shows(most, max(nccl))


@pytest.mark.parametrize(
    ("heading", "file"),
    [
        ("8 GPUs", "2026-11-21_h200x8_peers.json"),
        ("4 GPUs", "2026-11-26_h200x4_peers.json"),
        ("2 GPUs", "2026-11-23_h200x2_peers.json"),
    ],
)
def test_performance_shows_the_peers_that_were_measured(heading: str, file: str) -> None:
    measured = peers(file)
    shown = [row for row in rows("docs/reference/performance.md", heading) if re.fullmatch(r"\d+[KM]", row[0])]
    assert len(shown) >= 15
    for size, ours, other, ratio, over_vllm, over_nccl in shown:
        us = measured[byte_count(size)]
        peer = other.split("`")[1]
        assert us[peer] == min(time for name, time in us.items() if name != "llm_comm" and "fused" not in name)
        assert_shows(ours, us["llm_comm"])
        assert_shows(other, us[peer])
        assert_shows(ratio, us[peer] / us["llm_comm"])
        assert_shows(over_vllm, us["vllm_reg"] / us["llm_comm"])
        assert_shows(over_nccl, us["nccl"] / us["llm_comm"])


def test_performance_shows_the_engines_that_were_measured() -> None:
    file, checked = "", 0
    for first, _, batch, nccl, own, ours, over_nccl, over_own in (
        row for row in rows("docs/reference/performance.md", "In the engines") if len(row) == 8 and row[2].isdigit()
    ):
        file = _RESULT.findall(first)[0] if first else file
        times = decode(file)[batch]
        assert_shows(ours, times["llm_comm"])
        assert_shows(own, times["default"])
        assert_shows(over_own, speedups(file, "default")[batch])
        assert bool(nccl) == bool(over_nccl) == ("nccl" in times)
        if nccl:
            assert_shows(nccl, times["nccl"])
            assert_shows(over_nccl, speedups(file, "nccl")[batch])
        checked += 1
    assert checked == 52


def test_a_release_needs_the_tests() -> None:
    workflows = ROOT / ".github" / "workflows"
    jobs = yaml.safe_load((workflows / "release.yml").read_text(encoding="utf-8"))["jobs"]
    needed = {jobs[name]["uses"] for name in jobs["publish"]["needs"]}
    assert needed == {"./.github/workflows/ci.yml", "./.github/workflows/nightly.yml"}
    tests = yaml.safe_load((workflows / "ci.yml").read_text(encoding="utf-8"))
    assert "workflow_call" in tests[True], "YAML takes the key 'on' for true"
    assert {"run": ".ci/run"} in tests["jobs"]["test"]["steps"]
    nightly = yaml.safe_load((workflows / "nightly.yml").read_text(encoding="utf-8"))
    assert {"workflow_call", "schedule"} <= set(nightly[True])
    assert any('TESTS="not gpu"' in command for command in nightly["jobs"]["nightly"]["strategy"]["matrix"]["run"])
