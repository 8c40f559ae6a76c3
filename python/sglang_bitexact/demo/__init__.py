"""``demo``: the real server, real requests, and how far a cache hit is from a cold run."""
