"""Faults to plant in the machine code of AMD GPUs, in assembly text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A fault to plant in assembly text."""

    name: str
    algorithm: str  # as in the registry
    plant: Callable[[str], str]
    failure: str  # regular expression of what schedules find


_ASSEMBLY_OF_BLOCK_SYNC = "\t;;#ASMSTART\n\ts_waitcnt vmcnt\\(0\\) lgkmcnt\\(0\\)\n\t;;#ASMEND\n"
_WRONG = "element|expired|not reset"
_PENDING = "pending register"


def _replace(pattern: str, by: str | Callable[[re.Match[str]], str]) -> Callable[[str], str]:
    """Return a function that replaces all matches in a text, of which there must be some."""

    def replace(text: str) -> str:
        replaced, count = re.subn(pattern, by, text)
        if count == 0:
            raise ValueError(f"nothing matches {pattern}")
        return replaced

    return replace


def _wait_ahead_of_write_back(match: re.Match[str]) -> str:
    """Move all waits between a write-back and the store of a signal to before the write-back."""
    rest = re.sub(r"\ts_waitcnt .*\n", "", match[1])
    return f"\ts_waitcnt vmcnt(0) lgkmcnt(0)\n\tbuffer_wbl2 sc0 sc1\n{rest}"


def _invalidate_ahead_of_load(text: str) -> str:
    """Invalidate the caches before each load of a signal, and not after it."""
    without = _replace(r"\tbuffer_inv sc0 sc1\n", "")(text)
    return _replace(r"(\tglobal_load_dwordx2 .*off sc0 sc1\n)", r"\tbuffer_inv sc0 sc1\n\1")(without)


def _swap_ranks(text: str) -> str:
    """Swap the second and the third of the values that a thread adds to those of rank 0 and 1."""
    waited = re.sub(r"s_waitcnt lgkmcnt\(\d+\)", "s_waitcnt lgkmcnt(0)", text)
    shifted = r"(\tv_lshlrev_b32_e32 v\d+, 16, )(v\d+)\n"
    between = r"((?:\ts_waitcnt lgkmcnt\(0\)\n|\tv_add_f32_e32 .*\n)+)"
    return _replace(shifted + between + shifted, r"\1\5\n\3\4\2\n")(waited)


def _without_waits_for_loads(text: str) -> str:
    """Remove the waits that the compiler has inserted before uses of loaded values."""
    return _replace(r"(?<!;;#ASMSTART\n)\ts_waitcnt vmcnt\(\d+\)\n(?!\tbuffer_inv)", "")(text)


_STORE = r"global_store_dwordx4 (v\[\d+:\d+\]), v\[(\d+):(\d+)\], off sc0 sc1"
FAULTS: Sequence[Fault] = (
    Fault("add_is_subtract", "one_shot", _replace("v_add_f32_e32", "v_sub_f32_e32"), _WRONG),
    Fault("ranks_are_added_in_another_order", "one_shot", _swap_ranks, "element"),
    Fault(
        "lower_half_of_a_line_is_stored",
        "one_shot",
        _replace(_STORE, lambda m: f"global_store_dwordx2 {m[1]}, v[{m[2]}:{int(m[2]) + 1}], off sc0 sc1"),
        "expired",
    ),
    Fault(
        "halves_of_a_line_are_alike",
        "two_shot",
        _replace(
            rf"\t{_STORE}\n",
            lambda m: "".join(
                f"\tglobal_store_dwordx2 {m[1]}, v[{m[2]}:{int(m[2]) + 1}], off{offset} sc0 sc1\n"
                for offset in ("", " offset:8")
            ),
        ),
        _WRONG,
    ),
    Fault(
        "lines_are_stored_to_caches",
        "one_shot",
        _replace(_STORE, lambda m: m[0].removesuffix(" sc0 sc1")),
        "past the caches",
    ),
    Fault(
        "lines_are_polled_in_caches",
        "two_shot",
        _replace(r"(\tglobal_load_dwordx2 .*) sc0 sc1\n", r"\1\n"),
        "past the caches",
    ),
    Fault(
        "no_reset_of_a_line",
        "one_shot",
        _replace(
            r"(\tv_mov_b32_e32 v\d+, -1\n(?:\tv_mov_b32_e32 v\d+, v\d+\n){3}\t;;#ASMSTART\n)"
            r"\tglobal_store_dwordx4 .*\n",
            r"\1",
        ),
        "not reset|element|expired",
    ),
    Fault("no_waits_for_loads", "one_shot", _without_waits_for_loads, _PENDING),
    Fault("no_waits_for_loads", "two_shot", _without_waits_for_loads, _PENDING),
    Fault("no_waits_for_local_memory", "two_shot", _replace(r"\ts_waitcnt lgkmcnt\(\d+\)\n", ""), _PENDING),
    Fault("no_write_back", "two_shot_hb", _replace(r"\tbuffer_wbl2 sc0 sc1\n", ""), _WRONG),
    Fault(
        "wait_ahead_of_write_back",
        "two_shot_hb",
        _replace(r"\tbuffer_wbl2 sc0 sc1\n((?:.*\n){1,14}?\tglobal_store_dwordx2 )", _wait_ahead_of_write_back),
        _WRONG,
    ),
    Fault("no_wait_before_barrier", "two_shot_hb", _replace(_ASSEMBLY_OF_BLOCK_SYNC, ""), _WRONG),
    Fault("no_invalidate", "two_shot_hb", _replace(r"\tbuffer_inv sc0 sc1\n", ""), _WRONG),
    Fault("invalidate_ahead_of_the_load", "two_shot_hb", _invalidate_ahead_of_load, _WRONG),
    Fault(
        "signal_is_loaded_through_the_caches",
        "two_shot_hb",
        _replace(r"(\tglobal_load_dwordx2 .*off) sc0 sc1\n", r"\1\n"),
        _WRONG,
    ),
)
