"""Rows of tuning tables for groups over several nodes: files, what is valid, and what is chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tables import emulated_table, general_table

from llm_comm.errors import ConfigError
from llm_comm.nodes.in_node import chunks, slices
from llm_comm.planning.catalogue import load_table, table_text
from llm_comm.planning.node_rows import PIECES, WHOLE, NodeRow, general_rows, rows_for
from llm_comm.planning.tables import TuningTable

ROWS = (
    NodeRow(2, 65536, WHOLE, 0, is_faster=True, us=14.1, nccl_us=28.7),
    NodeRow(2, 1 << 20, WHOLE, 1 << 18, is_faster=True),
    NodeRow(2, 1 << 24, WHOLE, 1 << 20, is_faster=False, us=160.5, nccl_us=124.0),
    NodeRow(4, 1 << 20, PIECES, 0, is_faster=True),
)


def table_of(*rows: NodeRow) -> TuningTable:
    return general_table(8, 132)._replace(nodes=rows)


def written(tmp_path: Path, rows: list[Any]) -> Path:
    path = tmp_path / "table.yaml"
    text = table_text("emulated", 8, table_of(), {})
    path.write_text(f"{text}nodes:\n" + "".join(f"  - {yaml.safe_dump(row, default_flow_style=True)}" for row in rows))
    return path


def test_a_file_says_what_the_table_says(tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_text(table_text("emulated", 8, table_of(*ROWS), {}))
    assert load_table(path).table.nodes == ROWS
    path.write_text(table_text("emulated", 8, table_of(), {}))
    assert load_table(path).table.nodes == ()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"nodes": 1}, "nodes is 1; it must be a number of at least 2"),
        ({"nodes": "two"}, "nodes is 'two'"),
        ({"up_to": 0}, "up_to is 0; it must be a number of bytes above 0"),
        ({"up_to": True}, "up_to is true"),
        ({"exchange": "ring"}, "exchange is 'ring'; it must be all_gather or all_to_all"),
        ({"chunk_bytes": 100}, "chunk_bytes is 100; it must be 0 .* or at least 16384"),
        ({"chunk_bytes": -1}, "chunk_bytes is -1"),
        ({"is_faster": 1}, "is_faster is 1; it must be true or false"),
        ({"us": "fast"}, "us is 'fast'; it must be a number of microseconds"),
        ({"chunks": 3}, "chunks"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_with_its_line(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    entries = [ROWS[0].entry(), {**ROWS[3].entry(), **change}]
    with pytest.raises(ConfigError, match=f"line .*row of nodes 2, .*{complaint}"):
        load_table(written(tmp_path, entries))


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        (
            [ROWS[1].entry(), ROWS[0].entry()],
            "row of nodes 2, .* sorted by up_to, in bytes; the one before says 1048576",
        ),
        ([ROWS[0].entry(), ROWS[0].entry()], "sorted by up_to"),
        ([[2]], "row of nodes 1, .*: it must be 'key: value' pairs"),
        ([{"nodes": 2, "up_to": 8}], "row of nodes 1, .*: it lacks exchange, chunk_bytes, is_faster"),
    ],
)
def test_lists_that_are_wrong(tmp_path: Path, rows: list[Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_table(written(tmp_path, rows))


def test_rows_of_several_numbers_of_nodes_may_alternate(tmp_path: Path) -> None:
    rows = (ROWS[0], ROWS[3], ROWS[1])
    assert load_table(written(tmp_path, [row.entry() for row in rows])).table.nodes == rows


def test_ranks_compare_what_is_chosen_by() -> None:
    digests = {
        table_of(*rows).digest() for rows in (ROWS, ROWS[:3], (ROWS[0]._replace(chunk_bytes=1 << 15), *ROWS[1:]))
    }
    assert len(digests) == 3
    assert table_of(*(row.without_figures() for row in ROWS)).digest() == table_of(*ROWS).digest()


def test_a_message_goes_by_the_first_row_that_is_large_enough() -> None:
    found = rows_for(ROWS, "a table", 2, 8)
    assert found.origin == "a table"
    sizes = (0, 1, 65536, 65537, 1 << 20, (1 << 20) + 1, 1 << 30)
    assert [ROWS.index(found.find(size)) for size in sizes] == [0, 0, 0, 1, 1, 2, 2]
    # Up to where the engine's own collective is faster.
    assert found.limit == 1 << 20
    assert rows_for(ROWS[2:], "a table", 2, 8).limit == 0
    assert rows_for(ROWS, "a table", 4, 8).limit == 1 << 20
    # A row behind one that is slower does not count.
    slower_first = (ROWS[0], ROWS[1]._replace(is_faster=False), ROWS[2]._replace(is_faster=True))
    assert rows_for(slower_first, "a table", 2, 8).limit == 65536


def test_numbers_of_nodes_without_rows_go_by_the_model() -> None:
    assert rows_for(ROWS, "a table", 3, 8).rows == general_rows(3, 8)
    assert "reasoned, not measured" in rows_for(ROWS, "a table", 3, 8).origin
    limits = {nodes: rows_for((), "", nodes, 8).limit for nodes in (2, 3, 4, 5, 8, 100)}
    assert limits == {2: 2 << 20, 3: 1 << 19, 4: 1 << 19, 5: 1 << 17, 8: 1 << 17, 100: 1 << 17}
    # Slices of 64 KiB go whole.
    for nodes, places in ((3, 4), (4, 8), (8, 2)):
        rows = rows_for((), "", nodes, places)
        assert rows.find(places << 16).exchange == WHOLE
        assert rows.find((places << 16) + 1).exchange == PIECES
    assert all(row.exchange == WHOLE for row in rows_for((), "", 2, 8).rows)


def test_emulated_nodes_take_every_path() -> None:
    for nodes in range(2, 9):
        rows = rows_for(emulated_table().nodes, "emulated", nodes, 2)
        assert rows.limit == emulated_table().max_message_bytes
        assert {row.exchange for row in rows.rows} == ({WHOLE} if nodes == 2 else {WHOLE, PIECES})
        assert {row.chunk_bytes > 0 for row in rows.rows} == {False, True}


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("places", [1, 2, 3, 8])
def test_chunks_make_up_a_message_of_slices_alike(places: int, itemsize: int) -> None:
    for count in (1, 7, 1000, 16384, 50_003):
        for chunk_bytes in (0, 16384, 40_000):
            sizes = chunks(count, chunk_bytes, places, itemsize)
            assert sum(sizes) == count
            assert min(sizes) > 0
            assert len(sizes) == 1 or max(sizes) * itemsize <= chunk_bytes
            for size in sizes[:-1]:
                assert size == sizes[0]
                assert len(set(slices(size, places, itemsize))) == 1
            assert (len(sizes) > 1) == (chunk_bytes > 0 and count > sizes[0])
