"""The bundled model: a real, trained 256-expert top-8 checkpoint of 40 MB (model_data/kvasir-tiny)."""

from __future__ import annotations

from pathlib import Path


def bundled_model_path() -> Path:
    """The folder of the bundled checkpoint `kvasir-tiny`, in the Hugging Face layout."""
    return Path(__file__).parent / "model_data" / "kvasir-tiny"
