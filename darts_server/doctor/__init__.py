"""Start-up checks: find in seconds, without starting an engine, what would stop the server or trouble it later."""
