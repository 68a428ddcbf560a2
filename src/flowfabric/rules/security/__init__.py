"""Security: signing keys and the tokens, grant keys and handles they sign, and API tokens."""
