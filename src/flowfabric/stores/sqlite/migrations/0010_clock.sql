-- compatible: yes
-- The file's clock (file_clock.py): for each boot of the machine an instant, and what the clock since boot showed then.
-- A release before this one may still run: it stamps rows with its own wall clock, as it always has.

CREATE TABLE ff_clock (
    boot TEXT PRIMARY KEY,
    passed INTEGER NOT NULL,
    instant INTEGER NOT NULL,
    slew INTEGER NOT NULL
) STRICT;
