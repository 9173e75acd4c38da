#!/usr/bin/env python3
"""Installs the Python half of a published vLLM wheel for tests without GPUs: ``setup_vllm.py VERSION DIR``

DIR becomes a virtual environment that sees the packages of the Python which runs this script (torch, llm_comm) through
a .pth file, and has vLLM's Python sources and the few of its declared requirements that its distributed package and its
configuration import. Left out are the compiled libraries and everything that depends on CUDA: no test launches a kernel
of vLLM. A second call with the same arguments does nothing.
"""

from __future__ import annotations

import argparse
import fcntl
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

# Of the wheel's Requires-Dist. Their version limits are the wheel's own.
NEEDED = {
    "aiohttp", "cachetools", "cbor2", "cloudpickle", "fastapi", "jsonschema", "llguidance", "msgspec", "openai",
    "openai-harmony", "oss-harmony", "partial-json-parser", "pillow", "prometheus-client", "psutil", "py-cpuinfo",
    "pybase64", "pydantic", "pyzmq", "regex", "requests", "tqdm", "transformers",
}  # fmt: skip

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
#: What is replaced in the environment. vLLM's own code is as published, but for the first two.
STAND_INS = {
    "vllm/third_party/pynvml.py": _NVML,
    "vllm/_C_stable_libtorch.py": _OPERATORS,
    "xgrammar/__init__.py": _NAMES_ONLY,
    "xgrammar/structural_tag.py": _NAMES_ONLY,
    "xgrammar/openai_tool_call_schema.py": _NAMES_ONLY,
}


class InstallError(RuntimeError):
    """pip could not do it; the text holds its messages."""


def install(version: str, directory: Path) -> Path:
    """Makes the environment unless it is there; returns its Python.

    Raises:
        InstallError: The registry cannot be reached, or has no such version for this Python.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(directory.with_name(directory.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        return _install(version, directory)


def _install(version: str, directory: Path) -> Path:
    python = directory / "bin" / "python"
    done = directory / "installed.txt"
    recipe = f"vllm {version}\n{sys.executable} {sys.version}\n{Path(__file__).read_text(encoding='utf-8')}"
    if done.is_file() and done.read_text(encoding="utf-8") == recipe:
        return python
    shutil.rmtree(directory, ignore_errors=True)
    venv.create(directory, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(directory), "platbase": str(directory)}))
    outer = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    # addsitedir rather than a plain path: it runs the .pth files there, by which an editable llm_comm is found.
    lines = [f"import site; site.addsitedir({path!r})" for path in sorted(outer)]
    (site / "outer_environment.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    requirements = _unpack_vllm(version, site)
    _pip("--python", str(python), "install", "--only-binary=:all:", *requirements)
    done.write_text(recipe, encoding="utf-8")
    return python


def _unpack_vllm(version: str, site: Path) -> list[str]:
    """Unpacks the sources; returns the requirements to install."""
    # The wheel is 300 MB, the sources are 30: what is not needed never reaches the disk for longer than this takes.
    with tempfile.TemporaryDirectory() as downloads:
        _pip("download", "--no-deps", "--only-binary=:all:", "--dest", downloads, f"vllm=={version}")
        (wheel,) = Path(downloads).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".py") or ".dist-info/" in name:
                    archive.extract(name, site)
    for name, source in STAND_INS.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(source, encoding="utf-8")
    (metadata,) = site.glob("vllm-*.dist-info/METADATA")
    declared = HeaderParser().parsestr(metadata.read_text(encoding="utf-8")).get_all("Requires-Dist", [])
    return [line for line in declared if "extra ==" not in line and _name(line) in NEEDED]


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[._]+", "-", match.group().lower()) if match else ""


def _pip(*arguments: str) -> None:
    """Runs pip quietly: that vLLM's other requirements are missing, of which pip warns, is intended."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--retries", "2", "--timeout", "60"]
    done = subprocess.run([*pip, *arguments], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise InstallError(f"pip {' '.join(arguments)}:\n{done.stderr.strip()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    print(install(options.version, options.directory.absolute()))
