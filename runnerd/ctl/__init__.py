"""The command line: runnerctl."""
