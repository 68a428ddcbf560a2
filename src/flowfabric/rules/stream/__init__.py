"""Output streams: frames that an attempt appends while it runs, and how readers page through them."""
