"""The edges: processes, sockets, signals and files, driven by what core decides."""
