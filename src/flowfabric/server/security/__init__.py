"""Security of the server: sessions, the origin of requests, and the keys that sign handles."""
