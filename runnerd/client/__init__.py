"""The client library: a sans-IO session, and a blocking client on plain sockets."""
