"""The client library: a sans-IO session, and a blocking client on plain sockets.

`runnerd.client.blocking.connect()` is where to begin. Nothing is imported here, so that whoever
needs only the session, or only the errors, pays for nothing else.
"""
