"""A node in a copy of a process that has imported what a node needs; see `chaos`."""

from __future__ import annotations

import os
import sys

import torch

import kvasir_node.daemon
import kvasir_node.experts
import kvasir_node.kernels
import kvasir_node.serving  # noqa: F401 - imported here, once, for all copies
from kvasir_node.cli import main


def run_node(arguments: list[str], log: str) -> None:
    """`kvasir-node` with these arguments, its output in that file, in a process group of its own."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(output, number)
    torch.set_num_threads(1)
    sys.exit(main(arguments))
