-- Tokens of the API.

CREATE TABLE ff_api_token (
    token_id TEXT NOT NULL,
    name TEXT NOT NULL,
    scopes TEXT NOT NULL,
    digest TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    namespaces TEXT,
    previous_digest TEXT,
    previous_until INTEGER,
    expires_at INTEGER,
    revoked_at INTEGER,
    revision INTEGER NOT NULL,
    PRIMARY KEY (token_id)
) STRICT;
