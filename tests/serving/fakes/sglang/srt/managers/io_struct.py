from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class Message:
    pauses: bool


@dataclass
class PauseGenerationReqInput(Message):
    mode: str
    pauses = True

    def __post_init__(self) -> None:
        assert self.mode == "in_place"


@dataclass
class ContinueGenerationReqInput(Message):
    torch_empty_cache: bool
    pauses = False


@dataclass
class GenerateReqInput:
    input_ids: list[list[int]]
    sampling_params: dict[str, Any]
