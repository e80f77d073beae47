"""Which databases the market's tests run on: SQLite always, PostgreSQL where its programs are installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..support.databases import fresh_database, postgres_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[str | None]:
    """A PostgreSQL server's URL, or None."""
    with postgres_server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'market.db'}"
    server: str | None = request.getfixturevalue("postgres")
    if server is None:
        pytest.skip("PostgreSQL is not installed (or set KVASIR_TEST_POSTGRES)")
    return fresh_database(server)
