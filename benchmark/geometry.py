"""What V4-Flash and V4-Pro are, as far as tiles are concerned: constants with their source."""

from __future__ import annotations

from typing import NamedTuple


class Model(NamedTuple):
    """ratios: compress ratio per layer. active: parameters that a token uses, from the models' cards."""

    name: str
    ratios: tuple[int, ...]
    active: float

    @property
    def layers(self) -> int:
        return len(self.ratios)

    @property
    def overlapping(self) -> int:
        """Layers of ratio 4, which have c4 and c4-indexer state."""
        return self.ratios.count(4)


# Layers and their ratios: compress_ratios of the published config.json files, as layout.py's worked sizes
# have them (43 layers, 21 of ratio 4; 61 layers, 30 of ratio 4). Active parameters: the model cards.
FLASH = Model("V4-Flash", (0, 0, *(4, 128) * 20, 4), 13e9)
PRO = Model("V4-Pro", (128, 128, *(4, 128) * 29, 4), 49e9)
MODELS = (FLASH, PRO)
