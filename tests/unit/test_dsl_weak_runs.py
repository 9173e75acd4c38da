"""What ``dsl.check`` says, held against runs on a machine that reorders memory accesses at random.

The machine knows nothing of vector clocks. Stores wait in a buffer of each group and get out in any order, loads may
see what was there since the group's last wait, proxies copy when they like, ranks are now fast and now slow, and
callers change their tensors as soon as they may.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator

import pytest
from test_dsl_checks import BROKEN, CORRECT, WORLDS, Broken

from llm_comm import dsl
from llm_comm.dsl import Fault, ir
from llm_comm.dsl.checks.trial import Act, Address, Trial
from llm_comm.dsl.ir import Operation, Space

CALLS = 4
#: Inputs that a chunk is the sum of: (rank, chunk, piece, call). None: nothing that an input has.
Data = tuple[tuple[int, int, int, int], ...] | None
PUT, PACKETS, RESET = "put", "packets", "reset"


class WrongError(Exception):
    """A run has hung, lost something, or given a wrong result."""


class Machine:
    """Runs a program once."""

    def __init__(self, program: ir.Program, pieces: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.program = program
        self.world = program.world
        self.trial = Trial(program, pieces)
        actors = range(len(self.trial.actors))
        self.now = 0
        self.memory: dict[Address, list[tuple[int, Data]]] = defaultdict(lambda: [(0, None)])
        self.packets: dict[Address, tuple[Data] | None] = defaultdict(lambda: None)
        self.buffers: list[list[tuple[str, Address, Data]]] = [[] for _ in actors]
        self.proxies: dict[tuple[int, int], list[list]] = defaultdict(list)
        self.signals: dict[tuple[int, int, int, bool], int] = defaultdict(int)
        self.values: list[dict[int, list[Data]]] = [{} for _ in actors]
        self.position = [0 for _ in actors]
        self.last_wait = [0 for _ in actors]
        self.seen: list[dict[Address, int]] = [{} for _ in actors]
        self.call = [0] * self.world
        self.between: dict[int, dict[Address, int]] = {}  # of a rank between calls: how often its output was written
        for rank in range(self.world):
            self.begin(rank)

    # ---- Memory ------------------------------------------------------------------------------------------------------

    def write(self, address: Address, data: Data) -> None:
        self.now += 1
        self.memory[address].append((self.now, data))

    def load(self, actor: int, address: Address) -> Data:
        for kind, written, data in reversed(self.buffers[actor]):
            if kind == PUT and written == address:
                return data
        history = self.memory[address]
        oldest = max(i for i, (time, _) in enumerate(history) if time <= self.last_wait[actor])
        version = self.random.randint(max(oldest, self.seen[actor].get(address, 0)), len(history) - 1)
        self.seen[actor][address] = version
        return history[version][1]

    def let_out(self, actor: int) -> None:
        """One of the stores that wait, but not one before another to the same address."""
        buffer = self.buffers[actor]
        first = {address: i for i, (_, address, _) in reversed(list(enumerate(buffer)))}
        kind, address, data = buffer.pop(self.random.choice(sorted(first.values())))
        if kind == PUT:
            self.write(address, data)
            self.seen[actor][address] = len(self.memory[address]) - 1
        elif kind == RESET:
            self.packets[address] = None
        elif self.packets[address] is not None:
            raise WrongError(f"packets in {address} are overwritten")
        else:
            self.packets[address] = (data,)

    def let_all_out(self, actor: int) -> None:
        while self.buffers[actor]:
            self.let_out(actor)

    def run_proxy(self, key: tuple[int, int]) -> bool:
        """A copy reads its source, possibly before earlier ones have written; or the first request is done."""
        requests = self.proxies[key]
        unread = next((request for request in requests if request[0] == PUT and len(request) == 3), None)
        if unread is not None and (unread is requests[0] or self.random.random() < 0.5):
            unread.append(self.memory[unread[1]][-1][1])
        elif requests:
            kind, *request = requests.pop(0)
            if kind == PUT:
                self.write(request[1], request[2])
            else:
                self.signals[request[0]] += 1
        else:
            return False
        return True

    # ---- Calls -------------------------------------------------------------------------------------------------------

    def groups_of(self, rank: int) -> range:
        groups = len(self.program.groups)
        return range(rank * groups, (rank + 1) * groups)

    def begin(self, rank: int) -> None:
        for index, piece, address in self.trial.tensor_addresses(Space.INPUT, rank):
            self.write(address, ((rank, index, piece, self.call[rank]),))
        for actor in self.groups_of(rank):
            self.position[actor], self.last_wait[actor], self.seen[actor] = 0, self.now, {}

    def end(self, rank: int) -> bool:
        """The call ends on a rank: its result is right, and the caller changes both tensors."""
        actors = self.groups_of(rank)
        if self.call[rank] == CALLS or any(self.position[a] < len(self.trial.acts[a]) for a in actors):
            return False
        for actor in actors:
            self.let_all_out(actor)
        for index, piece, address in self.trial.tensor_addresses(Space.OUTPUT, rank):
            if self.memory[address][-1][1] != expected(self.program, rank, index, piece, self.call[rank]):
                raise WrongError(f"{address} of rank {rank} holds {self.memory[address][-1][1]}")
        for space in (Space.INPUT, Space.OUTPUT):
            for _, _, address in self.trial.tensor_addresses(space, rank):
                self.write(address, None)
        outputs = self.trial.tensor_addresses(Space.OUTPUT, rank)
        self.between[rank] = {address: len(self.memory[address]) for _, _, address in outputs}
        self.call[rank] += 1
        return True

    def go_on(self, rank: int) -> None:
        if any(len(self.memory[address]) != times for address, times in self.between.pop(rank).items()):
            raise WrongError(f"the output of rank {rank} is written between calls")
        if self.call[rank] < CALLS:
            self.begin(rank)

    # ---- Operations --------------------------------------------------------------------------------------------------

    def step(self, actor: int) -> bool:
        rank = self.trial.actors[actor][0]
        acts = self.trial.acts[actor]
        if rank in self.between or self.call[rank] == CALLS or self.position[actor] == len(acts):
            return False
        if not self.run_act(actor, rank, acts[self.position[actor]]):
            return False
        self.position[actor] += 1
        return True

    def run_act(self, actor: int, rank: int, act: Act) -> bool:
        op, values, buffer = act.op, self.values[actor], self.buffers[actor]
        peer = getattr(op, "peer", dsl.Relative(0)).on(rank, self.world)

        def addresses(owner: int, chunk: ir.Chunk) -> list[Address]:
            return [address for _, address in self.trial.addresses(act, rank, owner, chunk, self.call[rank])]

        if isinstance(op, ir.Load | ir.Get):
            values[op.result.number] = [self.load(actor, address) for address in addresses(peer, op.source)]
        elif isinstance(op, ir.Sum):
            of_pieces = zip(*(values[value.number] for _, value in op.operands), strict=True)
            values[op.result.number] = [add(piece) for piece in of_pieces]
        elif isinstance(op, ir.Store | ir.Put | ir.PutPackets):
            kind = PACKETS if isinstance(op, ir.PutPackets) else PUT
            data = values[op.value.number]
            buffer += [(kind, *pair) for pair in zip(addresses(peer, op.target), data, strict=True)]
        elif isinstance(op, ir.ReadPackets):
            sources = addresses(rank, op.source)
            if any(kind == RESET and address in sources for kind, address, _ in buffer):
                self.let_out(actor)
                return False
            found = [self.packets[address] for address in sources]
            values[op.result.number] = [data[0] for data in found if data is not None]
            if len(values[op.result.number]) < len(sources):
                return False
            buffer += [(RESET, address, None) for address in sources]
        elif isinstance(op, ir.PortPut):
            self.let_all_out(actor)
            pairs = zip(addresses(rank, op.source), addresses(peer, op.target), strict=True)
            self.proxies[actor, peer] += [[PUT, *pair] for pair in pairs]
        elif isinstance(op, ir.Signal):
            self.let_all_out(actor)
            key = (rank, peer, op.semaphore, op.through_port)
            if op.through_port:
                self.proxies[actor, peer].append(["signal", key])
            else:
                self.signals[key] += 1
        elif isinstance(op, ir.Wait):
            key = (peer, rank, op.semaphore, op.through_port)
            if not self.signals[key]:
                return False
            self.signals[key] -= 1
            self.last_wait[actor] = self.now
        else:
            assert isinstance(op, ir.Flush)
            return all(request[0] != PUT or len(request) > 3 for request in self.proxies[actor, peer])
        return True

    # ---- The whole ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        actors = range(len(self.trial.actors))
        speeds = [1.0 for _ in actors]
        slowness = self.random.choice([0.002, 0.02, 0.1])  # of stores and of proxies
        idle = 0
        while self.between or any(call < CALLS for call in self.call):
            if self.random.random() < 0.01:
                speeds = [self.random.choice([0.02, 1, 1, 1, 5]) for _ in actors]
            actor = self.random.choices(actors, speeds)[0]
            idle = 0 if self.turn(actor, slowness) else idle + 1
            if idle > 60 * len(actors):
                if not any([*map(self.force, actors)]):
                    raise WrongError("nobody gets on")
                idle = 0
        for actor in actors:
            self.let_all_out(actor)
        if any(self.signals.values()) or any(data is not None for data in self.packets.values()):
            raise WrongError("signals or packets are left over")

    def turn(self, actor: int, slowness: float) -> bool:
        rank = self.trial.actors[actor][0]
        if self.buffers[actor] and self.random.random() < slowness:
            self.let_out(actor)
            return True
        if self.proxies and self.random.random() < slowness:
            return self.run_proxy(self.random.choice(list(self.proxies)))
        if rank in self.between:
            if self.random.random() < 0.2:
                self.go_on(rank)
            return True
        return self.step(actor) or self.end(rank)

    def force(self, actor: int) -> bool:
        """All that waits for nobody happens. Whether that was anything."""
        rank = self.trial.actors[actor][0]
        moved = bool(self.buffers[actor]) or rank in self.between
        self.let_all_out(actor)
        for key in list(self.proxies):
            while self.run_proxy(key):
                moved = True
        if rank in self.between:
            self.go_on(rank)
        return self.step(actor) or self.end(rank) or moved


def add(operands: tuple[Data, ...]) -> Data:
    known = [data for data in operands if data is not None]
    return tuple(sorted(sum(known, ()))) if len(known) == len(operands) else None


def expected(program: ir.Program, rank: int, index: int, piece: int, call: int) -> Data:
    chunks = next(buffer.chunks for buffer in program.buffers if buffer.space is Space.OUTPUT)
    everybody, share = range(program.world), chunks // program.world
    sources = {
        Operation.ALL_REDUCE: lambda: [(other, index) for other in everybody],
        Operation.REDUCE_SCATTER: lambda: [(other, rank * chunks + index) for other in everybody],
        Operation.ALL_GATHER: lambda: [divmod(index, share)],
        Operation.ALL_TO_ALL: lambda: [(index // share, rank * share + index % share)],
        Operation.BROADCAST: lambda: [(program.root, index)],
    }
    return tuple((other, chunk, piece, call) for other, chunk in sources[program.operation]())


def what_goes_wrong(program: ir.Program, runs: int) -> Iterator[str]:
    has_loop = any(isinstance(step, ir.Loop) for group in program.groups for step in group.steps)
    for seed in range(runs):
        try:
            Machine(program, (1, 2, 4, 7)[seed % 4] if has_loop else 1, seed).run()
        except WrongError as error:
            yield f"run {seed}: {error}"


@pytest.mark.parametrize("program", CORRECT, ids=lambda program: program.name)
@pytest.mark.parametrize("world", [2, 4])
def test_what_is_accepted_goes_right(program: dsl.ProgramDefinition, world: int) -> None:
    assert world in WORLDS.get(program.name, range(2, 9))
    assert list(what_goes_wrong(program.build(world), runs=8)) == []


#: The machine gives each sum exactly, has calls of one size, and does not look at what nobody reads.
UNSEEN = {
    "a_proxy_outlives_the_call",
    "labels_are_mixed_up",
    "ranks_add_up_in_different_order",
    "ranks_that_receive_do_not_hear_of_each_other",
}


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.text.__name__)
def test_what_is_refused_goes_wrong(case: Broken) -> None:
    """So no program is refused for nothing."""
    is_seen = next(what_goes_wrong(case.program.build(case.world), runs=60), None) is not None
    assert is_seen == (case.text.__name__ not in UNSEEN)
    assert is_seen or case.fault in (Fault.RACE, Fault.CALLS, Fault.CONTENT)
