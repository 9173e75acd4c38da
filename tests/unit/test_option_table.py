"""What follows from the table of options, and what engines do with names that are not in it."""

from __future__ import annotations

import logging
import runpy
from pathlib import Path

import pytest

from llm_comm import Config, ConfigError
from llm_comm.config import EngineOptions
from llm_comm.integrations import engine_config
from llm_comm.options import OPTIONS

REPOSITORY = Path(__file__).parents[2]


def test_engines_warn_of_unknown_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a way back to an older version. What is known holds; a value that is not allowed is an error."""
    file = tmp_path / "config.yaml"
    file.write_text("timeuot_s: 5\nlog: info", encoding="utf-8")
    for name, text in (("CONFIG", str(file)), ("ALGORITM", "ring"), ("PDL", "0")):
        monkeypatch.setenv(f"LLM_COMM_{name}", text)
    monkeypatch.setattr(engine_config, "_warned", set())
    for _ in range(2):  # each group of a process loads the options, and one line is enough
        config = engine_config.load(logging.getLogger("llm_comm"), algorithm="one_shot")
    assert config == EngineOptions.load({}, log="info", pdl=False, algorithm="one_shot")
    assert set(config.origins) == {"log", "pdl", "algorithm"}
    section = engine_config.known({"fuze": True, "fuse": False}, "additional_config", logging.getLogger("llm_comm"))
    assert section == {"fuse": False}
    said = [message.partition(" is ignored: llm_comm ")[0] for message in caplog.messages]
    assert said == [
        "llm_comm: unknown variable LLM_COMM_ALGORITM (did you mean LLM_COMM_ALGORITHM?)",
        f"llm_comm: unknown option 'timeuot_s' ({file}:1) (did you mean timeout_s?)",
        "llm_comm: unknown option 'fuze' (additional_config) (did you mean fuse?)",
    ]
    monkeypatch.setenv("LLM_COMM_ALGORITHM", "of_a_newer_version")
    with pytest.raises(ConfigError, match="LLM_COMM_ALGORITHM='of_a_newer_version' is not allowed"):
        engine_config.load(logging.getLogger("llm_comm"))


def test_the_page_of_options_is_that_of_the_table() -> None:
    page = runpy.run_path(str(REPOSITORY / "tools" / "options_page.py"))["page"]
    assert (REPOSITORY / "docs" / "options.md").read_text(encoding="utf-8") == page(), "run tools/options_page.py"
    for name, option in OPTIONS.items():
        documented = [
            f"\n        {name}: {option.meaning[:30]}" in (kind.__doc__ or "") for kind in (Config, EngineOptions)
        ]
        assert documented == [not option.of_engines, option.of_engines]
