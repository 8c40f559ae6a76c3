"""What the tree keeps of a token besides its place: compressed rows and index keys, as bytes."""

from __future__ import annotations

from typing import Any

import torch


def stored_rows(pool: Any, loc: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compressed rows and index keys of the tokens at FULL indices ``loc``, by "kind.layer"; copies.

    pool: a DeepSeekV4TokenToKVPool on unified_kv. loc: int64 [tokens], from position 0.
    """
    out = {}
    for layer, buffer in enumerate(pool.unified_kv_pool.kv_buffer):
        ratio = pool.compression_ratios[layer]
        if ratio:
            ends = loc[ratio - 1 :: ratio] // ratio
            out[f"c{ratio}.{layer}"] = buffer[pool.unified_swa_pages + ends]
        if ratio == 4:
            out[f"index_key.{layer}"] = _index_keys(pool, layer, loc[3::4] // 4)
    return out


def _index_keys(pool: Any, layer: int, slots: torch.Tensor) -> torch.Tensor:
    """Bytes of the index keys at ``slots``: 128 codes and the scale, uint8 [N, 132]."""
    pages = pool.get_index_k_with_scale_buffer(layer_id=layer)
    page, offset = slots // 64, slots % 64
    codes = pages[page[:, None], offset[:, None] * 128 + torch.arange(128)]
    scales = pages[page[:, None], 64 * 128 + offset[:, None] * 4 + torch.arange(4)]
    return torch.cat((codes, scales), dim=1).view(torch.uint8)
