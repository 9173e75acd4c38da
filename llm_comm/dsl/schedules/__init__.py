"""Runs of programs under seeded schedules of the deterministic emulator; see docs/reference/dsl.md, "Schedules"."""

from __future__ import annotations

from llm_comm.dsl.schedules.explore import Explored, explore

__all__ = ["Explored", "explore"]
