"""A rank beside the daemon's own: `python -m kvasir_backbone.follower FOLDER DTYPE RANK RANKS PORT`.

Started by `tensor_parallel.Ranks`, never by hand. A byte on standard input announces a piece of work, the end
of standard input the end of rank 0.
"""

from __future__ import annotations

import sys


def main(arguments: list[str]) -> int:
    """Follow rank 0 until it ends; the process's status."""
    import torch
    import torch.distributed as dist

    from .checkpoint import Checkpoint
    from .tensor_parallel import _NOBODY, FollowingModel, distribution, join, meeting_point

    folder, dtype, rank, ranks, port = arguments
    torch.set_num_threads(1)
    with Checkpoint.open(folder) as checkpoint:
        more = distribution(checkpoint.config, int(ranks))
        store = meeting_point(int(rank), int(ranks), int(port))
        store.set(f"here/{rank}", "")
        join(store, int(rank), int(ranks))
        model = FollowingModel.load(checkpoint, dtype=dtype, dispatcher=_NOBODY, more=more)
        store.set(f"loaded/{rank}", "")
        while sys.stdin.buffer.read(1):
            order: list[object] = [None]
            dist.broadcast_object_list(order, src=0)
            model.follow(*order[0])  # type: ignore[misc]
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
