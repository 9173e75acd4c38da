"""``container/``: the Dockerfile is one that Docker would take, and its script installs what it should.

No image is built here: that takes Docker, a registry and 10 GB, or what ``container/try.sh`` takes. The script is what
an image runs; here it runs in virtual environments, with wheels and engines that consist of a file each.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
CONTAINER = REPOSITORY / "container"
DOCKERFILE = CONTAINER / "Dockerfile"
SCRIPT = CONTAINER / "install.sh"
PAGES = [REPOSITORY / "docs" / "quickstart.md", DOCKERFILE]


# ---- The Dockerfile --------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile: (instruction, arguments), with continued lines joined, without comments."""
    lines = [line for line in DOCKERFILE.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    found = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(name, " ".join(arguments.split())) for name, arguments in found]


def stages() -> dict[str, tuple[str, list[str]]]:
    """By name: the image that it begins with, and its RUN instructions."""
    arguments: dict[str, str] = {}
    found: dict[str, tuple[str, list[str]]] = {}
    for name, text in instructions():
        if name == "ARG":
            key, _, value = text.partition("=")
            assert not found, "an ARG that a FROM uses stands before the first one"
            arguments[key] = value
        elif name == "FROM":
            match = re.fullmatch(r"\$\{(\w+)\} AS (\w+)", text)
            assert match is not None, text
            found[match[2]] = (arguments[match[1]], [])
        else:
            assert name == "RUN", f"{name}: entry point, user and environment stay those of the engine"
            found[list(found)[-1]][1].append(text)
    return found


def test_stages() -> None:
    """Released images of the engines, in versions that have been measured on GPUs."""
    images = {name: image for name, (image, _) in stages().items()}
    assert images == {"vllm": "vllm/vllm-openai:v0.26.0", "sglang": "lmsysorg/sglang:v0.5.17"}
    troubleshooting = (REPOSITORY / "docs" / "operate" / "troubleshooting.md").read_text(encoding="utf-8")
    for image in images.values():
        assert image.partition(":v")[2] in troubleshooting


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_an_image_runs(engine: str) -> None:
    (command,) = stages()[engine][1]
    words = shlex.split(command)
    mounts = [word.partition("=")[2] for word in words if word.startswith("--mount=")]
    options = [dict(pair.split("=") for pair in mount.split(",")) for mount in mounts]
    assert all(option["type"] == "bind" for option in options), "no layer keeps the wheels"
    targets = {option["target"]: option["source"] for option in options}
    shell, script, *arguments = words[len(mounts) :]
    assert shell == "sh"
    assert REPOSITORY / targets[str(Path(script).parent)] / Path(script).name == SCRIPT
    assert [targets[arguments[0]], arguments[1]] == ["wheelhouse", engine]


def test_the_build_sees_what_it_mounts() -> None:
    """And nothing else: the context of a build is sent to the daemon."""
    assert (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").split() == ["*", "!container", "!wheelhouse"]
    assert "wheelhouse" in (REPOSITORY / "tools" / "build_wheels.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_pages_name(page: Path) -> None:
    """Targets, arguments and tags of ``docker`` fit the Dockerfile and each other."""
    text = page.read_text(encoding="utf-8")
    builds = re.findall(r"docker build -f (\S+) --target (\w+) +-t (\S+) \.", text)
    assert {(file, target) for file, target, _ in builds} == {("container/Dockerfile", name) for name in stages()}
    declared = {text.partition("=")[0] for name, text in instructions() if name == "ARG"}
    assert set(re.findall(r"--build-arg (\w+)=", text)) <= declared
    used = set(re.findall(r"\b(\w+-llm-comm)\b", text))
    assert used == {tag for _, _, tag in builds}


@pytest.mark.parametrize("block", re.findall(r"```\n(.*?)```", PAGES[0].read_text(encoding="utf-8"), re.DOTALL))
def test_shell_of_the_quickstart(block: str) -> None:
    done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- The script ------------------------------------------------------------------------------------------------------


def write_wheel(directory: Path, tag: str, has_cuda: bool = True) -> None:
    """A wheel of llm_comm that consists of one module."""
    directory.mkdir(exist_ok=True)
    module = f"__version__ = '9.8.7'\n\n\ndef cuda_compiled():\n    return {has_cuda}\n"
    metadata = "Metadata-Version: 2.1\nName: llm_comm\nVersion: 9.8.7\nRequires-Dist: torch>=99\n"
    wheel = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n"
    with zipfile.ZipFile(directory / f"llm_comm-9.8.7-{tag}.whl", "w") as archive:
        archive.writestr("llm_comm/__init__.py", module)
        archive.writestr("llm_comm-9.8.7.dist-info/METADATA", metadata)
        archive.writestr("llm_comm-9.8.7.dist-info/WHEEL", wheel)
        archive.writestr("llm_comm-9.8.7.dist-info/RECORD", "")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with an engine, and no llm_comm."""
    place = tmp_path_factory.mktemp("image")
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    (site,) = (place / "lib").glob("python3*/site-packages")
    (site / "vllm.py").write_text("")
    return place


def install(environment: Path, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    path = path or f"{environment / 'bin'}:/usr/bin:/bin"
    variables = {"PATH": path, "PIP_CONFIG_FILE": "/dev/null"}
    return subprocess.run(
        ["/bin/sh", SCRIPT, *arguments], env=variables, capture_output=True, text=True, timeout=120, check=False
    )


def test_it_installs_the_wheel(environment: Path, tmp_path: Path) -> None:
    """Without what the wheel requires, which comes with the engine, and without a package index."""
    write_wheel(tmp_path / "wheels", "py3-none-any")
    done = install(environment, str(tmp_path / "wheels"), "vllm")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("llm_comm 9.8.7 is installed beside vllm\n")
    asked = [environment / "bin" / "python", "-m", "pip", "list", "--format", "json"]
    listed = json.loads(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
    assert {"llm_comm", "llm-comm"} & {each["name"] for each in listed}
    assert "torch" not in {each["name"] for each in listed}
    subprocess.run([environment / "bin" / "python", "-m", "pip", "uninstall", "-q", "-y", "llm_comm"], check=True)


def test_what_is_missing_is_named(environment: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path / "other", "cp27-cp27m-any")
    write_wheel(tmp_path / "emulated", "py3-none-any", has_cuda=False)
    cases = {
        "no wheel in .* is for Python 3": (str(tmp_path / "other"), "vllm"),
        "has no package sglang": (str(tmp_path / "emulated"), "sglang"),
        "expected a directory of wheels and the name of an engine, got 1": (str(tmp_path / "emulated"),),
        "has no CUDA kernels": (str(tmp_path / "emulated"), "vllm"),
    }
    for said, arguments in cases.items():
        done = install(environment, *arguments)
        assert done.returncode == 1, said
        assert re.search(said, done.stderr), done.stderr
    nothing = install(environment, str(tmp_path / "emulated"), "vllm", path=str(tmp_path))
    assert nothing.returncode == 1
    assert "there is no python3 on the PATH" in nothing.stderr


# ---- What tries it ---------------------------------------------------------------------------------------------------


def test_the_script_that_builds_without_docker_is_a_script() -> None:
    """It takes minutes, root and Debian's packages: it is run by hand."""
    script = CONTAINER / "try.sh"
    assert subprocess.run(["sh", "-n", script], check=False).returncode == 0
    done = subprocess.run(["sh", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "usage: sh container/try.sh WHEELS ENGINE VERSION\n")
