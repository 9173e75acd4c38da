"""The communicator: one group's collectives, on GPUs or on emulated ones."""

from __future__ import annotations

import logging
import os
import traceback
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from llm_comm import _core, arrays, ops, selection
from llm_comm.bootstrap import Rendezvous, host_identity
from llm_comm.config import Config
from llm_comm.errors import CommunicatorError, LlmCommError, MissingRankError, RendezvousError, UnsupportedInputError
from llm_comm.fused import FusedCalls, device_limits
from llm_comm.fused_selection import FusedPlan
from llm_comm.selection import Plan
from llm_comm.status import StatusBoard
from llm_comm.watchdog import KERNEL_SHARE_OF_TIMEOUT, Watchdog

logger = logging.getLogger("llm_comm")

# Global names cost less than attributes.
_is_compiling = torch.compiler.is_compiling
_Tensor = torch.Tensor
#: Types of operands that are what they seem; others are wrappers, which torch's dispatcher knows how to open.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})

# DataType in csrc/include/llm_comm/reduce.cuh.
_DATA_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
# What would make the ranks of a group run different kernels, or expect other messages.
_OPTIONS_OF_ALL_RANKS = ("workspace_bytes", "max_message_bytes", "algorithm", "fuse", "debug")


class _Prepared(NamedTuple):
    plan: Plan
    #: What ``prepare_all_reduce`` of the core returned; None where there is nothing to exchange.
    run: Callable[[int, int, int], bool] | None


class Communicator:
    """All-reduce and its kin for the ranks of one process group on one machine.

    Making one is collective over the group: either all ranks get one or all raise. Calls are collective too: all ranks
    make the same calls, with the same shapes and dtypes, in the same order. Work is enqueued on the current CUDA stream
    and can be captured in CUDA graphs. A call on another stream than the last one waits for that one, which must still
    exist; graphs of one communicator must not run on two streams at once (``Config.debug`` notices). For inference:
    nothing is differentiated.

    Args:
        group: The ranks: 1 to 8 processes of this machine, each with a device of its own. gloo or NCCL.
        device: CUDA device of this rank, or ``"cpu"`` for an emulated GPU that works on CPU tensors. None takes the
            current CUDA device if there is one and the build has CUDA kernels, else an emulated GPU.
        config: Options, the same on all ranks; None loads them (``Config.load``).

    Raises:
        RendezvousError: Ranks are missing, on other machines, configured differently, or cannot reach each other's
            memory. The text says which and why.
        ConfigError: An option is not allowed.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device | str | int | None = None,
        config: Config | None = None,
    ) -> None:
        self.config = Config.load() if config is None else config
        # Where nobody chose a level here, one that the application has set for this logger stays.
        if "log" in self.config.origins or logger.level == logging.NOTSET:
            logger.setLevel(self.config.log.upper())
        self.device = _device(device)
        self.is_emulated = self.device.type == "cpu"
        self._device_index = -1 if self.is_emulated else self.device.index
        # The raw handle: making a Stream object would take a good part of the host time of a call.
        self._current_stream = _no_stream if self.is_emulated else torch._C._cuda_getCurrentRawStream
        rendezvous = Rendezvous(group, self.config.timeout_s, self.device)
        self.rank, self.world_size = rendezvous.rank, rendezvous.world_size
        self._prepared: dict[tuple[int, torch.dtype], _Prepared] = {}
        self._core: _core.Core | None = None
        self._fused: FusedCalls | None = None
        self._limits = device_limits(self.device)
        self._watchdog: Watchdog | None = None
        self._stop_watching: weakref.finalize[[], Communicator] | None = None

        try:
            self._set_up(rendezvous)
        except BaseException as error:
            # Whoever keeps the error keeps the frames that it went through, and what they hold: the device's memory.
            self._core = self._fused = None
            _clear_frames(error)
            raise
        self.name = ops.register(self)
        logger.info(
            "rank %d of %d on %s: workspace %d bytes (%s), %s",
            self.rank,
            self.world_size,
            "an emulated GPU" if self.is_emulated else self.device,
            self.workspace_bytes,
            self.memory_kind,
            self._table.name,
        )

    def _set_up(self, rendezvous: Rendezvous) -> None:
        _check_hosts(rendezvous, self)
        self._table = rendezvous.attempt("choice of a tuning table", self._find_table)
        fingerprints = rendezvous.gather("comparison of tuning tables", self._table.fingerprint())
        _check_alike("have different tuning tables", fingerprints)
        self._core, most_blocks = rendezvous.attempt("set-up of the device", self._make_core)
        clusters: list[int] = rendezvous.gather("comparison of clusters", most_blocks)
        self._limits = self._limits._replace(max_cluster=min(clusters))
        self.memory_kind = self._connect(rendezvous)
        self._fused = self._make_fused_calls()
        _check_reachable(rendezvous, self._core)
        self._watch(rendezvous)

    # ---- Operations ---------------------------------------------------------------------------------------------

    def all_reduce(self, x: Any, out: Any = None) -> Any:
        """Sums ``x`` over all ranks, accumulated in fp32 in rank order and rounded once: bitwise the same on all ranks.

        Args:
            x: Contiguous tensor of any shape, bfloat16, float16 or float32, on this communicator's device; or an array
                with DLPack or ``__cuda_array_interface__``.
            out: Where the sum goes: like ``x``, which it may be, but must not overlap otherwise. None: a new tensor.

        Returns:
            ``out``, or a new tensor (array) like ``x``.

        Raises:
            UnsupportedInputError: ``accepts(x)`` is false, or ``out`` does not fit ``x``.
            CommunicatorError: This or an earlier call has failed: PeerTimeout, LaunchError, MismatchError or
                ConcurrentUseError.
        """
        # Host time of a call is a bar: this path makes no Python call that it can do without.
        if _is_compiling() or type(x) is not _Tensor:
            return self._dispatch_all_reduce(x, out)
        return self._all_reduce(x, out)

    def _all_reduce(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """``all_reduce`` of a tensor that has memory of its own, now; what the operator for torch.compile runs."""
        count, dtype = x.numel(), x.dtype
        prepared = self._prepared.get((count, dtype))
        if prepared is None or x.device != self.device or not x.is_contiguous() or x.is_neg():
            prepared = self._prepare(x)
            if prepared is None:
                raise UnsupportedInputError(f"all_reduce: {self._why_declined(x)}")
        if (
            out is not None
            and out is not x
            and (
                not isinstance(out, _Tensor)
                or out.numel() != count
                or out.dtype is not dtype
                or out.device != self.device
                or not out.is_contiguous()
                or out.is_neg()
                or 0 < abs(x.data_ptr() - out.data_ptr()) < x.nbytes
            )
        ):
            raise UnsupportedInputError(_why_not_out(x, out))
        run = prepared.run
        if run is None:  # of one rank, or empty
            self.check()
            return x.clone() if out is None else out if out is x else out.copy_(x)
        try:
            if out is None:
                out = torch.empty_like(x)
            is_enqueued = run(x.data_ptr(), out.data_ptr(), self._current_stream(self._device_index))
        except RuntimeError as error:
            self._end_for(error)
            raise
        if not is_enqueued:
            self.check()
        return out

    def all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        *,
        out: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
        quantize: str | None = None,
        scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Sums ``x`` over all ranks, adds ``residual`` and norms each row, in one kernel.

        The sum is bitwise that of ``all_reduce``, and the new residual bitwise the torch sum of it and ``residual``.
        The normed rows are ``new_residual / sqrt(mean(new_residual ** 2) + eps) * weight`` computed in fp32 and rounded
        once; a row's bits do not depend on the rows beside it. (Engines round before the multiplication by the weight
        too.) Where the sum of the squares overflows fp32 a row becomes zeros, as in the engines.

        With ``quantize`` the normed rows, rounded to the dtype of ``x``, become FP8 e4m3, beyond +-448 saturated; NaN
        stays NaN. ``"static"``: multiplied by ``1 / scale``, as vLLM's ``static_scaled_fp8_quant``. ``"dynamic"``:
        divided by a scale for each row, its largest magnitude / 448 but at least 1 / (448 * 512), as vLLM's
        ``rms_norm_dynamic_per_token_quant``. (SGLang's per-token kernel multiplies by the reciprocal and has no least
        scale.)

        Args:
            x: [..., hidden], contiguous, bfloat16 or float16; hidden is a multiple of 8 up to 16384.
            residual: Like ``x``, the same on all ranks; None adds nothing, and the new residual is the sum.
            weight: [hidden], of the dtype of ``x``.
            eps: Added to the mean of the squares.
            out: Where the normed rows go: like ``x``, which it may be, or float8_e4m3fn. None: a new tensor.
            residual_out: Where the new residual goes: like ``x``; it may be ``residual``. None: a new tensor.
            quantize: None, ``"static"`` or ``"dynamic"``.
            scale: ``"static"``: float32, one element, required. ``"dynamic"``: where the scales go, float32 with an
                element for each row; None: a new tensor [..., 1].

        Returns:
            ``(normed, new_residual)``; with ``"dynamic"`` ``(normed, new_residual, scale)``.

        Raises:
            UnsupportedInputError: ``accepts_fused(x, weight, quantize)`` is false, or another tensor does not fit. The
                sum has not been made then: call ``all_reduce``.
            CommunicatorError: This or an earlier call has failed, as of ``all_reduce``.
        """
        if _is_compiling() or type(x) is not _Tensor or type(residual) not in _PLAIN or type(scale) not in _PLAIN:
            for name, tensor in (("x", x), ("residual", residual), ("weight", weight), ("scale", scale)):
                if not isinstance(tensor, _Tensor) and (tensor is not None or name in ("x", "weight")):
                    raise UnsupportedInputError(
                        f"all_reduce_add_rms_norm: {name} is a {type(tensor).__name__}, not a tensor"
                    )
            results = ops.fused(x, residual, weight, eps, quantize, scale, self.name)
            given = (out, residual_out, scale if quantize == "dynamic" else None)
            names = ("out", "residual_out", "scale")
            return tuple(
                made if wanted is None else _copy(made, f"all_reduce_add_rms_norm: {name}", wanted)
                for made, name, wanted in zip(results, names, given, strict=False)
            )
        return self._all_reduce_add_rms_norm(x, residual, weight, eps, out, residual_out, quantize, scale)

    def _all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
        quantize: str | None = None,
        scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """The same now, as ``_all_reduce``."""
        stream = self._current_stream(self._device_index)
        try:
            results, enqueued = self._live_fused().run(
                x, residual, weight, eps, out, residual_out, quantize, scale, stream
            )
        except LlmCommError:  # what does not fit, on all ranks alike
            raise
        except RuntimeError as error:
            self._end_for(error)
            raise
        if not enqueued:
            self.check()
        return results

    def accepts_fused(self, x: torch.Tensor, weight: torch.Tensor, quantize: str | None = None) -> bool:
        """Whether ``all_reduce_add_rms_norm`` of ``x`` and ``weight`` is served. Depends on shapes, dtypes, layout and
        kind of device only, so all ranks that hold the same kinds of tensors get the same answer."""
        if _is_compiling():
            return self._live_fused().accepts_traced(x, weight, quantize)
        return self.plan_fused(x, weight, quantize).algorithm != "declined"

    def plan_fused(self, x: torch.Tensor, weight: torch.Tensor, quantize: str | None = None) -> FusedPlan:
        """What ``all_reduce_add_rms_norm`` of ``x`` and ``weight`` would run, and why; ``"declined"`` is the algorithm
        of an input that is not served."""
        return self._live_fused().plan(x, weight, quantize)

    def accepts(self, x: Any) -> bool:
        """Whether ``all_reduce(x)`` is served. Depends on shape, dtype, layout and kind of device only, so all ranks
        that hold the same kind of tensor get the same answer.

        Raises:
            UnsupportedInputError: ``x`` is neither a tensor nor an array that torch can use.
        """
        tensor = x if isinstance(x, torch.Tensor) else arrays.as_tensor(x)
        if _is_compiling():  # which cannot trace the layout of a launch, nor texts with sizes
            count, nbytes = tensor.numel(), tensor.numel() * tensor.element_size()
            limit = selection.message_limit(self._table, self.config)
            is_input = arrays.is_dense_on(tensor, self.device) and tensor.dtype in _DATA_TYPES
            return is_input and (self.world_size == 1 or count == 0 or nbytes <= limit)
        return self._prepare(tensor) is not None

    def plan(self, x: Any) -> Plan:
        """What ``all_reduce(x)`` would run, and why; ``"declined"`` is the algorithm of an input that is not served.

        Raises:
            UnsupportedInputError: As of ``accepts``.
        """
        tensor = arrays.as_tensor(x)
        prepared = self._prepare(tensor)
        return self._plan(tensor) if prepared is None else prepared.plan

    def check(self) -> None:
        """Raises the CommunicatorError of an earlier call, if one has failed; costs no synchronization."""
        self._live_core()
        error = None if self._watchdog is None else self._watchdog.failure()
        if error is not None:
            raise error

    def _end_for(self, error: RuntimeError) -> None:
        """Ends the communicator because an operation that this rank accepts could not be launched, for want of memory
        for one. Others may have launched theirs: the next ones, of other numbers, would meet, and give wrong sums. In a
        capture nothing runs, and nothing has to end.

        Raises:
            LaunchError: It has ended.
        """
        if self._watchdog is None or self._is_capturing():
            return
        raise self._watchdog.end(str(error)) from error

    def _is_capturing(self) -> bool:
        if self.is_emulated:
            return False
        try:
            with torch.cuda.device(self.device):
                return torch.cuda.is_current_stream_capturing()
        except RuntimeError:  # the context is broken
            return False

    def on_error(self, callback: Callable[[CommunicatorError], None], *, exits: bool = False) -> None:
        """Calls ``callback`` with the error when this communicator fails, though no call is made any more.

        It comes within ``Config.timeout_s``, once, in a thread of the communicator (at once, in this one, if it has
        failed already), and must not wait for the GPU; to end the process it has to use ``os._exit``. A bound method
        does not keep its object alive. Where there is no callback, the error is logged. From then on every operation
        raises it.

        Args:
            callback: Called with what the operations raise.
            exits: From now on this communicator fails too when the process of another rank has exited without closing
                its own, though no operation waits for that rank: a second later, or as soon as this process ends or
                drops the communicator (where the callback is still there). A rank whose interpreter ends, by an
                exception for one, counts as one that has closed.
        """
        self._live_core()
        if self._watchdog is not None:
            self._watchdog.on_error(callback, exits)

    def use_table(self, table: selection.TuningTable) -> None:
        """Selects by another tuning table from now on. For tuning; make the same call on every rank."""
        self._table = table
        self._prepared.clear()
        self._fused = self._make_fused_calls()

    # ---- State --------------------------------------------------------------------------------------------------

    @property
    def table(self) -> selection.TuningTable:
        """The tuning table that selects."""
        return self._table

    @property
    def workspace_bytes(self) -> int:
        """Device memory that this rank holds for the communicator, allocated once."""
        return self._live_core().workspace_bytes()

    def close(self) -> None:
        """Frees the workspace. Call it on every rank when the last operation has ended; more than once is no error."""
        try:
            if self._core is not None and not self.is_emulated:
                torch.cuda.synchronize(self.device)
        finally:  # also where the CUDA context is broken
            if self._stop_watching is not None and self._stop_watching.detach() and self._watchdog is not None:
                self._watchdog.stop()
            self._stop_watching = self._watchdog = self._core = None
            self._fused = None
            self._prepared.clear()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- Calls --------------------------------------------------------------------------------------------------

    def _prepare(self, x: torch.Tensor) -> _Prepared | None:
        """What to launch for ``x``, or None if it is declined."""
        if self._why_not(x):
            return None
        key = (x.numel(), x.dtype)
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._plan_launch(*key)
            if prepared is not None:
                self._prepared[key] = prepared
        return prepared

    def _plan_launch(self, count: int, dtype: torch.dtype) -> _Prepared | None:
        core = self._live_core()
        data_type = _DATA_TYPES.get(dtype)
        if data_type is None:
            return None
        plan = selection.select(count, dtype.itemsize, self.world_size, self._table, self.config)
        if plan.algorithm == "declined":
            return None
        if plan.algorithm == "none":
            return _Prepared(plan, None)
        launch = _core.LaunchPlan(
            algorithm=selection.ALGORITHMS.index(plan.algorithm),
            blocks=plan.blocks,
            tile_lines_log2=plan.tile_lines.bit_length() - 1,
            depth=plan.depth,
            chunk_count=plan.chunk_elements,
        )
        if len(self._prepared) >= selection.MAX_PREPARED:
            self._prepared.clear()
        try:
            return _Prepared(plan, core.prepare_all_reduce(count, data_type, launch))
        except RuntimeError as error:
            self._end_for(error)
            raise

    def _plan(self, x: torch.Tensor) -> Plan:
        why = self._why_not(x)
        if why:
            return selection.declined(x.numel() * x.element_size(), why)
        return selection.select(x.numel(), x.element_size(), self.world_size, self._table, self.config)

    def _why_declined(self, x: torch.Tensor) -> str:
        return self._plan(x).reason

    def _why_not(self, x: torch.Tensor) -> str:
        """Why ``x`` is no input whatever its size, or ""."""
        if x.device != self.device:
            return f"the tensor is on {x.device}, the communicator on {self.device}"
        why = arrays.why_not_plain(x)
        if why:
            return why
        if not x.is_contiguous():
            return f"the tensor is not contiguous: shape {tuple(x.shape)}, strides {x.stride()}"
        if x.dtype not in _DATA_TYPES:
            return f"{x.dtype} is not one of {', '.join(map(str, _DATA_TYPES))}"
        return ""

    def _dispatch_all_reduce(self, x: Any, out: Any) -> Any:
        """What is no ordinary tensor, or not one yet."""
        if isinstance(x, _Tensor):
            # torch's dispatcher knows what to make of it: a graph while compiling, a fake result for a fake tensor, a
            # wait for one that is still on its way (AsyncCollectiveTensor), an error for a part of a DTensor.
            result = torch.ops.llm_comm.all_reduce(x, self.name)
            return result if out is None else _copy(result, "all_reduce: out", out)
        tensor = arrays.as_tensor(x)
        if out is None:
            return arrays.like(x, self._all_reduce(tensor))
        self._all_reduce(tensor, tensor if out is x else arrays.as_output(out))
        return out

    def _live_fused(self) -> FusedCalls:
        if self._fused is None:
            raise RuntimeError("this communicator is closed")
        return self._fused

    def _live_core(self) -> _core.Core:
        if self._core is None:
            raise RuntimeError("this communicator is closed")
        return self._core

    # ---- Set-up -------------------------------------------------------------------------------------------------

    def _find_table(self) -> selection.TuningTable:
        if self.is_emulated:
            return selection.find_table("emulated", self.world_size, 1, self.config)
        properties = torch.cuda.get_device_properties(self.device)
        return selection.find_table(properties.name, self.world_size, properties.multi_processor_count, self.config)

    def _make_core(self) -> tuple[_core.Core, int]:
        """The core, and the most blocks of a cluster that its device has room for."""
        options = _core.CoreOptions(
            rank=self.rank,
            world_size=self.world_size,
            slot_bytes=selection.slot_bytes(self.config),
            timeout_s=self.config.timeout_s * KERNEL_SHARE_OF_TIMEOUT,
            dependent_launch=self.config.pdl,
            check_calls=self.config.debug or self.is_emulated,
        )
        core = (
            _core.make_emulated_core(options) if self.is_emulated else _core.make_cuda_core(options, self.device.index)
        )
        return core, core.max_cluster_blocks()

    def _make_fused_calls(self) -> FusedCalls | None:
        return FusedCalls(self._live_core(), self.device, self.world_size, self._table, self.config, self._limits)

    def _watch(self, rendezvous: Rendezvous) -> None:
        if self.world_size == 1:
            return
        board = None
        try:
            board = StatusBoard.open(rendezvous)
        except MissingRankError:
            raise
        except RendezvousError as error:  # the same on all ranks
            logger.info("errors will tell nothing of the other ranks: %s", error)
        if not _core.bounded_waits:
            logger.warning("this build of llm_comm is for measuring only: its kernels wait for ever")
        watchdog = Watchdog(self._live_core(), self.rank, self.config.timeout_s, board)
        try:
            rendezvous.attempt("start of the watchdog", watchdog.start)
        except BaseException:
            watchdog.stop()
            raise
        self._watchdog = watchdog
        self._stop_watching = weakref.finalize(self, watchdog.abandon)

    def _connect(self, rendezvous: Rendezvous) -> str:
        """Allocates the workspace and maps those of the peers. Returns how."""
        if self.is_emulated:
            self._connect_by_descriptor(rendezvous)
            return "POSIX shared memory"
        try:
            self._connect_by_descriptor(rendezvous)
            return "VMM"
        except MissingRankError:
            raise
        except RendezvousError as error:  # the same on all ranks: all fall back
            logger.info("VMM is not permitted here, using cudaIpc: %s", error)
            why_not_vmm = str(error)
        try:
            self._connect_by_ipc(rendezvous)
        except MissingRankError:
            raise
        except RendezvousError as error:
            raise RendezvousError(f"{error}. Before that, by VMM: {why_not_vmm}") from error
        return "cudaIpc"

    def _connect_by_descriptor(self, rendezvous: Rendezvous) -> None:
        core = self._live_core()
        descriptors: list[int] = []
        try:
            rendezvous.attempt(
                "allocation of the workspace", lambda: descriptors.append(core.create_workspace(False)[0])
            )
            peers = rendezvous.exchange_descriptors(descriptors[0])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

        def map_peers() -> None:
            for peer, fd in peers.items():
                core.map_peer(peer, fd, b"")

        try:
            rendezvous.attempt("mapping of the peers' memory", map_peers)
        finally:
            for fd in peers.values():
                os.close(fd)

    def _connect_by_ipc(self, rendezvous: Rendezvous) -> None:
        core = self._live_core()
        _, handle = rendezvous.attempt("allocation of the workspace", lambda: core.create_workspace(True))
        handles = [bytes.fromhex(text) for text in rendezvous.gather("handles of workspaces", handle.hex())]

        def map_peers() -> None:
            for peer, peer_handle in enumerate(handles):
                if peer != self.rank:
                    core.map_peer(peer, -1, peer_handle)

        rendezvous.attempt("mapping of the peers' memory", map_peers)


def _no_stream(_device_index: int) -> int:
    return 0


def _device(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        use_cuda = torch.cuda.is_available()
        if use_cuda and not _core.cuda_archs:
            use_cuda = False
            logger.warning(
                "there are GPUs, but this build of llm_comm has no CUDA kernels: it emulates GPUs, on CPU tensors. "
                "Install it where nvcc is found"
            )
        device = torch.device("cuda" if use_cuda else "cpu")
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedInputError(f"device {device}: llm_comm runs on CUDA devices and, emulated, on 'cpu'")
    return torch.empty(0, device=device).device  # with its index


def _gpu(device: torch.device) -> str | None:
    """The same on all ranks that use the same GPU, and nowhere else; None for emulated ones."""
    return None if device.type == "cpu" else f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _clear_frames(error: BaseException | None) -> None:
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _check_hosts(rendezvous: Rendezvous, communicator: Communicator) -> None:
    """Compares what must be alike on all ranks. Before anything else: a rank elsewhere cannot map memory at all."""
    config = communicator.config
    hello = {
        **host_identity(),
        "version": _core.version,
        "device": communicator.device.type,
        "gpu": _gpu(communicator.device),
        "limits": communicator._limits,
        "config": {name: getattr(config, name) for name in _OPTIONS_OF_ALL_RANKS},
    }
    if rendezvous.world_size > selection.MAX_WORLD_SIZE:
        raise RendezvousError(
            f"the group has {rendezvous.world_size} ranks; llm_comm serves up to {selection.MAX_WORLD_SIZE}"
        )
    everyone = rendezvous.gather("comparison of ranks", hello)
    hosts = [f"{other['host']} (boot id {other['boot_id']})" for other in everyone]
    _check_alike("are on different machines", [other["boot_id"] for other in everyone], shown=hosts)
    gpus = [other["gpu"] for other in everyone]
    shared = {gpu: [rank for rank, of in enumerate(gpus) if of == gpu] for gpu in gpus if gpu and gpus.count(gpu) > 1}
    if shared:
        found = "; ".join(f"ranks {', '.join(map(str, ranks))} use {gpu}" for gpu, ranks in shared.items())
        raise RendezvousError(f"ranks share a GPU, each needs one of its own (torch.cuda.set_device): {found}")
    _check_alike("have different versions of llm_comm", [other["version"] for other in everyone])
    _check_alike("have different kinds of device", [other["device"] for other in everyone])
    _check_alike("have devices of different kinds", [other["limits"] for other in everyone])
    _check_alike("have different options", [other["config"] for other in everyone])


def _check_alike(what: str, values: list[Any], shown: list[Any] | None = None) -> None:
    """Raises RendezvousError, on all ranks alike, unless all values are equal."""
    if any(value != values[0] for value in values):
        found = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(shown or values))
        raise RendezvousError(f"the ranks {what}: {found}")


def _check_reachable(rendezvous: Rendezvous, core: _core.Core) -> None:
    """A store from every rank to every other one: links that map but do not carry (a bridge that blocks P2P) exist."""
    rendezvous.attempt("peer-to-peer write", core.send_marks)

    def look() -> None:
        unseen = core.peers_unseen()
        if unseen:
            raise RuntimeError(f"stores of ranks {unseen} did not arrive: the devices cannot write to each other")

    rendezvous.attempt("peer-to-peer test", look)


def _copy(made: torch.Tensor, name: str, out: torch.Tensor) -> torch.Tensor:
    """Puts what an operator has made where the caller wants it; ``copy_`` alone would convert and repeat it."""
    if not isinstance(out, _Tensor):
        raise UnsupportedInputError(f"{name} is a {type(out).__name__}; it must be a tensor")
    if out.numel() != made.numel() or out.dtype != made.dtype or out.device != made.device:
        raise UnsupportedInputError(
            f"{name} ({tuple(out.shape)}, {out.dtype}, {out.device}) must be like what goes there "
            f"({tuple(made.shape)}, {made.dtype}, {made.device})"
        )
    return out.copy_(made.view(out.shape))


def _why_not_out(x: torch.Tensor, out: Any) -> str:
    if not isinstance(out, _Tensor):
        return f"all_reduce: x is a tensor, out a {type(out).__name__}; they must be of one library"
    if out.is_neg():
        return f"all_reduce: out: {arrays.why_not_plain(out)}"
    if out.numel() != x.numel() or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
        return (
            f"all_reduce: out ({tuple(out.shape)}, {out.dtype}, {out.device}) must be contiguous and like x "
            f"({tuple(x.shape)}, {x.dtype}, {x.device})"
        )
    return "all_reduce: out overlaps x; it may be x itself or must not share memory with it"
