"""A small random DeepSeek-V4 checkpoint: real names, real loading code, text in and out.

    python -m sglang_cpu_ref.tiny_checkpoint DIR [--seed 0]

The weights are drawn from a seed, so two machines with the same vector instructions make
the same bytes. Sizes that upstream's kernels fix (head dim 512, window 128, index head dim
128, top-k 512) are kept; the others are small.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sglang_cpu_ref.tiny_tokenizer import build_tokenizer, write_tokenizer

# An entry per layer, and one more for the (absent) multi-token-prediction layer.
COMPRESS_RATIOS = (0, 4, 128, 4, 0)

# Window and compressed rows of this size make attention pick out a few rows, instead of
# the mean of all: a single wrong row shows in the answer, and answers do not repeat a token.
_KEY_SCALE = 3.0


def tiny_config(vocab_size: int, bos_token_id: int, eos_token_id: int) -> dict[str, Any]:
    """``config.json`` of the tiny model: 4 layers with compress ratios 0, 4, 128 and 4."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "vocab_size": vocab_size,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "hidden_size": 256,
        "intermediate_size": 128,
        "moe_intermediate_size": 128,
        "num_hidden_layers": len(COMPRESS_RATIOS) - 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 448,
        "qk_rope_head_dim": 64,
        "v_head_dim": 512,
        "q_lora_rank": 128,
        "o_lora_rank": 64,
        "o_groups": 2,
        "sliding_window": 128,
        "window_size": 128,
        "compress_ratios": list(COMPRESS_RATIOS),
        "compress_rope_theta": 160000,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.5,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "num_hash_layers": 1,
        "n_hash_layers": 1,
        "swiglu_limit": 10.0,
        "index_head_dim": 128,
        "index_n_heads": 4,
        "index_topk": 512,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "num_nextn_predict_layers": 0,
    }


class _Weights:
    """Draws tensors in a fixed order from one generator."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, gain: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """N(0, gain**2 / fan_in), where fan_in is the last dimension."""
        value = torch.randn(shape, generator=self._generator)
        return value.mul_(gain / math.sqrt(shape[-1])).to(dtype)

    def around(self, value: float, size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Norm weights: ``value`` with a tenth of noise, so that a forgotten weight shows."""
        return (value * (1.0 + 0.1 * torch.randn(size, generator=self._generator))).to(dtype)


def _linears(w: _Weights, config: dict[str, Any], prefix: str, ratio: int) -> Iterator[tuple[str, torch.Tensor]]:
    hidden, heads, dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    q_rank, o_rank, groups = config["q_lora_rank"], config["o_lora_rank"], config["o_groups"]
    yield f"{prefix}.wq_a.weight", w.normal(q_rank, hidden)
    yield f"{prefix}.q_norm.weight", w.around(1.0, q_rank)
    yield f"{prefix}.wq_b.weight", w.normal(heads * dim, q_rank)
    yield f"{prefix}.wkv.weight", w.normal(dim, hidden)
    yield f"{prefix}.kv_norm.weight", w.around(_KEY_SCALE, dim)
    yield f"{prefix}.wo_a.weight", w.normal(groups * o_rank, heads * dim // groups, gain=1.5)
    yield f"{prefix}.wo_b.weight", w.normal(hidden, groups * o_rank)
    yield f"{prefix}.attn_sink", w.normal(heads, dtype=torch.float32)
    if ratio:
        yield from _compressor(w, hidden, dim, ratio, f"{prefix}.compressor")
    if ratio == 4:
        index_dim, index_heads = config["index_head_dim"], config["index_n_heads"]
        yield f"{prefix}.indexer.wq_b.weight", w.normal(index_heads * index_dim, q_rank)
        yield f"{prefix}.indexer.weights_proj.weight", w.normal(index_heads, hidden)
        yield from _compressor(w, hidden, index_dim, ratio, f"{prefix}.indexer.compressor")


def _compressor(w: _Weights, hidden: int, dim: int, ratio: int, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    width = dim * (2 if ratio == 4 else 1)
    yield f"{prefix}.wkv.weight", w.normal(width, hidden)
    yield f"{prefix}.wgate.weight", w.normal(width, hidden, gain=2.0)
    yield f"{prefix}.norm.weight", w.around(_KEY_SCALE, dim, torch.float32)
    yield f"{prefix}.ape", w.normal(ratio, width, gain=width**0.5, dtype=torch.float32)


def _mixture(w: _Weights, config: dict[str, Any], prefix: str, hashed: bool) -> Iterator[tuple[str, torch.Tensor]]:
    hidden, width, experts = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    yield f"{prefix}.gate.weight", w.normal(experts, hidden, gain=2.0)
    if hashed:
        token = torch.arange(config["vocab_size"])
        picks = [(token * (2 * k + 1) + 3 * k) % experts for k in range(config["num_experts_per_tok"])]
        yield f"{prefix}.gate.tid2eid", torch.stack(picks, dim=1).to(torch.int32)
    else:
        yield f"{prefix}.gate.bias", w.normal(experts, dtype=torch.float32)
    for expert in [f"experts.{e}" for e in range(experts)] + ["shared_experts"]:
        yield f"{prefix}.{expert}.w1.weight", w.normal(width, hidden)
        yield f"{prefix}.{expert}.w2.weight", w.normal(hidden, width)
        yield f"{prefix}.{expert}.w3.weight", w.normal(width, hidden)


def _hyper(w: _Weights, streams: int, hidden: int, rows: int, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    scales = 1 if rows == streams else 3
    yield f"{prefix}_fn", w.normal(rows, streams * hidden, dtype=torch.float32)
    yield f"{prefix}_base", w.normal(rows, gain=0.5 * rows**0.5, dtype=torch.float32)
    yield f"{prefix}_scale", torch.full((scales,), 0.5)


def tiny_weights(config: dict[str, Any], text_token_ids: list[int], seed: int) -> dict[str, torch.Tensor]:
    """All tensors under the names of the published DeepSeek-V4 checkpoints.

    Only ``text_token_ids`` can be sampled: the other rows of the head are zero, so
    greedy decoding stays within printable text.
    """
    w = _Weights(seed)
    hidden, streams = config["hidden_size"], config["hc_mult"]
    vocab = config["vocab_size"]
    tensors = {"embed.weight": w.normal(vocab, hidden, gain=hidden**0.5)}
    for layer, ratio in enumerate(config["compress_ratios"][: config["num_hidden_layers"]]):
        prefix = f"layers.{layer}"
        mixes = (2 + streams) * streams
        tensors.update(_hyper(w, streams, hidden, mixes, f"{prefix}.hc_attn"))
        tensors.update(_hyper(w, streams, hidden, mixes, f"{prefix}.hc_ffn"))
        tensors[f"{prefix}.attn_norm.weight"] = w.around(1.0, hidden)
        tensors[f"{prefix}.ffn_norm.weight"] = w.around(1.0, hidden)
        tensors.update(_linears(w, config, f"{prefix}.attn", ratio))
        tensors.update(_mixture(w, config, f"{prefix}.ffn", layer < config["n_hash_layers"]))
    tensors.update(_hyper(w, streams, hidden, streams, "hc_head"))
    tensors["norm.weight"] = w.around(1.0, hidden)
    head = torch.zeros(vocab, hidden, dtype=torch.bfloat16)
    head[text_token_ids] = w.normal(len(text_token_ids), hidden, gain=3.0)
    tensors["head.weight"] = head
    return tensors


def write_checkpoint(directory: Path, seed: int = 0) -> None:
    """Write config, tokenizer and weights into ``directory``, made if needed (about 15 MiB)."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    config = tiny_config(tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id)
    write_tokenizer(tokenizer, directory)
    weights = tiny_weights(config, tokenizer.text_token_ids, seed)
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_checkpoint(args.directory, args.seed)
    print(args.directory)


if __name__ == "__main__":
    main()
