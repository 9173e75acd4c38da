"""Programs of this repository, run by torchrun as the ranks of one machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node")


def run_as_ranks(program: Path, *options: str, world: int = 2, timeout_s: float = 200, **variables: str) -> str:
    """What ``program`` prints, run by ``world`` ranks; AssertionError if it fails, with all that it has said.

    Args:
        variables: Of the environment, beside those of this process.
    """
    done = subprocess.run(
        [sys.executable, *_TORCHRUN, str(world), str(program), *options],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
