"""Sampling: the one place where a token is chosen, and the noise that chooses it.

The noise of token i of choice c under seed s is a pure function of (s, c, i): a Philox 4x64-10 stream
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11) keyed by seed and choice with i in its
counter, turned into Gumbel noise (Maddison et al., "A* Sampling", 2014). So a request's text depends
neither on what else runs nor on how often a position is computed, and a drafted token is right if and only
if it equals the token sampled at its place.

Knows logits, temperature, top_p and noise. Knows no requests, no text and no model. Imports numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from relay.errors import ConfigError

_MASK: Final = (1 << 64) - 1
MAX_TEMPERATURE: Final = 2.0


@dataclass(frozen=True, slots=True)
class Sampler:
    """How one request draws its tokens.

    `temperature` 0 is greedy (the lowest id among equal logits), up to 2. `top_p` in (0, 1] keeps the
    smallest set of most likely tokens that together have at least that probability at this temperature.
    `seed` and `choice` key the noise; both are taken modulo 2^64.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    choice: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            raise ConfigError(f"temperature must be from 0 to {MAX_TEMPERATURE:g}, not {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p must be over 0 and at most 1, not {self.top_p}")

    def sample(self, logits: NDArray[np.float32], index: int) -> int:
        """The token at place `index` (0 for the first generated one), from its logits [vocabulary] in fp32.

        Raises `FloatingPointError` where the logits hold NaN or no finite value.
        """
        best = int(np.argmax(logits))
        if not np.isfinite(logits[best]):
            raise FloatingPointError("the model's logits are not finite")
        if self.temperature == 0.0:
            return best
        scaled = logits.astype(np.float64) / self.temperature
        kept = nucleus(scaled, self.top_p)
        noise = gumbel(self.seed, self.choice, index, logits.shape[0])
        if kept is None:
            return int(np.argmax(scaled + noise))
        return int(kept[np.argmax(scaled[kept] + noise[kept])])


def nucleus(scaled: NDArray[np.float64], top_p: float) -> NDArray[np.intp] | None:
    """Ids of the smallest set of most likely tokens with probability of at least `top_p`, in order of id.

    `scaled` [vocabulary] are logits over the temperature. None means all of them. Of equal logits the
    lower id comes first.
    """
    if top_p >= 1.0:
        return None
    weights = np.exp(scaled - scaled.max())
    wanted = top_p * float(weights.sum())
    count = min(1024, scaled.shape[0])
    while True:  # sorting a whole vocabulary would cost more than the rest of the step
        least = np.partition(weights, -count)[-count]
        ids = np.flatnonzero(weights >= least)
        order = ids[np.argsort(-weights[ids], kind="stable")]
        cumulative = np.cumsum(weights[order])
        if count == scaled.shape[0] or cumulative[-1] >= wanted:
            size = int(np.searchsorted(cumulative, wanted)) + 1
            return np.sort(order[:size])
        count = min(8 * count, scaled.shape[0])


def gumbel(seed: int, choice: int, index: int, count: int) -> NDArray[np.float64]:
    """`count` standard Gumbel values, the noise of one token: value j belongs to token id j."""
    generator = np.random.Philox(
        key=np.array([seed & _MASK, choice & _MASK], dtype=np.uint64),
        counter=np.array([0, 0, 0, index & _MASK], dtype=np.uint64),
    )
    raw = generator.random_raw(count)
    uniform = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise
