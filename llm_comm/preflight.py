"""What a command checks before it starts ranks: a mistake is told once, and not after minutes of measuring."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_comm.config import Config
from llm_comm.dsl import programs
from llm_comm.errors import ConfigError
from llm_comm.planning.catalogue import check_table_option


def check(outputs: Mapping[str, Path | None], **overrides: Any) -> Config:
    """Returns the configuration that communicators of this command will load.

    Args:
        outputs: By option, the files that the command is to write at its end; None where there is none.
        overrides: As of ``configuration``.

    Raises:
        ConfigError: An option, or the tuning table or a program that it names, is wrong, or a file cannot be written.
    """
    config = configuration(**overrides)
    check_table_option(config)
    programs.of_option(config)
    for option, path in outputs.items():
        if path is not None:
            _check_output(option, path)
    return config


def configuration(**overrides: Any) -> Config:
    """The options that hold for a command.

    Args:
        overrides: Options of ``Config`` from the command line; None where it has none.

    Raises:
        ConfigError: An option is wrong.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    config = Config.load(**given)
    origins = {name: f"--{name.replace('_', '-')}" for name in given}
    return dataclasses.replace(config, origins={**config.origins, **origins})


def _check_output(option: str, path: Path) -> None:
    directory = path.parent
    if not directory.is_dir():
        raise ConfigError(f"{option} {path}: there is no directory {directory}; make it, or name another")
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a directory: name a file in it")
    if not os.access(path if path.exists() else directory, os.W_OK):
        raise ConfigError(f"{option} {path}: no permission to write there; name another file")
