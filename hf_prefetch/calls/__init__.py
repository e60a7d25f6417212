"""What happens around the forward of one experts module."""
