"""The swarms that the divergence experiment compares: which nodes, over which wire dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .inprocess import NodeSpec


@dataclass(frozen=True, slots=True)
class Mix:
    """One swarm. `dtype` is the backbone's compute dtype, which the product's wire has too; `wire` another,
    for what rounding rows and outputs alone does. `texts`: generate with it as well."""

    name: str
    dtype: str
    nodes: tuple[NodeSpec, ...]
    texts: bool = False
    wire: str = ""

    @property
    def wire_dtype(self) -> str:
        """What rows and outputs travel in."""
        return self.wire or self.dtype


_STORED, _INT8, _INT4 = NodeSpec("stored"), NodeSpec("int8"), NodeSpec("int4")

MIXES: Final = (
    Mix("stored, one kernel", "float32", (_STORED,) * 4),
    Mix(
        "stored, two kernels, batches of 3 to all",
        "float32",
        (_STORED, NodeSpec("stored", "torch"), NodeSpec("stored", "torch", batch=16), NodeSpec(batch=3)),
        texts=True,
    ),
    Mix("int8", "float32", (_INT8,) * 4),
    Mix("int4", "float32", (_INT4,) * 4),
    Mix("stored and int8", "float32", (_STORED, _INT8), texts=True),
    Mix(
        "stored, int8 and int4, two kernels",
        "float32",
        (_STORED, NodeSpec("int8", "torch", batch=64), _INT4, NodeSpec("int8", batch=7)),
        texts=True,
    ),
    Mix("bf16 experts", "float32", (NodeSpec(router_dtype="bfloat16"),) * 4, wire="bfloat16"),
    Mix("all in bf16", "bfloat16", (NodeSpec(router_dtype="bfloat16"),) * 4),
    Mix(
        "all in bf16, two kernels, routers bf16 and fp32",
        "bfloat16",
        (NodeSpec(router_dtype="bfloat16"), NodeSpec("stored", "torch", router_dtype="float32")),
    ),
    Mix(
        "bf16 with stored, int8 and int4, two kernels",
        "bfloat16",
        (
            NodeSpec("stored", "torch", router_dtype="bfloat16"),
            NodeSpec("int8", batch=16, router_dtype="bfloat16"),
            NodeSpec("int4", router_dtype="bfloat16"),
        ),
        texts=True,
    ),
)
"""Every mix reads the whole held-out text with authority, and half of it without."""

INT8: Final = "int8"
BF16: Final = "bf16 experts"
BF16_BACKBONE: Final = "all in bf16"
WATCHED: Final = ("stored, int8 and int4, two kernels", "bf16 with stored, int8 and int4, two kernels")
"""Mixes whose every reply is recomputed on a part of the text."""
