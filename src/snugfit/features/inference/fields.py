"""The field that the feature `inference` adds to `Setup` (a recipe's settings)."""

from __future__ import annotations

from snugfit.techniques.wish import Wish

CACHE = Wish[str]("cache", str, "", touches=("passes",))
"""The field `cache`: a kind of key/value cache in place of the job's; empty keeps the job's kind."""
