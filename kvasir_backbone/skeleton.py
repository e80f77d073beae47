"""The model on the meta device: its shape, its experts modules, its quantiser. No weights are read.

Knows how transformers names and builds a model (the experts interface of transformers 5, see
`transformers.integrations.moe`). Says early, and by name, what cannot be served: a model without routed
experts, and an architecture whose experts do not go through the interface.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relay.errors import ConfigError

_EXPERT_COUNTS = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts",
    "ffn_config", "num_routed_experts",
)  # fmt: skip
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
QUANTISERS = ("fp8", "mxfp4", "compressed-tensors")
"""The checkpoint quantisations that recipes can express."""


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model on the meta device, in float32.

    `model` is a transformers model without memory, `experts` its routed experts modules by layer number
    with their qualified names, `quantizer` transformers' own for a quantised checkpoint (set to
    dequantise), `architecture` the class of the model.
    """

    config: Any
    model: Any
    experts: dict[int, tuple[str, Any]]
    quantizer: Any
    architecture: str

    @property
    def text_config(self) -> Any:
        """The part of the configuration that describes the language model."""
        return self.config.get_text_config()


def check_folder(path: Path) -> dict[str, Any]:
    """Check that `path` is a checkpoint folder, without importing anything heavy; return its config.json.

    Raises `ConfigError`.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist: give the folder of a Hugging Face MoE checkpoint")
    if not path.is_dir():
        raise ConfigError(f"{path} is a file: give the folder of the checkpoint, the one with config.json")
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(f"{path} has no config.json, so it is not a Hugging Face checkpoint folder")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON ({error}): fetch it again") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{file} names no model_type: it is not the configuration of a model")
    return config


def build_skeleton(path: Path) -> Skeleton:
    """Build the model of that folder on the meta device.

    Raises `ConfigError` for an architecture that transformers does not know, one without routed experts,
    one whose experts do not go through the experts interface, one whose state does not fit transformers'
    default cache, and a quantisation without a recipe.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = load_config(path)
    auto: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            own = copy.deepcopy(config)  # from_config writes the dtype into what it is given
            model = auto.from_config(own, dtype=torch.float32, trust_remote_code=False)
    except ValueError as error:
        detail = str(error).partition("\n")[0]
        why = "" if detail.startswith("Unrecognized configuration class") else f" ({detail:.200})"
        raise ConfigError(
            f"{config.model_type}: transformers has no causal language model of this type, so Kvasir cannot "
            f"serve it{why}"
        ) from None
    except (AttributeError, ImportError, KeyError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{config.model_type}: transformers cannot build this model, so Kvasir cannot serve it "
            f"({type(error).__name__}: {error!s:.200})"
        ) from None
    experts = find_experts(model)
    if not experts:
        raise _no_experts(model, config)
    if not model._supports_default_dynamic_cache():
        raise ConfigError(
            f"{type(model).__name__} ({config.model_type}) keeps a state of its own beside "
            "transformers' cache, which Kvasir cannot hold for it yet"
        )
    return Skeleton(config, model, experts, _quantizer(config, model), type(model).__name__)


def load_config(path: Path) -> Any:
    """The transformers configuration of that folder, dequantising. Raises `ConfigError`."""
    from transformers import AutoConfig

    model_type = check_folder(path)["model_type"]
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(
            f"model type {model_type!r} is not known to this version of transformers, or its configuration "
            f"is broken: {error}"
        ) from None
    quantisation = getattr(config, "quantization_config", None)
    if isinstance(quantisation, dict):
        quantisation["dequantize"] = True
    return config


def is_experts_class(cls: type) -> bool:
    """Whether `use_experts_implementation` decorated this class."""
    forward: Any = getattr(cls, "forward", None)
    return hasattr(forward, "__wrapped__") and "experts_interface" in forward.__code__.co_freevars


def find_experts(model: Any) -> dict[int, tuple[str, Any]]:
    """The routed experts modules of a model by layer number: (qualified name, module).

    Raises `ConfigError` where a layer has several of them.
    """
    found: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        if not is_experts_class(type(module)):
            continue
        match = _LAYER.search(name)
        if match is None or int(match.group(1)) in found:
            raise ConfigError(
                f"{type(model).__name__}: cannot tell which layer the experts {name} belong to; this "
                "architecture is not supported"
            )
        found[int(match.group(1))] = (name, module)
    return found


def _no_experts(model: Any, config: Any) -> ConfigError:
    """Why there is nothing to serve: not MoE at all, or MoE outside the experts interface."""
    name, text = type(model).__name__, config.get_text_config()
    counts = [getattr(text, attribute, None) for attribute in _EXPERT_COUNTS]
    routed = any(not isinstance(count, (int, type(None))) or (count or 0) > 1 for count in counts)
    routed = routed or any("Expert" in type(module).__name__ for module in model.modules())
    if routed:
        return ConfigError(
            f"{name} ({config.model_type}) is a Mixture-of-Experts model whose experts do not go through "
            "transformers' experts interface, so Kvasir cannot serve it"
        )
    return ConfigError(
        f"{name} ({config.model_type}) has no routed experts: Kvasir serves Mixture-of-Experts models"
    )


def _quantizer(config: Any, model: Any) -> Any:
    """transformers' quantiser of a quantised checkpoint, or None. Raises `ConfigError`."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    method = settings["quant_method"] if isinstance(settings, dict) else settings.quant_method
    method = str(getattr(method, "value", method))
    if method not in QUANTISERS:
        raise ConfigError(
            f"{config.model_type}: no recipe for checkpoints quantised with {method!r}; "
            f"those with {', '.join(QUANTISERS)} work"
        )
    import torch
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=True)
        quantizer.quantization_config.dequantize = True
        quantizer.validate_environment(dtype=torch.float32, device_map=None, weights_only=True)
    except ImportError as error:
        raise ConfigError(
            f"reading a checkpoint quantised with {method!r} needs one more package: {error}"
        ) from None
    quantizer.preprocess_model(
        model=model,
        dtype=torch.float32,
        device_map=None,
        keep_in_fp32_modules=None,
        checkpoint_files=None,
    )
    return quantizer
