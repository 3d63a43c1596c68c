"""What `benchmarks.peers` times: the same stages in three programs, each a script for its own environment."""
