"""What cannot be served says so by its name; and every Mixture-of-Experts type of transformers is known."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvasir_backbone.checkpoint import Checkpoint
from relay.errors import ConfigError
from tests.support.architectures import (
    ARCHITECTURES,
    NOT_CAUSAL,
    NOT_SERVED,
    OUTSIDE,
    STATE,
    UNTESTED,
    save_asymmetric_int4,
)

SAYS = {
    OUTSIDE: r"{}.*(experts interface|cannot build this model).*cannot serve it",
    NOT_CAUSAL: r"{}: transformers has no causal language model of this type",
    STATE: r"\({}\) keeps a state of its own",
}
MODELS = Path(transformers.__file__).parent / "models"


@pytest.mark.parametrize("name", NOT_SERVED)
def test_it_is_refused_by_name_before_any_weights_are_read(tmp_path: Path, name: str) -> None:
    AutoConfig.for_model(name).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=SAYS[NOT_SERVED[name]].format(name)):
        Checkpoint.open(tmp_path)


def test_int4_with_zero_points_is_refused_by_the_tensor_that_transformers_cannot_convert(
    tmp_path: Path,
) -> None:
    with (
        Checkpoint.open(save_asymmetric_int4(tmp_path)) as checkpoint,
        pytest.raises(ConfigError, match=r"cannot convert model\.layers\.0\.mlp\.experts.*zero-point"),
    ):
        checkpoint.recipes()


def test_every_type_of_the_experts_interface_is_in_the_matrix_or_said_to_be_missing() -> None:
    """A new version of transformers brings new types: try them, and put each where it belongs."""
    covered = {
        path.parent.name
        for path in MODELS.glob("*/modeling_*.py")
        if "@use_experts_implementation" in path.read_text(encoding="utf-8")
    }
    causal = {
        name
        for name in CONFIG_MAPPING_NAMES
        if model_type_to_module_name(name).removesuffix("_text") in covered
        and name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    }
    assert len(causal) > 50
    known = {entry.model_type for entry in ARCHITECTURES} | set(UNTESTED) | {"minimax"}
    assert causal == known
    assert covered <= {
        model_type_to_module_name(name).removesuffix("_text") for name in {*known, *NOT_SERVED}
    }
