"""Runs the fuzz targets, each in a process of its own, with Atheris (libFuzzer that sees which lines of Python run).

    python tests/fuzz/fuzz.py                        # the runs of CI: always the same inputs
    python tests/fuzz/fuzz.py --seconds 600          # for so long each, with new inputs every time
    python tests/fuzz/fuzz.py --only table --replay FILE

An input that breaks a target is kept in build/fuzz, and the exit status is not 0.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAMES = ("config", "table", "messages")
#: What takes about 20 s each on a core that has nothing else to do.
RUNS = {"config": 8_000, "table": 6_000, "messages": 400_000}
SEED = 1
LONGEST_INPUT = 4096
#: Of one input: a hang.
LIMIT_S = 30
LIMIT_MB = 2048


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the readers of configuration, tuning tables and messages.")
    parser.add_argument("--seconds", type=int, help="for each target; without it, a fixed number of the same inputs")
    parser.add_argument("--only", choices=NAMES, action="append", help="this target; may be given more than once")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run one input")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was done to this file")
    parser.add_argument("--target", choices=NAMES, help=argparse.SUPPRESS)
    args, of_the_fuzzer = parser.parse_known_args()
    if args.target:
        return _fuzz(args.target, of_the_fuzzer)
    if of_the_fuzzer:
        parser.error(f"unknown options: {' '.join(of_the_fuzzer)}")
    results = {name: _run(name, args.seconds, args.replay) for name in args.only or NAMES}
    if args.json:
        args.json.write_text(json.dumps(_report(results), indent=1) + "\n", encoding="utf-8")
    return int(any(result["findings"] for result in results.values()))


def _fuzz(name: str, options: list[str]) -> int:
    """In a process of its own: libFuzzer ends it."""
    import atheris

    with atheris.instrument_imports(include=["yaml", "llm_comm"]):
        from targets import TARGETS
    atheris.Setup([sys.argv[0], *options], TARGETS[name])
    atheris.Fuzz()
    return 0


def _run(name: str, seconds: int | None, replay: Path | None) -> dict[str, Any]:
    kept = ROOT / "build" / "fuzz" / name
    new = kept / "corpus"
    new.mkdir(parents=True, exist_ok=True)
    options = [f"-max_len={LONGEST_INPUT}", f"-timeout={LIMIT_S}", f"-rss_limit_mb={LIMIT_MB}"]
    options += [f"-artifact_prefix={kept}/", "-print_final_stats=1", "-verbosity=0"]
    corpus = [str(HERE / "corpus" / name)]
    if replay is not None:
        corpus = [str(replay)]
    elif seconds is None:
        options += [f"-runs={RUNS[name]}", f"-seed={SEED}"]
        shutil.rmtree(new)  # what other runs have found would be other inputs
        new.mkdir()
    else:
        options += [f"-max_total_time={seconds}"]
    if replay is None:
        corpus.insert(0, str(new))  # libFuzzer adds to the first
    before = set(kept.iterdir())
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, __file__, "--target", name, *options, *corpus],
        # With other hashes the same inputs take other ways.
        env={**os.environ, "PYTHONHASHSEED": "0"},
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    executions = re.search(r"stat::number_of_executed_units:\s*(\d+)", done.stderr)
    findings = sorted(path.name for path in set(kept.iterdir()) - before)
    if done.returncode != 0:
        sys.stderr.write(done.stderr[-8000:])
        findings = findings or [f"exit status {done.returncode}"]
    result = {
        "executions": int(executions[1]) if executions else 0,
        "seconds": round(time.monotonic() - start),
        "findings": findings,
    }
    print(f"{name}: {result['executions']} inputs in {result['seconds']} s, {len(findings)} findings", flush=True)
    for finding in findings:
        print(f"  {kept / finding}", flush=True)
    return result


def _report(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "what": "fuzzing of the readers of configuration files and variables, tuning tables, and bootstrap messages",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip() or "unknown",
        "python": platform.python_version(),
        "atheris": metadata.version("atheris"),
        "pyyaml": metadata.version("pyyaml"),
        "llm_comm": metadata.version("llm_comm"),
        "longest_input": LONGEST_INPUT,
        "targets": results,
    }


if __name__ == "__main__":
    sys.exit(main())
