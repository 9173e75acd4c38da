"""Plugins for the engines that bench_serving starts: the arms ``free`` and ``free_norm``, and weights of a realistic
scale.

This directory is not part of any package. The harness puts it on the PYTHONPATH of the engines that it starts; the
``dist-info`` beside it lets them find the entry points as if it were installed, in all of their processes. Unless the
environment asks for something, it changes nothing.
"""

from __future__ import annotations

import os

#: Set by the harness to what is wanted.
FREE = os.environ.get("BENCH_SERVING_FREE") == "1"
FREE_NORMS = os.environ.get("BENCH_SERVING_FREE_NORMS") == "1"
SCALED_WEIGHTS = os.environ.get("BENCH_SERVING_WEIGHTS") == "scaled"

# The harness looks for these in the log.
FREE_MARK = "bench_serving: all-reduces of this group return uninitialised memory"
FREE_NORMS_MARK = "bench_serving: residual adds and norms behind sums do nothing"
WEIGHTS_MARK = "bench_serving: scaled weights"
BACKEND_MARK = "bench_serving: custom all-reduce"
DETERMINISTIC_MARK = "bench_serving: the engine is in its deterministic mode"
PROCESS_MARK = "bench_serving: rank %d of group tp is process %d"
