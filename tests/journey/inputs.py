"""What models are called with."""
