"""Bit-exact prefix reuse for DeepSeek-V4 on unified_kv.

A tile holds what a request slot's rings hold at a page boundary: the sliding window of every
layer, and the c4 and c4-indexer overlap rows. Switched on with
SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE; without it a server imports ``enabled`` only.
"""
