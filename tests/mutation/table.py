"""All mutants, in the order of their numbers."""

from __future__ import annotations

from mutant import Mutant, check_names
from table_bench import BENCH
from table_code import CODE
from table_edges import EDGES
from table_experts import EXPERTS
from table_host import HOST
from table_kernels import KERNELS
from table_layers import LINEAR_LAYERS
from table_moe import MOE
from table_nccl import IN_PLACE_OF_NCCL
from table_operations import OPERATIONS
from table_planning import PLANNING
from table_router import ROUTER
from table_runtime import RUNTIME
from table_switch import SWITCH

MUTANTS: tuple[Mutant, ...] = (
    *KERNELS,
    *HOST,
    *PLANNING,
    *OPERATIONS,
    *RUNTIME,
    *BENCH,
    *EDGES,
    *SWITCH,
    *LINEAR_LAYERS,
    *IN_PLACE_OF_NCCL,
    *CODE,
    *MOE,
    *ROUTER,
    *EXPERTS,
)
check_names(MUTANTS)
