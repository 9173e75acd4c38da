"""`Communicator` and the library in place of NCCL choose alike: table, algorithm and launch of random problems."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import llm_comm
from llm_comm import Config, ConfigError, _core, registry
from llm_comm.planning import catalogue, programs
from llm_comm.planning.catalogue import table_text
from llm_comm.planning.plan import Problem
from llm_comm.planning.selection import lay_out
from llm_comm.planning.tables import OPERATIONS_OF_PROGRAMS, Row, TuningTable, by_operation

DEVICES = (
    ("NVIDIA H100 80GB HBM3", 132, 90),
    ("NVIDIA H100 80GB HBM3", 114, 90),
    ("NVIDIA H200", 132, 90),
    ("NVIDIA H200", 132, 0),
    ("NVIDIA H800", 132, 90),
    ("NVIDIA B200", 148, 100),
    ("A card: of nobody (1)", 20, 80),
    ("emulated", 4, 0),
)
NCCL_TYPES = {"bf16": 9, "fp16": 6, "fp32": 7}
SETTINGS, PROBLEMS_OF_EACH = 100, 10
DAMAGED = 1000


class Limits(ctypes.Structure):
    """The structure of csrc/algorithms/launch_shape.h."""

    _fields_ = [
        ("slot_bytes", ctypes.c_uint64),
        ("sm_count", ctypes.c_uint32),
        ("max_cluster", ctypes.c_uint32),
        ("compute_capability", ctypes.c_uint32),
        ("staging_bytes", ctypes.c_uint64),
    ]


def random_rows(draw: random.Random) -> Iterator[Row]:
    """Rows of every kind that a table may have, those that no face runs without more included."""
    for operation in registry.operations().values():
        if draw.random() < 0.3:
            continue
        own = [a for a in operation.algorithms if not a.is_symmetric and not a.wire]
        symmetric = [a for a in operation.algorithms if a.is_symmetric]
        for algorithms in (own, symmetric, *([a] for a in operation.algorithms if a.wire)):
            for up_to in sorted(draw.sample(range(6, 28), draw.randint(1, 4))) if algorithms else ():
                algorithm = draw.choice(algorithms)
                yield random_row(draw, algorithm, 1 << up_to)
                if algorithm.uses_multimem and not algorithm.is_symmetric and draw.random() < 0.5:
                    yield random_row(draw, draw.choice([a for a in own if not a.uses_multimem]), 1 << up_to)
        if operation.name in OPERATIONS_OF_PROGRAMS and draw.random() < 0.5:
            yield Row(1 << draw.randint(6, 20), operation.name, "dsl:mine", programs.PROTOCOL, blocks=4)


def random_row(draw: random.Random, algorithm: registry.Algorithm, up_to: int) -> Row:
    numbers = {}
    for name, bounds in algorithm.ranges.items():
        some = {0, 1, 2, 4, 8, 16, 64, 256, 512, 1056, bounds.least}
        numbers[name] = draw.choice(sorted(n for n in some if bounds.takes(n)))
    return Row(up_to, algorithm.operation, algorithm.name, algorithm.protocol, **numbers)


def random_problem(draw: random.Random, world: int) -> tuple[Problem, int, int]:
    """A problem, the number of its operation in the test's function, and NCCL's number of its type."""
    which = draw.randrange(3)
    operation = ("all_reduce", "all_gather", "reduce_scatter")[which]
    data_type = "byte" if operation == "all_gather" else draw.choice(list(NCCL_TYPES))
    count = max(1, int(2 ** draw.uniform(0, 26)))
    parameters = (1.0, *[float(count)] * world, *[0.0] * (8 - world)) if which else ()
    return Problem(operation, count, 0, data_type, world, parameters), which, NCCL_TYPES.get(data_type, 1)


def of_python(table: TuningTable, problem: Problem, limits: _core.Limits) -> str:
    layout = lay_out(problem, table, Config.load({}), limits)
    if layout.launches is None:
        return "declined"
    number, _, tiling = layout.launches
    algorithm = next(a for a in registry.operations()[problem.operation].algorithms if a.number == number)
    numbers = tiling.blocks, tiling.tile_lines, tiling.cluster, tiling.depth, tiling.launch_units
    return "|".join(map(str, (table.name, algorithm.name, algorithm.protocol, *numbers)))


def function_of_the_library() -> Callable[..., None]:
    choose = ctypes.CDLL(llm_comm.nccl_library(emulated=True)).llm_comm_nccl_choice
    choose.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint32, ctypes.POINTER(Limits), ctypes.c_int]
    choose.argtypes += [ctypes.c_int, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t]
    return choose


def damaged(draw: random.Random, text: str) -> str:
    """A text in which characters or lines are wrong, missing, or there twice."""
    for _ in range(draw.randint(1, 3)):
        at, length = draw.randrange(len(text)), draw.choice((1, 1, 3, 30))
        some = (*"{}[]:,#&*!'\"\\%@-\t\n0", "\N{SNOWMAN}", ": ", "\n  ", "99999999999999999999")
        insert = draw.choice(("", text[at : at + length], *some))
        text = text[:at] + insert + text[at + draw.choice((0, length)) :]
    return text


def test_damaged_tables(tmp_path: Path) -> None:
    """Both faces give the same verdict, and the same reason."""
    choose = function_of_the_library()
    draw = random.Random(49)
    path = tmp_path / "mine.yaml"
    said = ctypes.create_string_buffer(4000)
    verdicts = []
    for number in range(DAMAGED):
        if number % 20 == 0:
            table = TuningTable("", by_operation(random_rows(draw)), 1 << 20)
            text = table_text("emulated", 2, table, {"date": "today"})
        path.write_text(damaged(draw, text), encoding="utf-8")
        choose(str(path).encode(), b"emulated", 2, Limits(1 << 20, 4, 1, 0, 0), 0, 9, 8, said, len(said))
        theirs = said.value.decode().removeprefix("error|") if said.value.startswith(b"error|") else ""
        try:
            catalogue.check_table_option(Config.load({"LLM_COMM_TABLE": str(path)}))
            ours = ""
        except ConfigError as error:
            ours = str(error)
        assert ours == theirs
        verdicts.append(ours)
    assert verdicts.count("") > DAMAGED / 50


def test_a_thousand_random_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = function_of_the_library()
    monkeypatch.delenv("LLM_COMM_TABLE", raising=False)
    draw = random.Random(48)
    kinds, outcomes = set(), set()
    for setting in range(SETTINGS):
        monkeypatch.setenv("LLM_COMM_TABLE_DIR", str(tmp_path / str(setting)))
        (tmp_path / str(setting)).mkdir()
        device, sm_count, capability = DEVICES[setting % len(DEVICES)]
        world = draw.choice((4, 8, draw.randint(2, 8)))
        path = ""
        if draw.random() < 0.6 and (rows := list(random_rows(draw))):
            table = TuningTable("", by_operation(rows), 1 << draw.randint(18, 30))
            name = draw.choice([_core.table_file_name(device, world)] * 2 + ["mine.yaml"])
            file = tmp_path / str(setting) / name
            text = table_text(device, world, table, {"date": "today"})
            file.write_text(text.replace("rows:", "broken:") if draw.random() < 0.1 else text, encoding="utf-8")
            path = str(file) if name == "mine.yaml" and "broken:" not in file.read_text() else ""
        numbers = (draw.choice([1 << 20, 8 << 20]), sm_count, draw.choice([1, 8, 16]), capability)
        staging = draw.choice([0, 4 << 20, 16 << 20])
        limits = _core.Limits(
            **dict(zip(("slot_bytes", "sm_count", "max_cluster", "compute_capability"), numbers, strict=True)),
            staging_bytes=staging,
        )
        config = Config.load({"LLM_COMM_TABLE": path} if path else {})
        found = catalogue.find_table(device, world, sm_count, config, capability)
        kinds.add(found.origin.kind)
        for _ in range(PROBLEMS_OF_EACH):
            problem, which, nccl_type = random_problem(draw, world)
            said = ctypes.create_string_buffer(400)
            choose(
                path.encode(), device.encode(), world, Limits(*numbers, staging), which, nccl_type, problem.count,
                said, len(said),
            )  # fmt: skip
            theirs = said.value.decode().replace(path, Path(path).name) if path else said.value.decode()
            ours = of_python(found, problem, limits)
            if theirs.startswith("declined|"):
                theirs = "declined"
            assert theirs == ours, (setting, problem, said.value)
            outcomes.add(ours.split("|")[1] if "|" in ours else ours)
    assert kinds == {"option table", "user's directory", "shipped", "nearest", "general", "emulated"}
    assert len(outcomes) > 6, outcomes
