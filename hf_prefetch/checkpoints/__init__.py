"""From a checkpoint's files to an enabled model, and back into files."""
