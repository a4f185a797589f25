"""Child processes that nothing outlives by accident: exec shim, guardian, spawner, log file."""
