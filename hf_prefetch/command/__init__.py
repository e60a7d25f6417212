"""What the command hf-prefetch does."""
