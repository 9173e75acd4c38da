"""``llm-comm nccl-path``: where the library that stands in for NCCL lies. Needs no GPU and no ranks."""

from __future__ import annotations

import argparse
import sys

from llm_comm.installation import nccl_library


def run(args: argparse.Namespace) -> int:
    """``llm-comm nccl-path``. Returns 0, or 1 where there is none."""
    try:
        print(nccl_library(emulated=args.emulated))
    except FileNotFoundError as error:
        print(f"llm-comm: {error}", file=sys.stderr)
        return 1
    return 0
