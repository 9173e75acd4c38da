"""Whether variables and options permit NVLink multicast, and sums in its switch."""

from __future__ import annotations

import logging

import pytest

from llm_comm import Config
from llm_comm.config import MULTICAST_OFF_VARIABLES, multicast_state
from llm_comm.integrations import engine_config


@pytest.mark.parametrize("option", ["auto", "0", "1"])
@pytest.mark.parametrize("name", MULTICAST_OFF_VARIABLES)
def test_machine_turns_multicast_off(name: str, option: str) -> None:
    off = MULTICAST_OFF_VARIABLES[name]
    assert multicast_state(Config(multicast=option), {name: off}) == (False, f"{name}={off}")


@pytest.mark.parametrize("name", MULTICAST_OFF_VARIABLES)
def test_other_values_do_not_turn_multicast_off(name: str) -> None:
    allowing = {"0": "1", "1": "0"}[MULTICAST_OFF_VARIABLES[name]]
    assert name not in multicast_state(Config(), {name: allowing})[1]


def test_known_variables_are_heeded() -> None:
    assert MULTICAST_OFF_VARIABLES == {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
    }


def test_option_turns_multicast_off() -> None:
    assert multicast_state(Config(multicast="0"), {}) == (False, "multicast is '0' (Python)")
    environ = {"LLM_COMM_MULTICAST": "0"}
    assert multicast_state(environ=environ) == (False, "LLM_COMM_MULTICAST=0")
    # The variable forbids it to the core too, so that no option permits it.
    assert multicast_state(Config(multicast="1"), environ) == (False, "LLM_COMM_MULTICAST=0")


def test_options_permit_multicast() -> None:
    assert multicast_state(Config(multicast="1"), {}) == (True, "multicast is '1' (Python)")
    assert multicast_state(Config.load({}), {}) == (True, "multicast is 'auto' (default)")


def test_a_variable_that_is_no_text_forbids_multicast() -> None:
    assert multicast_state(Config.load({}), {"NCCL_NVLS_ENABLE": "\udcff"}) == (False, "NCCL_NVLS_ENABLE=\\udcff")


def test_deterministic_sums_are_in_rank_order() -> None:
    assert Config.load({}, sum="any").sums_in_any_order
    assert not Config.load({}, sum="any", deterministic=True).sums_in_any_order
    assert not Config.load({}).sums_in_any_order


def test_multicast_defaults_to_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*MULTICAST_OFF_VARIABLES, "LLM_COMM_CONFIG", "LLM_COMM_MULTICAST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "1")
    assert multicast_state()[1] == "NVSHMEM_DISABLE_NVLS=1"


def test_modes_of_engines_keep_sums_in_rank_order(caplog: pytest.LogCaptureFixture) -> None:
    """``integrations/vllm`` and ``integrations/sglang`` ask for it in their deterministic modes."""
    log = logging.getLogger("an engine")
    with caplog.at_level("INFO", log.name):
        usual = Config.load({})
        assert engine_config.in_rank_order(usual, "VLLM_BATCH_INVARIANT", log) is usual
        assert not caplog.messages
        config = engine_config.in_rank_order(Config.load({}, sum="any"), "VLLM_BATCH_INVARIANT", log)
    assert not config.sums_in_any_order
    assert caplog.messages == ["llm_comm: sum is 'any', but VLLM_BATCH_INVARIANT is on: sums are made in rank order"]
