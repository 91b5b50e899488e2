"""Deliberately broken variants of the library: what the instruments must catch, or they prove nothing.

A worker process calls `apply` before it does anything else; there is no way back in that process.
"""

from __future__ import annotations

from . import delivering as delivering
from . import in_redis as in_redis
from . import receiving as receiving
from .registry import VARIANTS, Variant, applied, apply

__all__ = ["VARIANTS", "Variant", "applied", "apply"]
