-- compatible: yes
-- The exception that ended an attempt. The release before may still run: it leaves the column empty, and takes the
-- failure in the result row of a failed execution (encoding ff.failure) for a result if an edge passes it on.
ALTER TABLE ff_attempt ADD COLUMN failure TEXT;
