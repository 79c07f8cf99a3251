"""What commands share: the console, progress, files that are written whole or not at all."""
