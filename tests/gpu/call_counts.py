"""What ``Communicator.stats`` counts is what was called: eager calls, calls that graphs capture, and replays.

    torchrun --standalone --nproc-per-node 2 tests/gpu/call_counts.py

Emulated devices have no graphs: there a replay makes the calls again, and they count as eager ones.
"""

from __future__ import annotations

import torch
from common import Recording, Session, parser, report, run, session

from llm_comm import Communicator, Config

SIZES = (1, 4096, 4096, 100_000)
HIDDEN, ROWS = 512, 3
EAGER_ROUNDS, REPLAYS = 3, 5
#: Of one round.
CALLS = {"all_reduce": len(SIZES), "all_reduce_add_rms_norm": 1, "all_gather": 1, "linear": 1}


def check(ranks: Session) -> dict[str, int]:
    """Raises AssertionError unless the numbers are right; returns some of them."""
    inputs = [torch.ones(size, dtype=torch.bfloat16, device=ranks.device) for size in SIZES]
    rows = torch.ones(ROWS, HIDDEN, dtype=torch.bfloat16, device=ranks.device)
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=ranks.device)
    square = torch.ones(HIDDEN, HIDDEN, dtype=torch.bfloat16, device=ranks.device)
    nbytes = {
        "all_reduce": sum(x.nbytes for x in inputs),
        "all_reduce_add_rms_norm": rows.nbytes,
        "all_gather": rows.nbytes,
        "linear": rows.nbytes,
    }
    with Communicator(ranks.group, ranks.device, Config.load(timeout_s=30.0)) as communicator:

        def call_all() -> None:
            for x in inputs:
                communicator.all_reduce(x)
            communicator.all_reduce_add_rms_norm(rows, None, weight, 1e-5)
            communicator.all_gather(rows)
            communicator.linear(rows, square)

        for _ in range(EAGER_ROUNDS):
            call_all()
        launches_of_round, rest = divmod(communicator.stats().progress.launches, EAGER_ROUNDS)
        assert rest == 0
        recording = Recording(call_all, ranks.device)
        stats = communicator.stats()
        captured_rounds = 1 if ranks.on_gpu else 0
        expected = {
            name: (
                *(EAGER_ROUNDS * count, EAGER_ROUNDS * nbytes[name]),
                *(captured_rounds * count, captured_rounds * nbytes[name]),
            )
            for name, count in CALLS.items()
        }
        assert stats.by_operation() == expected, (stats.by_operation(), expected)
        launched = (EAGER_ROUNDS + captured_rounds) * launches_of_round
        assert stats.progress.launches == launched, (stats.progress, launched)

        for _ in range(REPLAYS):
            recording.replay()
        call_all()
        ranks.synchronize()
        communicator.check()
        progress = communicator.stats().progress
        ended = (EAGER_ROUNDS + REPLAYS + 1) * launches_of_round
        assert progress.operations_ended == ended, (progress, ended)
        ranks.barrier()
    return {"launches": progress.launches, "operations_ended": ended}


def main() -> int:
    arguments = parser((__doc__ or "").partition("\n")[0]).parse_args()
    with session(arguments) as ranks:
        figures = check(ranks)
        if ranks.rank == 0:
            table = [("launches", "ended"), (str(figures["launches"]), str(figures["operations_ended"]))]
            report("call_counts", ranks.device.type, ranks.world, table, figures, arguments.json)
    return 0


if __name__ == "__main__":
    run(main)
