"""A relay's meters in the Prometheus text format (version 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .load import RelayLoad
from .meters import Meters

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(meters: Meters, load: RelayLoad) -> str:
    """All of a relay's metrics: gauges of what is, counters since the start."""
    peers = {"device": meters.devices, "backbone": meters.backbones}
    lines = [
        *_family("kvasir_relay_peers", "gauge", "Connected peers.", "role", peers),
        *_single("kvasir_relay_circuits", "gauge", "Open circuits.", len(meters.circuits)),
        *_single("kvasir_relay_circuits_opened_total", "counter", "Circuits opened.", meters.circuits_opened),
        *_family(
            "kvasir_relay_circuits_ended_total",
            "counter",
            "Circuits ended or refused, by outcome.",
            "outcome",
            meters.outcomes,
        ),
        *_single("kvasir_relay_bytes_total", "counter", "Payload bytes forwarded.", meters.bytes_forwarded),
        *_family(
            "kvasir_relay_refusals_total", "counter", "Connections refused, by code.", "code", meters.refusals
        ),
        *_single("kvasir_relay_load", "gauge", "Load: 0 idle, 1 full.", round(load.share, 4)),
        *_single(
            "kvasir_relay_bytes_per_second", "gauge", "Payload bytes a second.", round(load.bytes_per_s)
        ),
        *_single("kvasir_relay_draining", "gauge", "Whether the relay is going away.", int(meters.draining)),
    ]
    return "\n".join(lines) + "\n"


def _single(name: str, kind: str, text: str, value: float) -> Iterable[str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name} {value}"


def _family(name: str, kind: str, text: str, label: str, values: Mapping[str, int]) -> Iterable[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for key in sorted(values):
        yield f'{name}{{{label}="{key}"}} {values[key]}'
