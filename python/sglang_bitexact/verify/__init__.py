"""``verify``: is a cache hit of a running server equal to a cold run, and how much does it reuse?"""
