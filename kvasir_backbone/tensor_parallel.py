"""The dense part over several processes: each holds a share of the attention heads and of the wide products.

Theory of operation. Rank 0 is the daemon; it alone schedules, routes, dispatches and samples. It starts the
other ranks (`follower.py`) and gives them every step's work; all ranks run the same pass over their own
shards, as transformers' `tp_plan` of the model cuts them, and sum up over torch.distributed (gloo). At an MoE
layer rank 0 takes the router's decision, dispatches and combines as ever; the others receive the combined
rows, or that the pass is over. So a follower never decides which experts run, and never reaches a worker.

A row-parallel product is summed in another order than in one process: logits move in their last bits, and
greedy text is the same up to near-ties (`equality.py`).

Every wait has a deadline: what a follower waits for in a pass ends with `TIMEOUT_S`, and its wait for work
ends with the end of rank 0, which closes the pipe between them. A rank that is gone ends the daemon.

Knows torch.distributed and transformers' plans. Knows no scheduling, no owners and no HTTP.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import structlog

from relay.errors import ConfigError, KvasirError

from .model import BackboneModel, StepResult, Work, packed_fault
from .routing import NothingLeft, StepRouting
from .seam import Dispatcher

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from .checkpoint import Checkpoint

_log = structlog.get_logger("backbone")

TIMEOUT_S: Final = 120.0
"""The longest wait for another rank in a pass. Above any dispatch's deadline."""
START_S: Final = 600.0
"""How long the ranks may take to start and load."""

_GOES_ON, _NOTHING_LEFT, _GIVEN_UP = 0, 1, 2


def tensor_parallel_fault(config: Any, ranks: int) -> str | None:
    """Why the dense part of a model of this configuration cannot be cut for so many ranks; None if it can."""
    text = config.get_text_config()
    if packed_fault(text) is not None:
        return f"requests of {text.model_type} run one pass each, which cannot be spread over processes"
    if not getattr(text, "base_model_tp_plan", None):
        return f"transformers has no tensor-parallel plan for {text.model_type}"
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    for what, count in (("attention heads", heads), ("key-value heads", kv_heads)):
        if count % ranks:
            return f"its {count} {what} cannot be divided among {ranks} processes"
    return None


def distribution(config: Any, ranks: int) -> dict[str, Any]:
    """What transformers' `from_pretrained` must be told, beside the configuration.

    Takes the experts' rules out of the configuration's plan: they are not here. Raises `ConfigError`.
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    fault = tensor_parallel_fault(config, ranks)
    if fault is not None:
        raise ConfigError(f"--tensor-parallel {ranks} does not work for this model: {fault}")
    text = config.get_text_config()
    plan: Mapping[str, str] = text.base_model_tp_plan
    text.base_model_tp_plan = {name: how for name, how in plan.items() if "experts" not in name.split(".")}
    make: Any = DistributedConfig
    return {"distributed_config": make(tp_size=ranks, tp_plan="auto")}


def meeting_point(rank: int, ranks: int, port: int = 0) -> Any:
    """The store that the ranks meet by: opened by rank 0, at any free port, and joined by the others."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        "127.0.0.1",
        port,
        ranks,
        is_master=rank == 0,
        timeout=timedelta(seconds=START_S),
        wait_for_workers=False,
    )


def join(store: Any, rank: int, ranks: int) -> None:
    """Become rank `rank` of so many, on this machine's loopback only."""
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)


class Ranks:
    """The other ranks, seen from rank 0: `start`, load, `ready`, then `order` for each step; `close`."""

    def __init__(self, folder: Path, dtype: str, ranks: int) -> None:
        self.count = ranks
        self._folder = folder
        self._dtype = dtype
        self._processes: list[subprocess.Popen[bytes]] = []
        self._store: Any = None
        self._fault = ""

    def start(self) -> None:
        """Start the processes and meet them; they load while this one does. Raises `KvasirError`."""
        self._store = meeting_point(0, self.count)
        for rank in range(1, self.count):
            command = [sys.executable, "-m", "kvasir_backbone.follower", str(self._folder), self._dtype]
            command += [str(rank), str(self.count), str(self._store.port)]
            self._processes.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=os.name != "nt")
            )
        self._wait("here")
        join(self._store, 0, self.count)

    def ready(self) -> None:
        """Wait until all have loaded. Raises `KvasirError`."""
        self._wait("loaded")

    def _wait(self, what: str) -> None:
        """Wait until every other rank has said so."""
        keys = [f"{what}/{rank}" for rank in range(1, self.count)]
        deadline = time.monotonic() + START_S
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                self._fault = f"the tensor-parallel processes are not {what} within {START_S:.0f} s"
            if self.fault():
                raise KvasirError(self._fault)
            time.sleep(0.05)

    def fault(self) -> str:
        """What is wrong with the other ranks; empty while all is well."""
        for rank, process in enumerate(self._processes, start=1):
            status = process.poll()
            if status is not None and not self._fault:
                self._fault = (
                    f"tensor-parallel process {rank} ended with status {status} (what it said, if anything, "
                    "is above): restart the backbone"
                )
        return self._fault

    def order(self, what: object) -> None:
        """Give all ranks their next piece of work. Raises `KvasirError` where one is gone."""
        import torch.distributed as dist

        try:
            if not self.fault():
                for process in self._processes:
                    assert process.stdin is not None
                    process.stdin.write(b"w")
                    process.stdin.flush()
                dist.broadcast_object_list([what], src=0)
        except (OSError, RuntimeError) as fault:
            self.broke(fault)
        if self.fault():
            raise KvasirError(self._fault)

    def abort(self) -> None:
        """The daemon ends: nobody waits for the others any more."""
        self._fault = self._fault or "the backbone is shutting down"

    def broke(self, fault: BaseException) -> None:
        """The ranks are out of step: nothing more can be computed."""
        self._fault = self._fault or f"the tensor-parallel processes fell out of step ({fault}): restart"

    def close(self) -> None:
        """End the processes and leave the group."""
        import torch.distributed as dist

        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5.0)
        self._processes.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None


class LeadingModel(BackboneModel):
    """Rank 0's share of the model: as `BackboneModel`, one step at a time. `lead` before the first."""

    _ranks: Ranks

    def lead(self, ranks: Ranks) -> LeadingModel:
        """Compute together with these ranks; returns itself."""
        self._ranks = ranks
        self._turn = threading.Lock()
        self._released: list[int] = []
        self.kv_token_bytes = max(1, self.kv_token_bytes // ranks.count)
        return self

    def forward(self, works: Sequence[Work], *arguments: Any, **settings: Any) -> StepResult:
        """See `BackboneModel.forward`."""
        with self._turn:
            released, self._released = self._released, []
            self._ranks.order((released, self.least_rows, list(works)))
            try:
                return super().forward(works, *arguments, **settings)
            except _Told as told:
                raise told.fault from None
            except Exception as fault:
                self._ranks.broke(fault)
                raise KvasirError(self._ranks.fault()) from fault

    def release(self, request: int) -> None:
        """See `BackboneModel.release`."""
        super().release(request)
        self._released.append(request)

    def record(self) -> bool:
        """Never: a recorded pass would not meet the other ranks."""
        return False

    def _routing(
        self, works: Sequence[Work], places: Sequence[int], dispatcher: Dispatcher | None
    ) -> StepRouting:
        step = super()._routing(works, places, dispatcher)
        return _Leading(step.dispatcher, step.keys, step.deadline_s, step.replay)


class FollowingModel(BackboneModel):
    """Another rank's share of the model: decides nothing, records nothing."""

    def follow(self, released: Sequence[int], least_rows: int, works: Sequence[Work]) -> None:
        """Compute one step with the others."""
        for request in released:
            self.release(request)
        self.least_rows = least_rows
        try:
            self.forward(works)
        except _GivenUp:
            return

    def record(self) -> bool:
        """Never: see `LeadingModel.record`."""
        return False

    def _routing(
        self, works: Sequence[Work], places: Sequence[int], dispatcher: Dispatcher | None
    ) -> StepRouting:
        return _Following(_NOBODY, [])

    def _record(self, *_: object) -> None:
        return


class _Nobody:
    """A follower's dispatcher, which is never asked."""

    def dispatch(self, *_: object) -> Tensor:
        raise AssertionError("a follower dispatches nothing")


_NOBODY: Final = _Nobody()


class _GivenUp(Exception):  # noqa: N818 - rank 0 ended the pass
    """Rank 0 gave the pass up."""


class _Told(Exception):  # noqa: N818 - carries another
    """The pass failed on rank 0, and all ranks know."""

    def __init__(self, fault: Exception) -> None:
        super().__init__(str(fault))
        self.fault = fault


class _Leading(StepRouting):
    """Rank 0: decides and dispatches, then tells the others what came of it."""

    def run(self, layer: int, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """See `StepRouting.run`."""
        try:
            out = super().run(layer, rows, ids, weights)
        except NothingLeft:
            _tell(rows, _NOTHING_LEFT)
            raise
        except Exception as fault:
            _tell(rows, _GIVEN_UP)
            raise _Told(fault) from fault
        _tell(out, _GOES_ON)
        return out


class _Following(StepRouting):
    """Another rank: takes what rank 0 combined."""

    def run(self, layer: int, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """See `StepRouting.run`."""
        import torch.distributed as dist

        message = rows.new_empty(len(rows) + 1, rows.shape[1])
        dist.broadcast(message, src=0)
        code = int(message[-1, 0])
        if code == _NOTHING_LEFT:
            raise NothingLeft
        if code == _GIVEN_UP:
            raise _GivenUp
        return message[:-1]


def _tell(out: Tensor, code: int) -> None:
    """Send the combined rows [N, width], and how it goes on in one row more."""
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.cat([out, out.new_full((1, out.shape[1]), float(code))]), src=0)


def load_leading(
    ranks: Ranks, checkpoint: Checkpoint, dtype: str, dispatcher: Dispatcher | None
) -> LeadingModel:
    """Start the other ranks and load this one's share. Raises `ConfigError` and `KvasirError`."""
    more = distribution(checkpoint.config, ranks.count)
    ranks.start()
    model = LeadingModel.load(checkpoint, dtype=dtype, dispatcher=dispatcher, more=more).lead(ranks)
    ranks.ready()
    sharded, whole = held_bytes(model.model)
    _log.info("ranks.ready", ranks=ranks.count, sharded_bytes=sharded, whole_bytes=whole)
    return model


def held_bytes(model: Any) -> tuple[int, int]:
    """Bytes of parameters in this process: (of sharded ones, of those that every rank has whole)."""
    sharded = whole = 0
    for parameter in model.parameters():
        local: Callable[[], Tensor] | None = getattr(parameter, "to_local", None)
        if local is None:
            whole += parameter.nbytes
        else:
            sharded += local().nbytes
    return sharded, whole
