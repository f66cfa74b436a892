"""Lock rules for any store with compare-and-set."""
