"""The proof at start that company changes no bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvasir_backbone import invariance
from kvasir_backbone.invariance import COMPANIES, prove
from kvasir_backbone.model import BackboneModel


def test_this_machine_computes_a_request_alike_in_any_company(bundled_model: BackboneModel) -> None:
    inner = bundled_model.dispatcher
    assert prove(bundled_model) is None
    assert bundled_model.dispatcher is inner
    assert bundled_model.kv_bytes == 0
    assert not bundled_model._logs


def test_passes_of_too_few_rows_are_found_out_and_mended(
    bundled_model: BackboneModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine whose products differ below eight rows."""
    real: Any = bundled_model._run

    def run(step: Any, tokens: Any, *arguments: Any, **options: Any) -> Any:
        logits = real(step, tokens, *arguments, **options)
        return logits + np.float32(1e-6) * logits if tokens.shape[1] < 8 else logits

    before = bundled_model.least_rows
    with monkeypatch.context() as patch:
        patch.setattr(bundled_model, "_run", run)
        patch.setattr(invariance, "COMPANIES", COMPANIES[4:6])
        assert prove(bundled_model) is None
        assert bundled_model.least_rows == 8
    bundled_model.least_rows = before


def test_where_no_size_helps_the_fault_is_named(
    bundled_model: BackboneModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bundled_model.least_rows
    real: Any = bundled_model._run

    def run(step: Any, tokens: Any, *arguments: Any, **options: Any) -> Any:
        logits = real(step, tokens, *arguments, **options)
        return logits + np.float32(1e-4) * (len(step.keys) - 5)

    with monkeypatch.context() as patch:
        patch.setattr(bundled_model, "_run", run)
        fault = prove(bundled_model)
    assert fault is not None
    assert "the logits of a prompt move by" in fault
    assert "beside 1 other requests" in fault
    assert bundled_model.least_rows == before
