"""Plugins for the engines that bench_serving starts: arms ``free`` and ``free_norm``, weights of a realistic scale, and
records of kernels.

This directory is not part of a package. The harness adds it to the PYTHONPATH of the engines that it starts. The
``dist-info`` next to it lets all of their processes find the entry points as if it were installed. Without the
variables below it changes nothing.
"""

from __future__ import annotations

import os

#: Set by the harness.
FREE = os.environ.get("BENCH_SERVING_FREE") == "1"
FREE_NORMS = os.environ.get("BENCH_SERVING_FREE_NORMS") == "1"
SCALED_WEIGHTS = os.environ.get("BENCH_SERVING_WEIGHTS") == "scaled"
PROFILE = os.environ.get("BENCH_SERVING_PROFILE") == "1"

# The harness searches the log for these texts.
FREE_MARK = "bench_serving: all-reduces of this group return uninitialised memory"
FREE_NORMS_MARK = "bench_serving: residual adds and norms behind sums do nothing"
WEIGHTS_MARK = "bench_serving: scaled weights"
BACKEND_MARK = "bench_serving: custom all-reduce"
DETERMINISTIC_MARK = "bench_serving: the engine is in its deterministic mode"
PROCESS_MARK = "bench_serving: rank %d of group tp is process %d"
