"""What of vLLM the contract tests install: its distributed package and its configuration, and what those import."""

from engine_environment import Engine

_NVML = '''"""Stands in for NVML: a machine with one GPU, of which nothing else is known."""


class NVMLError(Exception):
    pass


def nvmlInit():
    pass


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return 1
'''
_NAMES_ONLY = '''"""Stands in for a package with CUDA dependencies, of which the modules at hand import names only."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
'''
_OPERATORS = '"""Stands in for a compiled library that is imported to register its operators with torch."""\n'

VLLM = Engine(
    "vllm",
    needed=(
        "aiohttp", "cachetools", "cbor2", "cloudpickle", "fastapi", "jsonschema", "llguidance", "msgspec", "openai",
        "openai-harmony", "oss-harmony", "partial-json-parser", "pillow", "prometheus-client", "psutil", "py-cpuinfo",
        "pybase64", "pydantic", "pyzmq", "regex", "requests", "tqdm", "transformers",
    ),
    # vLLM's own code is as published, but for the first two.
    stand_ins={
        "vllm/third_party/pynvml.py": _NVML,
        "vllm/_C_stable_libtorch.py": _OPERATORS,
        "xgrammar/__init__.py": _NAMES_ONLY,
        "xgrammar/structural_tag.py": _NAMES_ONLY,
        "xgrammar/openai_tool_call_schema.py": _NAMES_ONLY,
    },
)  # fmt: skip
