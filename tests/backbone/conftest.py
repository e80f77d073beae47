"""Shared by the backbone's tests: what is heavy is made once a session, and only when asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvasir_backbone.checkpoint import Checkpoint
    from kvasir_backbone.model import BackboneModel
    from market.plans import Plan


@pytest.fixture(scope="session")
def bundled() -> Iterator[Checkpoint]:
    """The bundled checkpoint."""
    from kvasir_backbone.bundled import bundled_model_path
    from kvasir_backbone.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(bundled_model_path())
    yield checkpoint
    checkpoint.close()


@pytest.fixture(scope="session")
def bundled_plan(bundled: Checkpoint) -> Plan:
    """Its plan in eight windows, fp32 on the wire."""
    return bundled.make_plan(window_bytes=8 << 20, wire_dtype="float32")


@pytest.fixture(scope="session")
def bundled_model(bundled: Checkpoint, bundled_plan: Plan) -> BackboneModel:
    """Its backbone in fp32, experts run from the checkpoint. One engine at a time may use it."""
    from kvasir_backbone.local_experts import LocalExperts
    from kvasir_backbone.model import BackboneModel

    return BackboneModel.load(bundled, dtype="float32", dispatcher=LocalExperts(bundled.read, bundled_plan))


@pytest.fixture(scope="session")
def bundled_stock() -> Any:
    """The whole bundled model as stock transformers loads it."""
    from kvasir_backbone.bundled import bundled_model_path
    from kvasir_backbone.equality import load_stock

    return load_stock(bundled_model_path())
