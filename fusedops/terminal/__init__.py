"""What commands share: console, progress, texts, pictures, files written whole or not at all."""
