"""Start-up checks: what would stop the server, or trouble it, found in seconds and without its engine."""
