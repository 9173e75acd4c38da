"""The level of the llm_comm logger: whose it is to set."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from llm_comm import Communicator, Config

LOGGER = logging.getLogger("llm_comm")


@pytest.fixture(autouse=True)
def _level() -> Iterator[None]:
    before = LOGGER.level
    yield
    LOGGER.setLevel(before)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("applications", "config", "level"),
    [
        (logging.DEBUG, Config.load({}), logging.DEBUG),
        (logging.ERROR, Config.load({}, timeout_s=5.0), logging.ERROR),
        (logging.DEBUG, Config.load({}, log="error"), logging.ERROR),
        (logging.DEBUG, Config.load({"LLM_COMM_LOG": "warning"}), logging.WARNING),
        (logging.NOTSET, Config.load({}), logging.WARNING),
    ],
)
def test_a_level_of_the_application_stays_unless_one_is_chosen(
    applications: int, config: Config, level: int, group: dist.ProcessGroup
) -> None:
    LOGGER.setLevel(applications)
    for _ in range(2):
        with Communicator(group, "cpu", config):
            assert LOGGER.level == level
