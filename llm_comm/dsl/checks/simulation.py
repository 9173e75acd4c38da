"""Simulation: runs some consecutive calls of a trial and records all accesses with their vector clocks.

One execution order represents all. No operation chooses between alternatives:

- The n-th wait takes the n-th signal, because one group signals a semaphore and one group waits for it
  (``check_balance``).
- Packets are taken from a fixed address, where each put happens after the read of the previous put (``check_packets``
  raises otherwise).

So dependencies are the same in every run: which operations are reached, what happens before what, and, if all accesses
to a chunk are ordered, what each chunk holds. Only a program that is rejected could behave differently.
"""

from __future__ import annotations

from collections import defaultdict

from llm_comm.dsl import ir
from llm_comm.dsl.checks.accesses import Access, PortWork, Records
from llm_comm.dsl.checks.balance import Semaphore
from llm_comm.dsl.checks.contents import Content, Contents
from llm_comm.dsl.checks.knowledge import Carriers, Clock, Knowledge, SignalClocks, join, with_own
from llm_comm.dsl.checks.trial import Act, Address, Trial, at
from llm_comm.dsl.errors import Fault, ProgramError
from llm_comm.dsl.ir import Chunk, Space

#: Packets in flight: the sender's clock, and the data.
_Packets = tuple[Clock, Content | None]
_MAX_REPORTED = 4


class Simulation:
    """Run of a trial.

    Args:
        trial: Trial to run.
        calls: Number of consecutive calls.

    Attributes:
        records: Accesses to memory.
        contents: Contents of memory.
        stuck: After ``run``: (actor, operation) of each actor that waits for ever.
    """

    def __init__(self, trial: Trial, calls: int) -> None:
        self.records = Records()
        self.contents = Contents(trial)
        self.stuck: list[tuple[int, Act]] = []
        self._trial = trial
        self._calls = calls
        self._world = trial.program.world
        self._host = len(trial.actors)
        self._proxies: dict[tuple[int, int], int] = {}
        for actor, (rank, _) in enumerate(trial.actors):
            for act in trial.acts[actor]:
                if isinstance(act.op, ir.PortPut):
                    key = (actor, act.op.peer.on(rank, self._world))
                    self._proxies.setdefault(key, self._host + self._world + 2 * len(self._proxies))
        nothing = (0,) * (self._host + self._world + 2 * len(self._proxies))
        self._knowledge = [Knowledge(actor, nothing, nothing) for actor in range(self._host)]
        self._position = [0] * self._host
        self._call = [0] * self._world
        self._asked: dict[int, int] = defaultdict(int)
        self._first_put: list[int | None] = [None] * self._host
        self._values: list[dict[int, tuple[Content | None, ...]]] = [{} for _ in trial.actors]
        self._signals: dict[Semaphore, list[SignalClocks]] = defaultdict(list)
        self._waits: dict[Semaphore, int] = defaultdict(int)
        self._packets: dict[Address, list[_Packets]] = defaultdict(list)
        self._taken: dict[Address, int] = defaultdict(int)

    def run(self) -> None:
        """Run until all calls have ended, or no actor can progress."""
        nothing = self._knowledge[0].seen
        for rank in range(self._world):
            self._begin(rank, 0, nothing)
        going = True
        while going:
            going = False
            for actor, (rank, _) in enumerate(self._trial.actors):
                going |= self._advance(actor)
                going |= self._end_call(rank)
        for actor, acts in enumerate(self._trial.acts):
            if self._position[actor] < len(acts):
                self.stuck.append((actor, acts[self._position[actor]]))

    # ---- Calls -----------------------------------------------------------------------------------------------------

    def _actors_of(self, rank: int) -> range:
        groups = len(self._trial.program.groups)
        return range(rank * groups, (rank + 1) * groups)

    def _begin(self, rank: int, call: int, clock: Clock) -> None:
        """Let the caller access its tensors and launch call ``call``. The begin after the last call has no launch."""
        host, number = self._host + rank, call + 1
        for space in (Space.INPUT, Space.OUTPUT):
            for _, _, address in self._trial.tensor_addresses(space, rank):
                where = self._trial.program.where
                access = Access(host, number, clock, True, rank, call, address, None, where)
                self.records.accesses.setdefault(address, []).append(access)
        if len(self.records.begins) == call:
            self.records.begins.append({})
        self.records.begins[call][rank] = (host, number)
        self._call[rank] = call
        if call == self._calls:
            return
        for actor in self._actors_of(rank):
            self._knowledge[actor].begin(with_own(clock, host, number))
            self._position[actor] = 0
            self._first_put[actor] = None

    def _end_call(self, rank: int) -> bool:
        """Begin the next call if all groups of a rank have ended this one. Return whether they had."""
        call, actors = self._call[rank], self._actors_of(rank)
        if call == self._calls or any(self._position[actor] < len(self._trial.acts[actor]) for actor in actors):
            return False
        clock = self._knowledge[actors[0]].before_all()
        for actor in actors[1:]:
            clock = join(clock, self._knowledge[actor].before_all())
        if len(self.records.ends) == call:
            self.records.ends.append({})
        self.records.ends[call][rank] = clock
        self.contents.check_output(rank, call)
        self._begin(rank, call + 1, clock)
        return True

    # ---- Operations ------------------------------------------------------------------------------------------------

    def _advance(self, actor: int) -> bool:
        """Run an actor as far as possible. Return whether it progressed."""
        acts, before = self._trial.acts[actor], self._position[actor]
        rank = self._trial.actors[actor][0]
        if self._call[rank] == self._calls:
            return False
        while self._position[actor] < len(acts) and self._run(actor, rank, acts[self._position[actor]]):
            self._position[actor] += 1
        return self._position[actor] > before

    def _run(self, actor: int, rank: int, act: Act) -> bool:
        """Run an operation. Return False if it must wait."""
        op, values = act.op, self._values[actor]
        knowledge = self._knowledge[actor]
        knowledge.number += 1
        if isinstance(op, ir.Load):
            values[op.result.number] = self._load(actor, act, rank, op.source)
        elif isinstance(op, ir.Get):
            values[op.result.number] = self._load(actor, act, op.peer.on(rank, self._world), op.source)
        elif isinstance(op, ir.Sum):
            labels = [label.on(rank, self._world) for label, _ in op.operands]
            of_pieces = zip(*(values[value.number] for _, value in op.operands), strict=True)
            values[op.result.number] = tuple(
                self.contents.add(zip(labels, piece, strict=True), rank, op.where) for piece in of_pieces
            )
        elif isinstance(op, ir.Store):
            self._store(actor, act, rank, op.target, values[op.value.number])
        elif isinstance(op, ir.Put):
            self._store(actor, act, op.peer.on(rank, self._world), op.target, values[op.value.number])
            self._put_to_peer(actor)
        elif isinstance(op, ir.PutPackets):
            self._put_packets(actor, act, op)
        elif isinstance(op, ir.ReadPackets):
            return self._read_packets(actor, act, op)
        elif isinstance(op, ir.PortPut):
            self._port_put(actor, act, op)
        elif isinstance(op, ir.Signal):
            self._signal(actor, rank, op)
        elif isinstance(op, ir.Wait):
            return self._wait(actor, rank, op)
        else:
            assert isinstance(op, ir.Flush)
            self._flush(actor, op.peer.on(rank, self._world))
        return True

    def _load(self, actor: int, act: Act, owner: int, source: Chunk) -> tuple[Content | None, ...]:
        rank = self._trial.actors[actor][0]
        knowledge, call = self._knowledge[actor], self._call[rank]
        found = []
        for piece, address in self._trial.addresses(act, rank, owner, source, call):
            access = Access(actor, knowledge.number, knowledge.seen, False, rank, call, address, act.op, act.op.where)
            self.records.accesses.setdefault(address, []).append(access)
            found.append(self.contents.load(address, piece, call, act.op.where))
        return tuple(found)

    def _store(self, actor: int, act: Act, owner: int, target: Chunk, value: tuple[Content | None, ...]) -> None:
        rank = self._trial.actors[actor][0]
        knowledge, call = self._knowledge[actor], self._call[rank]
        addresses = self._trial.addresses(act, rank, owner, target, call)
        for (piece, address), content in zip(addresses, value, strict=True):
            before = knowledge.before_store(Carriers(target.buffer.parts, act.loop, piece))
            access = Access(actor, knowledge.number, before, True, rank, call, address, act.op, act.op.where)
            self.records.accesses.setdefault(address, []).append(access)
            self.contents.store(address, piece, call, content, act.op.where)

    def _put_packets(self, actor: int, act: Act, op: ir.PutPackets) -> None:
        rank = self._trial.actors[actor][0]
        knowledge, call = self._knowledge[actor], self._call[rank]
        addresses = self._trial.addresses(act, rank, op.peer.on(rank, self._world), op.target, call)
        for (piece, address), content in zip(addresses, self._values[actor][op.value.number], strict=True):
            before = knowledge.before_store(Carriers(op.target.buffer.parts, act.loop, piece))
            access = Access(actor, knowledge.number, before, True, rank, call, address, op, op.where)
            self.records.packet_puts.setdefault(address, []).append(access)
            self._packets[address].append((before, content))
        self._put_to_peer(actor)

    def _read_packets(self, actor: int, act: Act, op: ir.ReadPackets) -> bool:
        rank = self._trial.actors[actor][0]
        knowledge, call = self._knowledge[actor], self._call[rank]
        addresses = self._trial.addresses(act, rank, rank, op.source, call)
        if any(len(self._packets[address]) <= self._taken[address] for _, address in addresses):
            return False
        found = []
        for piece, address in addresses:
            sent, content = self._packets[address][self._taken[address]]
            self._taken[address] += 1
            knowledge.poll(sent, Carriers(op.source.buffer.parts, act.loop, piece))
            access = Access(actor, knowledge.number, sent, True, rank, call, address, op, op.where)
            self.records.packet_reads.setdefault(address, []).append(access)
            found.append(content)
        self._values[actor][op.result.number] = tuple(found)
        return True

    def _port_put(self, actor: int, act: Act, op: ir.PortPut) -> None:
        """Record a copy of the proxy: a read and a write by two actors of its own, both after the request."""
        rank = self._trial.actors[actor][0]
        peer = op.peer.on(rank, self._world)
        knowledge, call = self._knowledge[actor], self._call[rank]
        reads = self._proxies[actor, peer]
        self._asked[reads] += 1
        number = self._asked[reads]
        before = with_own(knowledge.seen, actor, knowledge.number)
        sources = self._trial.addresses(act, rank, rank, op.source, call)
        targets = self._trial.addresses(act, rank, peer, op.target, call)
        for (piece, source), (_, target) in zip(sources, targets, strict=True):
            content = self.contents.load(source, piece, call, op.where)
            self.contents.store(target, piece, call, content, op.where)
            of_source = Access(reads, number, before, False, rank, call, source, op, op.where)
            of_target = Access(reads + 1, number, before, True, rank, call, target, op, op.where)
            self.records.accesses.setdefault(source, []).append(of_source)
            self.records.accesses.setdefault(target, []).append(of_target)
            self.records.port_work.append(PortWork(op.where, rank, peer, call, reads + 1, number, target))

    def _signal(self, actor: int, rank: int, op: ir.Signal) -> None:
        peer, knowledge = op.peer.on(rank, self._world), self._knowledge[actor]
        sent = knowledge.signal()
        if op.through_port:
            sent = self._through_port(actor, peer, sent)
        else:
            self._first_put[actor] = None
        self._signals[Semaphore(rank, peer, op.semaphore, op.through_port)].append(sent)

    def _through_port(self, actor: int, peer: int, sent: SignalClocks) -> SignalClocks:
        """Return the knowledge of a signal through the port, which follows the proxy's copies.

        Stores of threads to a peer may be slower than the proxy. The signal therefore covers this group's operations
        only up to the first such store.
        """
        first = self._first_put[actor]
        clocks = [sent.seen, sent.polled]
        if first is not None:
            clocks = [(*clock[:actor], min(clock[actor], first - 1), *clock[actor + 1 :]) for clock in clocks]
        reads = self._proxies.get((actor, peer))
        if reads is not None:
            number = self._asked[reads]
            clocks = [with_own(with_own(clock, reads, number), reads + 1, number) for clock in clocks]
        return SignalClocks(*clocks)

    def _wait(self, actor: int, rank: int, op: ir.Wait) -> bool:
        key = Semaphore(op.peer.on(rank, self._world), rank, op.semaphore, op.through_port)
        if len(self._signals[key]) <= self._waits[key]:
            return False
        self._knowledge[actor].wait(self._signals[key][self._waits[key]])
        self._waits[key] += 1
        return True

    def _flush(self, actor: int, peer: int) -> None:
        """Record that the proxy has read its sources. Its writes may still be in flight."""
        reads = self._proxies.get((actor, peer))
        if reads is not None:
            knowledge = self._knowledge[actor]
            knowledge.seen = with_own(knowledge.seen, reads, self._asked[reads])

    def _put_to_peer(self, actor: int) -> None:
        if self._first_put[actor] is None:
            self._first_put[actor] = self._knowledge[actor].number


def check_waits(trial: Trial, simulation: Simulation) -> None:
    """Raise an error if actors wait for ever. Signals and waits are balanced, so the actors wait for each other.

    Raises:
        ProgramError: DEADLOCK, at a line that waits; the text says what the others wait for.
    """
    if not simulation.stuck:
        return
    several_groups = len(trial.program.groups) > 1
    waiting = []
    for actor, act in simulation.stuck[:_MAX_REPORTED]:
        rank, group = trial.actors[actor]
        name = f" (group {trial.program.groups[group].name!r})" if several_groups else ""
        waiting.append(f"rank {rank}{name} waits for {_awaited(trial, act, rank)} ({at(act.op.where)})")
    if len(simulation.stuck) > _MAX_REPORTED:
        waiting.append("...")
    raise ProgramError(
        Fault.DEADLOCK,
        f"ranks wait for each other: {'; '.join(waiting)}. Have each rank signal, or put, before it waits",
        simulation.stuck[0][1].op.where,
    )


def _awaited(trial: Trial, act: Act, rank: int) -> str:
    if isinstance(act.op, ir.Wait):
        return f"a signal of rank {act.op.peer.on(rank, trial.program.world)}"
    assert isinstance(act.op, ir.ReadPackets)
    _, address = trial.addresses(act, rank, rank, act.op.source, 0)[0]
    return f"packets in {address}"
