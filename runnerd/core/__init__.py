"""The rules: lives of execs, transcripts, budgets, the registry. No I/O, no clock, no trio."""
