"""Processes of a job: start, failure, watchdog, and configuration tables in TOML."""
