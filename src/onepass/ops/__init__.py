"""The public ops. Each family has functions with their formulas, contracts, and the code that turns calls into launches."""
