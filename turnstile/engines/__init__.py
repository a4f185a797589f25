"""Engine knowledge: which requests touch the card, how to evict, how to know that a job ended."""
