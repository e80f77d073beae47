"""`--precision auto` in a whole swarm: chosen by what fits, hash declared, error measured and shown."""

from __future__ import annotations

from pathlib import Path

import structlog
from sqlalchemy import select

from kvasir_node.cli import _parser, config_of
from kvasir_node.execution import choose_execution
from kvasir_node.experts import WindowExperts
from kvasir_node.status import Phase, describe
from market import tables
from tests.node.test_daemon import node
from tests.support.node_swarm import node_swarm


async def test_what_does_not_fit_as_stored_is_kept_at_int8(tmp_path: Path) -> None:
    async with node_swarm(tmp_path) as swarm:
        await swarm.publish()
        plan = swarm.plan
        sizes = {name: sum(plan.kept_bytes(w, name) for w in plan.windows) for name in plan.precisions}
        assert sizes["int8"] < sizes["bf16"] < sizes["stored"]
        with structlog.testing.capture_logs() as logs:
            async with node(
                swarm, tmp_path / "node", measure=False, budget_bytes=sizes["int8"], device="cpu"
            ) as running:
                leases = await running.proven(2)  # proven: its answers are those of int8, bit for bit
                await running.reaches(Phase.SERVING)
                snapshot = running.status.snapshot()
                rows = await swarm.market._store.read(
                    lambda session: session.rows(
                        select(tables.leases).where(tables.leases.c.state == "PROVEN")
                    )
                )
                await running.end()
        assert {lease.precision for lease in leases} == {"int8"}
        assert sum(window["kept_bytes"] for window in snapshot["windows"]) == sizes["int8"]
        for window in snapshot["windows"]:
            assert 1e-6 < window["d"] < 1e-3
        assert any("from stored" in line for line in describe(snapshot))
        loaded = [line for line in logs if line["event"] == "window.loaded"]
        assert [line["d"] for line in loaded] == [window["d"] for window in snapshot["windows"]]
        (chosen,) = [line for line in logs if line["event"] == "precision.chosen"]
        assert (chosen["precision"], chosen["wanted"]["int8"]) == ("int8", sizes["int8"])
        execution = choose_execution(plan, "int8")
        for row in rows:
            local = WindowExperts.load(
                plan,
                next(w for w in plan.windows if w.name == row.name),
                "int8",
                swarm.read,
                execution=execution,
            )
            assert row.quantised_hash == local.quantised_hash, "declared is what anybody computes"


async def test_what_fits_is_kept_as_stored(tmp_path: Path) -> None:
    async with node_swarm(tmp_path) as swarm:
        await swarm.publish()
        async with node(swarm, tmp_path / "node", measure=False) as running:
            leases = await running.proven(2)
            assert {lease.precision for lease in leases} == {"stored"}
            assert all(window["d"] == 0 for window in running.status.snapshot()["windows"])
            await running.end()


def test_the_command_takes_every_limit(tmp_path: Path) -> None:
    arguments = _parser().parse_args(
        [
            "run", "http://h:1", "--state-dir", str(tmp_path), "--max-cpu", "25%", "--upload-limit", "2MB",
            "--hours", "22-7", "--on-battery", "--device", "cpu", "--no-measure",
        ]
    )  # fmt: skip
    config = config_of(arguments, {})
    assert (config.max_cpu, config.upload_limit, str(config.rules.hours)) == (0.25, 2_000_000, "22:00-07:00")
    assert (config.rules.on_battery, config.rules.on_metered) == (True, False)
    assert (config.device, config.measure) == ("cpu", False)
