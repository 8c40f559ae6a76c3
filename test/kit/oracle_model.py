"""What the caches must hold, and what a request may reuse of them: prefixes in sets, no tree and no tensors.

A prefix of whole pages is a ``Path``, one choice per page. Each tier has pages (the compressed rows of a
prefix's last page) and windows (a tile: window and states at the end of the prefix). The model says what
must be where after each operation. What an eviction takes is SGLang's choice and is read from the tree,
but the model says when and from what it may take, and decides alone what is reused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

PAGE = 256
Path = tuple[int, ...]


@dataclass
class Tier:
    pages: set[Path] = field(default_factory=set)
    windows: set[Path] = field(default_factory=set)

    def kinds(self) -> tuple[set[Path], set[Path]]:
        return self.pages, self.windows


def prefixes(path: Path, pages: int) -> set[Path]:
    """The prefixes of 1 to ``pages`` pages: ((0, 1, 2), 2) -> {(0,), (0, 1)}."""
    return {path[:n] for n in range(1, pages + 1)}


def nominal(path: Path, *tiers: Tier) -> int:
    """How many pages of ``path`` have their compressed rows on any of ``tiers``, without a gap."""
    n = 0
    while n < len(path) and any(path[: n + 1] in tier.pages for tier in tiers):
        n += 1
    return n


def reusable(path: Path, *tiers: Tier) -> int:
    """The strict gate: the deepest boundary below which all rows are there, and whose window is."""
    reach = range(nominal(path, *tiers), 0, -1)
    return next((n for n in reach if any(path[:n] in tier.windows for tier in tiers)), 0)


@dataclass
class Damaged:
    pages: dict[Path, set[str]] = field(default_factory=dict)
    windows: dict[Path, set[str]] = field(default_factory=dict)

    def kinds(self) -> tuple[dict[Path, set[str]], dict[Path, set[str]]]:
        return self.pages, self.windows


@dataclass(eq=False)
class Stay:
    """One stay of a request in a slot. Boundaries are in pages, ``done`` and ``length`` in tokens.

    published: pages that are the tree's, which its lock holds. tiles: boundaries whose tiles it owns;
    in_flight: of steps whose result is not processed. decoded: settled ones that decode captured. dropped:
    boundaries that were to have one, and whether decode crossed them.
    """

    path: Path
    length: int
    done: int = 0
    published: int = 0
    branch: int | None = None
    tiles: set[int] = field(default_factory=set)
    in_flight: set[int] = field(default_factory=set)
    decoded: list[int] = field(default_factory=list)
    dropped: dict[int, bool] = field(default_factory=dict)
    released: bool = False

    @property
    def private_pages(self) -> int:
        return -(-self.done // PAGE) - self.published


@dataclass
class Oracle:
    """One rank's caches. ``host`` is None without HiCache.

    unbacked: what is on the device alone because the host had no room. damaged: what is stored with a
    file that is too short or has another byte, in these pools. unstored: what storage lost to such a
    file while the host had it, and does not get again before it is copied to the host anew.
    """

    tiles: int
    pages: int
    stride: int
    device: Tier = field(default_factory=Tier)
    host: Tier | None = field(default_factory=Tier)
    storage: Tier = field(default_factory=Tier)
    unbacked: Tier = field(default_factory=Tier)
    damaged: Damaged = field(default_factory=Damaged)
    unstored: Tier = field(default_factory=Tier)
    stays: list[Stay] = field(default_factory=list)
    zombies: list[Stay] = field(default_factory=list)

    @property
    def near(self) -> tuple[Tier, ...]:
        """What a match sees: device, and host if there is one."""
        return (self.device,) if self.host is None else (self.device, self.host)

    @property
    def held(self) -> int:
        """Tiles that requests own."""
        return sum(len(stay.tiles) for stay in self.stays + self.zombies)

    @property
    def free_tiles(self) -> int:
        return self.tiles - len(self.device.windows) - self.held

    @property
    def free_pages(self) -> int:
        return self.pages - len(self.device.pages) - sum(stay.private_pages for stay in self.stays)

    def locked(self) -> Tier:
        """What running requests keep on the device: their rows, and the window where they end.

        Windows above it on their way may be locked, too: a node that splits hands its lock on.
        """
        held = Tier()
        for stay in self.stays:
            held.pages |= prefixes(stay.path, stay.published)
            held.windows |= {stay.path[: stay.published]} & self.device.windows
        return held

    # Admission -------------------------------------------------------------------

    def to_load(self, path: Path) -> tuple[int, int]:
        """Pages and tiles that the device lacks of what it and the host have of ``path``."""
        best = reusable(path, *self.near)
        return len(prefixes(path, best) - self.device.pages), int(best > 0 and path[:best] not in self.device.windows)

    def load(self, path: Path, boundary: int) -> None:
        """A load back to the device: all rows, and the window at the end alone."""
        self.device.pages |= prefixes(path, boundary)
        self.device.windows |= {path[:boundary]} - {()}

    def prefetched(self, path: Path) -> int:
        """How deep a prefetch of ``path`` brings the host; what it has already if storage has no more.

        Found by name: a damaged file is noticed when it is read, and then nothing is taken.
        """
        known = reusable(path, *self.near)
        best = reusable(path, Tier(prefixes(path, known) | self.storage.pages, self.storage.windows))
        bad = any(self.damaged.pages.get(path[:n]) for n in range(known + 1, best + 1))
        return best if best > known and not bad and not self.damaged.windows.get(path[:best]) else known

    # Capture ---------------------------------------------------------------------

    def placed(self, stay: Stay, end: int) -> list[int]:
        """Boundaries in (done, end] that a chunk captures: grid, last of the sequence, branch."""
        last = {stay.length // PAGE, (stay.length - 1) // PAGE, stay.branch}
        return [
            n
            for n in range(stay.done // PAGE + 1, end // PAGE + 1)
            if (n in last or (self.stride and n % self.stride == 0)) and n not in stay.tiles
        ]

    def superseded(self, wanted: list[tuple[Stay, int]]) -> None:
        """Where tiles are short, requests that decode to a boundary give up an older one each."""
        missing = len(wanted) - self.free_tiles
        for stay, _ in wanted:
            while missing > 0 and stay.decoded:
                oldest = stay.decoded.pop(0)
                if oldest in stay.tiles:
                    stay.tiles.remove(oldest)
                    stay.dropped[oldest] = True
                    missing -= 1
                    break

    @staticmethod
    def ranked(wanted: list[tuple[Stay, int]]) -> list[tuple[Stay, int]]:
        """In the order in which they get tiles: each request's last boundary first, deepest first."""
        last = {id(stay): n for stay, n in sorted(wanted, key=lambda capture: capture[1])}
        return sorted(wanted, key=lambda capture: (capture[1] < last[id(capture[0])], -capture[1]))

    def capture(self, captures: Iterable[tuple[Stay, int]]) -> None:
        for stay, n in captures:
            stay.tiles.add(n)
            stay.in_flight.add(n)

    def finish(self, captures: Iterable[tuple[Stay, int, bool]]) -> None:
        """A step's result is processed; captures as (stay, boundary, by decode)."""
        for stay, n, decode in captures:
            if n not in stay.in_flight:
                continue
            stay.in_flight.remove(n)
            if stay.released:
                stay.tiles.discard(n)
            elif decode:
                if stay.decoded and not (self.stride and stay.decoded[-1] % self.stride == 0):
                    stay.tiles.discard(stay.decoded.pop())
                stay.decoded.append(n)
        self.zombies = [stay for stay in self.zombies if stay.tiles]

    # Publish and release ---------------------------------------------------------

    def publish(self, stay: Stay) -> tuple[set[int], set[int]]:
        """Whole pages become the tree's, and the tiles among them carriers' windows; those with one and without."""
        end = stay.done // PAGE
        ripe, dropped = ({n for n in of if stay.published < n <= end} for of in (stay.tiles, stay.dropped))
        stay.tiles -= ripe
        self.device.windows |= {stay.path[:n] for n in ripe}
        self.device.pages |= prefixes(stay.path, end)
        stay.published = end
        return ripe, dropped

    def release(self, stay: Stay) -> None:
        """The slot is given up: settled tiles go back, those in flight when they land."""
        self.stays.remove(stay)
        stay.released = True
        stay.tiles &= stay.in_flight
        if stay.tiles:
            self.zombies.append(stay)

    def empty(self) -> None:
        """Device and host are emptied; storage stays."""
        self.device, self.unbacked, self.unstored = Tier(), Tier(), Tier()
        self.host = None if self.host is None else Tier()

    # Against what the tree holds -------------------------------------------------

    def reconcile(self, device: Tier, host: Tier, *, evicted: set[str], refused: bool, settled: bool) -> None:
        """Compare with what was found, and take evictions over.

        evicted: the tiers ("device", "host") from which something was evicted in this step. refused: the
        host had no room for a copy. settled: no transfer is under way, so that copies must be complete.

        Raises:
            AssertionError: something appeared from nowhere, or is gone and must not be.
        """
        locked = self.locked()
        on_host = Tier() if self.host is None else self.host
        kinds = (device, host, locked, self.device, on_host, self.unbacked)
        for name, found, copies, fixed, had, had_copies, alone in zip(
            ("pages", "windows"), *(tier.kinds() for tier in kinds), strict=True
        ):
            assert found <= had, f"{name} on the device that nobody put there: {found - had}"
            gone = had - found
            assert not gone or "device" in evicted, f"{name} left the device without an eviction: {gone}"
            assert not gone & fixed, f"locked {name} were evicted: {gone & fixed}"
            assert copies <= had | had_copies, f"{name} on the host that nobody put there: {copies - had - had_copies}"
            lost = had_copies - copies
            assert not lost or "host" in evicted, f"{name} left the host without an eviction: {lost}"
            if self.host is not None:
                if refused:
                    alone |= had - copies
                nowhere = gone - copies - alone
                assert not nowhere or "host" in evicted, f"{name} left the device and are not on the host: {nowhere}"
                alone &= found - copies
                late = found - copies - alone
                assert not (settled and late), f"{name} are not on the host, and there was room: {late}"
            had &= found
            had_copies &= copies
            had_copies |= copies

    def stored(self, found: Tier, *, settled: bool) -> None:
        """Compare with what storage was found to hold. It gets what the host has, and loses only what
        was damaged: that leaves when it is read."""
        assert self.host is not None
        kinds = (found, self.storage, self.host, self.unstored)
        for name, (seen, had, copies, lost), damaged in zip(
            ("pages", "windows"), zip(*(tier.kinds() for tier in kinds), strict=True), self.damaged.kinds(), strict=True
        ):
            gone = had - seen
            assert gone <= {path for path, pools in damaged.items() if pools}, f"stored {name} are gone: {gone}"
            for path in gone:
                del damaged[path]
            had -= gone
            lost |= gone & copies
            lost -= seen
            late = copies - seen - lost
            assert not (settled and late), f"{name} of the host are not stored: {late}"
            had |= seen
