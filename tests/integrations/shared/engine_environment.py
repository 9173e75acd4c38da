"""Installs the Python half of an engine's published wheel, for tests without GPUs.

A virtual environment sees the packages of the Python that runs the tests (torch, llm_comm) through a .pth file, and has
the engine's Python sources and the few of its declared requirements that the modules under test import. Left out are
the compiled libraries and everything that depends on CUDA: no test launches a kernel of the engine.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

_CACHE = Path(__file__).parents[3] / ".cache"


class InstallError(RuntimeError):
    """pip could not do it; the text holds its messages."""


@dataclass(frozen=True)
class Engine:
    """What to install of an engine.

    Args:
        name: Of the package.
        needed: Names out of the wheel's Requires-Dist. Their version limits are the wheel's own.
        stand_ins: Sources, by path below site-packages, that are written over or beside what the wheel has.
        sources: Patterns of the files to unpack.
    """

    name: str
    needed: tuple[str, ...]
    stand_ins: Mapping[str, str]
    sources: tuple[str, ...] = ("*.py",)

    def install(self, version: str) -> Path:
        """Makes the environment unless it is there, in about a minute; returns its Python.

        Raises:
            InstallError: The registry cannot be reached, or has no such version for this Python.
        """
        directory = _CACHE / f"{self.name}-{version}-py{sys.version_info[0]}.{sys.version_info[1]}"
        directory.parent.mkdir(parents=True, exist_ok=True)
        with open(directory.with_name(directory.name + ".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
            return self._install(version, directory)

    def _install(self, version: str, directory: Path) -> Path:
        python = directory / "bin" / "python"
        done = directory / "installed.txt"
        recipe = f"{version}\n{self}\n{sys.executable} {sys.version}\n{Path(__file__).read_text(encoding='utf-8')}"
        if done.is_file() and done.read_text(encoding="utf-8") == recipe:
            return python
        shutil.rmtree(directory, ignore_errors=True)
        venv.create(directory, with_pip=False)
        site = Path(sysconfig.get_path("purelib", vars={"base": str(directory), "platbase": str(directory)}))
        outer = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        # addsitedir rather than a plain path: it runs the .pth files there, by which an editable llm_comm is found.
        lines = [f"import site; site.addsitedir({path!r})" for path in sorted(outer)]
        (site / "outer_environment.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
        requirements = self._unpack(version, site)
        # Not compiled: few of their modules are imported, and those are compiled then.
        _pip("--python", str(python), "install", "--no-compile", "--only-binary=:all:", *requirements)
        done.write_text(recipe, encoding="utf-8")
        return python

    def _unpack(self, version: str, site: Path) -> list[str]:
        """Unpacks the sources; returns the requirements to install."""
        # Wheels have up to 300 MB, the sources are 30 to 80: what is not needed never stays on the disk.
        with tempfile.TemporaryDirectory() as downloads:
            _pip("download", "--no-deps", "--only-binary=:all:", "--dest", downloads, f"{self.name}=={version}")
            (wheel,) = Path(downloads).glob(f"{self.name}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if ".dist-info/" in name or any(Path(name).match(pattern) for pattern in self.sources):
                        archive.extract(name, site)
        for name, source in self.stand_ins.items():
            (site / name).parent.mkdir(exist_ok=True)
            (site / name).write_text(source, encoding="utf-8")
        (metadata,) = site.glob(f"{self.name}-*.dist-info/METADATA")
        declared = HeaderParser().parsestr(metadata.read_text(encoding="utf-8")).get_all("Requires-Dist", [])
        return [line for line in declared if "extra ==" not in line and _name(line) in self.needed]


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[._]+", "-", match.group().lower()) if match else ""


def _pip(*arguments: str) -> None:
    """Runs pip quietly: that the engine's other requirements are missing, of which pip warns, is intended."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--retries", "2", "--timeout", "60"]
    done = subprocess.run([*pip, *arguments], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise InstallError(f"pip {' '.join(arguments)}:\n{done.stderr.strip()}")
