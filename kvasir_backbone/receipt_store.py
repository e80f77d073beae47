"""The receipts this backbone has signed, on disk: so that a restart continues every chain.

A receipt is stored before anyone sees it. It stays until the market has it and the device has countersigned
it or a later one; the last of each chain stays always. SQLite, one file, one thread.

Knows documents and whether they were posted and acknowledged. Knows nothing of what they say.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from relay.errors import ConfigError
from relay.identity import PublicKey, SignedDocument

SCHEMA_VERSION: Final = 1
_SCHEMA: Final = """
CREATE TABLE receipts (
    device BLOB NOT NULL,
    sequence INTEGER NOT NULL,
    digest BLOB NOT NULL,
    document BLOB NOT NULL,
    posted INTEGER NOT NULL DEFAULT 0,
    acknowledged INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (device, sequence)
) WITHOUT ROWID
"""


@dataclass(frozen=True, slots=True)
class StoredReceipt:
    """One receipt of a device's chain."""

    device: PublicKey
    sequence: int
    document: SignedDocument
    posted: bool
    acknowledged: bool


class ReceiptStore:
    """See the module docstring. Every method blocks; use it from one thread."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(_SCHEMA)
            self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            self._db.execute("COMMIT")
        elif version != SCHEMA_VERSION:
            raise ConfigError(
                f"{path} has schema version {version}, and this version of Kvasir knows {SCHEMA_VERSION}: "
                "update Kvasir"
            )

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def append(self, device: PublicKey, sequence: int, document: SignedDocument) -> None:
        """Store the next receipt of a chain. Raises `sqlite3.Error` if it cannot be kept."""
        self._db.execute(
            "INSERT INTO receipts (device, sequence, digest, document) VALUES (?, ?, ?, ?)",
            (device, sequence, document.digest, document.to_bytes()),
        )

    def adopt(
        self, device: PublicKey, sequence: int, document: SignedDocument, *, acknowledged: bool
    ) -> None:
        """Store a receipt that the market had and this file did not."""
        self._db.execute(
            "INSERT OR REPLACE INTO receipts (device, sequence, digest, document, posted, acknowledged) "
            "VALUES (?, ?, ?, ?, 1, ?)",
            (device, sequence, document.digest, document.to_bytes(), int(acknowledged)),
        )

    def last(self, device: PublicKey) -> StoredReceipt | None:
        """The newest receipt of a chain."""
        found = self._select("WHERE device = ? ORDER BY sequence DESC LIMIT 1", device)
        return found[0] if found else None

    def behind(self) -> list[PublicKey]:
        """The devices with receipts that the market does not have yet."""
        rows = self._db.execute("SELECT DISTINCT device FROM receipts WHERE posted = 0")
        return [PublicKey(device) for (device,) in rows]

    def unposted(self, device: PublicKey, limit: int = 256) -> list[StoredReceipt]:
        """The first receipts of a chain that the market does not have yet, in order."""
        return self._select("WHERE device = ? AND posted = 0 ORDER BY sequence LIMIT ?", device, limit)

    def mark_posted(self, device: PublicKey, sequence: int) -> None:
        """The market has it."""
        self._db.execute(
            "UPDATE receipts SET posted = 1 WHERE device = ? AND sequence = ?", (device, sequence)
        )
        self._prune(device)

    def mark_acknowledged(self, device: PublicKey, digest: bytes) -> int | None:
        """The device countersigned it, and with it all before; its sequence, or None if it is unknown."""
        row = self._db.execute(
            "SELECT sequence FROM receipts WHERE device = ? AND digest = ?", (device, digest)
        ).fetchone()
        if row is None:
            return None
        self._db.execute(
            "UPDATE receipts SET acknowledged = 1 WHERE device = ? AND sequence <= ?", (device, row[0])
        )
        self._prune(device)
        return int(row[0])

    def _prune(self, device: PublicKey) -> None:
        self._db.execute(
            "DELETE FROM receipts WHERE device = ? AND posted = 1 AND acknowledged = 1 AND sequence < "
            "(SELECT MAX(sequence) FROM receipts WHERE device = ?)",
            (device, device),
        )

    def _select(self, where: str, *arguments: object) -> list[StoredReceipt]:
        rows = self._db.execute(
            f"SELECT device, sequence, document, posted, acknowledged FROM receipts {where}", arguments
        )
        return [
            StoredReceipt(
                PublicKey(device), sequence, SignedDocument.from_bytes(document), bool(posted), bool(acked)
            )
            for device, sequence, document, posted, acked in rows
        ]
