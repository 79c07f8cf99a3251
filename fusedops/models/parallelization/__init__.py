"""From a plain transformer and a ParallelConfig to a model that trains on many ranks."""
