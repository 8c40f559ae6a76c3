"""Records the extension points of part 1 while a TinyRun computes."""

from __future__ import annotations

import unittest.mock


class Recorder:
    """Puts recording hooks onto the live backend, its pool and the stand-in cache.

    events: what was called, in order. rings: the window rows of a layer (prefill) or of all
    layers (end of a step) at each capture. flat: the rows that each prefill capture was given.
    """

    def __init__(self, run, stack, step_hooks):
        from sglang.benchmark import one_batch
        from sglang.kernels.ops.kvcache import dsv4_unified_kv_store

        self.run, self.events, self.rings, self.flat = run, [], [], []
        backend = run.runner.attn_backend

        def patch(owner, name, replacement):
            stack.enterContext(unittest.mock.patch.object(owner, name, replacement))

        patch(backend, "capture_swa_windows", self.prefill)
        for name in step_hooks:
            patch(backend, name, self.step(name))
        patch(one_batch.TreeCacheNamespace, "restore_swa_windows", self.restore)
        store = dsv4_unified_kv_store.store_swa_into_unified
        patch(dsv4_unified_kv_store, "store_swa_into_unified", self.around("store_swa_into_unified", store))
        # The slot clear was registered as a bound method when the pools were built.
        slots = run.runner.req_to_token_pool
        patch(slots, "_on_alloc_rows", self.around("clear_c4_req_states", slots._on_alloc_rows))

    def around(self, name, original):
        def call(*arguments, **keywords):
            self.events.append((name,))
            return original(*arguments, **keywords)

        return call

    def ring(self, layer):
        return self.run.pool.unified_kv_pool.kv_buffer[layer][: self.run.pool.unified_swa_pages].clone()

    def prefill(self, layer_id, kv, forward_batch, *, k_rope=None):
        self.events.append(("capture", layer_id, tuple(kv.shape), kv.dtype, k_rope))
        self.rings.append(self.ring(layer_id))
        self.flat.append(kv.clone())

    def step(self, name):
        def call(forward_batch):
            layers = range(len(self.run.pool.unified_kv_pool.kv_buffer))
            self.events.append((name, forward_batch.seq_lens.tolist()))
            self.rings.append([self.ring(layer) for layer in layers])

        return call

    def restore(self, reqs, req_pool_indices):
        self.events.append(("restore", [r.kv.req_pool_idx for r in reqs], req_pool_indices.tolist()))
