-- Queue numbers that follow from the queue's key, and feed positions that never restart.
--
-- Not compatible with the release before: stop its workers first. It takes a queue's number from a sequence, and reads
-- the feed as if positions had no gaps.

lock table ff_exec_core, ff_line, ff_batch, ff_feed in access exclusive mode;

-- A number is the first 63 bits of the digest of its key. Another server, or an earlier state of this one, cannot give
-- it to another queue, and whoever knows the key can write a lost row of this table again.
alter table ff_line add column number bigint;
update ff_line
   set number = ((('x' || encode(substr(digest, 1, 8), 'hex'))::bit(64)::bigint) >> 1) & 9223372036854775807;

-- A new column instead of a new type: only rows in a ready queue are written, not the whole table. A row whose number
-- stands for nothing, or for the queue of other work, gets the number of no queue. The sweep `queue_reconciler` finds
-- it and puts it into the right one.
drop index ff_exec_core_line;
alter table ff_exec_core rename column line to old_line;
alter table ff_exec_core add column line bigint;
update ff_exec_core e
   set line = coalesce(
           (select l.number
              from ff_line l
             where l.line = e.old_line
               and l.lane_id = e.lane_id
               and l.required = coalesce(e.required_capabilities, '')), -1)
 where e.old_line is not null;
alter table ff_exec_core drop column old_line;
create index ff_exec_core_line on ff_exec_core (line, rank, execution_id)
    where line is not null;

alter table ff_line drop column line;
alter table ff_line rename column number to line;
alter table ff_line add primary key (line);

-- Which life of which server gave out the last positions: the start of the server and the oid of this table. In
-- another life positions go on from the time of day, above those that a lost tail of the log may have had.
alter table ff_feed add column server text collate "C";
