"""Pipeline parallelism: schedules, splits, what runs them, and pictures of what ran."""
