"""Who holds which window: the backbone's view of the market's claims, and what follows from it.

Fed with the market's snapshot and changes; answers which devices to call, under which references, and
which replicas the planner may use. While the market is silent the view stays as it is: a device is dropped
only because its calls fail.

Pure, for one thread. Knows claims and references; knows no sessions and no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from market.messages import Assignment, Change, ResyncNeeded, Snapshot
from market.plans import Plan
from market.windows import Window
from relay.identity import PublicKey

from .roster import Replica, Roster, WindowMap


@dataclass(frozen=True, slots=True)
class Holding:
    """One claim as this backbone uses it. `ref` names it in the device's session (u16)."""

    assignment: Assignment
    ref: int

    @property
    def device(self) -> PublicKey:
        """Whose it is."""
        return self.assignment.device


@dataclass(frozen=True, slots=True)
class Difference:
    """What an update changed: devices concerned, and the leases that ended, each with its reason."""

    devices: frozenset[PublicKey]
    ended: Mapping[bytes, tuple[Holding, str]]


class Directory:
    """All claims of one plan that have not ended."""

    def __init__(self, plan: Plan) -> None:
        self.windows = WindowMap(plan)
        self.revision = 0
        self._holdings: dict[bytes, Holding] = {}
        self._by_device: dict[PublicKey, dict[bytes, Holding]] = {}
        self._next_ref: dict[PublicKey, int] = {}

    # --- updates -------------------------------------------------------------------------------------

    def replace_all(self, snapshot: Snapshot) -> Difference:
        """Take in a whole snapshot."""
        gone = self._holdings.keys() - {assignment.lease for assignment in snapshot.leases}
        taken = (self._take(lease) for lease in list(gone))
        ended: dict[bytes, tuple[Holding, str]] = {
            holding.assignment.lease: (holding, "no longer in the market's list")
            for holding in taken
            if holding
        }
        devices = {holding.device for holding, _ in ended.values()}
        for assignment in snapshot.leases:
            devices |= self._put(assignment)
        self.revision = snapshot.revision
        return Difference(frozenset(devices), ended)

    def apply(self, change: Change) -> Difference:
        """Take in one change. Raises `ResyncNeeded` if one before it is missing."""
        if change.previous != self.revision:
            raise ResyncNeeded(
                f"the market's change {change.revision} follows {change.previous}, and this side has "
                f"{self.revision}"
            )
        self.revision = change.revision
        if change.assignment is not None:
            return Difference(frozenset(self._put(change.assignment)), {})
        assert change.ended is not None
        holding = self._take(change.ended.lease)
        if holding is None:
            return Difference(frozenset(), {})
        return Difference(frozenset({holding.device}), {change.ended.lease: (holding, change.ended.reason)})

    def mark(self, lease: bytes, epoch: int, **changes: object) -> None:
        """Note a state that the market has confirmed to this backbone before its change arrives."""
        holding = self._holdings.get(lease)
        if holding is not None and holding.assignment.epoch == epoch:
            assignment = replace(holding.assignment, **changes)  # type: ignore[arg-type]
            self._keep(replace(holding, assignment=assignment))

    def _put(self, assignment: Assignment) -> set[PublicKey]:
        known = self._holdings.get(assignment.lease)
        if known is not None and known.assignment == assignment:
            return set()
        devices = {assignment.device}
        if known is not None and known.device != assignment.device:
            devices.add(known.device)
            self._take(assignment.lease)
            known = None
        if known is not None:
            ref = known.ref
        else:
            ref = self._next_ref.get(assignment.device, 0)
            used = {holding.ref for holding in self.of(assignment.device)}
            while ref in used:
                ref = (ref + 1) % 0x10000
            self._next_ref[assignment.device] = (ref + 1) % 0x10000
        self._keep(Holding(assignment, ref))
        return devices

    def _keep(self, holding: Holding) -> None:
        lease = holding.assignment.lease
        self._holdings[lease] = holding
        self._by_device.setdefault(holding.device, {})[lease] = holding

    def _take(self, lease: bytes) -> Holding | None:
        """Take a claim out. A device's last one takes the number of its next reference with it."""
        holding = self._holdings.pop(lease, None)
        if holding is not None:
            left = self._by_device[holding.device]
            del left[lease]
            if not left:
                del self._by_device[holding.device], self._next_ref[holding.device]
        return holding

    # --- answers -------------------------------------------------------------------------------------

    def holding(self, lease: bytes) -> Holding | None:
        """The claim of that lease, if it has not ended."""
        return self._holdings.get(lease)

    def all(self) -> tuple[Holding, ...]:
        """Every claim."""
        return tuple(self._holdings.values())

    def devices(self) -> frozenset[PublicKey]:
        """Devices to have a session with: those with a claim that is loaded, proven or draining."""
        return frozenset(
            holding.device for holding in self._holdings.values() if holding.assignment.state != "HELD"
        )

    def holders(self) -> frozenset[PublicKey]:
        """Devices with any claim."""
        return frozenset(self._by_device)

    def of(self, device: PublicKey) -> tuple[Holding, ...]:
        """A device's claims, in the order of their references."""
        found = self._by_device.get(device, {})
        return tuple(sorted(found.values(), key=lambda holding: holding.ref))

    def leased_windows(self, device: PublicKey) -> frozenset[Window]:
        """The windows whose bytes the device may fetch."""
        return frozenset(holding.assignment.window for holding in self.of(device))

    def roster(
        self,
        connected: Collection[PublicKey],
        *,
        usable: Collection[PublicKey],
        stale: Collection[tuple[bytes, int]] = (),
    ) -> Roster:
        """The proven replicas for the planner.

        `connected` are the devices with a session; devices that are not `usable` are left out, and so are
        leases that are `stale` at their epoch.
        """
        found: dict[int, list[Replica]] = {}
        for holding in self._holdings.values():
            assignment = holding.assignment
            if assignment.state != "PROVEN" or assignment.window not in self.windows.number:
                continue
            if assignment.device not in usable or (assignment.lease, assignment.epoch) in stale:
                continue
            found.setdefault(self.windows.number[assignment.window], []).append(
                Replica(
                    device=assignment.device,
                    wallet=assignment.wallet,
                    lease=assignment.lease,
                    epoch=assignment.epoch,
                    ref=holding.ref,
                    window=assignment.window,
                    numerics=assignment.numerics,
                    precision=assignment.precision,
                    connected=assignment.device in connected,
                )
            )
        honoured = frozenset(
            (holding.assignment.lease, holding.assignment.epoch)
            for holding in self._holdings.values()
            if holding.assignment.state in ("PROVEN", "DRAINING")
        )
        return Roster(self.windows, {number: tuple(replicas) for number, replicas in found.items()}, honoured)
