-- Budgets and quota policies belong to a namespace. What exists belongs to `default`.
--
-- The primary keys change, so the release before must not run on this schema: stop its processes first.

alter table ff_budget_policy add column namespace text collate "C" not null default 'default';
alter table ff_budget_policy alter column namespace drop default;
alter table ff_budget_policy drop constraint ff_budget_policy_pkey;
alter table ff_budget_policy add primary key (namespace, budget_id);
-- Which declaration in an application's code the limits were last taken from.
alter table ff_budget_policy add column declaration text collate "C";

alter table ff_budget_usage add column namespace text collate "C" not null default 'default';
alter table ff_budget_usage alter column namespace drop default;
alter table ff_budget_usage drop constraint ff_budget_usage_pkey;
alter table ff_budget_usage add primary key (namespace, budget_id, dimension);

alter table ff_budget_usage_by_exec add column namespace text collate "C" not null default 'default';
alter table ff_budget_usage_by_exec alter column namespace drop default;
alter table ff_budget_usage_by_exec drop constraint ff_budget_usage_by_exec_pkey;
alter table ff_budget_usage_by_exec add primary key (namespace, budget_id, execution_id, dimension);

alter table ff_budget_reservation add column namespace text collate "C" not null default 'default';
alter table ff_budget_reservation alter column namespace drop default;
alter table ff_budget_reservation drop constraint ff_budget_reservation_pkey;
alter table ff_budget_reservation add primary key (namespace, budget_id, reservation_id, dimension);

alter table ff_budget_usage_dedup add column namespace text collate "C" not null default 'default';
alter table ff_budget_usage_dedup alter column namespace drop default;
alter table ff_budget_usage_dedup drop constraint ff_budget_usage_dedup_pkey;
alter table ff_budget_usage_dedup add primary key (namespace, budget_id, digest, expires_at);

alter table ff_quota_policy add column namespace text collate "C" not null default 'default';
alter table ff_quota_policy alter column namespace drop default;
alter table ff_quota_policy drop constraint ff_quota_policy_pkey;
alter table ff_quota_policy add primary key (namespace, quota_policy_id);

alter table ff_quota_admitted add column namespace text collate "C" not null default 'default';
alter table ff_quota_admitted alter column namespace drop default;
alter table ff_quota_admitted drop constraint ff_quota_admitted_pkey;
alter table ff_quota_admitted add primary key (namespace, quota_policy_id, execution_id);

alter table ff_quota_window add column namespace text collate "C" not null default 'default';
alter table ff_quota_window alter column namespace drop default;
alter table ff_quota_window drop constraint ff_quota_window_pkey;
alter table ff_quota_window add primary key (namespace, quota_policy_id, dimension, execution_id);

drop index ff_budget_policy_next_reset_at;
create index ff_budget_policy_next_reset_at on ff_budget_policy (next_reset_at, namespace, budget_id)
    where next_reset_at is not null;
drop index ff_budget_policy_lapse_at;
create index ff_budget_policy_lapse_at on ff_budget_policy (lapse_at, namespace, budget_id)
    where lapse_at is not null;
