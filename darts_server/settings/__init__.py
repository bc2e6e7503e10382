"""The settings, validated once at the start. Other rooms get plain values."""

from darts_server.settings.fields import Settings
from darts_server.settings.sources import add_flags, apply_patch, load

__all__ = ["Settings", "add_flags", "apply_patch", "load"]
