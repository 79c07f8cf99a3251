"""The parts of ``make demo``, whose command is ../train_gpt2.py."""
