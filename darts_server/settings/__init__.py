"""Settings: every one is checked here, once, at start. The rooms get plain values."""

from darts_server.settings.fields import Settings
from darts_server.settings.runtime import changed, live, live_schema
from darts_server.settings.sources import add_flags, load

__all__ = ["Settings", "add_flags", "changed", "live", "live_schema", "load"]
