-- Tokens of the API.

create table ff_api_token (
    created_at                  bigint not null,
    revision                    bigint not null,
    token_id                    text collate "C" not null,
    name                        text collate "C" not null,
    scopes                      text collate "C" not null,
    digest                      text collate "C" not null,
    previous_until              bigint,
    expires_at                  bigint,
    revoked_at                  bigint,
    namespaces                  text collate "C",
    previous_digest             text collate "C",
    primary key (token_id)
);
