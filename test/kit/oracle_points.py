"""What the model remembers of reuse points, and the reason that a receipt must therefore give."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kit.oracle_model import Path, Stay


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

    def crossed(self, stay: Stay) -> None:
        """Decode reaches a boundary: tiles of the answer off the grid end here, those that it did not get as well."""
        stay.dropped = {n: decode for n, decode in stay.dropped.items() if self.due(n) or not decode}

    def publish(self, path: Path, published: Iterable[int], dropped: Iterable[int]) -> None:
        self.fates |= {path[:n]: False for n in published} | {path[:n]: True for n in dropped}

    def take(self, path: Path, reused: int, nominal: int, *, rejected: bool) -> None:
        """A request takes a slot, of ``nominal`` pages it reuses ``reused``; rejected: more was there to load."""
        if reused < nominal:
            reason = "load_rejected" if rejected else self._reason(path, reused, nominal)
            self.cuts[reason] = self.cuts.get(reason, 0) + 1

    def _reason(self, path: Path, reused: int, nominal: int) -> str:
        for n in range(nominal, reused, -1):
            if (dropped := self.fates.get(path[:n])) is not None or self.due(n):
                return "pool_full" if dropped else "tile_evicted"
        return "off_grid"
