"""``doctor``: is this SGLang, this server, this storage directory as it should be, and if not why."""
