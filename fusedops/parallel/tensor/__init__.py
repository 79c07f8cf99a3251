"""Tensor and sequence parallelism: layers, vocabulary, products that overlap communication."""
