"""Demo: decodes with the sharded model, then compares the result with the unsharded model.

The model runs in bf16 on GPUs, as in serving. On emulated devices it runs in float32: CPUs multiply float32 matrices
faster, and the tolerance of the comparison is two hundred times tighter.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llm_comm import files
from llm_comm.bench.report import DTYPES, dtype_name, environment, format_bytes, plan_text
from llm_comm.cli import launch
from llm_comm.cli.launch import Placement
from llm_comm.communicator import Communicator
from llm_comm.config import Config
from llm_comm.demo.model import KVCache, Llama, LlamaConfig
from llm_comm.errors import ConfigError

PLAN_LADDER = tuple(1024 << step for step in range(11))
# Tolerance of the relative norm of a step's logit difference. It is several times what one rounding of every partial
# sum to the model's dtype explains. A wrong or missing partial sum gives more than 0.1.
LOGIT_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}
_REFERENCE_SPAN = 64  # positions in one forward pass of the reference, to bound its memory


class CountedAllReduce:
    """All-reduce of the model: uses the communicator, and counts calls by message size in bytes.

    Messages that the communicator declines use torch.distributed, as in an engine, and are counted separately.
    """

    def __init__(self, comm: Communicator, group: dist.ProcessGroup) -> None:
        self._comm, self._group = comm, group
        self.ran: Counter[tuple[bool, int]] = Counter()  # by (accepted by the communicator, message size)

    def __call__(self, partial: Tensor) -> Tensor:
        accepted = self._comm.accepts(partial)
        self.ran[accepted, partial.numel() * partial.element_size()] += 1
        if not accepted:
            dist.all_reduce(partial, group=self._group)
            return partial
        total: Tensor = self._comm.all_reduce(partial)
        return total

    def calls(self, accepted: bool) -> dict[int, int]:
        """Return the number of calls by message size, for accepted or for declined messages."""
        return {size: count for (served, size), count in sorted(self.ran.items()) if served == accepted}


class Decoder:
    """Greedy decode with static shapes. On GPUs a step is one replay of a CUDA graph.

    All state (current token, position, histories, KV cache) is on the device and is advanced there by each step, so the
    host only launches.

    Args:
        model: Shard of this rank.
        all_reduce: All-reduce of the model.
        prompts: [batch, prompt length] int64, equal on all ranks.
        tokens: Number of tokens to generate.
    """

    def __init__(self, model: Llama, all_reduce: CountedAllReduce, prompts: Tensor, tokens: int) -> None:
        batch, prompt_length = prompts.shape
        self._model, self._all_reduce = model, all_reduce
        self._cache = KVCache(model, batch, prompt_length + tokens)
        self._prompts = prompts
        self._token = torch.empty(batch, 1, dtype=torch.int64, device=model.device)
        self._position = torch.empty(1, dtype=torch.int64, device=model.device)
        self._index = torch.empty(1, dtype=torch.int64, device=model.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured: Counter[tuple[bool, int]] = Counter()
        self.logits = torch.zeros(tokens, batch, model.config.vocab, device=model.device)
        self.generated = torch.zeros(tokens, batch, dtype=torch.int64, device=model.device)

    def prefill(self) -> None:
        """Run the prompts and generate the first token. A second call resets the decode to this point."""
        length = self._prompts.shape[1]
        positions = torch.arange(length, device=self._model.device)
        logits = self._model.forward(self._prompts, positions, self._cache)
        self._position.fill_(length - 1)
        self._index.fill_(-1)
        self._record(logits[:, -1])

    def capture(self) -> None:
        """Capture the step into a CUDA graph. Call after :meth:`prefill`, and call that again afterwards.

        The step runs once to warm up, so there must be room for one generated token beside the first.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()
        torch.cuda.current_stream().wait_stream(stream)
        ran = self._all_reduce.ran.copy()
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog thread may query its own events during the capture.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._step()
        self._captured = self._all_reduce.ran - ran
        self._all_reduce.ran = ran
        self._graph = graph

    def decode(self, steps: int) -> None:
        """Generate ``steps`` more tokens for each sequence."""
        if self._graph is None:
            for _ in range(steps):
                self._step()
            return
        for _ in range(steps):
            self._graph.replay()
        for kind, calls in self._captured.items():
            self._all_reduce.ran[kind] += calls * steps

    def _step(self) -> None:
        logits = self._model.forward(self._token, self._position, self._cache)
        self._record(logits[:, -1])

    def _record(self, logits: Tensor) -> None:
        """Choose the greedy token, store token and logits in the histories, and advance the state."""
        self._index.add_(1)
        self._position.add_(1)
        chosen = logits.argmax(dim=-1)
        self._token.copy_(chosen[:, None])
        self.generated.index_copy_(0, self._index, chosen[None])
        self.logits.index_copy_(0, self._index, logits[None])


@dataclass(frozen=True)
class Check:
    """Result of the comparison with the unsharded model.

    Attributes:
        logits_error: Largest relative norm of (sharded - unsharded) logits over all steps.
        worst_step: Step of that error.
        tolerance: Allowed error.
        rank_spread: Largest such difference between any rank and rank 0; 0 means bitwise equal.
        tokens_identical: Every rank generated the same tokens.
    """

    logits_error: float
    worst_step: int
    tolerance: float
    rank_spread: float
    tokens_identical: bool

    @property
    def passed(self) -> bool:
        """True if all errors are within the tolerance and all ranks generated the same tokens."""
        # in this form a NaN fails
        agree = self.logits_error <= self.tolerance and self.rank_spread <= self.tolerance
        return agree and self.tokens_identical


def run(args: argparse.Namespace) -> int:
    """Run ``llm-comm demo``. Return 0 if every check passed and the report was written, else 1.

    Raises:
        ConfigError: The options contradict each other or the machine, or the configuration is invalid.
    """
    if args.tokens < 2:
        raise ConfigError(f"--tokens {args.tokens}: at least 2, because the first one comes from the prompt")
    config = _model_config(args)
    placement = launch.place(args.world, args.device, preferred=[w for w in launch.WORLDS if config.divides(w)])
    config.require_divides(placement.world)
    launch.checked_config({"--json": args.json}, **_overrides(args))
    if not launch.in_rank():
        return launch.spawn(placement, args.argv)
    with launch.process_group(placement) as group, torch.inference_mode():
        return _run_rank(args, config, placement, group)


def _overrides(args: argparse.Namespace) -> dict[str, Any]:
    return {} if args.timeout_s is None else {"timeout_s": args.timeout_s}


def _model_config(args: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(
        hidden=args.hidden,
        layers=args.layers,
        heads=args.heads,
        kv_heads=args.kv_heads,
        intermediate=args.intermediate or args.hidden * 11 // 4,
        vocab=args.vocab,
    )


def _run_rank(args: argparse.Namespace, config: LlamaConfig, placement: Placement, group: dist.ProcessGroup) -> int:
    rank, device = launch.rank(), placement.device
    dtype = DTYPES[args.dtype] if args.dtype else torch.bfloat16 if placement.on_gpu else torch.float32
    if rank == 0:
        print(introduction(config, dtype, placement), flush=True)
    prompts = _draw_prompts(config, args.batch, args.prompt_len, args.seed).to(device)
    max_length = args.prompt_len + args.tokens
    build = partial(Llama, config, seed=args.seed, max_length=max_length, dtype=dtype, device=device)
    with Communicator(group, device, Config.load(**_overrides(args))) as comm:
        all_reduce = CountedAllReduce(comm, group)
        model = build(rank=rank, world=placement.world, all_reduce=all_reduce)
        decoder = Decoder(model, all_reduce, prompts, args.tokens)
        seconds = timed_decode(decoder, args.tokens - 1, device, group)
        comm.check()
        traffic = _traffic(comm, all_reduce, dtype)

    # The peers wait in the check's first collective while rank 0 runs the whole model.
    reference = reference_logits(build(), prompts, decoder.generated) if rank == 0 else None
    check = check_agreement(decoder.logits, decoder.generated, reference, LOGIT_TOLERANCE[dtype], group)
    passed, written = check.passed and bool(traffic["served"]), True
    if rank == 0:
        report = {
            "command": "demo",
            **environment(placement),
            "model": dataclasses.asdict(config),
            "dtype": dtype_name(dtype),
            "decode": {
                "tokens": args.tokens,
                "batch": args.batch,
                "prompt_len": args.prompt_len,
                "seconds": seconds,
                "tokens_per_s": (args.tokens - 1) * args.batch / seconds,
                "cuda_graph": placement.on_gpu,
                "generated": decoder.generated.T.tolist(),
            },
            "all_reduce": traffic,
            "check": {**dataclasses.asdict(check), "passed": passed},
        }
        print(render(report))
        if args.json:
            written = files.write_json("--json", args.json, report)
    return 0 if passed and written else 1


def _draw_prompts(config: LlamaConfig, batch: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab, (batch, length), generator=generator)


def _traffic(comm: Communicator, all_reduce: CountedAllReduce, dtype: torch.dtype) -> dict[str, Any]:
    """Return how many all-reduces ran, and the plans for their sizes and for a series of other sizes."""
    served, declined = all_reduce.calls(accepted=True), all_reduce.calls(accepted=False)
    sizes = sorted({*PLAN_LADDER, *served, *declined})
    messages = [torch.empty(size // dtype.itemsize, dtype=dtype, device=comm.device) for size in sizes]
    return {
        "served": served,
        "declined": declined,
        "workspace_bytes": comm.workspace_bytes,
        "plans": [dataclasses.asdict(comm.plan(message)) for message in messages],
    }


def timed_decode(decoder: Decoder, steps: int, device: torch.device, group: dist.ProcessGroup) -> float:
    """Run the prompts and ``steps`` decode steps. Return the seconds of the decode steps."""
    on_gpu = device.type == "cuda"
    decoder.prefill()
    if on_gpu:
        decoder.capture()
        decoder.prefill()
        torch.cuda.synchronize()
    launch.barrier(group)
    start = time.perf_counter()
    decoder.decode(steps)
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def reference_logits(model: Llama, prompts: Tensor, generated: Tensor) -> Tensor:
    """Compute the logits of the unsharded model for the generated tokens (teacher forcing).

    Args:
        model: Unsharded model.
        prompts: [batch, prompt length] int64.
        generated: [tokens, batch] int64.

    Returns:
        [tokens, batch, vocab] float32: logits from which each generated token should have been chosen.
    """
    sequences = torch.cat((prompts, generated[:-1].T), dim=1)
    batch, length = sequences.shape
    cache = KVCache(model, batch, length)
    positions = torch.arange(length, device=sequences.device)
    logits = [model.forward(sequences[:, span], span, cache) for span in positions.split(_REFERENCE_SPAN)]
    return torch.cat(logits, dim=1)[:, prompts.shape[1] - 1 :].transpose(0, 1)


def relative_error(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the norm of the difference divided by the norm of ``expected``, along the last dimension, in float64."""
    expected = expected.double()
    difference = torch.linalg.vector_norm(actual.double() - expected, dim=-1)
    ratio: Tensor = difference / torch.linalg.vector_norm(expected, dim=-1)
    return ratio


def check_agreement(
    logits: Tensor, generated: Tensor, reference: Tensor | None, tolerance: float, group: dist.ProcessGroup
) -> Check:
    """Compare the ranks with each other, and rank 0 with the unsharded model. Collective; the result is equal on all
    ranks.

    Args:
        logits: Logits of this rank, [tokens, batch, vocab] float32.
        generated: Tokens of this rank, [tokens, batch] int64.
        reference: Logits of the unsharded model on rank 0; ignored elsewhere.
        tolerance: Largest allowed relative error.
        group: Process group of the ranks.
    """
    logits, generated = logits.cpu(), generated.cpu()
    first_logits, first_generated = logits.clone(), generated.clone()
    dist.broadcast(first_logits, src=0, group=group)
    dist.broadcast(first_generated, src=0, group=group)
    spread = relative_error(logits, first_logits).max().item()
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, (spread, torch.equal(generated, first_generated)), group=group)
    spreads, identical = zip(*outcomes, strict=True)

    verdict: list[Any] = [None]
    if reference is not None:
        errors = relative_error(logits, reference.cpu()).amax(dim=1)
        verdict = [(errors.max().item(), int(errors.argmax()))]
    dist.broadcast_object_list(verdict, src=0, group=group)
    error, step = verdict[0]
    # torch's max propagates NaN, unlike Python's.
    return Check(error, step, tolerance, torch.tensor(spreads).max().item(), all(identical))


def introduction(config: LlamaConfig, dtype: torch.dtype, placement: Placement) -> str:
    """Return what is about to run, and on what."""
    return (
        f"llm-comm demo: tensor-parallel decode on {placement.describe()}\n"
        f"model:       Llama, {config.parameters / 1e6:.1f} M random weights in {dtype_name(dtype)}: "
        f"{config.layers} layers, hidden {config.hidden}, {config.heads} heads on {config.kv_heads} KV heads"
    )


def render(report: dict[str, Any]) -> str:
    """Format the report. The last line says whether the demo passed, and on what."""
    decode, traffic, check = (report[key] for key in ("decode", "all_reduce", "check"))
    served, declined = sum(traffic["served"].values()), sum(traffic["declined"].values())
    how = "one CUDA graph replay a step" if decode["cuda_graph"] else "eager"
    lines = [
        f"decode:      batch {decode['batch']}, {decode['prompt_len']} prompt tokens, "
        f"{decode['tokens']} generated, {how}: {decode['tokens_per_s']:.1f} tokens/s",
        f"all-reduces: {served} through llm_comm ({2 * report['model']['layers']} a step), "
        f"{declined} declined; workspace {format_bytes(traffic['workspace_bytes'])} a rank",
        "plan by message size (* sizes of this run):",
    ]
    used = {*traffic["served"], *traffic["declined"]}
    for plan in traffic["plans"]:
        size = plan["message_bytes"]
        lines.append(f"  {format_bytes(size):>8} {'*' if size in used else ' '} {plan_text(plan)}; {plan['reason']}")
    spread = check["rank_spread"]
    among_ranks = "bitwise equal" if spread == 0 else f"differ by up to {spread:.1e}"
    if served == 0:
        lines.append("check:       NO all-reduce went through llm_comm; the plan says why")
    lines += [
        f"check:       logits differ from the unsharded model's by at most {check['logits_error']:.1e} "
        f"(step {check['worst_step']}; {check['tolerance']:.0e} allowed)",
        f"check:       logits of all ranks {among_ranks}, "
        f"generated tokens {'identical' if check['tokens_identical'] else 'DIFFERENT'}",
        f"demo {'passed' if check['passed'] else 'FAILED'} on {report['ranks']['description']}",
    ]
    return "\n".join(lines)
