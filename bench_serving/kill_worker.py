"""Kill one worker during decoding and check how the engine reacts: ``python -m bench_serving.kill_worker``.

The test passes if every process of the engine ends by itself, with a status other than 0, within llm_comm's timeout
plus two seconds. The log must also name the lost worker: by llm_comm (its rank), or by the engine (name of the worker,
or process id). With ``--signal STOP`` the worker hangs instead of dying. Only a time limit of a wait can then detect
the failure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench_serving import cli, comparison, engine_logs, processes
from bench_serving.arms import ARMS, OURS
from bench_serving.engines.measure import DECODING
from bench_serving.settings import Job

GRACE_S = 2.0

_PROCESS = re.compile(r"bench_serving: rank (\d+) of group tp is process (\d+)")
_INTO_DECODING_S = 1.0


def ranks(log: str) -> dict[int, int]:
    """Return {rank: process id} of the tensor-parallel workers, from the log."""
    return {int(rank): int(pid) for rank, pid in _PROCESS.findall(log)}


def lines_that_name(log: str, rank: int, pid: int) -> list[str]:
    """Return the lines in which llm_comm or the engine says that ``rank`` was lost."""
    lost = "(?:died|dead|crash|exit|fail|terminat|[Kk]illed)"
    theirs = rf"(?:VllmWorker-{rank}|Worker_TP{rank}|TP{rank}|{pid})\b"
    said = re.compile(rf"llm_comm.*\b(?:from|for|with|of) rank {rank}\b|{theirs}.*{lost}|{lost}.*\b{theirs}")
    return [line.strip() for line in log.splitlines() if said.search(line)]


def what_failed(left: int, seconds: float, limit: float, status: int | None) -> list[str]:
    """Return what is wrong with how an engine ended.

    Args:
        left: Number of processes that still exist.
        seconds: Time until the last process had ended, or until the wait was given up.
        limit: Time within which all should have ended, in seconds.
        status: Exit status of the engine.
    """
    failures = []
    if left or seconds > limit:
        failures.append(f"{left} processes are left after {seconds:.1f} s; the limit is {limit:g} s")
    if status == 0:
        failures.append("the engine ended with status 0, as if all were well")
    return failures


def main(argv: Sequence[str] | None = None) -> int:
    """Run the test. Return 0 if the engine ended as it should."""
    parser = argparse.ArgumentParser(prog="python -m bench_serving.kill_worker", description=__doc__)
    parser.add_argument("--engine", choices=cli.ENGINES, default="vllm")
    parser.add_argument("--model", default="llama-2-70b")
    parser.add_argument("--layers", type=int, default=8, help="a short model will do")
    parser.add_argument("--tensor-parallel-size", "--tp", type=int, default=8)
    parser.add_argument("--rank", type=int, help="whom to end; default: the last")
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    parser.add_argument("--timeout-s", type=float, default=10.0, help="LLM_COMM_TIMEOUT_S of the engine")
    parser.add_argument("--start-timeout", type=float, default=300.0)
    parser.add_argument("--out", type=Path, default=Path("bench_serving_results/kill_worker"))
    options = parser.parse_args(argv)
    victim = options.tensor_parallel_size - 1 if options.rank is None else options.rank
    if not 0 <= victim < options.tensor_parallel_size:
        parser.error(f"--rank {victim}: there are ranks 0 to {options.tensor_parallel_size - 1}")
    settings = cli.settings_of(
        cli.parser().parse_args(
            [
                *("--engine", options.engine, "--model", options.model, "--layers", str(options.layers)),
                *("--tp", str(options.tensor_parallel_size), "--batch-sizes", "4", "--output-tokens", "1024"),
                *("--prefill-tokens", "0"),
            ]
        )
    )
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    arm = ARMS[OURS]
    Job(settings, OURS, False, str(out / "result.json"), endless=True).write(out / "job.json")
    environment = processes.environment(
        {**comparison.arm_environment(arm, settings), "LLM_COMM_TIMEOUT_S": str(options.timeout_s)}, os.environ
    )
    command = processes.module_command(f"bench_serving.engines.{options.engine}", str(out / "job.json"))
    with processes.Session(command, environment, out / "log.txt", out) as session:
        up = session.wait_for(
            lambda: DECODING in session.text(), options.start_timeout, lambda line: print(f"  {line}")
        )
        if not up:
            print(f"FAILED: the engine did not come to decode; its log ends with:\n{engine_logs.tail(session.text())}")
            return 1
        evidence = engine_logs.evidence(settings, arm, session.text())
        time.sleep(_INTO_DECODING_S)
        before = session.text()
        pid = ranks(before)[victim]
        print(f"  SIG{options.signal} to rank {victim}, process {pid}")
        os.kill(pid, getattr(signal, f"SIG{options.signal}"))
        begin = time.monotonic()
        limit = options.timeout_s + GRACE_S
        # One more second, to see how late a late process is.
        while session.processes and time.monotonic() - begin < limit + 1:
            time.sleep(0.05)
        seconds, left = time.monotonic() - begin, session.processes
        status = session.process.poll()
        after = session.text()[len(before) :]
    named = lines_that_name(after, victim, pid)
    failures = what_failed(len(left), seconds, limit, status)
    if not named:
        failures.append(f"no error names rank {victim}; the log ends with:\n{engine_logs.tail(after)}")
    report = {
        "engine": options.engine,
        "signal": options.signal,
        "rank": victim,
        "timeout_s": options.timeout_s,
        "seconds": round(seconds, 2),
        "status": status,
        "processes_left": len(left),
        "named_by": named[:5],
        "evidence": evidence,
        "failures": failures,
    }
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for line in named[:5]:
        print(f"  {line}")
    print(f"all processes ended after {seconds:.1f} s, status {status}" if not left else f"{len(left)} processes left")
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
