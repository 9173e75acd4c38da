"""Serves the scenarios of all files here from one process, which imports vLLM and warms its compiler up once."""

from __future__ import annotations

import column_scenarios
import experts_scenarios
import fusion_scenarios
import gather_scenarios
import linear_scenarios
import rope_scenarios
import scaled_scenarios
import scenarios
import vllm.logger
from rank_processes import serve
from scenarios import plugin
from vllm.config import VllmConfig
from warm_compiler import warm_up

COMPILED = (column_scenarios, fusion_scenarios, linear_scenarios, rope_scenarios, scaled_scenarios)
FILES = (*COMPILED, experts_scenarios, gather_scenarios, scenarios)


if __name__ == "__main__":
    warm_up(str(file.__file__) for file in COMPILED)
    if hasattr(vllm.logger, "configure_logging"):  # since 0.33; before, importing it is enough
        vllm.logger.configure_logging(VllmConfig().logging_config)
    # What is no scenario among these, nobody asks for.
    found = {f"{file.__name__}.{name}": value for file in FILES for name, value in vars(file).items()}
    serve(found, plugin.RANK_0_PROCESS.removesuffix("0") + "{}")
