"""A decode loop that runs for minutes: requests come and go over a paged cache, and nothing may drift, leak or slow down."""
