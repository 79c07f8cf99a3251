"""Host memory: copies to it and back, its buffers, and experts that are fetched on demand."""
