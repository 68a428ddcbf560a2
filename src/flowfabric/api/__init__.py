"""Schemas of the HTTP API: the requests and responses that server and client exchange.

One module per resource. Nothing here imports the server, the client or the SDK.
"""
