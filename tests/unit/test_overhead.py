"""``tests/gpu/overhead.py --compare``: what is said of two builds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "gpu" / "overhead.py"


def compare(directory: Path, *runs: dict[str, object]) -> tuple[int, str]:
    files = [directory / f"{number}.json" for number in range(len(runs))]
    for file, figures in zip(files, runs, strict=True):
        file.write_text(json.dumps({"figures": figures}))
    done = subprocess.run([sys.executable, PROGRAM, "--compare", *files], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def figures(label: str, us: float, us_fused: float) -> dict[str, object]:
    return {"label": label, "bounded_waits": True, "us": {"1024": us}, "us_fused": {"16384": us_fused}}


@pytest.mark.parametrize(
    ("us", "us_fused", "status", "said"), [(2.01, 3.0, 0, "+0.5 %: within"), (2.0, 3.06, 1, "+2.0 %: ABOVE")]
)
def test_medians_of_two_builds(tmp_path: Path, us: float, us_fused: float, status: int, said: str) -> None:
    after = [figures("after", us, us_fused), figures("after", 99.0, 99.0), figures("after", 1.0, 1.0)]
    before = [figures("before", 2.0, 3.0)]
    returned, text = compare(tmp_path, after[0], *before, *after[1:])
    assert (returned, f"at most {said} the bar of 1 %" in text) == (status, True), text
    assert f"{us:.3f}" in text
    assert f"{us_fused:.3f}" in text


def test_results_without_labels_are_told_apart_by_their_waits(tmp_path: Path) -> None:
    bounded, unbounded = ({"bounded_waits": bounded, "us": {"1024": us}} for bounded, us in ((True, 2.0), (False, 1.0)))
    for files in ((bounded, unbounded), (unbounded, bounded)):
        returned, text = compare(tmp_path, *files)
        assert (returned, "+100.0 %" in text, "fused: not in all of the files" in text) == (1, True, True), text


def test_what_the_build_of_the_first_file_costs(tmp_path: Path) -> None:
    returned, text = compare(tmp_path, figures("before", 2.0, 3.0), figures("after", 4.0, 3.0))
    assert (returned, "-50.0 %" in text) == (0, True), text


def test_one_build_is_no_comparison(tmp_path: Path) -> None:
    returned, text = compare(tmp_path, figures("after", 2.0, 3.0), figures("after", 2.0, 3.0))
    assert returned == 1
    assert "needs results of two builds, told apart by --label, not of after" in text
