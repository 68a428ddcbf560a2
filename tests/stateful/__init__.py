"""Random lives of executions, played on several stores at once and beside a naive second telling."""
