"""What several files of this folder begin with."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["python", "rust"])
def core(request):
    """Each of SGLang's tree cores."""
    return request.param


@pytest.fixture
def cache(core):
    """A tree into which requests publish; 8 tiles, 16 pages."""
    # Not above: this file is read by tests of parts that do not have all of it.
    from kit.tile_cache import TileCache, server_context

    with server_context() as args, TileCache(args, core=core, publishes=True) as made:
        yield made
