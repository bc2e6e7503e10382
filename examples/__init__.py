"""Examples that run on two CPU cores."""
