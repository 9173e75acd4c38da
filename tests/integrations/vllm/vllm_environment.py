"""What of vLLM the contract tests install: its distributed package, its configuration and its compiler, and what those
import."""

from pathlib import Path

from contract import Contract
from engine_environment import Engine

_NVML = '''"""Stands in for NVML: a machine with one GPU, of which the generation is all that is known."""


class NVMLError(Exception):
    pass


def nvmlInit():
    pass


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return 1


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetCudaComputeCapability(handle):
    return 9, 0
'''
_NAMES_ONLY = '''"""Stands in for a package with CUDA dependencies, of which the modules at hand import names only."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
'''
_NOTHING = '"""Stands in for a compiled library of which the modules at hand only ask whether it is there."""\n'
_OPERATORS = (Path(__file__).parent / "stand_in_operators.py").read_text(encoding="utf-8")
#: The oldest and the newest supported.
VERSIONS = ("0.26.0", "0.33.0")
VLLM = Engine(
    "vllm",
    needed=(
        "aiohttp", "cachetools", "cbor2", "cloudpickle", "einops", "fastapi", "jsonschema", "llguidance", "msgspec",
        "openai", "openai-harmony", "oss-harmony", "partial-json-parser", "pillow", "prometheus-client", "psutil",
        "py-cpuinfo", "pybase64", "pydantic", "pyzmq", "regex", "requests", "tqdm", "transformers",
    ),
    # vLLM's own code is as published, but for the first four.
    stand_ins={
        "vllm/third_party/pynvml.py": _NVML,
        "vllm/_C_stable_libtorch.py": _OPERATORS,
        "vllm/vllm_flash_attn/_vllm_fa2_C.py": _NOTHING,
        "vllm/vllm_flash_attn/_vllm_fa3_C.py": _NOTHING,
        "xgrammar/__init__.py": _NAMES_ONLY,
        "xgrammar/structural_tag.py": _NAMES_ONLY,
        "xgrammar/openai_tool_call_schema.py": _NAMES_ONLY,
    },
)  # fmt: skip


def vllm_contract(scenarios: str) -> Contract:
    """What the file ``scenarios`` has, in all versions. A process for each serves the other files too."""
    here = Path(__file__).parent
    return Contract(VLLM, VERSIONS, here / scenarios, served_by=here / "all_scenarios.py")
