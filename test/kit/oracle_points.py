"""What the model remembers of reuse points, and the reason that a receipt must therefore give."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kit.oracle_model import Path, Stay, Tier


@dataclass
class Points:
    """fates: per prefix that was published or was to be, whether it got no tile. cuts: reasons so far.

    Unlike the real one, this knows all of them, and each by its whole path.
    """

    stride: int
    fates: dict[Path, bool] = field(default_factory=dict)
    cuts: dict[str, int] = field(default_factory=dict)

    def due(self, n: int) -> bool:
        return self.stride > 0 and n % self.stride == 0

    def publish(self, stay: Stay, published: Iterable[int], dropped: Iterable[int], *tiers: Tier) -> None:
        """``stay`` published tiles; at others none was free, but ``tiers`` may have them from elsewhere.

        An answer's tile off the grid would have been given up for the next one, if there is one.
        """
        self.fates |= {stay.path[:n]: False for n in published}
        for n in dropped:
            lasts = self.due(n) or not stay.dropped[n] or n == stay.published
            if lasts and not any(stay.path[:n] in tier.windows for tier in tiers):
                self.fates[stay.path[:n]] = True

    def take(self, path: Path, reused: int, nominal: int, *, rejected: bool) -> None:
        """A request takes a slot, of ``nominal`` pages it reuses ``reused``; rejected: more was there to load."""
        if reused:
            self.fates[path[:reused]] = False
        if reused < nominal:
            reason = "load_rejected" if rejected else self._reason(path, reused, nominal)
            self.cuts[reason] = self.cuts.get(reason, 0) + 1

    def _reason(self, path: Path, reused: int, nominal: int) -> str:
        for n in range(nominal, reused, -1):
            if (dropped := self.fates.get(path[:n])) is not None or self.due(n):
                return "pool_full" if dropped else "tile_evicted"
        return "off_grid"
