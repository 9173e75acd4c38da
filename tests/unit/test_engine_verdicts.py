"""What the doctor says about engines that are not there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from llm_comm.cli import doctor, engine_verdicts, launch
from llm_comm.cli.engine_verdicts import ENGINES, Engine, is_supported
from llm_comm.config import EngineOptions

REPOSITORY = Path(__file__).parents[2]
VLLM, SGLANG = ENGINES
CONFIG = EngineOptions.load({})
ACTIVE = "; its all-reduces go through llm_comm"
KEPT = "; keeps its own all-reduce: "


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """One on which both engines, of a supported version, would be served: eight GPUs, and nothing is set."""
    for name in ("LLM_COMM_ENABLE", "LLM_COMM_CONFIG", "VLLM_PLUGINS", "SGLANG_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(engine_verdicts, "installed_version", {e.package: e.newest for e in ENGINES}.get)
    monkeypatch.setattr(engine_verdicts, "_has_entry_point", lambda _: True)
    monkeypatch.setattr(launch, "usable_gpus", lambda: (8, ""))
    return monkeypatch


def test_active(machine: pytest.MonkeyPatch) -> None:
    assert doctor.collect()["engines"] == {"vLLM": f"0.33{ACTIVE}", "SGLang": f"0.5.23{ACTIVE}"}


def test_no_engine_is_imported(machine: pytest.MonkeyPatch) -> None:
    doctor.collect()
    assert not {engine.package for engine in ENGINES} & sys.modules.keys()


def test_not_installed(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(engine_verdicts, "installed_version", lambda _: None)
    assert set(engine_verdicts.verdicts(CONFIG).values()) == {"not installed"}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"LLM_COMM_ENABLE": "0"}, "LLM_COMM_ENABLE is off"),
        ({"VLLM_PLUGINS": "a,b", "SGLANG_PLUGINS": "a,b"}, "_PLUGINS=a,b leaves llm_comm out"),
    ],
)
def test_switched_off_by_a_variable(
    engine: Engine, variables: dict[str, str], reason: str, machine: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        machine.setenv(name, value)
    for config in (CONFIG, None):  # it leaves the engine alone whatever else is set
        said = engine_verdicts.verdict(engine, config)
        assert said.startswith(f"{engine.newest}{KEPT}")
        assert said.endswith(reason)


@pytest.mark.parametrize(
    ("engine", "value", "active"),
    [
        (VLLM, "a,llm_comm", True),
        (SGLANG, "a,llm_comm", True),
        (VLLM, "", False),
        (SGLANG, "", True),
        (VLLM, "a, llm_comm", False),
        (SGLANG, "a, llm_comm", True),
    ],
)
def test_plugins_are_listed_as_the_engine_reads_them(
    engine: Engine, value: str, active: bool, machine: pytest.MonkeyPatch
) -> None:
    machine.setenv(engine.allowed, value)
    assert engine_verdicts.verdict(engine, CONFIG).endswith(ACTIVE) is active


def test_switched_off_in_a_file(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("enable: false")
    machine.setenv("LLM_COMM_CONFIG", str(file))
    assert engine_verdicts.verdict(VLLM, EngineOptions.load()) == f"0.33{KEPT}enable is false ({file}:1)"


def test_a_wrong_configuration_ends_the_start(machine: pytest.MonkeyPatch) -> None:
    said = engine_verdicts.verdict(SGLANG, None)
    assert said == "0.5.23; does not start with tensor parallelism: the configuration is wrong"
    machine.setattr(engine_verdicts, "_has_entry_point", lambda _: False)
    assert engine_verdicts.verdict(SGLANG, None).startswith(f"0.5.23{KEPT}"), "it does not load what would end it"


def test_without_an_entry_point(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(engine_verdicts, "_has_entry_point", lambda group: group == SGLANG.entry_points)
    assert "not installed as a plugin (entry point llm_comm of vllm.general_plugins)" in engine_verdicts.verdict(
        VLLM, CONFIG
    )
    assert engine_verdicts.verdict(SGLANG, CONFIG).endswith(ACTIVE)


def test_entry_points_of_this_installation() -> None:
    assert [engine_verdicts._has_entry_point(engine.entry_points) for engine in ENGINES] == [True, True]
    assert not engine_verdicts._has_entry_point("console_scripts")


@pytest.mark.parametrize("why", ["llm_comm was built without nvcc", "no GPU that torch can use", "only one GPU"])
def test_without_kernels_or_gpus(why: str, machine: pytest.MonkeyPatch) -> None:
    machine.setattr(launch, "usable_gpus", lambda: (1, why))
    assert engine_verdicts.verdict(VLLM, CONFIG) == f"0.33{KEPT}{why}"


def test_a_version_that_was_not_tested(machine: pytest.MonkeyPatch) -> None:
    """Plugins go by names of the engine, not by its version: only the engine knows."""
    machine.setattr(engine_verdicts, "installed_version", lambda _: "0.34.0")
    said = engine_verdicts.verdict(VLLM, CONFIG)
    assert said.startswith("0.34.0; the line about llm_comm in its log tells whether")
    assert said.endswith("tested with vLLM 0.26 to 0.33")


@pytest.mark.parametrize(
    ("engine", "versions", "supported"),
    [
        (VLLM, ["0.26.0", "0.26.0rc1+cu129", "0.30.2", "0.33.0", "0.33.1.post1"], True),
        (VLLM, ["0.20.0", "0.25.9", "0.34.0", "1.0", "dev"], False),
        (SGLANG, ["0.5.17", "0.5.20.post1", "0.5.23"], True),
        (SGLANG, ["0.5.16", "0.5.24", "0.5", "0.6.0"], False),
    ],
)
def test_supported_versions(engine: Engine, versions: list[str], supported: bool) -> None:
    assert [is_supported(engine, version) for version in versions] == [supported] * len(versions)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_documents_and_package_agree(engine: Engine) -> None:
    document = (REPOSITORY / "docs" / "engines" / f"{engine.package}.md").read_text(encoding="utf-8")
    assert re.search(rf"Supported: {engine.name} {engine.oldest} to {engine.newest} ", document)
    assert f"`{engine.allowed}=" in document
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    plugin = f'[project.entry-points."{engine.entry_points}"]\nllm_comm = "llm_comm.integrations.{engine.package}:'
    assert plugin in project
