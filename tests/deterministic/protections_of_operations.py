"""Protections of operations that go well: of lines, slots, progress, blocks and clusters."""

from __future__ import annotations

from edits import Edit
from protection import (
    AHEAD,
    FP8_SUBJECTS,
    HANGS,
    LEFT_ALONE,
    LINE,
    NOBODY_IS_MISSING,
    OPERATION,
    PLAIN_BY_SWITCH,
    RMS_NORM,
    SESSION,
    WRONG,
    WRONG_RESULT,
    Everywhere,
    Protection,
)

ROW_TILES = "csrc/algorithms/all_reduce_add_rms_norm/row_tiles.cuh"
#: Plain lines, ordered by signals.
NO_LL = {rf".*_hb|.*port|.*_ce|{PLAIN_BY_SWITCH}": "it sends no sentinel lines"}
NO_SLOT = {rf".*_hb|.*port|.*_ce|{PLAIN_BY_SWITCH}": "it uses no slot"}
ONE_SLOT = {
    r".*rms_norm/two_shot_ld_reduce": "a peer has heard of a rank's tile of the operation before it stores there"
}
ONE_BLOCK = {r".*/direct_ce": "its grids have one block"}

OF_OPERATIONS = (
    # ---- Lines ----
    Protection(
        "sentinel_check",
        "a line is taken only when it has arrived",
        (Edit(LINE, "!= kSentinel;", "!= kSentinel || WITHOUT;"),),
        failure=f"{WRONG_RESULT}|{NOBODY_IS_MISSING}",  # of bytes: it waits for a mask that nobody sends
        exempt=NO_LL,
    ),
    Protection(
        "all_words_checked",
        "all four words of a sentinel line are looked at",
        (Edit(LINE, "(low > high ? low : high)", "(WITHOUT ? line.word[0] : low > high ? low : high)"),),
        failure=WRONG_RESULT,
        exempt=NO_LL,
    ),
    Protection(
        "sentinel_remap",
        "a word equal to the sentinel is sent as the NaN beside it",
        (Edit(LINE, "line.word[i] < kSentinel - 1 ?", "WITHOUT || line.word[i] < kSentinel - 1 ?"),),
        exempt={"all_reduce_add_rms_norm/.*": "its schedules draw numbers only", **NO_LL},
    ),
    # ---- Operations and their slots ----
    Protection(
        "second_slot",
        "operations alternate between two slots",
        (
            Edit(
                OPERATION,
                "return (static_cast<uint32_t>(arrivals_) & kArrivalsPerOperation) != 0;",
                "return !WITHOUT && (static_cast<uint32_t>(arrivals_) & kArrivalsPerOperation) != 0;",
            ),
        ),
        exempt={**NO_SLOT, **ONE_SLOT},
    ),
    Protection(
        "re_arm",
        "R2: a received line is reset to the sentinel",
        Everywhere((r"session\.reset(_of)?\(", r"if (!WITHOUT) session.reset\1(")),
    ),
    Protection(
        "re_arm_after_receive",
        "a line is reset to the sentinel after it has been received, not before",
        (
            Edit(
                SESSION,
                "return receive_line(line, op_, sender(0), phase);",
                "if (WITHOUT) reset_line(const_cast<Line*>(line));\n return receive_line(line, op_, sender(0), phase);",
            ),
            Edit(
                SESSION,
                "lines[i] = is_wanted[i] ? sentinel_line() : Line{};",
                "{ if (WITHOUT && is_wanted[i]) reset_line(incoming_[i] + index);\n"
                " lines[i] = is_wanted[i] ? sentinel_line() : Line{}; }",
            ),
            Edit(SESSION, "{ reset_line(line); }", "{ if (!WITHOUT) reset_line(line); }"),
        ),
    ),
    Protection(
        "greeting",
        "R1: a rank ends an operation only when every rank has begun it, also where that does not follow from the data",
        Everywhere((r"greeting = 1;", "greeting = WITHOUT ? 0 : 1;")),
        exempt={"all_to_all/.*": "its shards have one size, and none is empty"},
    ),
    Protection(
        "grid_end_performs",
        "a grid's own lines are reset for peers too before the next grid passes grid_dependency_wait()",
        (),
        options=("--unordered-grids",),
        budget=5000,
        exempt={
            "all_reduce_add_rms_norm/.*": "their grids last long: noticed once, after 5,624 schedules",
            **NO_SLOT,
        },
    ),
    Protection(
        "dependency_wait",
        "a grid waits for the grids before it",
        (Edit(SESSION, "grid_dependency_wait_after(", "if (!WITHOUT) grid_dependency_wait_after("),),
        failure=f"{WRONG}|{AHEAD}",  # grids that do not wait let further ones come
    ),
    Protection(
        "one_number_per_operation",
        "the blocks of an operation advance its number once, together",
        (
            Edit(
                OPERATION,
                "block_index() == 0 ? kArrivals",
                "WITHOUT ? kArrivalsPerOperation : block_index() == 0 ? kArrivals",
            ),
        ),
        exempt=ONE_BLOCK,
    ),
    Protection(
        "arrive_last",
        "a block arrives after all its threads have begun",
        (
            Edit(
                SESSION,
                "{ return op_.begin(state); }",
                "{ const bool begun = op_.begin(state); if (WITHOUT && thread_index() == 0) op_.arrive();\n"
                " return begun; }",
            ),
            Edit(SESSION, "arrive() const { op_.arrive(); }", "arrive() const { if (!WITHOUT) op_.arrive(); }"),
        ),
    ),
    Protection(
        "header_arrived",
        "a token without a row has a header, which is taken only when it has arrived",
        Everywhere((r"has_arrived\(found\[1\]\) && ", "(WITHOUT || has_arrived(found[1])) && ")),
        failure=WRONG_RESULT,
    ),
    Protection(
        "expected_rows",
        "rows of ranks that have none of a token's experts are not summed",
        Everywhere((r"if \(summand\.is_there == 0\)", "if (!WITHOUT && summand.is_there == 0)")),
        failure=WRONG_RESULT,
    ),
    # ---- Progress ----
    Protection(
        "tickets",
        "P2: blocks of a grid that do not all run at once are numbered as they start",
        (
            Edit(
                OPERATION,
                "comm.takes_tickets != 0 ? take_ticket(state_of(comm), 1)",
                "comm.takes_tickets != 0 && !WITHOUT ? take_ticket(state_of(comm), 1)",
            ),
            Edit(
                OPERATION,
                "comm.takes_tickets != 0 ? take_ticket(state_of(comm), cluster_blocks)",
                "comm.takes_tickets != 0 && !WITHOUT ? take_ticket(state_of(comm), cluster_blocks)",
            ),
        ),
        failure=NOBODY_IS_MISSING,
        exempt=ONE_BLOCK,
    ),
    Protection(
        "ticket_before_trigger",
        "a block takes its ticket before it lets the next grid be launched",
        (
            Edit(
                OPERATION,
                "auto* const ticket = shared_memory<uint32_t>();",
                "auto* const ticket = shared_memory<uint32_t>();\n if (WITHOUT) grid_dependency_trigger();",
            ),
        ),
        budget=20_000,
        exempt={
            "all_reduce_add_rms_norm/.*": "numbers beyond the grid are those of rows that do not exist: it crashes",
            r".*_ce": "copies come behind its grids of several blocks, which wait for them to end",
        },
    ),
    Protection(
        "trigger_after_wait",
        "one grid of a stream at most comes ahead of the one that runs",
        (Edit(SESSION, "uint64_t slots = 0;", "uint64_t slots = 0; if (WITHOUT) grid_dependency_trigger();"),),
        failure=AHEAD,
    ),
    # ---- In blocks and clusters ----
    Protection(
        "lines_complete",
        "what a block has received, or whether it has begun, is used after all its threads are there",
        Everywhere(
            (r"block_sync\(\);(?!  // a thread that)(?! if \([^;{]*\*incomplete [!=]=)", "if (!WITHOUT) block_sync();")
        ),
        exempt={
            "all_reduce/port": "too few schedules show one of its two barriers; the other one has a control of its own"
        },
    ),
    Protection(
        "sums_complete",
        "sums are sent after all threads of the block have made theirs",
        Everywhere((r"block_sync\(\);(?= if \([^;{]*\*incomplete [!=]=)", "if (!WITHOUT) block_sync();")),
        failure=WRONG_RESULT,
    ),
    Protection(
        "contributions_twice",
        "the next tile does not overwrite what slow threads still sum",
        Everywhere((r"parity \^= 1;", "parity ^= WITHOUT ? 0 : 1;")),
        budget=20_000,
        failure=WRONG_RESULT,
    ),
    Protection(
        "cluster_meets",
        "blocks of a cluster deliver only once all of them have set up what counts deliveries",
        Everywhere((r"norm\.wait_for_cluster\(\);", "if (!WITHOUT) norm.wait_for_cluster();")),
        budget=20_000,
        failure=HANGS,
    ),
    Protection(
        "two_sets",
        "rows alternate between two sets of partial sums",
        (
            Edit(RMS_NORM, "return rows_ % 2;", "return WITHOUT ? 0 : rows_ % 2;"),
            Edit(RMS_NORM, "rows_ / 2 % 2", "(WITHOUT ? rows_ : rows_ / 2) % 2"),
        ),
        budget=20_000,
        failure=WRONG_RESULT,
        exempt={
            ".*rms_norm/two_shot_ld_reduce": "its blocks wait for others before each tile: too few schedules show it",
            ".*rms_norm/two_shot_fp8_hb": "it norms as two_shot_hb does, of which one schedule in hundreds shows it",
        },
    ),
    Protection(
        "expects_again",
        "a set of partial sums counts deliveries of the row after next too",
        (
            Edit(
                RMS_NORM,
                "if (!SingleRow && leads()) expect(set);",
                "if (!WITHOUT && !SingleRow && leads()) expect(set);",
            ),
        ),
        failure=HANGS,
        fp8=True,
    ),
    Protection(
        "sets_of_magnitudes",
        "the largest magnitudes of a row meet apart from its sums of squares",
        (
            Edit(RMS_NORM, "contribute(2 + set_of_row()", "contribute((WITHOUT ? 0 : 2) + set_of_row()"),
            Edit(RMS_NORM, "combine_partials(2 + set_of_row()", "combine_partials((WITHOUT ? 0 : 2) + set_of_row()"),
        ),
        failure=f"{WRONG_RESULT}|{HANGS}|{LEFT_ALONE}",
        subjects=FP8_SUBJECTS,
    ),
    Protection(
        "four_chunks_of_a_warp",
        "a warp delivers four chunks at once only where it holds four in a row",
        (Edit(RMS_NORM, "if (fills_warps_ &&", "if ((WITHOUT || fills_warps_) &&"),),
        failure=f"{WRONG_RESULT}|{HANGS}|{LEFT_ALONE}",  # too much or too little is counted
        exempt={
            "all_reduce_add_rms_norm/one_shot": "its warps hold two chunks",
            r"all_reduce_add_rms_norm/.*_hb": "it has no clusters, to whose blocks a warp delivers four chunks",
        },
    ),
    Protection(
        "warps_without_values",
        "a warp without values of a row, which delivers nothing, does not wait for its sum of squares",
        (
            Edit(
                ROW_TILES,
                "if (team.thread / kWarpThreads * kWarpThreads >= args.row_lines) return;",
                "if (!WITHOUT && team.thread / kWarpThreads * kWarpThreads >= args.row_lines) return;",
            ),
        ),
        budget=20_000,
        failure=f"{WRONG_RESULT}|{HANGS}",
    ),
    Protection(
        "nobody_leaves_alone",
        "a block stays as long as others of its cluster deliver to it",
        Everywhere((r"if \(norms \|\| ([^{]*)\) \{", r"if (norms || (!WITHOUT && (\1))) {")),
        budget=20_000,
        failure=LEFT_ALONE,
    ),
)
