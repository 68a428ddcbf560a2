-- name: snapshot_holders
-- Sessions that keep dead rows of this database from being vacuumed, oldest first: transactions of this database, those
-- of other databases that have written, prepared ones, and replication slots of standbys that send feedback.
select * from (
    select 'transaction' as kind,
           'pid ' || a.pid as name,
           nullif(a.application_name, '') as application,
           a.datname::text as database,
           a.state,
           floor(extract(epoch from clock_timestamp() - a.xact_start))::bigint as age_s,
           greatest(age(a.backend_xmin), age(a.backend_xid))::bigint as transactions
      from pg_stat_activity a
     where (a.backend_xid is not null or (a.backend_xmin is not null and a.datname = current_database()))
       and a.pid <> pg_backend_pid()
       and coalesce(a.backend_type, '') <> 'autovacuum worker'
    union all
    select 'prepared transaction', p.gid, null, p.database::text, 'prepared',
           floor(extract(epoch from clock_timestamp() - p.prepared))::bigint, age(p.transaction)::bigint
      from pg_prepared_xacts p
    union all
    select 'replication slot', s.slot_name::text, s.plugin::text, s.database::text,
           case when s.active then 'active' else 'inactive' end, null, age(s.xmin)::bigint
      from pg_replication_slots s
     where s.xmin is not null
) holder
 order by transactions desc, age_s desc nulls last
 limit :limit;
