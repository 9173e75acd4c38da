"""Pages: links lead somewhere, what they name is in the code, result files are cited, and tables show their figures."""

from __future__ import annotations

import argparse
import functools
import json
import pydoc
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import bench_serving.cli
import llm_comm
import llm_comm.dsl
from llm_comm.cli.commands import build_parser
from llm_comm.cli.engine_verdicts import ENGINES, Engine
from llm_comm.options import OPTIONS

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


_SOURCE = re.compile(r"`((?:\w+/)+\w+\.(?:py|cuh|cu|h|cpp|def|cmake)|test_\w+\.py)`")
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


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 1300


def test_no_page_is_too_long() -> None:
    """docs/experiments keep all that was tried; the other pages are for people who want an answer."""
    words = {
        name(page): len(page.read_text(encoding="utf-8").split())
        for page in (ROOT / "docs").rglob("*.md")
        if "experiments" not in page.parts
    }
    assert {page: count for page, count in words.items() if count > 3500} == {}
    assert sum(words.values()) <= 39_760


def test_the_page_of_experiments_lists_all_of_them() -> None:
    folder = ROOT / "docs" / "experiments"
    listed = re.findall(
        r"^\| \[([\w.]+)\]\(\1\)", (folder / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert sorted(listed) == sorted(page.name for page in folder.glob("*.md") if page.name != "README.md")


# ---- What pages name -------------------------------------------------------------------------------------------

CODE = [
    path
    for folder in ("llm_comm", "csrc", "tests", "tools", "cmake", "bench_serving", "examples", "configs", "container")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".cuh", ".cu", ".h", ".cpp", ".def", ".cmake", ".yaml", ".sh") and path.is_file()
] + [ROOT / "CMakeLists.txt", ROOT / "Makefile", ROOT / "pyproject.toml", *(ROOT / ".github").rglob("*.yml")]
#: Pages whose commands and options are those of today.
CURRENT = [page for page in PAGES if "experiments" not in page.parts and page.name != "CHANGELOG.md"]


@functools.cache
def words_of_code() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in CODE if path != Path(__file__))


def test_pages_that_the_code_names_exist() -> None:
    """In docstrings, comments and errors: the page, and the heading behind #."""
    named = set(re.findall(r"\bdocs/[\w/]+\.md(?:#[\w-]+)?", words_of_code()))
    assert len(named) > 20
    assert [fault for target in sorted(named) if (fault := broken(ROOT / "README.md", target))] == []


@pytest.mark.parametrize("page", CURRENT, ids=name)
def test_options_and_variables_exist(page: Path) -> None:
    named = set(re.findall(r"\bLLM_COMM_[A-Z][A-Z_]*[A-Z]\b", page.read_text(encoding="utf-8")))
    known = {f"LLM_COMM_{option.upper()}" for option in OPTIONS}
    assert [variable for variable in sorted(named - known) if variable not in words_of_code()] == []


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings}


def parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the commands of ``parser`` by name."""
    subparsers = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(subparsers[0].choices) if subparsers else {}


def commands(page: Path, program: str) -> list[list[str]]:
    """Return what stands behind ``program`` in code spans and code blocks of ``page``, in words."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL)
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    joined = [re.sub(r"\\\n", " ", block) for block in blocks]
    lines = [line.partition(" #")[0] for block in joined for line in block.splitlines()]
    found = [re.search(rf"(?<![\w-]){program}([^;|)`]*)", " ".join(line.split())) for line in [*lines, *spans]]
    return [match[1].strip(" .").split() for match in found if match]


def unknown_flags(words: list[str], parser: argparse.ArgumentParser) -> set[str]:
    flags = {word.partition("=")[0] for word in words if word.startswith("--") and len(word) > 2}
    return flags - flags_of(parser)


@pytest.mark.parametrize("page", CURRENT, ids=name)
def test_commands_exist(page: Path) -> None:
    """Each ``llm-comm COMMAND --flag`` of a page is one that the command line takes."""
    wrong = []
    for words in commands(page, r"llm-comm (?:\w+-llm-comm )?(?=[a-z])"):
        parser, rest = build_parser(), list(words)
        while rest and parsers(parser) and rest[0] in parsers(parser):
            parser = parsers(parser)[rest.pop(0)]
        if len(rest) == len(words) or unknown_flags(rest, parser):
            wrong.append(words)
    assert wrong == []


@pytest.mark.parametrize("page", CURRENT, ids=name)
def test_options_of_bench_serving_exist(page: Path) -> None:
    found = commands(page, r"python -m bench_serving(?= )")
    assert [words for words in found if unknown_flags(words, bench_serving.cli.parser())] == []


@pytest.mark.parametrize("page", CURRENT, ids=name)
def test_targets_of_make_exist(page: Path) -> None:
    code = " ".join(re.findall(r"`[^`]+`|```.*?```", page.read_text(encoding="utf-8"), flags=re.DOTALL))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"(?:^|[`\n])make ([a-z-]+)", code)) <= targets


def test_the_page_of_the_api_has_all_public_names() -> None:
    """`make docs` puts the docstrings of the names in its tables on the page."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    public = [*llm_comm.__all__, *(each for each in dir(llm_comm.Communicator) if not each.startswith("_"))]
    public += [f"llm_comm.dsl.{each}" for each in llm_comm.dsl.__all__]
    assert [each for each in public if f"`{each}`" not in page] == []


@pytest.mark.parametrize(
    ("heading", "place"),
    [
        ("Package `llm_comm`", "llm_comm."),
        ("`Communicator`: operations", "llm_comm.Communicator."),
        ("`Communicator`: queries", "llm_comm.Communicator."),
        ("`Communicator`: the rest", "llm_comm.Communicator."),
        ("Other modules", ""),
    ],
)
def test_names_in_the_tables_of_the_api_exist(heading: str, place: str) -> None:
    table = [cell for row in rows("docs/api.md", heading) for cell in row]
    names = [name for cell in table for name in re.findall(r"^`([\w.]+)`|, `([\w.]+)`$", cell)]
    found = [place + (first or last) for first, last in names]
    assert len(found) >= 10
    assert [each for each in found if pydoc.locate(each) is None] == []


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_pages_name_the_supported_versions(engine: Engine) -> None:
    versions = f"{engine.name} {engine.oldest} to {engine.newest}"
    for page in ("README.md", f"docs/engines/{engine.package}.md"):
        assert versions in (ROOT / page).read_text(encoding="utf-8")
    tested = [row for row in rows("docs/compatibility.md", "Engine versions") if row[0] == engine.name]
    emulated = [row[1] for row in tested if "emulated" in row[2]]
    for version in (engine.oldest, engine.newest):
        assert any(each.startswith(version) for each in emulated)


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


def speedups(file: str, over: str, kind: str = "decode") -> dict[str, float]:
    """How many times faster llm_comm is than the arm ``over``, by batch size, or by prompt if ``kind`` is "prefill";
    empty without such an arm."""
    sizes = load(file)[kind]
    if not all(over in arms for arms in sizes.values()):
        return {}
    if file in _BY_TPOT:
        return {batch: arms[over] / arms["llm_comm"] for batch, arms in decode(file).items()}
    return {size: arms["llm_comm"]["speedup_over"][over]["median"] for size, arms in sizes.items()}


# ---- Newest runs -----------------------------------------------------------------------------------------------


def newest(kind: str) -> str:
    """Return the result file of ``kind``, such as ``h200x4_peers``, with the latest date in its name."""
    return max(path.name for path in RESULTS.glob(f"????-??-??_{kind}.json"))


def setup_of(file: str) -> tuple[Any, ...] | None:
    """Return what decides which run of an engine replaces another: engine, GPUs, model, mode, FlashInfer's all-reduce.

    None for a file that does not compare llm_comm with the engine's own path, or lacks a batch size of the tables.
    """
    report = load(file)
    if not isinstance(report, dict) or not isinstance(report.get("decode"), dict):
        return None
    if not report["decode"] or not all({"default", "llm_comm"} <= arms.keys() for arms in report["decode"].values()):
        return None
    if not set(BATCHES) <= report["decode"].keys():
        return None
    engine, versions, settings = report["engine"], report["versions"], report["settings"]
    flashinfer = "flashinfer-python" in versions and report["variables"].get("SGLANG_IS_FLASHINFER_AVAILABLE") != "0"
    model = Path(settings["model"]).name, settings["layers"], settings.get("deterministic", False)
    return engine, versions[engine], report["device"], *model, flashinfer


@functools.cache
def newest_days() -> dict[tuple[Any, ...], str]:
    """Return the day of the newest run by setup."""
    days: dict[tuple[Any, ...], str] = {}
    for path in sorted(RESULTS.glob("*.json")):
        if (setup := setup_of(path.name)) is not None:
            days[setup] = max(days.get(setup, ""), load(path.name)["date"][:10])
    return days


@pytest.mark.parametrize("page", CURRENT, ids=name)
def test_a_page_with_runs_of_an_engine_has_the_newest(page: Path) -> None:
    cited = {file for file in _RESULT.findall(page.read_text(encoding="utf-8")) if file.endswith(".json")}
    shown: dict[tuple[Any, ...], str] = {}
    for file in cited:
        if (setup := setup_of(file)) is not None:
            shown[setup] = max(shown.get(setup, ""), load(file)["date"][:10])
    assert shown == {setup: newest_days()[setup] for setup in shown}


#: Pages that speak of newest runs. ``test_a_page_with_runs_of_an_engine_has_the_newest`` reads those that show some.
_SPEAK_OF_NEWEST = {"docs/experiments/engines.md", "docs/develop/releasing.md"}


def test_what_pages_say_of_newest_runs_is_checked() -> None:
    found = {name(page) for page in PAGES if re.search(r"\bnewest\s+runs?\b", page.read_text(encoding="utf-8"))}
    assert found == _SPEAK_OF_NEWEST
    text = (ROOT / "docs" / "experiments" / "engines.md").read_text(encoding="utf-8").split("\n\n")[1]
    said = [float(number) for number in re.findall(r"(\d\.\d\d)x", text)]
    tables: list[list[list[str]]] = []  # default options, then older runs
    for row in rows("docs/reference/performance.md", "In the engines"):
        if row[0] == "engine, model":
            tables.append([])
        elif _RESULT.search(row[-1]) and "fuse_linear" not in row[0]:
            tables[-1].append(row)
    by_default, older = tables
    experts = [number for number, row in enumerate(by_default) if "experts" in row[0]]
    bounds = [[float(cell[:-1]) for row in table for cell in row[3:7]] for table in (by_default[: experts[0]], older)]
    bounds.append([float(number) for row in older for number in re.findall(r"[\d.]+", row[-2])])
    assert said == [bound for values in bounds for bound in (min(values), max(values))]


def assert_shows(text: str, value: float) -> None:
    """The first number of ``text`` is ``value``, to the digits that it has."""
    number = re.search(r"-?\d+(?:\.(\d+))?", text)
    assert number, text
    # Half a digit, and what rounding twice can add.
    assert abs(float(number[0]) - value) <= 0.51 * 10 ** -len(number[1] or ""), f"{text} is {value}"


BATCHES = ("1", "4", "16", "64")


def assert_shows_speedups(row: list[str], first: int) -> None:
    """The four cells of ``row`` from ``first`` on are those of the result file that ``row`` links to."""
    (file,) = _RESULT.findall(" ".join(row))
    report = load(file)
    assert any(
        f"{report['device'][0]} {gpu}" in row and f"NVIDIA {gpu}" in report["device"] for gpu in ("H100", "H200")
    )
    measured = speedups(file, "default")
    for text, batch in zip(row[first : first + 4], BATCHES, strict=True):
        assert_shows(text, measured[batch])


def test_the_readme_shows_the_engines_that_were_measured() -> None:
    shown = [row for row in rows("README.md", "What you get") if _RESULT.search(" ".join(row))]
    assert len(shown) >= 10
    for row in shown:
        assert_shows_speedups(row, 3)


@pytest.mark.parametrize("gpus", [8, 4, 2])
def test_performance_shows_the_newest_peers_that_were_measured(gpus: int) -> None:
    file, heading = newest(f"h200x{gpus}_peers"), f"{gpus} GPUs"
    page = (ROOT / "docs" / "reference" / "performance.md").read_text(encoding="utf-8")
    assert _RESULT.findall(page.partition(f"### {heading}\n")[2])[0] == file
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
    shown = [row for row in rows("docs/reference/performance.md", "In the engines") if _RESULT.search(row[-1])]
    assert len(shown) >= 20
    for row in shown:
        assert_shows_speedups(row, 3)
        (file,) = _RESULT.findall(row[-1])
        assert f"[{load(file)['commit']}]" in row[-1]
        nccl = list(speedups(file, "nccl").values())
        assert bool(row[-2]) == bool(nccl)
        if nccl:
            assert_shows_range(row[-2], nccl)


def test_performance_shows_the_fused_kernel_that_was_measured() -> None:
    measured = peers(newest("h200x4_peers"))
    heading = "All-reduce, residual add and RMSNorm in one kernel"
    shown = [row for row in rows("docs/reference/performance.md", heading) if re.fullmatch(r"\d+[KM]", row[0])]
    assert len(shown) >= 7
    for size, fused, alone, flashinfer in shown:
        us = measured[byte_count(size)]
        theirs = min(time for peer, time in us.items() if peer.startswith("fi_fusedrms"))
        assert_shows(fused, us["llm_comm_fusedrms"])
        assert_shows(fused.partition("(")[2], us["llm_comm_fusedrms"] / us["llm_comm"])
        assert_shows(alone, us["llm_comm"])
        assert_shows(flashinfer, theirs)
        assert_shows(flashinfer.partition("(")[2], theirs / us["llm_comm_fusedrms"])


def assert_shows_range(text: str, values: Sequence[float]) -> None:
    """``text`` is "least to most" of several values, or the only one."""
    if len(values) == 1:
        assert_shows(text, values[0])
        return
    least, most = text.split(" to ")
    assert_shows(least, min(values))
    assert_shows(most, max(values))


#: Columns of speed-ups in pages of engines, and the sizes of a result file whose least and most they show.
_OF_COLUMN = {
    "decode speed-up": ("decode", BATCHES),
    "batch 1 to 16": ("decode", BATCHES[:3]),
    "batch 64": ("decode", BATCHES[3:]),
    "prefill of 4096": ("prefill", ("4096",)),
}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_pages_of_engines_show_what_was_measured(engine: str) -> None:
    head, shown = [], 0
    for row in rows(f"docs/engines/{engine}.md"):
        if row[-1] == "data":
            head = row
        files = _RESULT.findall(row[-1])
        for column, text in zip(head, row, strict=False) if files else ():
            if column in _OF_COLUMN:
                kind, sizes = _OF_COLUMN[column]
                measured = speedups(files[0], "default", kind)
                assert_shows_range(text, [measured[size] for size in sizes])
                shown += 1
    assert shown >= 1


def test_starts_took_as_long_as_the_page_says() -> None:
    shown = [row for row in rows("docs/operate/troubleshooting.md") if _RESULT.search(row[-1])]
    assert len(shown) == 4
    for _, text in shown:
        starts = [run["start_s"] for file in _RESULT.findall(text) for run in load(file)["runs"]]
        assert_shows_range(text.partition(" s (")[0], starts)


def test_the_cost_of_fewer_multiprocessors_is_that_of_the_file() -> None:
    measured = {(row["max_blocks"], row["MiB"]): row for row in load("2026-11-23_h200x2_max_blocks.json")["rows"]}
    shown = [row for row in rows("docs/operate/tuning.md", "Fewer multiprocessors") if re.match(r"not set|\d", row[0])]
    assert len(shown) >= 5
    for blocks, *cells_of_sizes in shown:
        for cell, mib in zip(cells_of_sizes, (4, 16, 64, 256), strict=True):
            figures = measured[None if blocks == "not set" else int(blocks), mib]
            for text, operation in zip(cell.split(", "), ("all_reduce", "all_gather", "reduce_scatter"), strict=True):
                assert_shows(text, figures[operation])


def tuned(*files: str) -> dict[tuple[str, int], tuple[float, float]]:
    """Return the best time and NCCL's by operation and bytes of a part; of later files where several have a size."""
    found = {}
    for file in files:
        report = load(file)
        for run in report.get("runs", [report]):
            for operation, sizes in run["operations"].items():
                for size in sizes:
                    best = min(candidate["us"] for candidate in size["candidates"])
                    found[operation, size["bytes"]] = (best, size["nccl_us"])
    return found


@pytest.mark.parametrize(
    ("index", "files"),
    [
        (0, [newest("h200x2_tune")]),
        (1, [newest("h200x4_tune")]),
        (2, ["2026-11-25_h100x2_tune.json", newest("h100x2_tune")]),  # the newest up to 16M, the other above
    ],
)
def test_gathers_and_scatters_show_what_was_measured(index: int, files: list[str]) -> None:
    measured = tuned(*files)
    shown = list(rows("docs/reference/all_gather.md", "How fast"))
    starts = [number for number, row in enumerate(shown) if row[0] == "shard"] + [len(shown)]
    table = [row for row in shown[starts[index] : starts[index + 1]] if re.fullmatch(r"\d+[KM]", row[0])]
    assert len(table) >= 6
    for size, gather, symmetric, nccl, ratio, scatter, nccl_scatter, ratio_scatter in table:
        us, of_nccl = measured["all_gather", byte_count(size)]
        assert_shows(gather, us)
        assert_shows(nccl, of_nccl)
        best = us
        if symmetric:
            best_symmetric, _ = measured["all_gather of symmetric tensors", byte_count(size)]
            assert_shows(symmetric, best_symmetric)
            best = min(us, best_symmetric)
        assert_shows(ratio, of_nccl / best)
        us, of_nccl = measured["reduce_scatter", byte_count(size)]
        assert_shows(scatter, us)
        assert_shows(nccl_scatter, of_nccl)
        assert_shows(ratio_scatter, of_nccl / us)


def test_the_library_in_place_of_nccl_shows_what_was_measured() -> None:
    arms = load("2026-11-25_h100x2_nccl_tests.json")["arms"]
    times = {
        arm: {(program, size): us for program, kind, graphs, size, us, *_ in runs if kind == "half" and graphs}
        for arm, runs in arms.items()
    }
    shown = [row for row in rows("docs/reference/nccl.md", "Measured") if re.fullmatch(r"\d+[KM]", row[0])]
    assert len(shown) >= 9
    for size, *four in shown:
        for text, operation in zip(four, ("all_reduce", "all_gather", "reduce_scatter", "broadcast"), strict=True):
            if text == "NCCL's":
                continue
            ours, theirs = (times[arm][f"{operation}_perf", byte_count(size)] for arm in ("llm_comm", "nccl"))
            assert_shows(text, ours)
            assert_shows(text.partition("/")[2], theirs)
            assert_shows(text.partition("(")[2], theirs / ours)


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
