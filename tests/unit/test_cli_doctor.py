"""The doctor: reports what it finds, survives what it does not find, and reads the machine's tools right."""

from __future__ import annotations

import argparse
import json
import os

import pytest

from llm_comm import _core
from llm_comm.cli import commands, doctor, engine_verdicts, launch
from llm_comm.config import Config
from llm_comm.installation import code_for, oldest_driver
from llm_comm.planning.catalogue import find_table

SECTIONS = {
    "verdict",
    "versions",
    "build",
    "gpus",
    "links",
    "multicast",
    "workspace",
    "tuning",
    "engines",
    "configuration",
}


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LLM_COMM_")]:
        monkeypatch.delenv(name)


def test_every_section_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == SECTIONS
    assert not [title for title, section in report.items() if "error" in section]


def test_a_failing_section_is_reported_and_the_others_stay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise OSError("driver is gone")

    sections = {"gpus": doctor.fact(broken), "engines": doctor.fact(lambda: {"vLLM": "not installed"})}
    monkeypatch.setattr(doctor, "_SECTIONS", sections)
    assert doctor.run(argparse.Namespace(json=False, model=None)) == 0
    assert capsys.readouterr().out == "gpus\n  error: OSError: driver is gone\nengines\n  vLLM: not installed\n"


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        ("LLM_COMM_ALGORITHM", "ring", "LLM_COMM_ALGORITHM='ring' is not allowed; valid: 'auto'"),
        ("LLM_COMM_ALGORITM", "auto", "unknown variable LLM_COMM_ALGORITM (did you mean LLM_COMM_ALGORITHM?)"),
        ("LLM_COMM_TABLE", "/no/such.yaml", "option table (LLM_COMM_TABLE): "),
    ],
)
def test_a_wrong_option_is_told_once_and_nothing_is_judged_by_it(
    variable: str, value: str, error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(engine_verdicts, "installed_version", {"vllm": "0.33"}.get)
    monkeypatch.setattr(engine_verdicts, "_has_entry_point", lambda _: True)
    monkeypatch.setattr(launch, "usable_gpus", lambda: (0, "no GPU here"))
    assert commands.main(["doctor"]) == 2
    text = capsys.readouterr().out
    assert text.startswith(f"error: ConfigError: {error}")
    assert text.count("ConfigError") == 1
    assert "demo_would_run_on" not in text

    assert commands.main(["doctor", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {*SECTIONS, "error"}
    assert report["error"].startswith(f"ConfigError: {error}")
    judged = {title for title, section in report.items() if section != doctor.NOT_JUDGED}
    assert judged == {"error", "versions", "build", "gpus", "links", "engines"}
    stops = "does not start with tensor parallelism: the configuration is wrong"
    # An engine starts with unknown names.
    verdict = "keeps its own all-reduce: no GPU here" if "unknown" in error else stops
    assert report["engines"] == {"vLLM": f"0.33; {verdict}", "SGLang": "not installed"}


def test_render_shows_nesting_matrices_and_plain_words() -> None:
    report = {
        "gpus": {"GPU 0": {"vmm": True, "posix_fd": False, "driver": None}},
        "links": {"links": [["X", "NV18"]]},
    }
    assert doctor.render(report).splitlines() == [
        "gpus",
        "  GPU 0:",
        "    vmm: yes",
        "    posix_fd: no",
        "    driver: -",
        "links",
        "  links:",
        "       X  NV18",
    ]


def test_multicast_says_which_variables_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    found = doctor.collect()["multicast"]
    assert found["state"] == "off"
    assert found["variables"]["NCCL_NVLS_ENABLE"] == "0"


def test_multicast_says_how_to_get_it_and_which_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _core.multicast_switches:
        monkeypatch.delenv(name, raising=False)  # the report asks no driver for multicast
    found = doctor.collect()["multicast"]
    assert (found["state"], found["sum"]) == ("off", "rank order")
    assert all("`llm-comm tune --multicast`" in why for why in found["why"].values())
    monkeypatch.setenv("LLM_COMM_MULTICAST", "1")
    monkeypatch.setenv("LLM_COMM_SUM", "any")
    found = doctor.collect()["multicast"]
    assert (found["state"], found["sum"]) == ("would be set up and tested", "any order")
    assert set(found["why"].values()) == {"multicast is '1' (LLM_COMM_MULTICAST)"}


@pytest.mark.parametrize(("variables", "says_so"), [({}, True), ({"LLM_COMM_ALGORITHM": "one_shot"}, False)])
def test_tuning_says_which_groups_engines_leave_to_nccl(
    variables: dict[str, str], says_so: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    general = find_table("NVIDIA L40S", 4, 142, Config(), 89)
    monkeypatch.setattr(doctor, "tables_here", lambda _: {4: general})
    monkeypatch.setattr(doctor, "_uuid", lambda index: f"GPU-{index}")
    monkeypatch.setattr(doctor, "why_too_slow", lambda gpus: f"no NVLink between {gpus[0]} and {gpus[3]}")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = doctor.collect()["tuning"]["4 ranks"]
    assert "general" in found
    assert ("; engines use NCCL: no NVLink between GPU-0 and GPU-3" in found) == says_so


def test_configuration_names_the_variable_a_value_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_COMM_TIMEOUT_S", "12.5")
    found = doctor.collect()["configuration"]
    assert found["timeout_s"] == "12.5 (LLM_COMM_TIMEOUT_S)"
    assert found["multicast"] == "auto (default)"


@pytest.mark.parametrize(
    ("machine_code", "ptx", "text"),
    [
        ("80,90a", "", "machine code for compute capability 8.0, 9.0a"),
        ("80,103", "100", "machine code for compute capability 8.0, 10.3, and PTX for compute capability 10.0"),
        ("", "90", "PTX for compute capability 9.0"),
        ("", "", "none: built without nvcc"),
    ],
)
def test_kernels_of_a_build(machine_code: str, ptx: str, text: str) -> None:
    assert doctor.describe_kernels(machine_code, ptx) == text


@pytest.mark.parametrize(
    ("capability", "code"),
    [
        (75, "none"),
        (80, "sm_80"),
        (89, "sm_80"),
        (90, "sm_90"),
        (100, "sm_100"),
        (103, "sm_103"),
        (110, "PTX of sm_100, which the driver compiles"),
        (120, "PTX of sm_100, which the driver compiles"),
    ],
)
def test_which_of_the_kernels_a_gpu_runs(capability: int, code: str) -> None:
    assert code_for(capability, "80,90,100,103", "100") == code


def test_code_of_one_architecture_alone_runs_on_no_other() -> None:
    assert code_for(90, "90a", "") == "sm_90a"
    assert code_for(100, "90a", "") == "none"
    assert code_for(89, "90", "90") == "none"
    assert code_for(90, "", "") == "none"


@pytest.mark.parametrize(("nvcc", "driver"), [("12.9.86", "525"), ("13.0.88", "580"), ("14.0.1", None), ("", None)])
def test_the_oldest_driver_goes_by_the_major_version_of_cuda(nvcc: str, driver: str | None) -> None:
    assert oldest_driver(nvcc) == driver
