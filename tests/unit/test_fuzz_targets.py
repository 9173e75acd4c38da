"""The fuzz targets without the fuzzer: every input of the corpora, and what a few random changes make of them."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[1] / "fuzz"
sys.path.insert(0, str(FUZZ))

import targets  # noqa: E402

CORPORA = {name: sorted((FUZZ / "corpus" / name).iterdir()) for name in targets.TARGETS}
CHANGES = 20


def changed(data: bytes, random_numbers: random.Random) -> bytes:
    at = random_numbers.randrange(len(data) + 1)
    return data[:at] + random_numbers.randbytes(random_numbers.randrange(4)) + data[at + random_numbers.randrange(4) :]


@pytest.mark.parametrize(("name", "path"), [(name, path) for name, paths in CORPORA.items() for path in paths])
def test_corpus(name: str, path: Path) -> None:
    data = path.read_bytes()
    targets.TARGETS[name](data)
    random_numbers = random.Random(path.name)
    for _ in range(CHANGES):
        targets.TARGETS[name](changed(data, random_numbers))


def test_corpora_are_small() -> None:
    assert all(CORPORA.values())
    assert sum(path.stat().st_size for paths in CORPORA.values() for path in paths) < 64 << 10


def test_a_target_notices_a_wrong_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    for reader in ("parse_yaml", "load_table"):
        monkeypatch.setattr(targets, reader, lambda _: {"other": 1})
    monkeypatch.setattr("llm_comm.runtime.descriptors.sender_of", lambda *_: 1)
    inputs = {"config": b"log: info", "table": b"device: x", "messages": b"1nobody 1"}
    for name, data in inputs.items():
        with pytest.raises((AssertionError, TypeError)):
            targets.TARGETS[name](data)
