"""Who is right where the backbone cannot compute an output itself: other wallets' replicas are asked.

Two replicas that agree are both taken to be right; one that disagrees with two that agree is outvoted. One
against one says nothing: a third wallet is asked, and without one the matter rests. The question is an
ordinary call, with the row and all the ids of the call it is about, under the other's own lease; it pays
nothing.

What it is worth: a wallet's word against two others. Wallets in one hand can outvote an honest one, so a
recompute is always preferred where there are bytes.

`rule` is pure. `Arbiter` asks, and blocks while it waits: it belongs to the audit thread. Knows rosters and
calls. Knows no sessions and no trust.
"""

from __future__ import annotations

import queue
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import torch
from torch import Tensor

from kvasir_node.calls import Call, Group, Reply, encode, reply_bytes
from kvasir_node.residual import residual
from kvasir_node.tensors import bytes_to_rows, rows_to_bytes
from market.plans import Plan
from relay.errors import KvasirError
from relay.identity import PublicKey

from .audit import Sample
from .comparing import pair_limit
from .roster import Replica
from .seam import DEFAULT_DEADLINE_S

if TYPE_CHECKING:
    from .dispatch import CallEnd, Lines

ASK_S: Final = 5.0
"""How long one replica may take to answer."""

MAX_ASKED: Final = 3
"""Replicas asked about one output, those that do not answer included."""

Outcome = Literal["agreed", "outvoted", "open"]


@dataclass(frozen=True, slots=True)
class Word:
    """What one replica says an output is: [width] in the wire dtype."""

    replica: Replica
    output: Tensor


@dataclass(frozen=True, slots=True)
class Finding:
    """How far one replica's word, `output`, is from one that is taken to be right, and how far it may be."""

    replica: Replica
    output: Tensor
    d: float
    limit: float


@dataclass(frozen=True, slots=True)
class Ruling:
    """`agreed`: all do. `outvoted`: some are wrong. `open`: too few words, or no two alike.

    `findings` has each word that is judged, right or wrong; none while the matter is open.
    """

    outcome: Outcome
    findings: tuple[Finding, ...] = ()


def rule(words: Sequence[Word], *, summed: bool = False) -> Ruling:
    """Judge words of distinct wallets about one output; `summed`: about one partial sum."""
    assert len({word.replica.wallet for word in words}) == len(words), "one word a wallet"
    near = [[_apart(a, b, summed).d <= _apart(a, b, summed).limit for b in words] for a in words]
    support = [sum(row) for row in near]
    most = max(range(len(words)), key=lambda number: support[number])
    if len(words) < 2 or support[most] < 2 or 2 * support[most] <= len(words):
        return Ruling("open")
    witness = words[most]
    findings = []
    for number, word in enumerate(words):
        other = next(words[i] for i in range(len(words)) if i != number and near[most][i])
        findings.append(_apart(word, witness if word is not witness else other, summed))
    return Ruling("agreed" if all(near[most]) else "outvoted", tuple(findings))


def _apart(word: Word, other: Word, summed: bool) -> Finding:
    d = float(residual(word.output, other.output)) if word is not other else 0.0
    return Finding(word.replica, word.output, d, pair_limit(word.replica, other.replica, summed=summed))


class Arbiter:
    """Asks other wallets' replicas. `lines` reaches them, `next_call` gives call ids."""

    def __init__(
        self,
        plan: Plan,
        lines: Lines,
        *,
        next_call: Callable[[], int],
        rng: random.Random,
        ask_s: float = ASK_S,
    ) -> None:
        self._plan = plan
        self._lines = lines
        self._next_call = next_call
        self._rng = rng
        self._ask_s = ask_s
        self.asked = 0
        """Calls made to ask."""

    def settle(self, sample: Sample, words: Sequence[Word]) -> tuple[Ruling, tuple[Word, ...]]:
        """Ask further wallets about a sample until its matter is clear, or nobody is left to ask.

        `words` are those that are known, at least one. Returns the ruling and all words.
        """
        known, summed = list(words), sample.weights is not None
        ruling = rule(known, summed=summed)
        others = self._others(sample, {word.replica.wallet for word in known})
        for _ in range(MAX_ASKED):
            if ruling.outcome != "open" or len(known) >= 3:
                break
            groups = next(others, None)
            if groups is None:
                break
            output = self._ask(sample, groups)
            if output is not None:
                known.append(Word(groups[0][0], output))
                ruling = rule(known, summed=summed)
        return ruling, tuple(known)

    def _others(
        self, sample: Sample, heard: set[PublicKey]
    ) -> Iterator[tuple[tuple[Replica, tuple[int, ...]], ...]]:
        """Devices of wallets not heard yet that hold all of the sample's experts, in random order.

        For each its replicas with the ids that fall to them, in the order of the ids.
        """
        roster = self._lines.roster()
        wanted = _by_window(roster.windows.owners(sample.layer), sample.ids or (sample.expert,))
        held: dict[PublicKey, dict[int, Replica]] = {}
        for number in wanted:
            for replica in roster.of(number):
                if replica.connected:
                    held.setdefault(replica.device, {})[number] = replica
        able = [replicas for replicas in held.values() if len(replicas) == len(wanted)]
        self._rng.shuffle(able)
        for replicas in able:
            wallet = replicas[next(iter(wanted))].wallet
            if wallet not in heard:
                heard.add(wallet)
                yield tuple((replicas[number], ids) for number, ids in wanted.items())

    def _ask(self, sample: Sample, groups: tuple[tuple[Replica, tuple[int, ...]], ...]) -> Tensor | None:
        """One call, as any other; the output asked for, or None without a usable answer."""
        ids = tuple(expert for _, some in groups for expert in some)
        count = 1 if sample.weights is not None else len(ids)
        deadline_s = DEFAULT_DEADLINE_S - self._rng.random()
        call = Call(
            self._next_call(),
            sample.layer,
            1,
            int(1000 * deadline_s),
            tuple(Group(replica.ref, (len(some),), some) for replica, some in groups),
            rows_to_bytes(sample.row.reshape(1, -1).contiguous()),
            None if sample.weights is None else rows_to_bytes(sample.weights.contiguous()),
        )
        ends: queue.SimpleQueue[CallEnd] = queue.SimpleQueue()
        self.asked += 1
        self._lines.submit(
            groups[0][0].device,
            call.id,
            encode(call),
            ends.put,
            answer_bytes=reply_bytes(count, self._plan.row_bytes),
        )
        try:
            reply = ends.get(timeout=self._ask_s).reply
        except queue.Empty:
            return None
        return None if reply is None else self._read(sample, reply, count, ids)

    def _read(self, sample: Sample, reply: Reply, count: int, ids: tuple[int, ...]) -> Tensor | None:
        if reply.outputs != count or reply.weighted != (sample.weights is not None):
            return None
        try:
            outputs = bytes_to_rows(reply.rows, count, self._plan.width, self._plan.wire_dtype)
        except KvasirError:
            return None
        output = outputs[0 if reply.weighted else ids.index(sample.expert)].clone()
        return output if bool(torch.isfinite(output).all()) else None


def _by_window(owners: Sequence[int], ids: Sequence[int]) -> Mapping[int, tuple[int, ...]]:
    """The ids of each window, in the order of the ids; a call's ids are grouped by window already."""
    found: dict[int, tuple[int, ...]] = {}
    for expert in ids:
        found[owners[expert]] = (*found.get(owners[expert], ()), expert)
    return found
