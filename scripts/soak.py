"""A relay under churn for a while: its round trip and memory at the end must be those of the start.

    python3 scripts/soak.py                                20 minutes
    python3 scripts/soak.py --minutes 0.5 --warm-up 10     the form that tests run

Devices come, talk, are cut off or leave, in a process of their own; so do frozen ones, strangers and broken
frames. Measured in the relay's process are RSS, and the round trip of 6 KiB through one steady circuit,
against the same through a bare proxy in the same second, so that a busy machine does not look like decay.

The first seconds count nowhere: caches fill, the allocator takes what a full house of connections needs once,
and the crowd is not complete. What grows after that is a leak.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from _env import enter

LIMIT = 1.10
WARM_UP_S = 20.0


def main(arguments: list[str]) -> int:
    """Run the soak; status 1 if the relay decayed."""
    from benches.relay import Role, resident

    parser = argparse.ArgumentParser(prog="soak.py", description="A relay under churn for a while.")
    parser.add_argument("--minutes", type=float, default=20.0, help="how long (%(default)s)")
    parser.add_argument(
        "--warm-up",
        type=float,
        default=WARM_UP_S,
        help="seconds before that which count nowhere (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="the figures as one line of JSON, last")
    options = parser.parse_args(arguments)
    seconds, seed = options.warm_up + options.minutes * 60, secrets.token_hex(8)
    with (
        Role("plain", seed) as plain,
        Role("proxy", seed, plain.hear()) as proxy,
        Role("relay", seed) as relay,
    ):
        url = f"http://127.0.0.1:{relay.hear()}"
        with ExitStack() as stack:
            stack.enter_context(Role("device", seed, url)).hear()  # there before it is called
            churn = stack.enter_context(Role("churn", seed, url, seconds))
            steady = stack.enter_context(Role("steady", seed, url, proxy.hear(), seconds))
            memory: list[int] = []
            ratios: list[float] = []
            started = time.monotonic()
            while (found := steady.hear()) is not None:
                if time.monotonic() - started >= options.warm_up:
                    ratios.append(found)
                    memory.append(resident(relay.pid))
            churned = churn.hear()
    figures = verdict(ratios, memory)
    for name, value in {**figures, **churned}.items():
        print(f"{name:<24} {value}")
    passed = figures["round_trip_end_vs_start"] <= LIMIT and figures["rss_end_vs_start"] <= LIMIT
    print("no decay" if passed else f"DECAY: more than {LIMIT - 1:.0%} above the start")
    if options.json:
        print(json.dumps({**figures, **churned}))
    return 0 if passed else 1


def verdict(ratios: list[float], memory: list[int]) -> dict[str, float]:
    """The last fifth against the first: round trip (by the proxy's) and RSS."""
    part = max(3, len(ratios) // 5)
    first, last = slice(0, part), slice(-part, None)
    return {
        "round_trip_end_vs_start": round(
            statistics.median(ratios[last]) / statistics.median(ratios[first]), 3
        ),
        "rss_end_vs_start": round(statistics.median(memory[last]) / statistics.median(memory[first]), 3),
        "rss_end_mb": round(memory[-1] / 1e6, 1),
        "samples": len(ratios),
    }


if __name__ == "__main__":
    enter("all")
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
