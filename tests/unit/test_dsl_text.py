"""Programs as text and as pictures."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from llm_comm import dsl
from llm_comm.dsl import ir
from llm_comm.dsl.library import PROGRAMS, broadcast_ll, two_shot_hb, two_shot_ll

SVG = "{http://www.w3.org/2000/svg}"

TWO_SHOT = """\
  input: 2 chunks, each 1/2 of the message
  output: 2 chunks, each 1/2 of the message
  scattered: packets, 2 chunks, each 1/2 of the message
  gathered: packets, 2 chunks, each 1/2 of the message
group main:
  %0 = load input[rank+1]
  put_packets %0 to scattered[rank] of rank+1
  %1 = load input[rank]
  %2 = read_packets scattered[rank+1]
  %3 = sum %1 of rank, %2 of rank+1
  store %3 to output[rank]
  put_packets %3 to gathered[rank] of rank+1
  %4 = read_packets gathered[rank+1]
  store %4 to output[rank+1]"""


def test_two_shot_as_text() -> None:
    head, where, *lines = dsl.describe(two_shot_ll.build(2)).splitlines()
    assert head == "program two_shot_ll: all_reduce in a world of 2"
    assert where.strip().startswith(two_shot_ll.build(2).where.file)
    assert "\n".join(lines) == TWO_SHOT


def test_who_runs_a_line_and_how_far_behind() -> None:
    text = dsl.describe(two_shot_hb.build(2))
    assert "  scattered: scratch, 2 chunks, each 1/2 of the message, 3 stages\n" in text
    assert "\n  loop over pieces:\n" in text
    assert "\n    behind 2: wait for rank+1, semaphore 1\n" in text
    text = dsl.describe(broadcast_ll.build(3))
    assert text.startswith("program broadcast_ll: broadcast in a world of 3, root 0\n")
    assert "\n  only 1, 2: store " in text


def test_ports_gets_and_symmetric_tensors_as_text() -> None:
    @dsl.program("all_gather")
    def text(p: dsl.Builder) -> None:
        x, y = p.input.chunks(1, symmetric=True), p.output.chunks(p.world, symmetric=True)
        p.port_put(x[0], p.ranks[1] if p.world < 2 else p.rank + 1, y[p.rank])
        p.signal(p.rank + 1, through_port=True)
        p.wait(p.rank + 1, through_port=True)
        p.flush(p.rank + 1)
        with p.only(0):
            p.put(p.get(p.ranks[1], x[0]), p.ranks[1], y[0])

    lines = [line.strip() for line in dsl.describe(text.build(2)).splitlines()]
    assert "input: 1 chunk, each 1/2 of the message, symmetric" in lines
    assert lines[-6:] == [
        "port_put input[0] to output[rank] of rank+1",
        "signal rank+1, semaphore 0 through the port",
        "wait for rank+1, semaphore 0 through the port",
        "flush to rank+1",
        "only 0: %0 = get input[0] of rank 1",
        "only 0: put %0 to output[0] of rank 1",
    ]


def elements(svg: str, kind: str, css_class: str) -> list[ElementTree.Element]:
    return [found for found in ElementTree.fromstring(svg).iter(f"{SVG}{kind}") if found.get("class") == css_class]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_picture_has_a_lane_for_each_rank(program: dsl.ProgramDefinition) -> None:
    svg = dsl.draw(program.build(4))
    assert [lane.text for lane in elements(svg, "text", "lane")] == [f"rank {rank}" for rank in range(4)]


def test_a_picture_has_all_operations_and_who_waits_for_whom() -> None:
    built = two_shot_ll.build(3)
    svg = dsl.draw(built)
    steps = built.groups[0].steps
    boxes = elements(svg, "g", "op")
    assert len(boxes) == 3 * len(steps)
    titles = {box.findtext(f"{SVG}title") for box in boxes}
    assert titles == {f"{Path(step.where.file).name}:{step.where.line}: {step.where.text}" for step in steps}
    reads = [step for step in steps if isinstance(step, ir.ReadPackets)]
    arrows = elements(svg, "line", "arrow")
    assert len(arrows) == 3 * len(reads)
    assert all(float(arrow.attrib["x1"]) < float(arrow.attrib["x2"]) for arrow in arrows)


def test_boxes_do_not_cover_each_other() -> None:
    boxes = elements(dsl.draw(two_shot_hb.build(4), pieces=3), "g", "op")
    rects = [box.find(f"{SVG}rect") for box in boxes]
    places = [(rect.attrib["x"], rect.attrib["y"]) for rect in rects if rect is not None]
    assert len(places) == len(set(places)) == len(boxes)


def test_loops_are_drawn_for_each_piece() -> None:
    built = two_shot_hb.build(2)
    one, three = (len(elements(dsl.draw(built, pieces=pieces), "g", "op")) for pieces in (1, 3))
    assert three == 3 * one


def test_what_waits_for_ever_is_drawn_too() -> None:
    @dsl.program("broadcast")
    def stuck(p: dsl.Builder) -> None:
        x, y = p.input.chunks(1), p.output.chunks(1)
        with p.group("a<b"):
            p.wait(p.rank + 1)
            p.copy(x[0], y[0])

    svg = dsl.draw(stuck.build(2))
    rects = [box.find(f"{SVG}rect") for box in elements(svg, "g", "op")]
    assert [rect is not None and "stroke-dasharray" in rect.attrib for rect in rects] == [True] * 6
