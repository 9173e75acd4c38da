"""Serves the scenarios of all files here from one process, which imports vLLM and warms its compiler up once."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import column_scenarios
import fusion_scenarios
import gather_scenarios
import linear_scenarios
import scaled_scenarios
import scenarios
import vllm.logger
from rank_processes import serve
from scenarios import plugin
from vllm.config import VllmConfig
from warm_compiler import warm_up

COMPILED = (column_scenarios, fusion_scenarios, linear_scenarios, scaled_scenarios)
FILES = (*COMPILED, gather_scenarios, scenarios)


def by_name(file: ModuleType) -> dict[str, Any]:
    """``file.function`` and the function, of all that ``file`` knows: what is no scenario, nobody asks for."""
    return {f"{file.__name__}.{name}": function for name, function in vars(file).items()}


if __name__ == "__main__":
    warm_up(str(file.__file__) for file in COMPILED)
    if hasattr(vllm.logger, "configure_logging"):  # since 0.33; before, importing it is enough
        vllm.logger.configure_logging(VllmConfig().logging_config)
    found = {name: function for file in FILES for name, function in by_name(file).items()}
    serve(found, plugin.RANK_0_PROCESS.removesuffix("0") + "{}")
