"""Send mutated requests and random sequences of requests to a real server, and check after each that all is well."""
