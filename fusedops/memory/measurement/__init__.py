"""What a step allocates: traces, the report, its picture, and the search for a policy."""
