"""Where rows are kept. A store knows rows, guards, lines and feeds, and no behaviour."""
