"""The laboratory: what it records, what it compares, and its short form on a tiny model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.append(str(SCRIPTS))

import lab  # noqa: E402
from labs import LABS, attacks, calibrate, divergence, load, table  # noqa: E402
from labs.inprocess import Experts, InProcessSwarm, NodeSpec  # noqa: E402
from labs.mixes import BF16, BF16_BACKBONE, INT8, MIXES, WATCHED  # noqa: E402
from labs.recording import ExecutionLog, digests, mismatches  # noqa: E402
from labs.scores import Score, first_difference, forked_share  # noqa: E402
from labs.svg import Bars, Curves, page  # noqa: E402
from labs.unruled import OwnRouters  # noqa: E402

from kvasir_backbone.checkpoint import Checkpoint  # noqa: E402
from kvasir_backbone.model import BackboneModel  # noqa: E402
from kvasir_backbone.seam import RowKey  # noqa: E402
from tests.support.tiny_models import save_tiny  # noqa: E402

SPECS = (NodeSpec(), NodeSpec("int8", "torch", batch=2), NodeSpec("int4"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("lab"), "qwen3_moe")


@pytest.fixture
def checkpoint(folder: Path) -> Iterator[Checkpoint]:
    with Checkpoint.open(folder) as opened:
        yield opened


def keys(count: int) -> list[RowKey]:
    return [RowKey(1, 0, position, False) for position in range(count)]


# --- what was executed ------------------------------------------------------------------------------------


def executed(rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    log = ExecutionLog()
    for expert in ids.unique().tolist():
        mine = rows[(ids == expert).any(1)]
        log.note(0, digests(mine), torch.full((len(mine),), expert))
    return log.take(0)


def test_executed_experts_are_compared_row_by_row() -> None:
    rows, ids = torch.randn(6, 16), torch.stack([torch.randperm(9)[:3] for _ in range(6)])
    assert mismatches(rows, ids, executed(rows, ids)) == 0
    done, owners = executed(rows, ids)
    twice = torch.cat([done, done]), torch.cat([owners, owners])  # a call that was sent again
    assert mismatches(rows, ids, twice) == 0
    other = ids.clone()
    other[4, 0] = 20
    assert mismatches(rows, ids, executed(rows, other)) == 1
    assert mismatches(rows, ids, (done[1:], owners[1:])) == 1  # one expert is missing
    assert (
        mismatches(rows, ids, executed(torch.cat([rows, torch.ones(1, 16)]), torch.cat([ids, ids[:1]]))) == 1
    )
    assert mismatches(rows.to(torch.bfloat16), ids, executed(rows.to(torch.bfloat16).float(), ids)) == 0


def test_workers_execute_what_was_decided_and_a_worker_that_does_not_is_found(checkpoint: Checkpoint) -> None:
    swarm = InProcessSwarm(Experts(checkpoint), SPECS)
    try:
        width, generator = swarm.plan.width, torch.Generator().manual_seed(1)
        rows = torch.randn(40, width, generator=generator)
        ids = torch.stack([torch.randperm(48, generator=generator)[:8] for _ in range(40)])
        for layer in swarm.layers:
            assert swarm.dispatch(layer, rows, ids, keys(40), 60.0).shape == (40, 8, width)
        assert swarm.decisions == 40 * len(swarm.layers)
        assert swarm.mismatches == 0
        # A node that runs another expert than it was asked for, the C core included.
        layer, owners = next(iter(swarm.layers.items()))
        node, window, number = owners[0]
        experts = node.holdings[number].experts
        if experts.direct is None:
            pytest.skip("no C compiler here: experts are not run by address")
        addresses = dict(experts.direct.addresses)
        first, second = (layer, window.expert_start), (layer, window.expert_start + 1)
        addresses[first], addresses[second] = addresses[second], addresses[first]
        experts.direct = replace(experts.direct, addresses=addresses)
        swarm.dispatch(layer, rows, ids, keys(40), 60.0)
        asked = (ids == first[1]).any(1) ^ (ids == second[1]).any(1)
        assert swarm.mismatches == int(asked.sum()) > 0
    finally:
        swarm.close()


def test_owners_that_route_for_themselves_differ_and_one_that_has_everything_does_not(
    checkpoint: Checkpoint,
) -> None:
    model = BackboneModel.load(checkpoint, dtype="float32")
    experts = Experts(checkpoint)
    rows = torch.randn(64, experts.plan("float32").width, generator=torch.Generator().manual_seed(2))
    for specs, differs in (((NodeSpec(),), False), (SPECS, True)):
        swarm = InProcessSwarm(experts, specs)
        try:
            routers = OwnRouters(model, swarm)
            layer = next(iter(swarm.layers))
            gate = model.model.get_submodule(f"model.layers.{layer}.mlp.gate")
            with torch.inference_mode():
                _, weights, ids = gate(rows)
                made, ran = routers.run(layer, rows, ids)
            outputs = swarm.dispatch(layer, rows, ids, keys(64), 60.0)
            assert (routers.differing > 0) is differs
            assert ran.any(1).all()
            if not differs:
                torch.testing.assert_close(made, (outputs * weights.unsqueeze(-1)).sum(1))
        finally:
            swarm.close()


# --- figures ----------------------------------------------------------------------------------------------


def test_the_short_form_gives_every_figure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = torch.randint(512, (2, 32), generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr(divergence, "sequences", lambda *_, **__: text)
    monkeypatch.setattr(divergence, "heldout_text", lambda _: "")
    monkeypatch.setattr(divergence, "PROMPT", 8)
    options = argparse.Namespace(model=folder, short=True, no_network=True)
    report = divergence.run(options)
    figures = report.figures
    assert {
        "decisions", "with_authority_mismatches", "without_authority_mismatch_share", "forked_share",
        "top1_bf16", "top1_int8", "perplexity_change_bf16", "perplexity_change_int8", "bit_equal_share",
        "within_tolerance_share", "combined_error", "expert_error", "router_cpu_share",
    } <= set(figures)  # fmt: skip
    assert figures["with_authority_mismatches"] == 0
    assert figures["decisions"] > 0  # type: ignore[operator]
    assert 0 < figures["without_authority_mismatch_share"] < 1  # type: ignore[operator]
    assert figures["bit_equal_share"] < 1 == figures["within_tolerance_share"]  # type: ignore[operator]
    assert 0 < figures["router_cpu_share"] < 1  # type: ignore[operator]
    assert len(figures["mixes"]) == len(divergence.SHORT)  # type: ignore[arg-type]
    ElementTree.fromstring(report.svg)


def test_the_mixes_have_what_the_figures_need() -> None:
    names = [mix.name for mix in MIXES]
    assert len(set(names)) == len(names)
    assert {INT8, BF16, BF16_BACKBONE, *WATCHED} <= set(names)
    assert {spec.precision for mix in MIXES for spec in mix.nodes} == {"stored", "int8", "int4"}


def test_a_machine_is_scored_against_the_reference() -> None:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(16, (2, 8), generator=generator)
    logits = torch.randn(2, 8, 16, generator=generator)
    ids = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(32)]).view(16, 2, 2)
    same = Score()
    same.add(tokens, logits, logits, ids.flip(-1), ids)  # the order of the chosen does not matter
    assert (same.top1, same.choices, same.perplexity_change) == (1.0, 0.0, 0.0)
    assert abs(same.mean_kl) < 1e-6
    assert same.first == [None, None]
    other = ids.clone()
    other[11, 1, 0] = 9
    differing = Score()
    differing.add(tokens, logits + torch.randn(2, 8, 16, generator=generator), logits, other, ids)
    assert differing.first == [None, 3]
    assert differing.choices == pytest.approx(1 / 32)
    assert differing.mean_kl > 0.01
    assert first_difference([1, 2, 3], [1, 2, 4]) == 2
    assert first_difference([1], [1, 2]) == 1
    assert forked_share([[1], [2]], [[1], [3]]) == 0.5


def test_limits_follow_the_largest_honest_d() -> None:
    assert calibrate.round_up(2.536e-6 * 3) == 7.7e-6
    assert calibrate.round_up(1e-5) == 1e-5
    assert calibrate.round_up(0.0) == 0.0
    honest = calibrate.Honest("stored", "bfloat16")
    rows = torch.randn(4, 8)
    honest.add("torch", rows, rows)
    assert honest.equal == 4
    assert honest.limit == calibrate.FLOOR["stored"]
    honest.add("torch", rows * 1.01, rows)
    assert honest.limit == pytest.approx(3 * honest.largest, rel=0.1)
    assert honest.rows == 8


def test_attacks_recover_what_rows_and_ids_say() -> None:
    generator = torch.Generator().manual_seed(5)
    looks = torch.randn(20, 32, generator=generator)
    labels, secret = (torch.randint(20, (300,), generator=generator) for _ in range(2))
    train = looks[labels] + 0.05 * torch.randn(300, 32, generator=generator)
    test = looks[secret] + 0.05 * torch.randn(300, 32, generator=generator)
    assert (attacks.nearest(train, labels, test) == secret).float().mean() > 0.95
    assert (attacks.probe(train, labels, test, 20) == secret).float().mean() > 0.9
    hot = torch.zeros(20, 40).scatter_(1, torch.rand(20, 40, generator=generator).topk(4).indices, 1.0)
    scores = attacks.token_scores(hot[labels], labels, hot[secret], 20)
    assert (scores.argmax(1) == secret).float().mean() > 0.9
    found = attacks.replayed(looks[secret[:5]], lambda _, tokens: looks[tokens], lambda *_: torch.arange(20))
    assert found == secret[:5].tolist()


# --- the command ------------------------------------------------------------------------------------------


def test_every_experiment_is_there_and_the_list_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for name in LABS:
        parser = argparse.ArgumentParser()
        load(name).add_arguments(parser)
        assert callable(load(name).run)
    assert lab.main([]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in LABS)


def test_tables_and_figures_are_well_formed() -> None:
    assert table(["a", "b"], [["x", 0.12345], ["long", 1]]) == [
        "a          b",
        "x     0.1235",
        "long       1",
    ]
    curves = Curves("a < b", "d", "share", {"one": [(1e-9, 1.0), (1e-3, 0.0)]}, {"limit": 1e-5})
    root = ElementTree.fromstring(page([Bars("t & u", ["n"], {"s": [0.0]}), curves]))
    assert root.tag.endswith("svg")
