"""The dispatcher of a `weighted` swarm: combine weights go out, one partial sum a row and call comes back.

For a worker that holds all of a row's experts the reply is k times smaller, and upload is what home links are
short of. The weights are continuous; which experts run is decided above the seam, as ever.

The arithmetic. A worker runs its experts in fp32, multiplies by the weights and adds in fp32 in the order
of the ids, and rounds once to the wire dtype. Here the partial sums of a row's calls are added in fp32 in
the order of their windows, and rounded once to the rows' dtype. What the checkpoint gives in the place of a
worker is made the same way, window by window. So a row's result depends on which of its experts one call
held, and on nothing else: with each layer in one window (no window cuts it) that is always all of them, and
the text is the same whoever owns what and whatever fails; where layers are cut, it is the same within
rounding.

Knows rows, calls and sums. Knows no sockets, no market and no router.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from kvasir_node.tensors import partial_sums, rows_to_bytes
from market.plans import Plan
from relay.errors import KvasirError

from .audit import Sample, judge_sample, limit_of, unfinite_rows
from .comparing import MAX_OUTPUTS, Rival
from .dispatch import MAX_SUSPECTS, SwarmDispatcher, _Run, reply_order
from .flight import WorkerCall
from .roster import Replica
from .seam import RowKey


def cuts_a_layer(plan: Plan) -> bool:
    """Whether some layer's experts lie in more than one window."""
    recipes = {recipe.layer: recipe.experts for recipe in plan.layers}
    return any(
        window.expert_start > 0 or window.expert_end < recipes[layer]
        for window in plan.windows
        for layer in range(window.layer_start, window.layer_end)
        if layer in recipes
    )


class WeightedDispatcher(SwarmDispatcher):
    """A `seam.Combiner` over a weighted plan. `dispatch` goes out without weights, as in any swarm."""

    def combine(
        self,
        layer: int,
        rows: Tensor,
        ids: Tensor,
        weights: Tensor,
        keys: Sequence[RowKey],
        deadline_s: float,
    ) -> Tensor:
        """See `seam.Combiner.combine`."""
        flat = weights.detach().float().reshape(-1).contiguous()
        run = self._prepare(layer, rows, ids.tolist(), keys, deadline_s, flat)
        self._fly(run)
        self._add_up(run)
        if run.flight.failed:
            raise self._failure(run)
        return run.out

    def _add_up(self, run: _Run) -> None:
        """Add what came for each row, in the order of the windows; rows of failed parts mean nothing."""
        if len(run.sums) == 1:
            ((rows, sums),) = run.sums.values()
            if len(rows) == run.slots:  # one call had all rows: its sums are the outputs, not copied
                run.put(range(run.slots), sums)
                return
        total = torch.zeros(run.out.shape, dtype=torch.float32)
        for _, (rows, sums) in sorted(run.sums.items()):
            total.index_add_(0, torch.tensor(rows), sums.float())  # no row twice in one call
        run.out.copy_(total)

    # --- what differs from a swarm without weights ---------------------------------------------------

    def _weights_of(self, run: _Run, call: WorkerCall) -> memoryview | None:
        if run.weights is None:
            return None
        if _is_all(run, call):
            return rows_to_bytes(run.weights)
        slots = [slot for _, index in call.groups for slot in run.flight.parts[index].slots]
        return rows_to_bytes(run.weights[slots])

    def _store(self, run: _Run, call: WorkerCall, outputs: Tensor, taken: Collection[int]) -> None:
        if run.weights is None:
            super()._store(run, call, outputs, taken)
        elif taken:
            run.sums[min(taken)] = (call.rows, outputs)

    def _compute_here(self, run: _Run, index: int) -> None:
        if run.weights is None:
            super()._compute_here(run, index)
            return
        assert self._reference is not None
        part = run.flight.parts[index]
        outputs = torch.empty(len(part.slots), run.rows.shape[1], dtype=torch.float32)
        wanted: dict[int, tuple[list[int], list[int]]] = {}
        rows_of = [at for at, ids in enumerate(part.ids) for _ in ids]
        experts = [expert for ids in part.ids for expert in ids]
        for place, (at, expert) in enumerate(zip(rows_of, experts, strict=True)):
            rows, places = wanted.setdefault(expert, ([], []))
            rows.append(part.rows[at])
            places.append(place)
        for expert, (rows, places) in sorted(wanted.items()):
            outputs[places] = self._reference.run(run.layer, expert, run.rows[rows].float())
        sums = partial_sums(outputs, run.weights[list(part.slots)], rows_of, len(part.rows))
        run.sums[index] = (part.rows, sums.to(run.rows.dtype))

    # --- verification --------------------------------------------------------------------------------

    def _drawer(
        self, run: _Run, call: WorkerCall, outputs: Tensor, taken: Collection[int]
    ) -> Callable[[random.Random], tuple[Replica, Sample]]:
        if run.weights is None:
            return super()._drawer(run, call, outputs, taken)

        def draw(rng: random.Random) -> tuple[Replica, Sample]:
            place = rng.randrange(len(call.rows))
            return sample_of_sum(run, call, place, outputs[place])

        return draw

    def _rivals(self, run: _Run, call: WorkerCall) -> tuple[Rival, ...]:
        """Partial sums can be compared where the same parts were summed up by one other call."""
        if run.weights is None:
            return super()._rivals(run, call)
        parts = [index for _, index in call.groups]
        other = run.flight.accepted.get(parts[0])
        if other is None or [index for _, index in other.groups] != parts:
            return ()
        if other.groups[0][0].wallet == call.groups[0][0].wallet:
            return ()
        _, sums = run.sums[min(parts)]
        rivals = []
        for place in sorted(self._rng.sample(range(len(call.rows)), min(MAX_OUTPUTS, len(call.rows)))):
            winner, sample = sample_of_sum(run, other, place, sums[place])
            loser, theirs = sample_of_sum(run, call, place, sums[place])
            rivals.append(Rival(place, loser, winner, sample, theirs.precisions, call.id))
        return tuple(rivals)

    def _check_suspects(self, run: _Run, call: WorkerCall, outputs: Tensor) -> str | None:
        """As for single outputs, with the band widened by what the weights make of a row's outputs."""
        if run.weights is None:
            return super()._check_suspects(run, call, outputs)
        broken = unfinite_rows(outputs)
        suspects = broken or self._band.suspects(run.layer, self._weighed_rows(run, call), outputs)
        for place in suspects[:MAX_SUSPECTS]:
            replica, sample = sample_of_sum(run, call, place, outputs[place])
            try:
                d = judge_sample(sample, "stored", self._recompute, self._band)
            except KvasirError:  # no bytes here: what is not finite is refused, the rest left to audits
                return "the reply has values that are not finite" if broken else None
            if d > limit_of(replica.numerics, replica.precision) and not self._broken_here(sample):
                if self._auditor is not None:
                    self._auditor.rejected(replica, d, sample)
                return f"a partial sum of layer {run.layer} was wrong: d = {d:.3g}"
        return None

    def _broken_here(self, sample: Sample) -> bool:
        """Whether the model's own outputs are not finite, which is no worker's doing."""
        if bool(torch.isfinite(sample.output).all()):
            return False
        row = sample.row.unsqueeze(0)
        experts = zip(sample.ids, sample.precisions, strict=True)
        made = [self._recompute(sample.layer, expert, row, precision) for expert, precision in experts]
        return not all(bool(torch.isfinite(output).all()) for output in made)

    def _weighed_rows(self, run: _Run, call: WorkerCall) -> Tensor:
        """The call's rows, each as long as a sum of unrelated outputs would be for a row of its length."""
        assert run.weights is not None
        squares = run.weights.square()
        if _is_all(run, call):
            return run.rows.float() * squares.view(len(run.rows), -1).sum(1, keepdim=True).sqrt()
        at = {row: place for place, row in enumerate(call.rows)}
        size = torch.zeros(len(call.rows))
        for _, index in call.groups:
            part = run.flight.parts[index]
            rows = [at[row] for row, ids in zip(part.rows, part.ids, strict=True) for _ in ids]
            size.index_add_(0, torch.tensor(rows), squares[list(part.slots)])
        return run.rows[list(call.rows)].float() * size.sqrt().unsqueeze(-1)


def _is_all(run: _Run, call: WorkerCall) -> bool:
    """Whether the call has all of the dispatch, in the order of the dispatch."""
    return len(call.groups) == 1 and call.outputs == len(run.rows) * run.k


def sample_of_sum(run: _Run, call: WorkerCall, place: int, output: Tensor) -> tuple[Replica, Sample]:
    """The partial sum number `place` of a reply, with all that is needed to make it again.

    The replica is the one, of those that the sum was made under, that may be off the most.
    """
    assert run.weights is not None
    rows, experts, replicas = reply_order(call, run.flight)
    slots = [slot for _, index in call.groups for slot in run.flight.parts[index].slots]
    row = call.rows[place]
    chosen = [number for number, other in enumerate(rows) if other == row]
    replica = max((replicas[n] for n in chosen), key=lambda each: limit_of(each.numerics, each.precision))
    sample = Sample(
        call.layer,
        experts[chosen[0]],
        run.rows[row].clone(),
        output.clone(),
        ids=tuple(experts[number] for number in chosen),
        precisions=tuple(replicas[number].precision for number in chosen),
        weights=run.weights[[slots[number] for number in chosen]],
        call=call.id,
    )
    return replica, sample
