"""Who makes it happen: loads, asks the rule, commits, answers."""
