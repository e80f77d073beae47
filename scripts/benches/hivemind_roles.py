"""The other side of the call suite: hivemind's experts, run by the interpreter of an environment of its own.

    PYTHON hivemind_roles.py server HIDDEN WIDTH EXPERTS
    PYTHON hivemind_roles.py client HIDDEN EXPERTS ADDRESS...

Imports nothing of Kvasir. The server prints its addresses as JSON and serves until its input closes. The
client answers each number on its input with as many seconds: `EXPERTS` `RemoteExpert` calls of one fp32 row
at once, one a thread, from the first call to the last answer.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hivemind  # type: ignore[import-not-found]  # it is in its own environment
import torch
from hivemind.moe import ModuleBackend, Server, get_experts  # type: ignore[import-not-found]
from hivemind.utils.tensor_descr import BatchTensorDescriptor  # type: ignore[import-not-found]
from torch import Tensor, nn

READY_S = 60.0


class SwiGlu(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rows [n, hidden] -> rows [n, hidden]."""
        out: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return out


def say(value: object) -> None:
    """One line of JSON to the parent."""
    print(json.dumps(value), flush=True)


def server(hidden: int, width: int, count: int) -> None:
    """Serve `count` experts of fp32 weights until the input closes."""
    dht = hivemind.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    rows = BatchTensorDescriptor(hidden)
    experts = {}
    for number in range(count):
        expert = SwiGlu(hidden, width)
        for parameter in expert.parameters():
            parameter.requires_grad_(False)
        experts[f"expert.{number}"] = ModuleBackend(
            name=f"expert.{number}",
            module=expert,
            optimizer=None,
            args_schema=(rows,),
            outputs_schema=rows,
            max_batch_size=64,
        )
    serving = Server(dht, experts, num_connection_handlers=1)
    serving.run_in_background(timeout=READY_S)
    say([str(address) for address in dht.get_visible_maddrs()])
    sys.stdin.read()
    serving.shutdown()
    dht.shutdown()


def client(hidden: int, count: int, addresses: list[str]) -> None:
    """Time calls to all experts at once."""
    dht = hivemind.DHT(start=True, initial_peers=addresses, client_mode=True)
    names = [f"expert.{number}" for number in range(count)]
    until = time.monotonic() + READY_S
    experts: list[Any] = []
    while len(experts) < count or None in experts:
        experts = get_experts(dht, names)
        if time.monotonic() > until:
            sys.exit("hivemind's experts were not found in its DHT")
    row = torch.randn(1, hidden)

    def call(expert: Any) -> Tensor:
        with torch.inference_mode():
            out: Tensor = expert(row)
            return out

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(call, experts))
        say("ready")
        for line in sys.stdin:
            seconds = []
            for _ in range(int(line)):
                started = time.perf_counter()
                list(pool.map(call, experts))
                seconds.append(time.perf_counter() - started)
            say(seconds)
    dht.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    role, *rest = sys.argv[1:]
    if role == "server":
        server(*map(int, rest))
    else:
        client(int(rest[0]), int(rest[1]), rest[2:])
