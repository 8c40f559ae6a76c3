"""Errors that are a message for the user, not a traceback."""

from __future__ import annotations


class BitexactError(Exception):
    """Says what was found, what was expected and what to change."""
