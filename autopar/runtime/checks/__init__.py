"""What tells a user at the next call that what runs is not what the code says."""
