"""The embedded runner: Redis and every service as child processes of one command."""
