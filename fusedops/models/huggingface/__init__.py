"""Configurations and weights of Hugging Face: reading and writing."""
