"""One experiment per method: claim, presets, table, plot and checks."""
