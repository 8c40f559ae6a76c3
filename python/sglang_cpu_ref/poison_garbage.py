"""Garbage that is a large finite number, whatever number format it is read in."""

from __future__ import annotations

import random

import torch

_BLOCK_WORDS = 1 << 22
# Rows of one call are windows into the block that begin this many words apart.
_STEP_WORDS = 61


class Garbage:
    """Random words from one prepared block; the same sequence for the same seed.

    As float32 or bfloat16 a word is between 32 and 512 in magnitude, either sign. As e4m3 codes
    its bytes are finite, every other one about 2.5. So a row of keys, of compressor state, of
    index-key codes or of their float32 scales that is read by mistake changes a result, and
    never by way of a NaN.
    """

    def __init__(self, seed: int) -> None:
        self._start = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._block = self._words(_BLOCK_WORDS)

    def _words(self, count: int) -> torch.Tensor:
        """int32 [count]; bytes 0 and 2 any but e4m3's NaN, bytes 1 and 3 one of 42, 43, C2, C3 (hex)."""
        code = torch.randint(0, 256, (count, 4), dtype=torch.uint8, generator=self._generator)
        code[:, 0::2] -= ((code[:, 0::2] & 0x7F) == 0x7F).to(torch.uint8)
        code[:, 1::2] = (code[:, 1::2] & 0x81) | 0x42
        return code.view(torch.int32).view(-1)

    def fill(self, records: torch.Tensor, which: torch.Tensor) -> None:
        """Overwrite ``records[which]``, every record and every call with other words.

        records: any dtype, [n, ...], each record contiguous and a whole number of 32-bit
        words. which: int64 [m], no record twice.
        """
        words = records.flatten(1).view(torch.int32)
        width = words.shape[1]
        if self._block.numel() < 2 * width:
            self._block = self._words(2 * width)
        room = self._block.numel() - width
        # At least half of the block's starts stay to choose from.
        most = max(1, room // 2 // _STEP_WORDS)
        for first in range(0, len(which), most):
            part = which[first : first + most]
            start = self._start.randrange(room - (len(part) - 1) * _STEP_WORDS)
            windows = self._block.as_strided((len(part), width), (_STEP_WORDS, 1), start)
            words.index_copy_(0, part, windows)
