"""What ``patch`` replaces: one module for each kind of module of transformers and torch."""
