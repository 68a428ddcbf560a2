-- compatible: yes
-- Sessions of the console are tokens with a parent. A release before this one may still run: it accepts no session,
-- because it computes the digest of a session's secret differently.

alter table ff_api_token add column parent text collate "C";
