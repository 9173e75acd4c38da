"""Plugins for the engines that bench_serving starts: the arm ``free``, and weights of a realistic scale.

This directory is not part of any package. The harness puts it on the PYTHONPATH of an engine that needs it; the
``dist-info`` beside it lets the engine find the entry points as if it were installed, in all of its processes.
"""

from __future__ import annotations

import os

#: Set by the harness to what is wanted.
FREE = os.environ.get("BENCH_SERVING_FREE") == "1"
SCALED_WEIGHTS = os.environ.get("BENCH_SERVING_WEIGHTS") == "scaled"

# The harness looks for these in the log.
FREE_MARK = "bench_serving: all-reduces of this group return uninitialised memory"
WEIGHTS_MARK = "bench_serving: scaled weights"
BACKEND_MARK = "bench_serving: custom all-reduce"
