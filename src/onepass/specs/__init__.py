"""What each kernel family computes, as plain data."""
