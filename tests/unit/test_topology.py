"""Which ranks are on which node, from what they say of themselves."""

from __future__ import annotations

import re
from typing import Any

import pytest
from harness import names_of_world, unnamed

from llm_comm import _core
from llm_comm.errors import RendezvousError
from llm_comm.nodes.topology import Topology, places_of, topology_of


def said(
    *machines: str, names: dict[int, str] | None = None, domains: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Return the answers of ranks on these machines.

    Args:
        machines: Of each rank.
        names: Their option ``node``, by rank.
        domains: NVLink domains, by machine.
    """
    names, domains = names or {}, domains or {}
    return [
        {"host": f"host-{machine}", "boot_id": machine, "node": names.get(rank), "domain": domains.get(machine, "")}
        for rank, machine in enumerate(machines)
    ]


def place_of(everyone: list[dict[str, Any]], rank: int) -> Topology | None:
    places = places_of(everyone, [each["domain"] for each in everyone])
    return topology_of(everyone, places, rank, names_of_world(len(everyone)))


def placed(everyone: list[dict[str, Any]], rank: int) -> Topology:
    found = place_of(everyone, rank)
    assert found is not None
    return found


def test_one_machine_is_no_group_of_nodes() -> None:
    assert place_of(said("a"), 0) is None
    assert place_of(said(*"aaaaaaaa"), 3) is None
    assert place_of(said("a", "a", names={0: "x", 1: "x"}), 0) is None


@pytest.mark.parametrize(
    ("machines", "nodes"),
    [
        ("aabb", ((0, 1), (2, 3))),
        ("abab", ((0, 2), (1, 3))),
        ("bbaa", ((0, 1), (2, 3))),  # in the order of their first ranks
        ("abccba", ((0, 5), (1, 4), (2, 3))),
        ("abc", ((0,), (1,), (2,))),
        ("a" * 8 + "b" * 8, (tuple(range(8)), tuple(range(8, 16)))),
    ],
)
def test_ranks_of_a_machine_are_a_node(machines: str, nodes: tuple[tuple[int, ...], ...]) -> None:
    everyone = said(*machines)
    for rank in range(len(machines)):
        found = placed(everyone, rank)
        assert found.nodes == nodes
        assert found.nodes[found.node][found.local_rank] == rank
        assert found.ranks_here == nodes[found.node]
        assert found.partners == tuple(ranks[found.local_rank] for ranks in nodes)
        assert rank in found.partners
    assert placed(everyone, 0).hosts == tuple(f"host-{machines[ranks[0]]}" for ranks in nodes)


def test_names_divide_a_machine() -> None:
    found = placed(said(*"aaaa", names=dict(enumerate(("x", "y", "x", "y")))), 2)
    assert found.nodes == ((0, 2), (1, 3))
    assert found.hosts == ("x", "y")
    assert found.names.full(3) == "rank 3 (global rank 3, node 1 named y)"


@pytest.mark.parametrize(
    ("everyone", "words"),
    [
        (said(*"aab"), r"the ranks are on 2 nodes, and not as many on each: rank 0: host-a \(boot id a\), rank 1: "),
        (said(*"a" * 17), "^group WORLD has 17 ranks; llm_comm serves up to 16"),
        (said(*"a" * 17, *"b" * 17), r"^host-a \(boot id a\) has 17 ranks; llm_comm serves up to 16"),
        (
            said("a", "a", names={1: "x"}),
            r"on some ranks \(rank 1: 'x'\), but not on rank 0: set LLM_COMM_NODE on all",
        ),
        (
            said(*"abab", names=dict(enumerate("xyyx"))),
            r"option node 'x' are on different machines: rank 0: host-a \(node 'x'\), rank 3: host-b",
        ),
    ],
    ids=["uneven", "too many of a machine", "too many of a node", "a name on one rank", "a name on two machines"],
)
def test_what_is_declined_says_why(everyone: list[dict[str, Any]], words: str) -> None:
    for rank in range(len(everyone)):
        with pytest.raises(RendezvousError) as caught:
            place_of(everyone, rank)
        assert re.search(words, unnamed(str(caught.value)))


def test_hosts_of_a_domain_are_one_node() -> None:
    assert place_of(said(*"aabb", domains={"a": "x/1", "b": "x/1"}), 0) is None
    assert placed(said(*"aabb", domains={"a": "x/1", "b": "x/2"}), 0).nodes == ((0, 1), (2, 3))
    assert placed(said(*"aabbccdd", domains=dict(zip("abcd", ("x/1", "x/1", "y/1", "y/1"), strict=True))), 0).nodes == (
        (0, 1, 2, 3),
        (4, 5, 6, 7),
    )


def test_a_domain_does_not_join_hosts_where_it_cannot() -> None:
    most = _core.max_world_size
    too_many = said(*"a" * most, *"b" * most, domains={"a": "x/1", "b": "x/1"})
    assert len(placed(too_many, 0).nodes) == 2
    named = said(*"aabb", names=dict(enumerate("ppqq")), domains={"a": "x/1", "b": "x/1"})
    assert len(placed(named, 0).nodes) == 2
    some = said(*"aabb", domains={"a": "x/1", "b": "x/1"})
    some[3]["domain"] = ""
    assert len(placed(some, 0).nodes) == 2
    # Hosts of two domains, of which one host has a rank of each.
    mixed = said(*"aabb", domains={"a": "x/1", "b": "x/1"})
    mixed[1]["domain"] = mixed[2]["domain"] = "y/1"
    assert len(placed(mixed, 0).nodes) == 2


def test_hosts_are_nodes_where_domains_would_be_uneven() -> None:
    """Groups that are served without domains are served with them."""
    for domains in ({"a": "x/1", "b": "x/1"}, {"a": "x/1", "b": "x/1", "c": "y/1"}):
        assert placed(said(*"aabbcc", domains=domains), 0).nodes == ((0, 1), (2, 3), (4, 5))
    of_two = dict(zip("abcde", ("x/1", "x/1", "x/1", "y/1", "y/1"), strict=True))
    assert len(placed(said(*"aabbccddee", domains=of_two), 0).nodes) == 5
    alone = {"a": "x/1", "b": "x/1", "c": "y/1"}
    assert len(placed(said(*"abcc", domains=alone, names=dict(enumerate("pqrs"))), 0).nodes) == 4
