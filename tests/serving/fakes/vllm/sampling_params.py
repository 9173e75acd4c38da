from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1


@dataclass
class SamplingParams:
    temperature: float
    max_tokens: int
    ignore_eos: bool
    detokenize: bool
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logprobs: int | None = None
