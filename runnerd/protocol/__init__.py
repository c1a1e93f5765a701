"""What crosses the socket and the shim's control socket: messages, framing, errors. No I/O."""
