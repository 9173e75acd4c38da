from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

from typing_extensions import NotRequired, Unpack

version: str
cuda_archs: str
cuda_ptx_archs: str
nvcc_version: str
#: False in a build that measures the cost of bounded waits.
bounded_waits: bool
max_world_size: int
#: Variables that can forbid NVLink multicast, each with the value that usually does.
multicast_switches: dict[str, str]
#: Maximum registered windows of a symmetric heap.
max_windows: int
#: Limits of linear layers: maximum rows of x, maximum rows of ``batch_invariant_linear``, the multiple that inputs and
#: outputs must have, the multiple that FP8 inputs must have, and the maximum of inputs and of outputs.
linear_max_tokens: int
linear_max_many_tokens: int
linear_multiple: int
linear_fp8_multiple: int
linear_max_features: int
rope_max_tokens: int
rope_max_head_size: int
rope_rotary_multiple: int
experts_max: int
experts_max_top_k: int
#: Granularities of the scales of FP8 elements.
SCALE_OF_TENSOR: int
SCALE_OF_ROW: int
SCALE_OF_BLOCK: int

class CoreOptions:
    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        slot_bytes: int,
        timeout_s: float,
        dependent_launch: bool,
        check_calls: bool,
        staging_bytes: int = 0,
        multicast: bool = False,
    ) -> None: ...

# ---- Registry (fields: csrc/algorithms/algorithm.h) ----

class _Algorithm:
    number: int
    operation: str
    name: str
    protocol: str
    title: str
    data_types: list[str]
    tunables: list[str]
    # Minimum, maximum and whether only powers of two are allowed, by tunable.
    ranges: dict[str, tuple[int, int, bool]]
    # Bit i is set if buffer i must be in symmetric memory.
    symmetric: int
    uses_multimem: bool
    sums_in_switch: bool
    ranks_may_differ: bool
    # Value of option wire that permits the algorithm; "" if nothing is quantized.
    wire: str
    needs_row: bool

class _Operation:
    name: str
    title: str
    buffers: list[str]
    outputs: list[str]
    optional: list[str]
    parameters: list[str]
    row_multiple: int
    max_row: int

# Algorithms, ordered by number.
def algorithms() -> list[_Algorithm]: ...
def operations() -> list[_Operation]: ...

# Bytes of an element, by name of the data type, in the order of DataType.
def data_types() -> dict[str, int]: ...

# ---- Shapes of launches (csrc/algorithms/launch_shape.h) ----

class Problem:
    def __init__(
        self, *, count: int, row: int, data_type: int, world_size: int, parameters: Sequence[float]
    ) -> None: ...

class TuningParameters:
    def __init__(
        self,
        *,
        blocks: int,
        threads: int = 0,
        tile_lines: int = 0,
        cluster: int = 0,
        depth: int = 0,
        crowded_above: int = 0,
    ) -> None: ...
    @property
    def blocks(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def tile_lines(self) -> int: ...
    @property
    def cluster(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def crowded_above(self) -> int: ...

Sharing: TypeAlias = Literal["descriptor", "fabric", "cudaIpc"]
Epilogue: TypeAlias = Literal["none", "silu_and_mul", "gelu_tanh_and_mul"]

# Shape and type of a linear layer. ``scales``: granularities of the scales of x and of the weight for FP8, such as
# ``SCALE_OF_TENSOR``.
class _LinearProblem(TypedDict):
    tokens: int
    inputs: int
    outputs: int
    data_type: int
    epilogue: Epilogue
    scales: NotRequired[tuple[int, int] | None]

class LinearChoice:
    def __init__(self, *, block_outputs: int = 0, stages: int = 0, stage_boxes: int = 0) -> None: ...
    @property
    def block_outputs(self) -> int: ...
    @property
    def stages(self) -> int: ...
    @property
    def stage_boxes(self) -> int: ...

class RopeProblem:
    # cache: blocks, slots of a block, tokens with a slot, whether slots have 64 bits, strides of keys and of values in
    # elements: between blocks, slots and heads. None: no cache.
    def __init__(
        self,
        *,
        tokens: int,
        inputs: int,
        outputs: int,
        data_type: int,
        head_size: int,
        kv_heads: int,
        rotary_size: int,
        is_interleaved: bool,
        has_norms: bool,
        epsilon: float,
        positions: int,
        has_fp32_angles: bool,
        has_64_bit_positions: bool,
        cache: tuple[int, int, int, bool, Sequence[int], Sequence[int]] | None = None,
    ) -> None: ...

class Limits:
    def __init__(
        self, *, slot_bytes: int, sm_count: int, max_cluster: int, compute_capability: int, staging_bytes: int = 0
    ) -> None: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def staging_bytes(self) -> int: ...
    @property
    def sm_count(self) -> int: ...
    @property
    def max_cluster(self) -> int: ...
    @property
    def compute_capability(self) -> int: ...

class Tiling:
    def __init__(self, *, blocks: int, tile_lines: int, cluster: int, depth: int, launch_units: int) -> None: ...
    @property
    def blocks(self) -> int: ...
    @property
    def tile_lines(self) -> int: ...
    @property
    def cluster(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def launch_units(self) -> int: ...

class Grid:
    @property
    def blocks(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def cluster_blocks(self) -> int: ...
    @property
    def variant(self) -> int: ...

class Shape:
    @property
    def tiling(self) -> Tiling: ...
    @property
    def launches(self) -> int: ...
    @property
    def whole(self) -> Grid: ...
    @property
    def last(self) -> Grid: ...

# Compute all launches of a call. Raises ValueError if algorithm, workspace or device do not support it.
def shape(algorithm: int, problem: Problem, tuning: TuningParameters, limits: Limits, /) -> Shape: ...

# Tuning parameters worth measuring, simplest first.
def candidates(algorithm: int, problem: Problem, limits: Limits, /) -> list[TuningParameters]: ...

# Fields of a planning.tables.Row, and of a tuning table (csrc/host/tables.h) as parameters of
# planning.catalogue._table_of.
RowFields: TypeAlias = tuple[int, str, str, str, int, int, int, int, int, float | None, dict[str, Any] | None]
TableFields: TypeAlias = tuple[str, str, int, int, list[RowFields], dict[str, Any]]

# Read the tuning table of a file; ``path``: bytes of its name. Raises ValueError, without the name, if the table cannot
# be used.
def read_table(path: bytes, /) -> TableFields: ...
def shipped_tables() -> list[TableFields]: ...

# Return the tuning table for a device (csrc/host/table_choice.h), the fields of its planning.tables.Origin, and
# warnings. ``named``: file of option ``table``, or empty. Raises ValueError if that file cannot be used.
def find_table(
    named: bytes, device: str, world: int, sm_count: int, compute_capability: int, /
) -> tuple[TableFields, tuple[str, str, bool, str], list[str]]: ...

#: Suffix of the file names of installed tables.
table_suffix: str

def table_directory() -> str | None: ...
def table_file_name(device: str, world: int, /) -> str: ...
def rows_of_shards(operation: str, sm_count: int, /) -> list[RowFields]: ...

# Fill in the tunables of a linear layer that are 0, for a device with ``sm_count`` SMs and ``max_shared_bytes`` of
# shared memory per block. Raises ValueError if kernel or device do not support the layer.
def linear_choice(
    *, choice: LinearChoice, sm_count: int, max_shared_bytes: int, **problem: Unpack[_LinearProblem]
) -> LinearChoice: ...

# Bytes of each of the two slots, and of the staging memory, in a workspace of ``workspace_bytes``.
def slot_bytes(workspace_bytes: int, /) -> int: ...
def staging_bytes(workspace_bytes: int, /) -> int: ...

# ---- Core of a rank ----

# Parameters of a launch of a DSL kernel. ``memory``, ``semaphore_words``: symmetric offsets, (window, offset).
# ``data_type``: number. ``symmetric``: bit 0 is set if peers access the input, bit 1 if they access the output.
class ProgramLaunch:
    def __init__(
        self,
        *,
        kernel: int,
        groups: int,
        blocks: int,
        threads: int,
        shared_bytes: int,
        memory: tuple[int, int],
        memory_bytes: int,
        semaphore_words: tuple[int, int],
        semaphores: int,
        data_type: int,
        input_bytes: int,
        output_bytes: int,
        part_bytes: int,
        symmetric: int,
    ) -> None: ...

class Call:
    @property
    def operation(self) -> str: ...
    @property
    def data_type(self) -> str: ...
    @property
    def row(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def details(self) -> list[tuple[str, str]]: ...

class WrongSizes:
    @property
    def fault(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def peer(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def limit(self) -> int: ...

class OperationError:
    @property
    def cause(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def peer(self) -> int: ...
    @property
    def operation(self) -> str: ...
    @property
    def phase(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def calls(self) -> list[Call]: ...
    @property
    def text(self) -> str: ...
    @property
    def sizes(self) -> WrongSizes: ...

class Loan:
    # Return whether the tensor of the capsule and all its views are gone.
    def has_ended(self) -> bool: ...

# Number of calls of one kind, and bytes of their messages. Thread-safe.
class CallStatistics:
    def __init__(self) -> None: ...
    @property
    def calls(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    # Calls that graphs have captured, counted once each, however often the graph is launched.
    @property
    def captured_calls(self) -> int: ...
    @property
    def captured_bytes(self) -> int: ...

# Counter of calls with messages of ``bytes`` bytes.
class Counter:
    def __init__(self, statistics: CallStatistics, bytes: int) -> None: ...
    # Count a call that launches nothing. The core counts all other calls that do not fail.
    def add(self) -> None: ...

class Core:
    # Handles of memory are (fd, bytes): a descriptor that the caller owns and b"", or -1 and the bytes of a fabric or
    # cudaIpc handle.
    def create_workspace(self, sharing: Sharing) -> tuple[int, bytes]: ...
    def map_peer(self, peer: int, fd: int, bytes: bytes) -> None: ...
    def workspace_bytes(self) -> int: ...
    # Steps that release the memory of the workspaces and take it again. Each rank calls a step after all ranks have
    # finished the previous one. A step raises RuntimeError if it fails.
    def begin_release(self) -> None: ...
    def release_workspaces(self) -> None: ...
    def restore_workspace(self) -> tuple[int, bytes]: ...
    def restore_peer(self, peer: int, fd: int, bytes: bytes) -> None: ...
    def end_release(self) -> None: ...
    # Steps that set up NVLink multicast over the workspaces of all ranks. ``create_multicast`` returns the descriptor
    # of the multicast object, which the caller closes; ``join_multicast`` takes the descriptor of rank 0. A step raises
    # RuntimeError, before any look-up in the driver, if the environment forbids multicast.
    def create_multicast(self) -> int: ...
    def join_multicast(self, fd: int, /) -> None: ...
    def add_multicast_device(self) -> None: ...
    def bind_multicast(self) -> None: ...
    def drop_multicast(self) -> None: ...
    def max_cluster_blocks(self) -> int: ...
    def send_marks(self) -> None: ...
    def peers_unseen(self) -> list[int]: ...
    # Load the kernels of algorithms. ``prepare`` loads kernels that are missing, and then waits for the device.
    def load(self, algorithms: Sequence[int]) -> None: ...
    # Return a function that runs the call. It takes the addresses of the operation's buffers in order, 0 for an absent
    # optional buffer, and the handle of a stream. It returns False once the communicator has failed.
    # ``direct``: algorithm, problem and tiling to run instead if the tensors that peers access are in symmetric memory.
    # ``counter``, ``direct_counter``: counters of the calls of each alternative.
    def prepare(
        self,
        algorithm: int,
        problem: Problem,
        tiling: Tiling,
        direct: tuple[int, Problem, Tiling] | None = None,
        counter: Counter | None = None,
        direct_counter: Counter | None = None,
    ) -> Callable[..., bool]: ...
    # Return whether FP8 linear layers have kernels for the device.
    def multiplies_fp8(self) -> bool: ...
    # Return tilings of a layer that are worth measuring, ordered by the time that the kernel's model expects.
    def linear_choices(self, **problem: Unpack[_LinearProblem]) -> list[LinearChoice]: ...
    # Return a function that runs the layer. It takes x, weight, out and bias (0: none), for FP8 also the scales of x
    # and of the weight, and a stream. ``x_scale_strides``: strides of block scales over tokens and over blocks; None:
    # rows of blocks, contiguous.
    def prepare_linear(
        self,
        *,
        choice: LinearChoice,
        x_scale_strides: tuple[int, int] | None = None,
        counter: Counter | None = None,
        **problem: Unpack[_LinearProblem],
    ) -> Callable[..., bool]: ...
    # Experts of few tokens, two launches. The function takes the addresses of x, gate_up_weight, down_weight, topk_ids,
    # topk_weights, the state between the layers, out, the scales of both weights (0: none), and a stream. Choices:
    # tilings of the two layers. scale_strides: those of both scales, if weights are FP8. first_expert: number of the
    # first expert in topk_ids. all_experts: that the router chooses from; 0: experts.
    def prepare_experts(
        self,
        *,
        tokens: int,
        top_k: int,
        experts: int,
        hidden: int,
        intermediate: int,
        data_type: int,
        epilogue: Epilogue,
        gate_up: LinearChoice = ...,
        down: LinearChoice = ...,
        scaling_factor: float = 1.0,
        scale_strides: Sequence[Sequence[int]] | None = None,
        first_expert: int = 0,
        all_experts: int = 0,
        counter: Counter | None = None,
    ) -> Callable[..., bool]: ...
    # Router of experts, one launch. The function takes the addresses of x, weight, bias (0: none), logits,
    # topk_weights, topk_ids, and a stream.
    def prepare_router(
        self,
        *,
        tokens: int,
        experts: int,
        top_k: int,
        hidden: int,
        data_type: int,
        renormalize: bool,
        counter: Counter | None = None,
    ) -> Callable[..., bool]: ...
    # Layer of q, k and v, one launch. The function takes the addresses of x, weight, bias (0: none), out, positions,
    # the table of angles, norms' weights of q and of k (0: none), caches of keys and of values and slots (0: no cache),
    # and a stream. block_rows, stages: the tiling; 0: the kernel chooses.
    def prepare_rope(
        self, problem: RopeProblem, *, block_rows: int = 0, stages: int = 0, counter: Counter | None = None
    ) -> Callable[..., bool]: ...
    # Load a DSL kernel and return its number. ``image``: a cubin, or for emulated GPUs the path of a shared library.
    def load_program(self, image: bytes, kernel: str, title: str) -> int: ...
    # Return a function that takes input, output and a stream.
    def prepare_program(self, launch: ProgramLaunch, counter: Counter | None = None) -> Callable[..., bool]: ...
    # Registered windows of the symmetric heap. Handles have the form of workspace handles.
    def create_window(self, window: int, bytes: int) -> tuple[int, bytes]: ...
    def map_window(self, window: int, peer: int, fd: int, bytes: bytes) -> None: ...
    def unmap_window(self, window: int, /) -> None: ...
    def close_window(self, window: int, /) -> None: ...
    # Return window and offset of ``bytes`` bytes at ``address``; None if no window of this rank contains them.
    def find(self, address: int, bytes: int, /) -> tuple[int, int] | None: ...
    # Return a DLPack capsule of ``bytes`` bytes of this rank's own memory. Its tensor keeps the memory alive.
    # ``device``: CUDA device, or -1 for emulated GPUs.
    def lend(self, window: int, offset: int, bytes: int, device: int) -> tuple[object, Loan]: ...
    def channels(
        self, memory: tuple[int, int], bytes: int, semaphore_words: tuple[int, int], semaphores: int
    ) -> bytes: ...
    def error(self) -> OperationError | None: ...
    def check_order(self) -> None: ...
    def abort(self) -> None: ...
    def peer_exited(self, peer: int, /) -> None: ...
    def has_been_captured(self) -> bool: ...
    def wait_for(self, stream: int) -> None: ...
    def last_call(self) -> Call: ...
    def operations_ended(self) -> int | None: ...

# Return "NAME=value" of the first environment variable that forbids NVLink multicast, or "".
def multicast_switched_off(environment: dict[str, str], /) -> str: ...
def bytes_of_semaphores(world_size: int, semaphores: int) -> int: ...
def bytes_of_channels() -> int: ...

# Return False if a store to the first or the last of these bytes would end the process.
def is_writable(address: int, bytes: int) -> bool: ...

class NodeExchange:
    def __init__(self, *, rank: int, ranks: int, part_bytes: int, timeout_s: float, device: int) -> None: ...
    def address(self) -> bytes: ...
    def connect(self, addresses: Sequence[bytes], names: Sequence[str]) -> None: ...
    def run(self, input: int, output: int, pieces: Sequence[tuple[int, int, int, int]], stream: int) -> bool: ...
    def set_limit(self, timeout_s: float) -> None: ...
    def error(self) -> str: ...
    def abort(self) -> None: ...
    def has_been_captured(self) -> bool: ...
    def close(self) -> None: ...

def ucx_version() -> str: ...
def make_emulated_core(options: CoreOptions, /) -> Core: ...
def make_cuda_core(options: CoreOptions, device: int, /) -> Core: ...
def device_report(device: int, /) -> dict[str, str | int | bool]: ...
