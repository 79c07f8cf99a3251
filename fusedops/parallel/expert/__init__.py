"""Expert parallelism: dispatch of tokens to the ranks that own their experts, and combine."""
