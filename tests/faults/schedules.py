"""Faults in schedules: an instant that fires twice or never."""

from __future__ import annotations

from tests.faults.fault import Fault

FIRE = "tests/scenarios/schedules/test_fire.py"
DEFINE = "tests/scenarios/schedules/test_define.py"
INSTANTS = "tests/rules/schedules/test_instants.py"

SCHEDULES = (
    Fault(
        "two workers fire one instant",
        "rules/schedules/overlap.py",
        "merge_changes(Change((seen_schedule(row),), own),",
        "merge_changes(Change((), own),",
        f"{FIRE}::test_a_pause_as_it_fires_decides_who_was_first",
    ),
    Fault(
        "an instant that has a run gets another decision",
        "rules/schedules/overlap.py",
        "        if name in self._runs or name in self.created or instant in self.pending:",
        "        if name in self.created or instant in self.pending:",
        f"{DEFINE}::test_a_long_backfill_that_died_is_finished_by_the_next_one",
    ),
    Fault(
        "the end of a run does not move the queue",
        "rules/schedules/fire.py",
        "    elif row.paused_at is None:\n        plan.advance_queue()\n",
        "",
        f"{FIRE}::test_the_queued_run_begins_when_the_run_ends_as_it_fires",
    ),
    Fault(
        "a run that ended as its schedule fires counts as under way",
        "rules/schedules/overlap.py",
        "    return run is not None and run.lifecycle_phase is not LifecyclePhase.TERMINAL",
        "    return run is not None",
        f"{FIRE}::test_a_skipped_instant_is_counted_and_the_next_one_fires_after_the_end",
    ),
    Fault(
        "what is too old is made up for",
        "rules/schedules/fire.py",
        "        if fires_at < too_old:",
        "        if fires_at < 0:",
        f"{FIRE}::test_a_weekend_down",
    ),
    Fault(
        "a clock that is set back lets a new definition repeat instants",
        "rules/schedules/define.py",
        "        begin = max(now, due.decided_until)",
        "        begin = now",
        f"{FIRE}::test_a_clock_that_is_set_back_repeats_nothing",
    ),
    Fault(
        "a redeploy drops an instant that has come",
        "rules/schedules/define.py",
        "    due = due_instants(row, now, early=True)",
        "    due = due_instants(row, 0, early=True)",
        f"{FIRE}::test_a_redeploy_with_another_cron_at_the_instant_fires_it_once",
    ),
    Fault(
        "a deploy ends the pause of a person",
        "rules/schedules/define.py",
        "    if row.paused_at is None or returns:",
        "    if True:",
        "tests/sdk/test_schedules.py::test_deploys_change_pause_and_bring_back_what_is_declared",
    ),
    Fault(
        "hours are counted through a change by half an hour",
        "rules/schedules/recurrence.py",
        "        changed = _first_change(zone, begin, found)",
        "        changed = None",
        f"{INSTANTS}::test_spring_and_autumn_in_four_zones",
    ),
    Fault(
        "a time in the gap is not moved behind it",
        "rules/schedules/recurrence.py",
        "        wall += timedelta(minutes=1)",
        "        break",
        f"{INSTANTS}::test_a_calendar_fires_like_a_cron_job_at_the_same_time",
    ),
)
