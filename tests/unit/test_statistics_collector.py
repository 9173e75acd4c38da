"""What calls are counted into, without a communicator."""

from __future__ import annotations

import json
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from llm_comm.config import Config
from llm_comm.operations.all_reduce import AllReduce
from llm_comm.operations.operation import within_range
from llm_comm.planning.plan import Plan
from llm_comm.planning.selection import Layout
from llm_comm.planning.tables import ALL_REDUCE
from llm_comm.runtime.statistics import (
    MAX_REASONS,
    OTHER_REASONS,
    Calls,
    Declined,
    Progress,
    StatisticsCollector,
    Stats,
    size_class,
    without_sizes,
)


@pytest.mark.parametrize(
    ("nbytes", "up_to"), [(0, 0), (1, 1), (2, 2), (3, 4), (1024, 1024), (1025, 2048), ((1 << 40) + 1, 1 << 41)]
)
def test_a_size_class_ends_at_a_power_of_two(nbytes: int, up_to: int) -> None:
    assert size_class(nbytes) == up_to


def test_counters_of_one_class_count_together_and_others_do_not() -> None:
    statistics = StatisticsCollector()
    for nbytes, algorithm, calls in ((600, "one_shot", 1), (1024, "one_shot", 2), (1025, "one_shot", 1), (7, "two", 1)):
        counter = statistics.counter(ALL_REDUCE, nbytes, algorithm, "LL")
        for _ in range(calls):
            counter.add()
    assert statistics.calls() == (
        Calls(ALL_REDUCE, "one_shot", "LL", 1024, 3, 600 + 2 * 1024, 0, 0),
        Calls(ALL_REDUCE, "one_shot", "LL", 2048, 1, 1025, 0, 0),
        Calls(ALL_REDUCE, "two", "LL", 8, 1, 7, 0, 0),
    )


def test_what_was_prepared_and_never_called_is_not_told() -> None:
    statistics = StatisticsCollector()
    statistics.counter(ALL_REDUCE, 600, "one_shot", "LL")
    assert statistics.calls() == ()


def test_reasons_of_other_sizes_are_one() -> None:
    statistics = StatisticsCollector()
    for size in (10, 200):
        statistics.decline(ALL_REDUCE, f"{size} bytes, more than 5")
    statistics.decline(ALL_REDUCE, "torch.float64 is not one of torch.bfloat16")
    assert statistics.declined() == (
        Declined(ALL_REDUCE, "N bytes, more than N", 2),
        Declined(ALL_REDUCE, "torch.float64 is not one of torch.bfloat16", 1),
    )
    assert without_sizes("shape (3, 64), sm_89, cuda:1") == "shape (N, N), sm_89, cuda:N"


def test_there_are_so_many_reasons_at_most() -> None:
    statistics = StatisticsCollector()
    for number in range(MAX_REASONS + 50):
        statistics.decline(ALL_REDUCE, f"reason{number}")
    declined = statistics.declined()
    assert len(declined) == MAX_REASONS + 1
    assert sum(each.count for each in declined) == MAX_REASONS + 50
    assert [each.count for each in declined if each.reason == OTHER_REASONS] == [50]


STATS = Stats(
    (
        Calls("a", "one_shot", "LL", 1024, 3, 3000, 2, 2000),
        Calls("a", "two_shot", "LL", 4096, 1, 4096, 0, 0),
        Calls("b", "one_shot", "LL", 0, 5, 0, 0, 0),
    ),
    (Declined("a", "N bytes", 7),),
    Progress(9, 20, 1.5, "PeerTimeout"),
)


def test_sums_by_operation() -> None:
    assert STATS.by_operation() == {"a": (4, 7096, 2, 2000), "b": (5, 0, 0, 0)}


def test_a_dict_is_json() -> None:
    told = json.loads(json.dumps(STATS.as_dict()))
    assert told["calls"][1] == {
        **{"operation": "a", "algorithm": "two_shot", "protocol": "LL", "up_to_bytes": 4096},
        **{"calls": 1, "bytes": 4096, "captured_calls": 0, "captured_bytes": 0},
    }
    assert told["declined"] == [{"operation": "a", "reason": "N bytes", "count": 7}]
    assert told["bytes_saved"] == 0
    assert told["progress"] == {"launches": 9, "operations_ended": 20, "idle_s": 1.5, "error": "PeerTimeout"}


def test_a_range_surrounds_a_launch_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[object] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", log.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: log.append("end"))

    def run(*arguments: int) -> bool:
        log.append(arguments)
        if arguments == (0,):
            raise RuntimeError("not launched")
        return True

    launch = within_range(run, torch.device("cuda", 0), ALL_REDUCE, 4096, "one_shot", "LL")
    assert launch(1, 2) is True
    with pytest.raises(RuntimeError, match="not launched"):
        launch(0)
    title = "llm_comm all_reduce one_shot LL 4096 B"
    assert log == [title, (1, 2), "end", title, (0,), "end"]


def sums_of(run: Callable[..., bool], device: str, nvtx: bool) -> AllReduce:
    handle, planner = mock.Mock(statistics=StatisticsCollector(), device=torch.device("cpu")), mock.Mock(world_size=2)
    handle.core().prepare.return_value = run
    planner.config = Config.load({}, nvtx=nvtx)
    plan = Plan(ALL_REDUCE, "one_shot", "LL", 1, 64, 1, 1, 0, 1, 8, 16, "a row")
    planner.lay_out.return_value = Layout(plan, (0, None, None))  # type: ignore[arg-type]
    sums = AllReduce(handle, planner)
    sums._device = torch.device(device)
    return sums


@pytest.mark.parametrize(
    ("device", "nvtx", "is_wrapped"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_ranges_are_for_gpus_and_what_is_called_without_them_is_the_launch(
    device: str, nvtx: bool, is_wrapped: bool
) -> None:
    def run(*_: int) -> bool:
        return True

    sums = sums_of(run, device, nvtx)
    prepared = sums._prepare_call(sums._layout(8, torch.bfloat16))
    assert not isinstance(prepared, str)
    assert (prepared.run is not run) == is_wrapped
