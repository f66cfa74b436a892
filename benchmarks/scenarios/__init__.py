"""Who competes in what, and what the ratio must be: a module for each group of scenarios."""
